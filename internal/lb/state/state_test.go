package state

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

func frontend(address string, first, last uint16) model.Frontend {
	return model.Frontend{
		Address: netip.MustParseAddr(address), Protocol: model.TCP,
		Ports: value.PortRange{First: first, Last: last},
	}
}

func services(name string, frontends ...model.Frontend) []model.Service {
	return []model.Service{{Name: name, Frontends: frontends}}
}

// configuration returns the declaration of the source that configures the node.
func configuration(source string, config model.Config) Declaration {
	return Declaration{Source: source, Node: &config.Node, Services: config.Services}
}

func TestReplaceMerges(t *testing.T) {
	w := NewWriter()
	if got := w.Snapshot(); got.Revision != 0 || len(got.Services) != 0 {
		t.Fatalf("at start: %+v", got)
	}
	file := model.Config{Services: services("web", frontend("192.0.2.10", 80, 80))}
	file.Limits.Flows = 7
	revision, err := w.Replace(configuration("file", file))
	if err != nil || revision != 1 {
		t.Fatalf("Configure(file) = %d, %v", revision, err)
	}
	old := w.Snapshot()
	revision, err = w.Replace(Declaration{Source: "api", Services: services("dns", frontend("192.0.2.10", 53, 53))})
	if err != nil || revision != 2 {
		t.Fatalf("Replace(api) = %d, %v", revision, err)
	}
	want := &Snapshot{Revision: 2, Node: model.Node{Limits: model.Limits{Flows: 7}}, Services: []*model.Service{
		{Name: "dns", Source: "api", Frontends: []model.Frontend{frontend("192.0.2.10", 53, 53)}},
		{Name: "web", Source: "file", Frontends: []model.Frontend{frontend("192.0.2.10", 80, 80)}},
	}}
	want.Configured = want.Services
	compare := cmp.Options{
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
		cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
	}
	if diff := cmp.Diff(want, w.Snapshot(), compare); diff != "" {
		t.Errorf("merged (-want +got):\n%s", diff)
	}
	if len(old.Services) != 1 || old.Revision != 1 {
		t.Errorf("an old snapshot changed: %+v", old)
	}
	if revision, err = w.Replace(configuration("file", file)); err != nil || revision != 2 {
		t.Errorf("the same again = %d, %v; want the present revision", revision, err)
	}
	if _, err = w.Replace(Declaration{Source: "api"}); err != nil || len(w.Snapshot().Services) != 1 {
		t.Errorf("withdrawing a source left %+v, %v", w.Snapshot(), err)
	}
	if _, err = w.Replace(Declaration{Source: "file"}); err != nil || w.Snapshot().Node.Limits.Flows != 7 {
		t.Errorf("without services the node is %+v, %v; want it as it was configured", w.Snapshot().Node, err)
	}
}

// TestNodeHasOneOwner: only the first source that configures the node may configure it.
func TestNodeHasOneOwner(t *testing.T) {
	w := NewWriter()
	limits := func(n uint32) model.Config { return model.Config{Node: model.Node{Limits: model.Limits{Flows: n}}} }
	if _, err := w.Replace(Declaration{Source: "api", Services: services("web")}); err != nil {
		t.Fatal(err)
	}
	for revision, flows := range []uint32{7, 8} {
		if got, err := w.Replace(configuration("file", limits(flows))); err != nil || got != Revision(2+revision) {
			t.Fatalf("Configure = %d, %v", got, err)
		}
	}
	before := w.Snapshot()
	var conflict *ConflictError
	if _, err := w.Replace(configuration("api", limits(8))); !errors.As(err, &conflict) || conflict.Owner != "file" || conflict.Source != "api" {
		t.Errorf("a second source configured the node: %v", err)
	}
	if got := w.Snapshot(); got != before || got.Node.Limits.Flows != 8 || len(got.Services) != 1 {
		t.Errorf("the state is %+v", got)
	}
}

