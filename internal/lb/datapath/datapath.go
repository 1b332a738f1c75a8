// Package datapath is the way into the kernel: it loads the programs, attaches them, pins
// maps and links so that they outlive the process, and turns the project's values into
// what the programs read. Nothing else of shunt imports a BPF library.
//
//	/sys/fs/bpf/shunt/<instance>/
//	    abi-1/sh_services …     the maps, taken over by the next process of the same ABI
//	    link-<interface>        the program on an interface, replaced in one step
//	    tc-in-<interface>       those with attach: tc
//	    tc-out-<interface>
//	    clsact-<interface>      a note that the qdisc is ours (Linux before 6.6)
//	    deliver-in-<interface>  those at tc beside one at XDP (deliver.go)
//	    deliver-out-<interface>
//	    chain-<interface>       what runs there before and after it
//	    link-drops-<program>    the programs that count frames the kernel refused
//
// A VLAN with attach: native has no pin: sh_vlans says that the program of its parent hands its frames on.
//
// A killed process leaves all of this in place and working. Open adopts it; Remove, which
// needs no process to be alive, takes it away.
//
// Needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, and CAP_SYS_ADMIN to mount bpffs.
package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/vishvananda/netlink"
)

// Options say which data plane is meant.
type Options struct {
	Instance string       // names its directory, so that several can live on one host
	Limits   model.Limits // size the maps; unused by OpenReadOnly
	PinRoot  string       // a bpffs; kernel.DefaultPinRoot if empty
	Log      *slog.Logger // slog.Default() if nil
	Version  *abi.Version // other than this process's; for tests
	// VLANs says what an interface is at its parent, and whether it is a VLAN; VLANOf if nil. For tests.
	VLANs func(netlink.Link) (VLAN, bool)

	version *abi.Version
}

func (o *Options) complete() error {
	if o.PinRoot == "" {
		o.PinRoot = kernel.DefaultPinRoot
		_, _ = kernel.SharePins() // to read needs it as well; Open says what is wrong
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.VLANs == nil {
		o.VLANs = VLANOf
	}
	if o.version = o.Version; o.version == nil {
		o.version = abi.Built()
	}
	return kernel.CheckName(o.Instance)
}

// Datapath is a loaded data plane that this process writes to. The methods of
// reconcile.Maps are for one caller at a time; all others may be called at any time.
type Datapath struct {
	View
	log     *slog.Logger
	adopted bool

	// addresses is held while a record of sh_addresses is read, changed and written.
	addresses sync.Mutex
	// natDestination holds the services of that kind; settings.nat_destination follows.
	natDestination map[uint32]bool
	hostBackends   map[uint32]bool // the backends on this host; the same
	toClients      sync.Mutex      // held while that setting changes
	features       abi.Feature     // that the programs are loaded with
	tcWays         uint64          // bit 1 << index: the interface is at tc (bpf/lb/config.h); mu guards it
	vlans          func(netlink.Link) (VLAN, bool)

	// ways is held while a backend changes, so that what belongs to one tenant of a
	// position (SetHop, SetSources) is never written into the next one's record.
	ways    sync.Mutex
	sources sourceRuns

	reserved map[abi.FlowKey]bool // source ports; nil before the first Reserve

	grace *kernel.Grace
	sweep *ebpf.Program
	// recall is the program behind ScanRemembered.
	recall *ebpf.Program

	// mu guards what is attached.
	mu         sync.Mutex
	attached   map[string]*attached
	withoutTCX bool // as on Linux before 6.6
	drops      []link.Link
}

var _ reconcile.Maps = (*Datapath)(nil)

// Open loads the data plane of an instance, or takes over the one that is there, which is
// upgraded if it has another ABI. Where that fails, it goes on as it was; what was made is gone.
func Open(opts Options) (*Datapath, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	if err := kernel.Mount(opts.PinRoot, opts.Log); err != nil {
		return nil, err
	}
	have, err := finishUpgrade(opts)
	if err != nil {
		return nil, err
	}
	if have != 0 && have != opts.version.ABI {
		return openUpgraded(opts, have)
	}
	set, err := opts.mapSet()
	if err != nil {
		return nil, err
	}
	maps, adopted, err := set.Open()
	if err != nil {
		return nil, err
	}
	d := newDatapath(opts, maps, adopted)
	if err := d.prepare(); err != nil {
		err = errors.Join(err, d.Close())
		if !adopted {
			err = errors.Join(err, set.Remove())
		}
		return nil, err
	}
	return d, nil
}

func newDatapath(opts Options, maps map[string]*ebpf.Map, adopted bool) *Datapath {
	return &Datapath{
		View: View{maps: maps, root: opts.PinRoot, instance: opts.Instance, version: opts.version}, log: opts.Log, adopted: adopted, vlans: opts.VLANs,
		natDestination: map[uint32]bool{}, hostBackends: map[uint32]bool{}, attached: map[string]*attached{},
	}
}

func (d *Datapath) prepare() error {
	if err := d.mapMemory(true); err != nil {
		return err
	}
	if err := d.loadTools(); err != nil {
		return err
	}
	d.forgetKnown() // a predecessor may have been killed before it could
	atomic.StoreUint32(&d.settings[0].RememberBudget, rememberBudget(d.maps[abi.MapRemembered].MaxEntries()))
	if err := d.forgetOwn(); err != nil {
		return err
	}
	var err error
	d.features = d.featuresInUse()
	if d.tcWays, err = d.tcWaysInUse(); err != nil {
		return err
	}
	if d.grace, err = kernel.NewGrace(); err != nil {
		return err
	}
	for i := range d.services {
		if d.services[i].Table != 0 && d.services[i].Forwarding == uint8(abi.FORWARDING_NAT_DESTINATION) {
			d.natDestination[uint32(i)] = true
		}
	}
	for i := range d.backends {
		if d.isHost(d.backends[i].Hop) {
			d.hostBackends[uint32(i)] = true
		}
	}
	d.sources.adopt(&d.View)
	return nil
}

// ticking is the clock by which programs tell how old a flow is.
func (d *Datapath) ticking() map[string]any {
	return map[string]any{"jiffies_per_second": d.rate, "tick_shift": d.tickShift()}
}

// loadTools loads the programs that user space runs.
func (d *Datapath) loadTools() error {
	if err := d.loadClock(); err != nil {
		return err
	}
	coll, err := d.loadCollection(d.version.Only(abi.ObjectSweep, "sh_sweep", "sh_recall"), d.ticking())
	if err != nil {
		return fmt.Errorf("load the programs that expire flows: %w", err)
	}
	defer coll.Close()
	if d.sweep, err = kernel.TakeProgram(coll, "sh_sweep"); err == nil {
		d.recall, err = kernel.TakeProgram(coll, "sh_recall")
	}
	return err
}

// Adopted says whether the maps were there already, with what they held.
func (d *Datapath) Adopted() bool { return d.adopted }

// Close lets go of everything and takes nothing away: pinned programs go on.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for name, a := range d.attached {
		errs = append(errs, a.close())
		a.releaseGuests()
		delete(d.attached, name)
	}
	for _, l := range d.drops {
		errs = append(errs, l.Close())
	}
	d.drops = nil
	for _, program := range []**ebpf.Program{&d.sweep, &d.recall} {
		if *program != nil {
			errs = append(errs, (*program).Close())
			*program = nil
		}
	}
	if d.grace != nil {
		errs = append(errs, d.grace.Close())
		d.grace = nil
	}
	return errors.Join(append(errs, d.View.Close())...)
}
