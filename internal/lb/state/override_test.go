package state

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// clock is a wall clock that a test sets.
type clock struct{ time time.Time }

func newClock() *clock { return &clock{time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)} }

func (c *clock) now() time.Time { return c.time }

func address(text string) model.BackendAddress {
	if a, err := netip.ParseAddr(text); err == nil {
		return model.BackendAddress{Address: a}
	}
	pair := netip.MustParseAddrPort(text)
	return model.BackendAddress{Address: pair.Addr(), Port: pair.Port()}
}

// service returns a service with backends of weight 5, each written as its address, or as name=address.
func service(name string, backends ...string) model.Service {
	s := model.Service{Name: name}
	for _, b := range backends {
		called, at, named := strings.Cut(b, "=")
		if !named {
			at = called
		}
		s.Backends = append(s.Backends, model.Backend{BackendAddress: address(at), Weight: 5, Name: called})
	}
	return s
}

// writer returns a writer with a clock, no file, and these services of source "file".
func writer(t *testing.T, all ...model.Service) (*Writer, *clock) {
	t.Helper()
	w, c := NewWriter(), newClock()
	w.now = c.now
	replace(t, w, "file", all...)
	return w, c
}

func replace(t *testing.T, w *Writer, source string, all ...model.Service) {
	t.Helper()
	if _, err := w.Replace(Declaration{Source: source, Services: all}); err != nil {
		t.Fatal(err)
	}
}

