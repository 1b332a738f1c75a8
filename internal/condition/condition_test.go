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
	"pgregory.net/rapid"
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

// TestManyAreOne: ten of a code are told one by one; more are one condition, which is told a few
// times only, and the last ones that are left are separate again.
func TestManyAreOne(t *testing.T) {
	clock := time.Unix(0, 0).UTC()
	var said []string
	joined := map[string]bool{}
	set := Set{
		Now: func() time.Time { clock = clock.Add(time.Second); return clock },
		OnChange: func(c Change) {
			said = append(said, fmt.Sprint(c.Condition.Subject, " ", c.Cleared))
			if c.Joined {
				joined[c.Condition.Subject] = true
			}
		},
	}
	const many = 50000
	subject := func(i int) string { return fmt.Sprintf("10.0.%d.%d", i/250, i%250) }
	raise := func(i int) {
		set.Raise(Condition{Code: NeighbourUnresolved, Subject: subject(i), Text: "cannot send to it", Remedy: []string{"this", "that"}[i%2]})
	}
	set.Raise(Condition{Code: PortsShort, Subject: "default", Text: "few"})
	for i := range apartMax {
		raise(i)
	}
	if len(said) != 1+apartMax || len(set.List()) != 1+apartMax {
		t.Errorf("of %d it was said %q, and the list is %v", apartMax, said, set.List())
	}
	said = nil
	raise(apartMax)
	if len(said) != 1+apartMax || said[0] != "several false" || len(joined) != apartMax || joined[subject(apartMax)] {
		t.Errorf("of one more it was said %q, of %v that they are joined", said, joined)
	}
	said = nil
	for i := apartMax + 1; i < many; i++ {
		raise(i)
	}
	if len(said) != 12 { // 22, 44, … 45,056
		t.Errorf("of %d it was said %q", many, said)
	}
	list := set.List()
	want := Condition{Code: NeighbourUnresolved, Severity: Error, Subject: Several, Since: time.Unix(2, 0).UTC(),
		Text: "50000 times: 10.0.0.0, 10.0.0.1, 10.0.0.10 and 49997 more; 10.0.0.0: cannot send to it", Remedy: "this; or that"}
	if len(list) != 2 || list[0] != want || len(set.All()) != 1+many {
		t.Errorf("the list is %+v, want %+v and another; all are %d", list, want, len(set.All()))
	}
	said = nil
	for i := many - 1; i > 0; i-- {
		set.Clear(NeighbourUnresolved, subject(i))
	}
	if len(said) > 25 || len(set.List()) != 2 || set.List()[0].Subject != subject(0) {
		t.Errorf("when all but one were cleared it was said %q, and there is %+v", said, set.List())
	}
	var end []string
	for i := range apartMax / 2 {
		end = append(end, subject(i)+" false")
	}
	end = append(end, "several true")
	for i := apartMax/2 - 1; i > 0; i-- {
		end = append(end, subject(i)+" true")
	}
	if got := said[max(0, len(said)-len(end)):]; !slices.Equal(got, end) {
		t.Errorf("at the end it was said %q, want %q", got, end)
	}
}

// TestWhoWatchesKnowsAll: the changes told so far, put together, are at any time the contents of
// the list.
func TestWhoWatchesKnowsAll(t *testing.T) {
	type id struct{ code, subject string }
	rapid.Check(t, func(t *rapid.T) {
		told := map[id]bool{}
		set := Set{OnChange: func(c Change) {
			who := id{c.Condition.Code, c.Condition.Subject}
			if c.Cleared && !told[who] {
				t.Errorf("%v has ended and was never told", who)
			}
			told[who] = true
			if c.Cleared {
				delete(told, who)
			}
		}}
		for range 100 {
			code := rapid.SampledFrom([]string{PortsShort, NoBackend}).Draw(t, "code")
			subject := fmt.Sprint(rapid.IntRange(0, 25).Draw(t, "subject"))
			if rapid.IntRange(0, 2).Draw(t, "raise") > 0 {
				set.Raise(Condition{Code: code, Subject: subject, Text: fmt.Sprint(rapid.IntRange(0, 2).Draw(t, "text"))})
			} else {
				set.Clear(code, subject)
			}
			listed := map[id]bool{}
			for _, c := range set.List() {
				listed[id{c.Code, c.Subject}] = true
			}
			if diff := cmp.Diff(listed, told, cmp.AllowUnexported(id{})); diff != "" {
				t.Fatalf("what was told is not what is listed:\n%s", diff)
			}
		}
	})
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