// TestReplaceSeveral: several sources change in one step or not at all, and of two that conflict, the
// later one is refused.
func TestReplaceSeveral(t *testing.T) {
	w := NewWriter()
	file := configuration("file", model.Config{Node: model.Node{Limits: model.Limits{Flows: 7}}, Services: services("web", frontend("192.0.2.10", 80, 89))})
	meets := Declaration{Source: "api", Services: append(services("dns", frontend("192.0.2.10", 53, 53)), services("more", frontend("192.0.2.10", 85, 85))...)}
	for _, c := range []struct {
		declared []Declaration
		want     ConflictError
	}{
		{[]Declaration{file, meets}, ConflictError{Source: "api", Service: "more", Object: "frontend tcp 192.0.2.10:85", Owner: "file", Detail: "it has tcp 192.0.2.10:80-89"}},
		{[]Declaration{meets, file}, ConflictError{Source: "file", Service: "web", Object: "frontend tcp 192.0.2.10:80-89", Owner: "api", Detail: "it has tcp 192.0.2.10:85"}},
		{[]Declaration{file, {Source: "api", Services: services("web")}}, ConflictError{Source: "api", Service: "web", Object: `service "web"`, Owner: "file"}},
		{[]Declaration{{Source: "api", Services: services("web")}, file}, ConflictError{Source: "file", Service: "web", Object: `service "web"`, Owner: "api"}},
	} {
		var conflict *ConflictError
		if _, err := w.Replace(c.declared...); !errors.As(err, &conflict) || *conflict != c.want {
			t.Errorf("Replace = %#v, want %#v", conflict, c.want)
		}
		if w.Snapshot().Revision != 0 {
			t.Fatalf("a refused change is in force: %+v", w.Snapshot())
		}
	}
	meets.Services = meets.Services[:1]
	if revision, err := w.Replace(file, meets); err != nil || revision != 1 || len(w.Snapshot().Services) != 2 || w.Snapshot().Node.Limits.Flows != 7 {
		t.Errorf("Replace = %d, %v, and then %+v", revision, err, w.Snapshot())
	}
	if revision, err := w.Replace(file, meets); err != nil || revision != 1 {
		t.Errorf("the same again = %d, %v", revision, err)
	}
}

// TestTry: Try returns the same snapshot as Replace would make, and changes nothing.
func TestTry(t *testing.T) {
	w := NewWriter()
	if _, err := w.Replace(Declaration{Source: "api", Services: services("dns", frontend("192.0.2.10", 53, 53))}); err != nil {
		t.Fatal(err)
	}
	before := w.Snapshot()
	config := model.Config{Node: model.Node{Limits: model.Limits{Flows: 7}}, Services: services("web", frontend("192.0.2.10", 80, 80))}
	tried, err := w.Try(configuration("file", config))
	if err != nil || w.Snapshot() != before {
		t.Fatalf("%v; the state is %+v, before %+v", err, w.Snapshot(), before)
	}
	if _, err := w.Replace(configuration("file", config)); err != nil {
		t.Fatal(err)
	}
	if got := w.Snapshot(); !reflect.DeepEqual(got, tried) || len(got.Services) != 2 || len(got.Configured) != 2 {
		t.Errorf("tried %+v, got %+v", tried, got)
	}
	var conflict *ConflictError
	if _, err := w.Try(configuration("api", config)); !errors.As(err, &conflict) || conflict.Owner != "file" {
		t.Errorf("a second source may configure the node: %v", err)
	}
	config.Services = services("dns")
	if _, err := w.Try(configuration("file", config)); !errors.As(err, &conflict) || conflict.Owner != "api" {
		t.Errorf("a service of another source may be named: %v", err)
	}
}

// TestNodeIsACopy: the writer's node does not change when the caller's does.
func TestNodeIsACopy(t *testing.T) {
	w := NewWriter()
	cfg := model.Config{Node: model.Node{Interfaces: []model.Interface{{Name: "eth0"}}}}
	if _, err := w.Replace(configuration("file", cfg)); err != nil {
		t.Fatal(err)
	}
	cfg.Interfaces[0].Name = "changed"
	if got := w.Snapshot().Node.Interfaces[0].Name; got != "eth0" {
		t.Errorf("the interface is now called %q", got)
	}
}

