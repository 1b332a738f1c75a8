package value

import (
	"slices"
	"strings"
	"testing"
)

func TestFew(t *testing.T) {
	for _, c := range []struct {
		names []string
		want  string
	}{
		{[]string{"web"}, "web"},
		{[]string{"a", "b", "c"}, "a, b, c"},
		{[]string{"a", "b", "c", "d"}, "a, b, c and 1 other"},
		{[]string{"a", "b", "c", "d", "e"}, "a, b, c and 2 others"},
	} {
		if got := Few(c.names); got != c.want {
			t.Errorf("%v is %q, want %q", c.names, got, c.want)
		}
	}
}

func TestDifferentSettings(t *testing.T) {
	before := []Setting{{"a", "1"}, {"b", "2"}, {"d", "4"}}
	after := []Setting{{"c", "3"}, {"b", "5"}, {"d", "4"}}
	var lines []string
	changes := DifferentSettings(before, after)
	for _, c := range changes {
		lines = append(lines, c.String())
	}
	if want := []string{"- a: 1", "~ b: 2 -> 5", "+ c: 3"}; !slices.Equal(lines, want) {
		t.Errorf("they differ by %q, want %q", lines, want)
	}
	if err := Fixed(changes, "b", "think again"); err == nil || !strings.HasPrefix(err.Error(), "b from 2 to 5 needs restart: think again") {
		t.Errorf("a fixed setting gave %v", err)
	}
	if err := Fixed(changes, "d", "think again"); err != nil {
		t.Errorf("a setting that has not changed gave %v", err)
	}
}
