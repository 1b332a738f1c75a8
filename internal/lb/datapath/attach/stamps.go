package attach

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// StampProbes switches stamping of `shunt diag ping` probes on or off for the programs at XDP. If that is a
// change, each program is loaded anew and replaces the old one in a single step, so no packet is lost. The
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
	if d.features&abi.FEATURE_STAMPS != 0 {
		return nil
	}
	stamps, err := kernel.MakeStamps(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return err
	}
	d.stamps, d.features = stamps, d.features|abi.FEATURE_STAMPS
	if err := d.renewAll((*attached).runsXDP); err != nil {
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
	if d.features&abi.FEATURE_STAMPS != 0 {
		d.features &^= abi.FEATURE_STAMPS
		if err := d.renewAll((*attached).runsXDP); err != nil {
			d.features |= abi.FEATURE_STAMPS
			return err
		}
		kernel.CloseMaps(d.stamps)
		d.stamps = nil
	}
	return kernel.RemoveStamps(d.opts.PinRoot, d.opts.Instance)
}

// fitStamps keeps in the object only the requested program, under the one name that both have in the kernel,
// with its maps.
func (d *Plane) fitStamps(spec *ebpf.CollectionSpec) error {
	stamping := spec.Programs[abi.ProgramXDPStamps]
	if stamping == nil {
		return errors.New("the compiled object lacks " + abi.ProgramXDPStamps + "; this is a fault in the build: run `make generate`")
	}
	delete(spec.Programs, abi.ProgramXDPStamps)
	if d.features&abi.FEATURE_STAMPS == 0 {
		for _, name := range []string{kernel.StampMap, kernel.StampCountMap, abi.MapStamping} {
			delete(spec.Maps, name)
		}
		return nil
	}
	stamping.Name = abi.ProgramXDP
	spec.Programs[abi.ProgramXDP] = stamping
	for name, m := range d.stamps {
		spec.Maps[name].MaxEntries = m.MaxEntries()
	}
	return nil
}
