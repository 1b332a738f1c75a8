package load

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/node"
)

// Breakages between reconciler and data plane, for daemons whose faults the tests have to find. Each is
// a mistake that a developer could make. The context ends when the daemon gets its signal to stop.
var between = map[string]func(context.Context, reconcile.Maps) reconcile.Maps{
	// A daemon that takes the maps for empty uses positions and generations again that are in use.
	"mirror not adopted": func(_ context.Context, m reconcile.Maps) reconcile.Maps { return forgetful{m} },
	// A slot names a backend that does not exist yet.
	"slot before backend": func(ctx context.Context, m reconcile.Maps) reconcile.Maps { return hasty{m, ctx} },
}

// The daemons without a fault.
const (
	watchedHow = "watched" // with a witness
	fullHow    = "full"    // whose kernel has no room for frontends while a file exists
)

// runWatched is `shunt run` with one of these in between; it knows the options that launch gives.
func runWatched(how string) int {
	flags := flag.NewFlagSet("run", flag.ExitOnError)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	options := node.Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), OnExit: node.ExitKeep}
	var balancer daemon.Options
	if broken := between[how]; broken != nil {
		balancer.Through = func(m reconcile.Maps) reconcile.Maps { return broken(ctx, m) }
	}
	flags.StringVar(&options.ConfigPath, "config", "", "")
	flags.StringVar(&options.Instance, "instance", "", "")
	flags.StringVar(&options.Socket, "socket", "", "")
	flags.Func("on-exit", "", func(way string) error { options.OnExit = node.OnExit(way); return nil })
	_ = flags.Parse(slices.DeleteFunc(os.Args[1:], func(a string) bool { return a == "run" })) // exits
	if how == watchedHow {
		out, err := os.OpenFile(options.ConfigPath+".writes", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		balancer.Through = func(m reconcile.Maps) reconcile.Maps { return &witness{Maps: m, out: out} }
	}
	if how == fullHow {
		balancer.Through = func(m reconcile.Maps) reconcile.Maps { return full{m, options.ConfigPath + ".full"} }
	}
	if balancer.Through == nil {
		fmt.Fprintf(os.Stderr, "%s=%s: unknown value\n", childVariable, how)
		return 2
	}
	options.Products = []node.Product{daemon.Product(balancer)}
	if err := node.Run(ctx, options); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// forgetful pretends that the maps are empty.
type forgetful struct{ reconcile.Maps }

func (forgetful) Contents() (reconcile.Contents, error) { return reconcile.Contents{}, nil }

// hasty writes backends after the slots that name them, with a delay. A backend that is not written yet
// when the daemon gets its signal to stop is never written: the maps are closed then.
type hasty struct {
	reconcile.Maps
	ctx context.Context //nolint:containedctx // a daemon's whole life
}

func (h hasty) PutBackend(r reconcile.BackendRecord) error {
	time.AfterFunc(300*time.Millisecond, func() {
		if h.ctx.Err() != nil {
			return
		}
		if err := h.Maps.PutBackend(r); err != nil {
			panic(err)
		}
	})
	return nil
}

// full has a map that takes no more entries while a file exists.
type full struct {
	reconcile.Maps
	path string
}

func (f full) PutFrontend(frontend model.Frontend, service uint32) error {
	if _, err := os.Stat(f.path); err == nil {
		return fmt.Errorf("write frontend %s: %w: no room here", frontend, syscall.E2BIG)
	}
	return f.Maps.PutFrontend(frontend, service)
}

// witness records every write to the maps: the kind of entry, its owner, and whether it was there
// already. It knows the entries from the adoption and from the writes since.
type witness struct {
	reconcile.Maps
	out  *os.File
	have reconcile.Contents
	slot map[uint32]reconcile.Slot // by position in the array
}

// write is a line of the witness's record.
type write struct {
	What  string `json:"what"` // backend, service, frontend, filter, address, slots, table
	Of    string `json:"of"`
	Again bool   `json:"again,omitempty"` // the same entry was there already
}

func (w *witness) note(what, of string, again bool) {
	line, _ := json.Marshal(write{what, of, again})
	_, _ = w.out.Write(append(line, '\n'))
}

func (w *witness) Contents() (reconcile.Contents, error) {
	c, err := w.Maps.Contents()
	if err != nil {
		return c, err
	}
	w.slot = map[uint32]reconcile.Slot{}
	for i, r := range c.Services {
		for n, slot := range c.Slots[i].All() {
			w.slot[r.Offset+uint32(n)] = slot
		}
		for n, slot := range c.BeforeSlots[i].All() {
			w.slot[r.BeforeOffset+uint32(n)] = slot
		}
	}
	w.have, err = w.Maps.Contents() // a copy of its own: the reconciler keeps c
	if w.have.Filters == nil {
		w.have.Filters = map[reconcile.Filter]bool{}
	}
	return c, err
}

// put notes a write to one of the maps in have, and whether the entry had this value already.
func put[K, V comparable](w *witness, what, of string, have map[K]V, key K, value V) {
	before, there := have[key]
	w.note(what, of, there && before == value)
	have[key] = value
}

// gone notes a deletion.
func gone[K comparable, V any](w *witness, what, of string, have map[K]V, key K) {
	_, there := have[key]
	w.note(what, of, !there)
	delete(have, key)
}

func (w *witness) PutBackend(r reconcile.BackendRecord) error {
	put(w, "backend", r.Address.String(), w.have.Backends, r.Index, r)
	return w.Maps.PutBackend(r)
}

func (w *witness) DeleteBackend(r reconcile.BackendRef) error {
	gone(w, "backend", w.have.Backends[r.Index].Address.String(), w.have.Backends, r.Index)
	return w.Maps.DeleteBackend(r)
}

// PutService does not note that the table before a change is no longer referred to: that too happens by
// time alone.
func (w *witness) PutService(r reconcile.ServiceRecord) error {
	without := w.have.Services[r.Index]
	without.BeforeOffset, without.BeforeSize = 0, 0
	if w.have.Services[r.Index] != r && without == r {
		w.have.Services[r.Index] = r
		return w.Maps.PutService(r)
	}
	put(w, "service", r.Name, w.have.Services, r.Index, r)
	return w.Maps.PutService(r)
}

func (w *witness) DeleteService(index uint32, generation uint8) error {
	gone(w, "service", w.have.Services[index].Name, w.have.Services, index)
	return w.Maps.DeleteService(index, generation)
}

func (w *witness) PutFrontend(f model.Frontend, service uint32) error {
	put(w, "frontend", f.Address.String(), w.have.Frontends, f, service)
	return w.Maps.PutFrontend(f, service)
}

func (w *witness) DeleteFrontend(f model.Frontend) error {
	gone(w, "frontend", f.Address.String(), w.have.Frontends, f)
	return w.Maps.DeleteFrontend(f)
}

func (w *witness) PutFilter(f reconcile.Filter, allow bool) error {
	put(w, "filter", w.have.Services[f.Service].Name, w.have.Filters, f, allow)
	return w.Maps.PutFilter(f, allow)
}

func (w *witness) DeleteFilter(f reconcile.Filter) error {
	gone(w, "filter", w.have.Services[f.Service].Name, w.have.Filters, f)
	return w.Maps.DeleteFilter(f)
}

func (w *witness) PutAddress(r reconcile.AddressRecord) error {
	put(w, "address", r.Address.String(), w.have.Addresses, r.Address, r)
	return w.Maps.PutAddress(r)
}

func (w *witness) DeleteAddress(a netip.Addr) error {
	gone(w, "address", a.String(), w.have.Addresses, a)
	return w.Maps.DeleteAddress(a)
}

// WriteSlots tells a table that programs read from a table without readers yet, which is written as a
// whole. Changes by time alone (a slot that settles) are not noted.
func (w *witness) WriteSlots(offset uint32, slots reconcile.Table) error {
	owner := ""
	for _, r := range w.have.Services {
		if offset >= r.Offset && offset < r.Offset+r.Size {
			owner = r.Name
		}
	}
	again, settles := false, true
	for n, slot := range slots.All() {
		before, there := w.slot[offset+uint32(n)]
		again = again || there && before == slot
		settles = settles && slot.State != reconcile.Transition && before.State != slot.State && before.Current == slot.Current
		w.slot[offset+uint32(n)] = slot
	}
	switch {
	case owner == "":
		w.note("table", "", false)
	case !settles:
		w.note("slots", owner, again)
	}
	return w.Maps.WriteSlots(offset, slots)
}
