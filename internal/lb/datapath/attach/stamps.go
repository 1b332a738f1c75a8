package attach

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// StampProbes has the programs for what comes in stamp probes of `shunt diag ping`, or no longer. Where that is a change, each is loaded
// anew and takes the place of the old one in a single step, so no packet is lost. The stamps are pinned beside the instance's
// other pins for as long as they are asked for (kernel.StampRings reads them). If it fails, a later call tries again.
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
	if err := d.renewAll((*attached).isThere); err != nil {
		d.features &^= abi.FEATURE_STAMPS // an interface that has them already may keep them, until it is loaded again
		kernel.CloseMaps(d.stamps)
		d.stamps = nil
		return errors.Join(err, kernel.RemoveStamps(d.opts.PinRoot, d.opts.Instance))
	}
	return nil
}

// endStamps also takes away what a predecessor has left. Its programs are replaced when their interfaces are attached again.
func (d *Plane) endStamps() error {
	if d.stampsProbes() {
		d.features &^= abi.FEATURE_STAMPS
		if err := d.renewAll((*attached).isThere); err != nil {
			d.features |= abi.FEATURE_STAMPS
			return err
		}
		kernel.CloseMaps(d.stamps)
		d.stamps = nil
	}
	return kernel.RemoveStamps(d.opts.PinRoot, d.opts.Instance)
}

// fitStamps leaves one program of the object, which takes the stages' name there: plain, or with stamps the one that stamps probes,
// which has maps beside its own.
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

// stampsProbes is whether programs are to stamp probes now.
func (d *Plane) stampsProbes() bool { return d.features&abi.FEATURE_STAMPS != 0 }
