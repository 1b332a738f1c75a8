package state

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// TestPart: services that a part does not name stay, in their place and as the same pointers.
func TestPart(t *testing.T) {
	w := NewWriter()
	all := append(append(services("a"), services("b", frontend("192.0.2.1", 80, 80))...), services("c")...)
	if _, err := w.Replace(Declaration{Source: "api", Services: all}); err != nil {
		t.Fatal(err)
	}
	names := func() string {
		var all []string
		for _, s := range w.Snapshot().Services {
			all = append(all, s.Name)
		}
		return strings.Join(all, " ")
	}
	before := w.Snapshot().Services
	part := Declaration{Source: "api", Part: true, Services: append(services("b", frontend("192.0.2.1", 81, 81)), services("d")...), Withdrawn: []string{"a", "unknown"}}
	tried, err := w.Try(part)
	if err != nil || names() != "a b c" {
		t.Fatalf("after Try there are %s, %v", names(), err)
	}
	if revision, err := w.Replace(part); err != nil || revision != 2 || names() != "b c d" {
		t.Fatalf("revision %d, %v, and there are %s", revision, err, names())
	}
	after := w.Snapshot().Services
	if after[1] != before[2] || after[0] == before[1] || after[0].Frontends[0].Ports.First != 81 {
		t.Errorf("the services were %p and are %p", before, after)
	}
	if !slices.Equal(after, tried.Services) {
		t.Errorf("Try said %p, and it is %p: each is looked at twice", tried.Services, after)
	}
	if revision, err := w.Replace(part); err != nil || revision != 2 {
		t.Errorf("the same again is revision %d, %v", revision, err)
	}
	var conflict *ConflictError
	if _, err := w.Replace(Declaration{Source: "other", Part: true, Services: services("c")}); !errors.As(err, &conflict) || conflict.Owner != "api" {
		t.Errorf("another source may name its service: %v", err)
	}
	if _, err := w.Replace(Declaration{Source: "other", Part: true, Withdrawn: []string{"c"}}); err != nil || names() != "b c d" {
		t.Errorf("another source may withdraw its service: %v, and there are %s", err, names())
	}
}

// TestPartsAreAWhole: after any parts, drains and refusals the writer equals one that got the whole declaration of each source at
// once, and it refuses the same declarations.
func TestPartsAreAWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := NewWriter()
		said := map[string]map[string]model.Service{"file": {}, "api": {}}
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			if rapid.IntRange(0, 4).Draw(t, "what") == 0 {
				override(t, w)
				continue
			}
			var declared []Declaration
			next := map[string]map[string]model.Service{"file": maps.Clone(said["file"]), "api": maps.Clone(said["api"])}
			for _, source := range rapid.SampledFrom([][]string{{"file"}, {"api"}, {"api", "file"}}).Draw(t, "sources") {
				d := Declaration{Source: source, Part: rapid.Bool().Draw(t, "part")}
				if !d.Part {
					clear(next[source])
				} else {
					d.Withdrawn = rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 0, 2).Draw(t, "withdrawn")
					for _, name := range d.Withdrawn {
						delete(next[source], name)
					}
				}
				for _, name := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 0, 3, rapid.ID).Draw(t, "services") {
					s := drawService(t, name)
					d.Services = append(d.Services, s)
					next[source][name] = s
				}
				declared = append(declared, d)
			}
			before := w.Snapshot()
			tried, failed := w.Try(declared...)
			if w.Snapshot() != before {
				t.Fatal("Try changed the state")
			}
			_, err := w.Replace(declared...)
			if !reflect.DeepEqual(err, failed) {
				t.Fatalf("Try: %v; Replace: %v", failed, err)
			}
			_, refused := NewWriter().Replace(wholes(next)...)
			if (err != nil) != (refused != nil) {
				t.Fatalf("declared by parts: %v; as a whole: %v", err, refused)
			}
			if err != nil {
				if w.Snapshot() != before {
					t.Fatal("what was refused changed the state")
				}
				continue
			}
			said = next
			if now := w.Snapshot(); now != before && !reflect.DeepEqual(now, tried) {
				t.Fatalf("tried %s, got %s", dump(tried), dump(now))
			}
			compareWithWhole(t, w, said)
		}
	})
}

func drawService(t *rapid.T, name string) model.Service {
	s := model.Service{Name: name}
	for range rapid.IntRange(0, 2).Draw(t, "frontends") {
		first := rapid.Uint16Range(1, 6).Draw(t, "first")
		s.Frontends = append(s.Frontends, model.Frontend{Address: netip.MustParseAddr("192.0.2.1"), Protocol: model.TCP,
			Ports: value.PortRange{First: first, Last: first + rapid.SampledFrom([]uint16{0, 0, 0, 1, 3}).Draw(t, "more")}})
	}
	for range rapid.IntRange(0, 2).Draw(t, "backends") {
		s.Backends = append(s.Backends, model.Backend{Weight: 5, BackendAddress: model.BackendAddress{Port: 80,
			Address: netip.AddrFrom4([4]byte{10, 0, 0, rapid.ByteRange(1, 3).Draw(t, "backend")})}})
	}
	return s
}

