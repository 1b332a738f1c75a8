// Package store holds the maps that programs and daemon share: it opens them, and reads and writes their contents, in the
// project's values. View reads, Writer also changes; Writer implements reconcile.Maps. Programs that only user space
// runs, such as sh_sweep, are loaded here; nothing here is attached to an interface.
//
// Needs CAP_BPF and CAP_PERFMON, and CAP_NET_ADMIN for the types of some maps.
package store

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// Writer is a data plane whose maps this process writes. The methods of reconcile.Maps are for one caller at a
// time; all others may be called at any time.
type Writer struct {
	View
	adopted bool
	discard func() error // takes the maps away again that Open has made

	// require makes all attached programs support features, before a record needs them.
	require func(abi.Feature) error

	// addresses is held while a record of sh_addresses is read, changed and written.
	addresses sync.Mutex
	// natDestination holds the services with that forwarding; settings.nat_destination follows.
	natDestination map[uint32]bool
	hostBackends   map[uint32]bool // the backends on this host; the same
	toClients      sync.Mutex      // held while that setting changes

	// backendMu is held while a backend changes, so that data of one tenant of a position (SetHop, SetNATSources) are
	// never written into the next tenant's record.
	backendMu sync.Mutex
	sources   natSourceRuns

	reserved map[abi.FlowKey]bool // source ports; nil before the first Reserve

	nextPod uint32 // from which index on a pod's interface gets one; 0: none has got one from this process

	grace *kernel.Grace
	sweep *ebpf.Program
	// recall is the program behind ScanRemembered.
	recall *ebpf.Program
}

var _ reconcile.Maps = (*Writer)(nil)

// Open opens the maps of an instance, or makes them. If Open fails, existing maps continue unchanged, and new
// ones are removed.
func Open(opts Options) (*Writer, error) {
	set, err := opts.MapSet()
	if err != nil {
		return nil, err
	}
	maps, adopted, err := set.Open()
	if err != nil {
		return nil, err
	}
	w := New(opts, maps)
	if w.adopted = adopted; !adopted {
		w.discard = set.Remove
	}
	if err := w.Adopt(); err != nil {
		return nil, errors.Join(err, w.Abandon())
	}
	return w, nil
}

// New returns a Writer of these maps, which it closes. Before Adopt only Adopt, Abandon and Close may be
// called.
func New(opts Options, maps map[string]*ebpf.Map) *Writer {
	return &Writer{
		View: View{opts: opts, maps: maps}, adopted: true,
		require:        func(abi.Feature) error { return nil },
		natDestination: map[uint32]bool{}, hostBackends: map[uint32]bool{},
	}
}

// Adopt reads the contents of the maps, and loads the programs that user space runs.
func (w *Writer) Adopt() error {
	if err := w.mapMemory(true); err != nil {
		return err
	}
	if err := w.loadTools(); err != nil {
		return err
	}
	w.forgetKnown() // a predecessor may have been killed before it could
	atomic.StoreUint32(&w.settings[0].RememberBudget, rememberBudget(w.maps[abi.MapRemembered].MaxEntries()))
	if err := w.forgetOwn(); err != nil {
		return err
	}
	var err error
	if w.grace, err = kernel.NewGrace(); err != nil {
		return err
	}
	for i := range w.services {
		if w.services[i].Table != 0 && w.services[i].Forwarding == uint8(abi.FORWARDING_NAT_DESTINATION) {
			w.natDestination[uint32(i)] = true
		}
	}
	for i := range w.backends {
		if w.isHost(w.backends[i].Hop) {
			w.hostBackends[uint32(i)] = true
		}
	}
	w.sources.adopt(&w.View)
	return nil
}

// Require sets the function that makes programs support features: it is called before a record is written that
// needs them, and its error refuses the record.
func (w *Writer) Require(require func(abi.Feature) error) { w.require = require }

// ticking returns the constants of the clock by which programs measure the age of a flow.
func (w *Writer) ticking() map[string]any {
	return map[string]any{"jiffies_per_second": w.rate, "tick_shift": w.tickShift()}
}

// loadTools loads the programs that user space runs.
func (w *Writer) loadTools() error {
	if err := w.loadClock(); err != nil {
		return err
	}
	coll, err := w.Load(w.opts.Version.Only(abi.ObjectSweep, "sh_sweep", "sh_recall"), w.ticking())
	if err != nil {
		return fmt.Errorf("load the programs that expire flows: %w", err)
	}
	defer coll.Close()
	if w.sweep, err = kernel.TakeProgram(coll, "sh_sweep"); err == nil {
		w.recall, err = kernel.TakeProgram(coll, "sh_recall")
	}
	return err
}

// Adopted reports whether the maps existed already, with contents.
func (w *Writer) Adopted() bool { return w.adopted }

// Close closes everything and removes nothing.
func (w *Writer) Close() error {
	var errs []error
	for _, program := range []**ebpf.Program{&w.sweep, &w.recall} {
		if *program != nil {
			errs = append(errs, (*program).Close())
			*program = nil
		}
	}
	if w.grace != nil {
		errs = append(errs, w.grace.Close())
		w.grace = nil
	}
	return errors.Join(append(errs, w.View.Close())...)
}

// Abandon closes everything, and removes the maps that did not exist before.
func (w *Writer) Abandon() error {
	err := w.Close()
	if w.discard != nil {
		err = errors.Join(err, w.discard())
	}
	return err
}
