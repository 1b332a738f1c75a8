package reconcile_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
)

func TestBeforeNaming(t *testing.T) {
	maps := fake.New(roomy)
	var calls []string
	r := reconcile.New(maps, reconcile.BeforeNaming(func(records []reconcile.BackendRecord) {
		for _, record := range records {
			calls = append(calls, record.BackendAddress.String())
		}
		last := maps.Operations[len(maps.Operations)-1]
		if !strings.HasPrefix(last, "put backend") {
			t.Errorf("called after %q", last)
		}
	}))
	for _, backends := range []string{"10.0.0.2:80 10.0.0.9:80*0", "10.0.0.2:80 10.0.0.9:80*0 10.0.0.3:80"} {
		if _, err := r.Apply(desired(service("web", "192.0.2.10:80", backends))); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"10.0.0.2:80", "10.0.0.3:80"}; !slices.Equal(calls, want) {
		t.Errorf("called for %q, want %q", calls, want)
	}
}

// TestAroundFrontends: f is called right before the first frontend and right after the last one that is put, and not if
// none is put.
func TestAroundFrontends(t *testing.T) {
	maps := fake.New(roomy)
	var calls []int // number of frontends
	r := reconcile.New(maps, reconcile.AroundFrontends(func() {
		contents, _ := maps.Contents()
		calls = append(calls, len(contents.Frontends))
		if last := maps.Operations[len(maps.Operations)-1]; len(calls)%2 == 1 && !strings.HasPrefix(last, "put service") {
			t.Errorf("called after %q", last)
		}
	}))
	for _, step := range []struct {
		frontends, backends string
		calls               []int
	}{
		{"192.0.2.10:80 192.0.2.11:80", "10.0.0.2:80", []int{0, 2}},
		{"192.0.2.10:80 192.0.2.11:80", "10.0.0.2:80 10.0.0.3:80", nil},
		{"192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80", nil},
	} {
		calls = nil
		if _, err := r.Apply(desired(service("web", step.frontends, step.backends))); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(calls, step.calls) {
			t.Errorf("with %s and %s it is called with %v frontends, want %v", step.frontends, step.backends, calls, step.calls)
		}
	}
}

// TestBeforeForgetting: backends get other sources when the new ones are known and before
// the old ones go, and nothing is called if none goes.
func TestBeforeForgetting(t *testing.T) {
	maps := fake.New(roomy)
	calls := 0
	refuses := errors.New("refused")
	r := reconcile.New(maps, reconcile.BeforeForgetting(func(sources []netip.Addr) error {
		calls++
		if len(sources) != 1 || sources[0] != netip.MustParseAddr("10.0.0.1") {
			t.Errorf("called for the sources %v", sources)
		}
		contents, _ := maps.Contents()
		for _, source := range []string{"10.0.0.1", "10.0.0.9"} {
			if !contents.Addresses[netip.MustParseAddr(source)].Source {
				t.Errorf("%s is no source when backends are given others", source)
			}
		}
		return refuses
	}))
	d := desired(service("web", "192.0.2.10:80", "10.0.0.2:80"))
	for i, sources := range []string{"10.0.0.1", "10.0.0.9", "10.0.0.9 10.0.0.8"} {
		d.NATSources = nil
		for source := range strings.FieldsSeq(sources) {
			d.NATSources = append(d.NATSources, netip.MustParseAddr(source))
		}
		_, err := r.Apply(d)
		if i == 1 { // the source stays until its flows are ended
			if !errors.Is(err, refuses) {
				t.Fatalf("%v, want %v", err, refuses)
			}
			refuses = nil
			_, err = r.Apply(d)
		}
		if err != nil {
			t.Fatal(err)
		}
		if want := 2 * min(i, 1); calls != want {
			t.Errorf("after the sources %s it was called %d times, want %d", sources, calls, want)
		}
	}
}