// override sets or clears an override; there may be no such backend.
func override(t *rapid.T, w *Writer) {
	address := fmt.Sprintf("10.0.0.%d", rapid.IntRange(1, 3).Draw(t, "overridden"))
	if rapid.IntRange(0, 3).Draw(t, "clear") == 0 {
		_, _ = w.Clear(address)
		return
	}
	setting := Setting{Kind: rapid.SampledFrom(Kinds).Draw(t, "kind")}
	switch setting.Kind {
	case KindWeight:
		setting.Weight = 9
	case KindHealth:
		setting.Health = HealthDown
	default:
		if rapid.Bool().Draw(t, "over") {
			setting.Deadline = time.Unix(1, 0)
		}
	}
	_, _ = w.Set(address, setting)
}

// wholes returns the declarations of all sources.
func wholes(said map[string]map[string]model.Service) (all []Declaration) {
	for _, source := range slices.Sorted(maps.Keys(said)) {
		d := Declaration{Source: source}
		for _, name := range slices.Sorted(maps.Keys(said[source])) {
			d.Services = append(d.Services, said[source][name])
		}
		all = append(all, d)
	}
	return all
}

// compareWithWhole compares the writer with one that gets whole declarations, with the same overrides.
func compareWithWhole(t *rapid.T, w *Writer, said map[string]map[string]model.Service) {
	whole := NewWriter()
	if _, err := whole.Replace(wholes(said)...); err != nil {
		t.Fatal(err)
	}
	for _, o := range w.Overrides() {
		if _, err := whole.Set(o.Backend.String(), o.Setting); err != nil {
			t.Fatalf("an override is of no backend: %v", err)
		}
	}
	if got, want := dump(w.Snapshot()), dump(whole.Snapshot()); got != want {
		t.Fatalf("after parts:\n%s\nall at once:\n%s", got, want)
	}
	if got, want := dumpClaims(w.claims), dumpClaims(whole.claims); got != want {
		t.Fatalf("claims after parts:\n%s\nall at once:\n%s", got, want)
	}
}

// dump returns a snapshot as text, without its revision and without the order of services.
func dump(s *Snapshot) string {
	var lines []string
	for _, list := range [][]*model.Service{s.Services, s.Configured} {
		sorted := slices.SortedFunc(slices.Values(list), byName)
		for _, service := range sorted {
			lines = append(lines, fmt.Sprintf("%s of %s: %v %v", service.Name, service.Source, service.Frontends, service.Backends))
		}
		lines = append(lines, "")
	}
	for _, o := range s.Overrides {
		lines = append(lines, fmt.Sprintf("%s %+v %v", o.Backend, o.Setting, o.Sources))
	}
	return strings.Join(lines, "\n")
}

func dumpClaims(c claims) string {
	var lines []string
	for place, at := range c {
		for _, all := range append(slices.Collect(maps.Values(at.exact)), at.ranges) {
			for _, x := range all {
				lines = append(lines, fmt.Sprintf("%v %s %s", place, x.Frontend, x.service.Name))
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// many returns services with the same number of backends each.
func many(count, backends int) (all []model.Service) {
	for i := range count {
		s := model.Service{Name: fmt.Sprintf("s%05d", i), Frontends: []model.Frontend{frontend(fmt.Sprintf("10.96.%d.%d", i/256, i%256), 80, 80)}}
		for j := range backends {
			s.Backends = append(s.Backends, model.Backend{Weight: 1, BackendAddress: model.BackendAddress{Address: netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(j)}), Port: 80}})
		}
		all = append(all, s)
	}
	return all
}

// cpuTime returns the CPU time of this process so far, the collector's included.
func cpuTime(b *testing.B) time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// BenchmarkPart changes one weight among services of 100 backends, tried and taken over.
func BenchmarkPart(b *testing.B) {
	for _, count := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("%dx100", count), func(b *testing.B) {
			all := many(count, 100)
			w := NewWriter()
			if _, err := w.Replace(Declaration{Source: "api", Services: all}); err != nil {
				b.Fatal(err)
			}
			at := cpuTime(b)
			defer func() { b.ReportMetric((cpuTime(b)-at).Seconds()*1000/float64(b.N), "cpu-ms/op") }()
			for i := 0; b.Loop(); i++ {
				s := all[count/2]
				s.Backends = slices.Clone(s.Backends)
				s.Backends[0].Weight = uint16(2 + i%2)
				part := Declaration{Source: "api", Services: []model.Service{s}, Part: true}
				if _, err := w.Try(part); err != nil {
					b.Fatal(err)
				}
				if revision, err := w.Replace(part); err != nil || revision != Revision(2+i) {
					b.Fatal(revision, err)
				}
			}
		})
	}
}
