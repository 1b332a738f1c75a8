// Package attach keeps the programs of an instance on interfaces: it loads them with the needed features, attaches them
// at XDP, at tc or at the parent of a VLAN, replaces them in one step, chains them with other programs, and detaches
// them. The maps are store's.
//
//	/sys/fs/bpf/shunt/<instance>/
//	    link-<interface>        the program on an interface, replaced in one step
//	    tc-in-<interface>       the programs with attach: tc
//	    tc-out-<interface>
//	    clsact-<interface>      a note that the qdisc is ours (Linux before 6.6)
//	    deliver-in-<interface>  the programs at tc beside one at XDP (deliver.go)
//	    deliver-out-<interface>
//	    chain-<interface>       the programs before and after it
//	    link-drops-<program>    the programs that count frames the kernel refused
//	    stamps-1/               stamps of probes, while stamp_probes is set
//
// A VLAN with attach: native has no pin: by sh_vlans the program of its parent passes its frames on.
//
// Needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON.
package attach

import (
	"errors"
	"log/slog"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// Plane is a data plane whose maps this process writes and whose programs it attaches. The rules for callers of
// Writer hold here too.
type Plane struct {
	*store.Writer
	opts  store.Options
	log   *slog.Logger
	vlans func(netlink.Link) (store.VLAN, bool)

	// mu guards the attachments, and the settings with which the programs were loaded.
	mu         sync.Mutex
	attached   map[string]*attached
	features   abi.Feature                    // that the programs are loaded with
	stamps     map[string]*ebpf.Map           // with FEATURE_STAMPS: the ring of stamps, and their count
	atTC       tcInterfaces                   // the interfaces that are at tc
	shared     [len(directions)]*ebpf.Program // at the interfaces of all pods; nil until one is expected
	withoutTCX bool                           // as on Linux before 6.6
	drops      []link.Link
}

// New returns the plane of a Writer, which it closes. Attachments of a predecessor continue until they are
// replaced.
func New(w *store.Writer) (*Plane, error) {
	opts := w.Options()
	d := &Plane{Writer: w, opts: opts, log: opts.Log, vlans: opts.VLANs, attached: map[string]*attached{}, features: w.FeaturesInUse()}
	if d.vlans == nil {
		d.vlans = VLANOf
	}
	forgotten, err := w.ForgetPods()
	if err != nil { // other interfaces get these indices once no other index is free
		d.log.Warn("cannot remove all records of interfaces of pods that have gone", "error", err)
	}
	if forgotten > 0 {
		d.log.Info("removed the records of interfaces of pods that have gone since a daemon last ran", "interfaces", forgotten)
	}
	if d.atTC, err = d.interfacesAtTC(); err != nil {
		return nil, err
	}
	w.Require(d.require)
	return d, nil
}

// Close closes everything and removes nothing: pinned programs continue.
func (d *Plane) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for name, a := range d.attached {
		errs = append(errs, a.close())
		a.releaseGuests()
		delete(d.attached, name)
	}
	errs = append(errs, d.closeShared())
	for _, l := range d.drops {
		errs = append(errs, l.Close())
	}
	d.drops = nil
	kernel.CloseMaps(d.stamps)
	d.stamps = nil
	return errors.Join(append(errs, d.Writer.Close())...)
}

// constants are the load-time values of lb/config.h, for one interface's program.
func (d *Plane) constants(a *attached) map[string]any {
	features, interfaces := d.features, uint64(0)
	if d.delivers(a) {
		features |= abi.FEATURE_TC_INTERFACES
		interfaces = d.atTC.named()
	}
	constants := d.Constants()
	constants["features"] = uint32(features)
	constants["interface_index"] = a.index
	constants["generic_mode"] = abi.Bool(a.Mode != kernel.ModeNative)
	constants["redirect_back"] = abi.Bool(a.Mode == kernel.ModeNative && a.redirectBack)
	constants["tc_interfaces"] = interfaces
	return constants
}
