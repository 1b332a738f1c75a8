package attach

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// StampProbes switches stamping of `shunt diag ping` probes on or off for the programs that see packets coming in. If that is
// a change, each program is loaded anew and replaces the old one in a single step, so no packet is lost. The
// stamps are pinned beside the instance's other pins while stamping is on (kernel.StampRings reads them). After
// a failure, a later call tries again.
func (d *Plane) StampProbes(on bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	unlock, err := kernel.Lock(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return err
	}
	defer unlock()
	if on {
		err = d.beginStamps()
	} else {
		err = d.endStamps()
	}
	if err != nil {
		return fmt.Errorf("stamp probes (%t): %w", on, err)
	}
	return nil
}

func (d *Plane) beginStamps() error {
	if d.stampsProbes() {
		return nil
	}
	stamps, err := kernel.MakeStamps(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return err
	}
	d.stamps, d.features = stamps, d.features|abi.FEATURE_STAMPS
	if err := d.renewAll(); err != nil {
		d.features &^= abi.FEATURE_STAMPS // an interface that has them already may keep them, until it is loaded again
		kernel.CloseMaps(d.stamps)
		d.stamps = nil
		return errors.Join(err, kernel.RemoveStamps(d.opts.PinRoot, d.opts.Instance))
	}
	return nil
}

// endStamps also removes the stamps of a predecessor. Its programs are replaced when their interfaces are
// attached again.
func (d *Plane) endStamps() error {
	if d.stampsProbes() {
		d.features &^= abi.FEATURE_STAMPS
		if err := d.renewAll(); err != nil {
			d.features |= abi.FEATURE_STAMPS
			return err
		}
		kernel.CloseMaps(d.stamps)
		d.stamps = nil
	}
	return kernel.RemoveStamps(d.opts.PinRoot, d.opts.Instance)
}

// fitStamps keeps in the object only the requested program, plain or stamping, under the one name that both have in the kernel,
// with its maps.
func (d *Plane) fitStamps(spec *ebpf.CollectionSpec, plain, stamping string, stamps bool) error {
	if spec.Programs[plain] == nil || spec.Programs[stamping] == nil {
		return fmt.Errorf("the compiled object lacks %s or %s; this is a fault in the build: run `make generate`", plain, stamping)
	}
	chosen := spec.Programs[stamping]
	delete(spec.Programs, stamping)
	if !stamps {
		for _, name := range []string{kernel.StampMap, kernel.StampCountMap, abi.MapStamping} {
			delete(spec.Maps, name)
		}
		return nil
	}
	chosen.Name = plain
	spec.Programs[plain] = chosen
	for name, m := range d.stamps {
		spec.Maps[name].MaxEntries = m.MaxEntries()
	}
	return nil
}

// stampsProbes reports whether programs have to stamp probes now.
func (d *Plane) stampsProbes() bool { return d.features&abi.FEATURE_STAMPS != 0 }
