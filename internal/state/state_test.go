package state

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/internal/model"
)

func frontend(address string, first, last uint16) model.Frontend {
	return model.Frontend{
		Address: netip.MustParseAddr(address), Protocol: model.TCP,
		Ports: model.PortRange{First: first, Last: last},
	}
}

func config(name string, frontends ...model.Frontend) model.Config {
	return model.Config{Services: []model.Service{{Name: name, Frontends: frontends}}}
}

func TestReplaceMerges(t *testing.T) {
	w := NewWriter()
	if got := w.Snapshot(); got.Revision != 0 || len(got.Config.Services) != 0 {
		t.Fatalf("at start: %+v", got)
	}
	file := config("web", frontend("192.0.2.10", 80, 80))
	file.Limits.Flows = 7
	revision, err := w.Replace("file", file)
	if err != nil || revision != 1 {
		t.Fatalf("Replace(file) = %d, %v", revision, err)
	}
	old := w.Snapshot()
	revision, err = w.Replace("api", config("dns", frontend("192.0.2.10", 53, 53)))
	if err != nil || revision != 2 {
		t.Fatalf("Replace(api) = %d, %v", revision, err)
	}
	want := model.Config{Limits: model.Limits{Flows: 7}, Services: []model.Service{
		{Name: "dns", Frontends: []model.Frontend{frontend("192.0.2.10", 53, 53)}},
		{Name: "web", Frontends: []model.Frontend{frontend("192.0.2.10", 80, 80)}},
	}}
	compare := cmp.Options{
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	}
	if diff := cmp.Diff(want, w.Snapshot().Config, compare); diff != "" {
		t.Errorf("merged (-want +got):\n%s", diff)
	}
	if len(old.Config.Services) != 1 || old.Revision != 1 {
		t.Errorf("an old snapshot changed: %+v", old)
	}
	if revision, err = w.Replace("file", file); err != nil || revision != 2 {
		t.Errorf("the same again = %d, %v; want the present revision", revision, err)
	}
	if _, err = w.Replace("api", model.Config{}); err != nil || len(w.Snapshot().Config.Services) != 1 {
		t.Errorf("withdrawing a source left %+v, %v", w.Snapshot(), err)
	}
}

func TestSnapshotIsACopy(t *testing.T) {
	w := NewWriter()
	cfg := config("web", frontend("192.0.2.10", 80, 80))
	if _, err := w.Replace("file", cfg); err != nil {
		t.Fatal(err)
	}
	cfg.Services[0].Name = "changed"
	cfg.Services[0].Frontends[0].Ports.First = 1
	got := w.Snapshot().Config.Services[0]
	if got.Name != "web" || got.Frontends[0].Ports.First != 80 {
		t.Errorf("the snapshot changed with the caller's value: %+v", got)
	}
}

func TestConflicts(t *testing.T) {
	limits := func(n uint32) model.Config { return model.Config{Limits: model.Limits{Flows: n}} }
	gue := func(port uint16) model.Config {
		return model.Config{Encapsulation: model.Encapsulation{GUEPort: port}}
	}
	native := model.Config{Interfaces: []model.Interface{{Name: "eth0", Attach: model.AttachNative}}}
	auto := model.Config{Interfaces: []model.Interface{{Name: "eth0", Attach: model.AttachAuto}}}
	for _, c := range []struct {
		name      string
		file, api model.Config
		object    string // empty: no conflict
	}{
		{"same name", config("web"), config("web"), `service "web"`},
		{"same port", config("a", frontend("192.0.2.1", 80, 80)), config("b", frontend("192.0.2.1", 80, 80)), "frontend tcp 192.0.2.1:80"},
		{"port in any", config("a", frontend("192.0.2.1", 0, 65535)), config("b", frontend("192.0.2.1", 80, 80)), "frontend tcp 192.0.2.1:80"},
		{"any over port", config("a", frontend("192.0.2.1", 80, 80)), config("b", frontend("192.0.2.1", 0, 65535)), "frontend tcp 192.0.2.1:any"},
		{"behind a short one", config("a", frontend("192.0.2.1", 1, 100), frontend("192.0.2.1", 2, 3)), config("b", frontend("192.0.2.1", 50, 50)), "frontend tcp 192.0.2.1:50"},
		{"neighbours", config("a", frontend("192.0.2.1", 1, 79)), config("b", frontend("192.0.2.1", 80, 90)), ""},
		{"other address", config("a", frontend("192.0.2.1", 80, 80)), config("b", frontend("192.0.2.2", 80, 80)), ""},
		{"other limits", limits(1), limits(2), "limits"},
		{"same limits", limits(1), limits(1), ""},
		{"one has limits", limits(1), config("b"), ""},
		{"other encapsulation", gue(1), gue(2), "encapsulation"},
		{"same encapsulation", gue(1), gue(1), ""},
		{"other attach", native, auto, `interface "eth0"`},
		{"same interface", native, native, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := NewWriter()
			if _, err := w.Replace("file", c.file); err != nil {
				t.Fatal(err)
			}
			before := w.Snapshot()
			_, err := w.Replace("api", c.api)
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
	cfg := config("web")
	cfg.Services = append(cfg.Services, cfg.Services[0])
	if _, err := NewWriter().Replace("file", cfg); err == nil {
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
				if _, err := w.Replace(fmt.Sprint(i), config(fmt.Sprintf("s%d-%d", i, j))); err != nil {
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
	if got := len(w.Snapshot().Config.Services); got != writers {
		t.Errorf("%d services at the end, want %d", got, writers)
	}
}