// shown returns the backends of all services with their weights, and operators' overrides of their
// health: "web 10.0.0.2=0 10.0.0.3=5,down".
func shown(w *Writer) string {
	var parts []string
	for _, s := range w.Snapshot().Services {
		parts = append(parts, s.Name)
		for _, b := range s.Backends {
			part := fmt.Sprintf("%s=%d", b.BackendAddress, b.EffectiveWeight())
			if b.Override.Health != "" {
				part += "," + string(b.Override.Health)
			}
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, " ")
}

func expect(t *testing.T, w *Writer, want string) {
	t.Helper()
	if got := shown(w); got != want {
		t.Errorf("the state is\n%s, want\n%s", got, want)
	}
}

// drainOf returns a setting of KindDrain.
func drainOf(s Setting) Setting {
	s.Kind = KindDrain
	return s
}

func drain(t *testing.T, w *Writer, selector string, s Setting) {
	t.Helper()
	if _, err := w.Set(selector, drainOf(s)); err != nil {
		t.Fatal(err)
	}
}

// drained returns the backends of the overrides in force.
func drained(w *Writer) (all []string) {
	for _, o := range w.Overrides() {
		all = append(all, o.Backend.String())
	}
	return all
}

func TestDrainInEveryService(t *testing.T) {
	w, c := writer(t, service("web", "10.0.0.2:80", "10.0.0.3:80"), service("api", "10.0.0.2:80", "10.0.0.2:81"))
	before := w.Snapshot()
	_, changed := w.Watch()
	drain(t, w, "10.0.0.2:80", Setting{Author: Author{By: "me"}})
	expect(t, w, "web 10.0.0.2:80=0 10.0.0.3:80=5 api 10.0.0.2:80=0 10.0.0.2:81=5")
	select {
	case <-changed:
	default:
		t.Error("a drain did not wake those who watch")
	}
	if before.Services[0].Backends[0].EffectiveWeight() != 5 {
		t.Error("an old snapshot changed")
	}
	got := w.Overrides()
	if len(got) != 1 || got[0].By != "me" || !got[0].Since.Equal(c.time) || !got[0].Deadline.IsZero() || got[0].Over || !slices.Equal(got[0].Sources, []string{"file"}) {
		t.Errorf("drains are %+v", got)
	}
	if _, ok := w.NextDeadline(); ok {
		t.Error("a drain without a deadline has one")
	}
	if _, err := w.Clear("10.0.0.2"); err != nil {
		t.Fatal(err)
	}
	expect(t, w, "web 10.0.0.2:80=5 10.0.0.3:80=5 api 10.0.0.2:80=5 10.0.0.2:81=5")
}

func TestDeadline(t *testing.T) {
	w, c := writer(t, service("web", "10.0.0.2", "10.0.0.3"), service("api", "10.0.0.2"))
	first, second := c.time.Add(time.Minute), c.time.Add(time.Hour)
	drain(t, w, "10.0.0.2", Setting{Deadline: second})
	drain(t, w, "10.0.0.3", Setting{Deadline: first})
	due := func(want time.Time) {
		t.Helper()
		if next, ok := w.NextDeadline(); ok != !want.IsZero() || !next.Equal(want) {
			t.Errorf("the next deadline is %v, %v; want %v", next, ok, want)
		}
	}
	due(first)
	c.time = first.Add(-1)
	revision := w.Snapshot().Revision
	if w.PassDeadlines() != revision {
		t.Error("a deadline passed before its time")
	}
	expect(t, w, "web 10.0.0.2=0 10.0.0.3=0 api 10.0.0.2=0")
	c.time = first
	if w.PassDeadlines() != revision+1 {
		t.Error("no new snapshot after a deadline")
	}
	expect(t, w, "web 10.0.0.2=0 api 10.0.0.2=0")
	due(second)
	c.time = second.Add(time.Hour)
	replace(t, w, "other", service("else", "10.0.0.3", "10.0.0.4")) // a change looks at the clock too
	expect(t, w, "web api else 10.0.0.4=5")
	due(time.Time{})
	drain(t, w, "10.0.0.2", Setting{Deadline: c.time.Add(1)}) // another drain replaces it
	expect(t, w, "web 10.0.0.2=0 api 10.0.0.2=0 else 10.0.0.4=5")
	drain(t, w, "10.0.0.4", Setting{Deadline: c.time.Add(-1)})
	expect(t, w, "web 10.0.0.2=0 api 10.0.0.2=0 else")
}

func TestSelectors(t *testing.T) {
	const v6 = "[2001:db8::2]:80"
	all := []model.Service{
		service("a", "green=10.0.0.2:80", "blue=10.0.0.3:80", "10.0.0.2:81", "10.0.0.2", v6),
		service("b", "green=10.0.0.2:80", "blue=10.0.0.4:80", "10.0.0.3:80=10.0.0.5:80", "2001:db8::2"),
	}
	for _, c := range []struct{ selector, want string }{
		{"green", "10.0.0.2:80"},
		{"10.0.0.2:80", "10.0.0.2:80"},
		{"10.0.0.2", "10.0.0.2 10.0.0.2:80 10.0.0.2:81"},
		{"2001:db8::2", "2001:db8::2 " + v6},
		{v6, v6},
		{"10.0.0.3:80", "10.0.0.3:80"}, // an address before a name
		{"blue", "look for backend \"blue\": 10.0.0.3:80 and 10.0.0.4:80 have this name: give the address of one of them"},
		{"red", "look for backend \"red\": no backend has this name or address: `shunt backend list` shows them"},
		{"", "look for backend \"\": no backend has this name or address: `shunt backend list` shows them"},
		{"10.0.0.2:82", "look for backend \"10.0.0.2:82\": no backend has this name or address: `shunt backend list` shows them"},
	} {
		w, _ := writer(t, all...)
		revision := w.Snapshot().Revision
		backends, err := w.Set(c.selector, drainOf(Setting{}))
		got := joined(backends)
		if err != nil {
			var wrong *SelectorError
			if got = err.Error(); !errors.As(err, &wrong) || w.Snapshot().Revision != revision {
				t.Errorf("%q: %T, and revision %d after %d", c.selector, err, w.Snapshot().Revision, revision)
			}
		} else if strings.Join(drained(w), " ") != got {
			t.Errorf("%q: drained are %v, and not %s", c.selector, drained(w), got)
		}
		if got != c.want {
			t.Errorf("%q names %s, want %s", c.selector, got, c.want)
		}
	}
}

func joined(backends []model.BackendAddress) string {
	var all []string
	for _, b := range backends {
		all = append(all, b.String())
	}
	return strings.Join(all, " ")
}

func TestClearDrain(t *testing.T) {
	w, _ := writer(t, service("a", "blue=10.0.0.3:80", "10.0.0.4:81"), service("b", "blue=10.0.0.4:80"))
	drain(t, w, "10.0.0.4:80", Setting{})
	for _, selector := range []string{"10.0.0.3:80", "10.0.0.9", "green"} {
		if _, err := w.Clear(selector); err == nil || !strings.Contains(err.Error(), "no backend with an override") {
			t.Errorf("clearing the drain of %s, which is none, gives %v", selector, err)
		}
	}
	// Two backends are called blue, but only one is drained.
	if ended, err := w.Clear("blue", KindDrain); err != nil || len(ended) != 1 || ended[0].Backend.String() != "10.0.0.4:80" {
		t.Errorf("clearing blue: %v, %v", ended, err)
	}
	expect(t, w, "a 10.0.0.3:80=5 10.0.0.4:81=5 b 10.0.0.4:80=5")
}

// TestOverrideEnds has backends that leave the configuration, in one source and in two.
func TestOverrideEnds(t *testing.T) {
	w, _ := writer(t, service("web", "10.0.0.2", "10.0.0.3"))
	replace(t, w, "other", service("api", "10.0.0.2"))
	drain(t, w, "10.0.0.2", Setting{})
	drain(t, w, "10.0.0.3", Setting{})
	replace(t, w, "file", service("web", "10.0.0.3", "10.0.0.4"))
	expect(t, w, "web 10.0.0.3=0 10.0.0.4=5 api 10.0.0.2=0")
	if got := w.Overrides()[0].Sources; !slices.Equal(got, []string{"other"}) {
		t.Errorf("the drain is held by %v, want other", got)
	}
	// A refused declaration ends no override.
	if _, err := w.Replace(Declaration{Source: "other", Services: []model.Service{service("web")}}); err == nil {
		t.Fatal("a conflict was taken over")
	}
	if got := drained(w); !slices.Equal(got, []string{"10.0.0.2", "10.0.0.3"}) {
		t.Errorf("drained after a conflict are %v", got)
	}
	replace(t, w, "other")
	replace(t, w, "file", service("web", "10.0.0.2", "10.0.0.3")) // it comes back, and is not drained
	expect(t, w, "web 10.0.0.2=5 10.0.0.3=0")
}

// TestSourceThatHasNotSpoken has overrides of two sources, of which one speaks first.
func TestSourceThatHasNotSpoken(t *testing.T) {
	d := newMemoryDisk()
	c := newClock()
	w, err := open("dir/overrides", c.now, d)
	if err != nil {
		t.Fatal(err)
	}
	replace(t, w, "file", service("web", "10.0.0.2", "10.0.0.3"))
	replace(t, w, "other", service("api", "10.0.0.4"))
	for _, b := range []string{"10.0.0.2", "10.0.0.3", "10.0.0.4"} {
		drain(t, w, b, Setting{})
	}
	if w, err = open("dir/overrides", c.now, d); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Clear("10.0.0.3"); err != nil { // before any source has spoken
		t.Error(err)
	}
	replace(t, w, "file", service("web", "10.0.0.3"))
	expect(t, w, "web 10.0.0.3=5")
	if got := drained(w); !slices.Equal(got, []string{"10.0.0.4"}) {
		t.Errorf("drained are %v: 10.0.0.2 has left, and 10.0.0.4 may still come", got)
	}
	replace(t, w, "other") // the first declaration has no services
	if got := drained(w); len(got) != 0 {
		t.Errorf("drained are %v, want none", got)
	}
}

func TestDrainsConcurrently(t *testing.T) {
	w, _ := writer(t, service("web", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"))
	var done sync.WaitGroup
	for i := 2; i <= 5; i++ {
		done.Go(func() {
			for range 50 {
				b := fmt.Sprintf("10.0.0.%d", i)
				if _, err := w.Set(b, drainOf(Setting{Deadline: w.now().Add(time.Hour)})); err != nil {
					t.Error(err)
				}
				w.NextDeadline()
				w.PassDeadlines()
				if _, err := w.Clear(b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	done.Wait()
	expect(t, w, "web 10.0.0.2=5 10.0.0.3=5 10.0.0.4=5 10.0.0.5=5")
	if r := w.Snapshot().Revision; r != 1+4*50*2 {
		t.Errorf("revision is %d after 400 changes", r)
	}
}

func set(t *testing.T, w *Writer, selector string, s Setting) {
	t.Helper()
	if _, err := w.Set(selector, s); err != nil {
		t.Fatal(err)
	}
}

// TestKinds has all kinds on one backend: the most restrictive one decides, each ends by itself,
// and a reload leaves them.
func TestKinds(t *testing.T) {
	all := []model.Service{service("web", "10.0.0.2", "10.0.0.3"), service("api", "10.0.0.2")}
	w, _ := writer(t, all...)
	set(t, w, "10.0.0.2", Setting{Kind: KindWeight, Weight: 65535})
	expect(t, w, "web 10.0.0.2=65535 10.0.0.3=5 api 10.0.0.2=65535")
	set(t, w, "10.0.0.2", Setting{Kind: KindHealth, Health: HealthUp})
	expect(t, w, "web 10.0.0.2=65535,up 10.0.0.3=5 api 10.0.0.2=65535,up")
	set(t, w, "10.0.0.2", Setting{Kind: KindHealth, Health: HealthDown})
	expect(t, w, "web 10.0.0.2=65535,down 10.0.0.3=5 api 10.0.0.2=65535,down")
	set(t, w, "10.0.0.2", Setting{Kind: KindWeight, Weight: 0})
	set(t, w, "10.0.0.2", Setting{Kind: KindDrain})
	replace(t, w, "file", append(all, service("new", "10.0.0.2"))...)
	expect(t, w, "web 10.0.0.2=0,down 10.0.0.3=5 api 10.0.0.2=0,down new 10.0.0.2=0,down")
	if kinds := kindsOf(w.Overrides()); kinds != "drain weight health" {
		t.Errorf("overrides are %s", kinds)
	}
	if _, err := w.Clear("10.0.0.3"); err == nil {
		t.Error("the overrides of a backend that has none were cleared")
	}
	if ended, err := w.Clear("10.0.0.2", KindHealth); err != nil || kindsOf(ended) != "health" {
		t.Errorf("cleared are %v, %v", ended, err)
	}
	if _, err := w.Clear("10.0.0.2", KindHealth); err == nil || !strings.Contains(err.Error(), "override of its health") {
		t.Errorf("what was cleared can be cleared again: %v", err)
	}
	set(t, w, "10.0.0.2", Setting{Kind: KindWeight, Weight: 9})
	if ended, err := w.Clear("10.0.0.2", KindDrain); err != nil || kindsOf(ended) != "drain" {
		t.Errorf("cleared are %v, %v", ended, err)
	}
	expect(t, w, "web 10.0.0.2=9 10.0.0.3=5 api 10.0.0.2=9 new 10.0.0.2=9")
	set(t, w, "10.0.0.3", Setting{Kind: KindWeight, Weight: 8})
	if ended := w.ClearAll(KindDrain, KindHealth); len(ended) != 0 {
		t.Errorf("cleared are %v, of which there is none", ended)
	}
	if ended := w.ClearAll(); kindsOf(ended) != "weight weight" {
		t.Errorf("cleared are %v", ended)
	}
	expect(t, w, "web 10.0.0.2=5 10.0.0.3=5 api 10.0.0.2=5 new 10.0.0.2=5")
	if revision := w.Snapshot().Revision; len(w.ClearAll()) != 0 || w.Snapshot().Revision != revision {
		t.Error("to clear nothing is a change")
	}
}

func kindsOf(overrides []Override) string {
	var kinds []string
	for _, o := range overrides {
		kinds = append(kinds, string(o.Kind))
	}
	return strings.Join(kinds, " ")
}
