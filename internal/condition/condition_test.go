package condition

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestRaiseAndClearTellOnce(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var said []string
	set := Set{
		Now: func() time.Time { return now },
		OnChange: func(c Change) {
			said = append(said, fmt.Sprint(c.Condition.Subject, " ", c.Condition.Text, " ", c.Cleared))
		},
	}
	c := Condition{Code: AddressInUse, Subject: "192.0.2.1", Text: "one"}
	set.Raise(c)
	now = now.Add(time.Hour)
	set.Raise(c)
	c.Text = "two"
	set.Raise(c)
	set.Clear(AddressInUse, "somebody else")
	if got := set.List(); len(got) != 1 || got[0].Since.Hour() != 3 {
		t.Errorf("after three raises: %+v, want one condition since 03:04:05", got)
	}
	set.Clear(AddressInUse, "192.0.2.1")
	set.Clear(AddressInUse, "192.0.2.1")
	want := []string{"192.0.2.1 one false", "192.0.2.1 two false", "192.0.2.1 two true"}
	if diff := cmp.Diff(want, said); diff != "" {
		t.Errorf("changes told (-want +got):\n%s", diff)
	}
	if got := set.List(); got == nil || len(got) != 0 {
		t.Errorf("List of an empty set is %#v, want an empty, non-nil list", got)
	}
}

func TestListIsWorstFirst(t *testing.T) {
	var set Set
	for _, c := range []Condition{
		{Code: PortsShort, Subject: "b"},
		{Code: AggregationSwitchedOff, Subject: "eth0"},
		{Code: PortsShort, Subject: "a"},
		{Code: ReconcileFailing, Subject: "x"},
	} {
		set.Raise(c)
	}
	var got []string
	for _, c := range set.List() {
		got = append(got, c.Code+" "+c.Subject)
	}
	want := []string{"reconcile_failing x", "ports_short a", "ports_short b", "aggregation_switched_off eth0"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestDefinitionFillsWhatIsMissing(t *testing.T) {
	var set Set
	set.Raise(Condition{Code: AddressInUse, Subject: "x", Text: "y", Since: time.Unix(0, 0).UTC()})
	b, err := json.Marshal(set.List()[0])
	if err != nil {
		t.Fatal(err)
	}
	d, _ := Lookup(AddressInUse)
	remedy, _ := json.Marshal(d.Remedy)
	want := `{"code":"address_in_use","severity":"error","subject":"x","text":"y","remedy":` + string(remedy) + `,"since":"1970-01-01T00:00:00Z"}`
	if string(b) != want {
		t.Errorf("JSON is\n%s, want\n%s", b, want)
	}
}

func TestConcurrentUse(t *testing.T) {
	raised := map[string]bool{}
	set := Set{OnChange: func(c Change) { // unguarded on purpose: calls come one at a time
		if raised[c.Condition.Subject] != c.Cleared {
			t.Errorf("%s: told %v twice", c.Condition.Subject, !c.Cleared)
		}
		raised[c.Condition.Subject] = !c.Cleared
	}}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 200 {
				subject := fmt.Sprint((i + j) % 5)
				set.Raise(Condition{Code: PortsShort, Subject: subject})
				set.List()
				set.Clear(PortsShort, subject)
			}
		})
	}
	wg.Wait()
	if got := set.List(); len(got) != 0 {
		t.Errorf("%d conditions left, want none", len(got))
	}
}

func TestNilSetTakesEverything(t *testing.T) {
	var set *Set
	set.Raise(Condition{Code: PortsShort})
	set.Clear(PortsShort, "")
	if len(set.List()) != 0 {
		t.Error("a nil set holds something")
	}
}

func TestCodesAreWellFormed(t *testing.T) {
	word := regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`)
	if !slices.IsSortedFunc(Codes, func(a, b Definition) int { return strings.Compare(a.Code, b.Code) }) {
		t.Error("Codes are not sorted")
	}
	for i, d := range Codes {
		if !word.MatchString(d.Code) || rank(d.Severity) < 0 || d.Subject == "" || d.Meaning == "" || d.Remedy == "" {
			t.Errorf("definition %d is incomplete: %+v", i, d)
		}
		if i > 0 && Codes[i-1].Code == d.Code {
			t.Errorf("%s is defined twice", d.Code)
		}
	}
}
