package kernel

import (
	"slices"
	"testing"
)

func TestListsOfCPUs(t *testing.T) {
	for list, want := range map[string][]int{"0": {0}, "0-2,5": {0, 1, 2, 5}, "3,1": {3, 1}} {
		if got, err := ParseCPUs(list); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v, want %v", list, got, err, want)
		}
	}
	for _, list := range []string{"", "a", "2-1", "0-", "0-99999999", "1,"} {
		if got, err := ParseCPUs(list); err == nil {
			t.Errorf("%q is read as %v", list, got)
		}
	}
}