func TestSnapshotIsACopy(t *testing.T) {
	w := NewWriter()
	wanted := services("web", frontend("192.0.2.10", 80, 80))
	if _, err := w.Replace(Declaration{Source: "file", Services: wanted}); err != nil {
		t.Fatal(err)
	}
	wanted[0].Name = "changed"
	wanted[0].Frontends[0].Ports.First = 1
	got := w.Snapshot().Services[0]
	if got.Name != "web" || got.Frontends[0].Ports.First != 80 {
		t.Errorf("the snapshot changed with the caller's value: %+v", got)
	}
}

func TestConflicts(t *testing.T) {
	for _, c := range []struct {
		name      string
		file, api []model.Service
		object    string // empty: no conflict
	}{
		{"same name", services("web"), services("web"), `service "web"`},
		{"same port", services("a", frontend("192.0.2.1", 80, 80)), services("b", frontend("192.0.2.1", 80, 80)), "frontend tcp 192.0.2.1:80"},
		{"port in any", services("a", frontend("192.0.2.1", 0, 65535)), services("b", frontend("192.0.2.1", 80, 80)), "frontend tcp 192.0.2.1:80"},
		{"any over port", services("a", frontend("192.0.2.1", 80, 80)), services("b", frontend("192.0.2.1", 0, 65535)), "frontend tcp 192.0.2.1:any"},
		{"behind a short one", services("a", frontend("192.0.2.1", 1, 100), frontend("192.0.2.1", 2, 3)), services("b", frontend("192.0.2.1", 50, 50)), "frontend tcp 192.0.2.1:50"},
		{"neighbours", services("a", frontend("192.0.2.1", 1, 79)), services("b", frontend("192.0.2.1", 80, 90)), ""},
		{"other address", services("a", frontend("192.0.2.1", 80, 80)), services("b", frontend("192.0.2.2", 80, 80)), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := NewWriter()
			if _, err := w.Replace(Declaration{Source: "file", Services: c.file}); err != nil {
				t.Fatal(err)
			}
			before := w.Snapshot()
			_, err := w.Replace(Declaration{Source: "api", Services: c.api})
			if c.object == "" {
				if err != nil {
					t.Errorf("unexpected: %v", err)
				}
				return
			}
			var conflict *ConflictError
			if !errors.As(err, &conflict) {
				t.Fatalf("got %v, want a conflict", err)
			}
			if conflict.Source != "api" || conflict.Owner != "file" || conflict.Object != c.object {
				t.Errorf("got %+v, want object %q", conflict, c.object)
			}
			if w.Snapshot() != before {
				t.Error("a refused configuration changed the state")
			}
		})
	}
}

func TestDuplicateInOneSource(t *testing.T) {
	if _, err := NewWriter().Replace(Declaration{Source: "file", Services: append(services("web"), services("web")...)}); err == nil {
		t.Error("two services of one name were taken over")
	}
}

func TestWatchSeesEveryChange(t *testing.T) {
	w := NewWriter()
	const writers, rounds = 4, 50
	var done sync.WaitGroup
	for i := range writers {
		done.Go(func() {
			for j := range rounds {
				if _, err := w.Replace(Declaration{Source: fmt.Sprint(i), Services: services(fmt.Sprintf("s%d-%d", i, j))}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	timeout := time.After(30 * time.Second)
	last := Revision(0)
	for {
		snapshot, changed := w.Watch()
		if snapshot.Revision < last {
			t.Fatalf("revision went from %d to %d", last, snapshot.Revision)
		}
		last = snapshot.Revision
		if last == writers*rounds {
			break
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("stuck at revision %d of %d", last, writers*rounds)
		}
	}
	done.Wait()
	if got := len(w.Snapshot().Services); got != writers {
		t.Errorf("%d services at the end, want %d", got, writers)
	}
}
