package attach

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// refusalCounters count frames that the kernel refused after the program's verdict.
var refusalCounters = []string{"sh_bulk_tx", "sh_redir_err", "sh_devmap_xmit"}

func isDropsLink(file string) bool {
	return slices.ContainsFunc(refusalCounters, func(p string) bool { return file == dropsPrefix+p })
}

// countRefusals attaches the programs that count refused frames, once per process, and replaces the programs of
// an earlier process. Forwarding does not need them, so a failure is a warning. The caller holds mu.
func (d *Plane) countRefusals() {
	if d.drops != nil {
		return
	}
	d.drops = []link.Link{}
	if err := d.attachDrops(); err != nil {
		d.log.Warn("frames that the kernel refuses after the verdict are not counted", "error", err)
	}
}

func (d *Plane) attachDrops() error {
	// The tracepoints see every network namespace, and interface indices repeat in them.
	netns, err := host.Netns()
	if err != nil {
		return err
	}
	coll, err := d.Load(d.opts.Version.Loader(abi.ObjectDrops), map[string]any{"netns_inode": uint32(netns)})
	if err != nil {
		return fmt.Errorf("load the programs that count refused frames: %w", err)
	}
	defer coll.Close()
	var errs []error
	for _, name := range refusalCounters {
		if err := d.attachDrop(name, coll.Programs[name]); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (d *Plane) attachDrop(name string, program *ebpf.Program) error {
	if program == nil {
		return fmt.Errorf("attach %s: the object compiled from drops.bpf.c lacks it; run `make generate`", name)
	}
	path := filepath.Join(kernel.Directory(d.opts.PinRoot, d.opts.Instance), dropsPrefix+name)
	l, err := kernel.PinTracing(program, name, path)
	if err != nil {
		return err
	}
	d.drops = append(d.drops, l)
	return nil
}
