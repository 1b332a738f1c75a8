package store

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// EndNATSources ends every flow that full NAT sends from one of these addresses, which no backend names any more,
// and returns how many of them were in use. It may be called again for the same addresses.
func (w *Writer) EndNATSources(addresses []netip.Addr) (open uint64, err error) {
	if len(addresses) == 0 {
		return 0, nil
	}
	if err := w.Grace(); err != nil { // a running program may have read the record that named them
		return 0, err
	}
	load := func() (*ebpf.CollectionSpec, error) {
		spec, err := w.opts.Version.Only(abi.ObjectSweep, abi.ProgramSourceless)()
		if err == nil {
			spec.Maps[abi.MapDeparted].MaxEntries = uint32(len(addresses))
		}
		return spec, err
	}
	coll, err := w.Load(load, w.ticking())
	if err != nil {
		return 0, fmt.Errorf("load the program that ends flows of NAT sources that are gone: %w", err)
	}
	defer coll.Close()
	for _, a := range addresses {
		if err := coll.Maps[abi.MapDeparted].Put(abi.ToAddr(a), uint8(1)); err != nil {
			return 0, fmt.Errorf("write the NAT source %s, which is gone: %w", a, err)
		}
	}
	for range straysTries {
		var found abi.Sourceless
		if _, err := coll.Programs[abi.ProgramSourceless].Run(&ebpf.RunOptions{Context: found, ContextOut: &found}); err != nil {
			return open, fmt.Errorf("run %s to end flows of NAT sources that are gone: %w", abi.ProgramSourceless, err)
		}
		if open += found.Open; found.Entries == 0 {
			return open, nil
		}
	}
	return open, fmt.Errorf("flows of NAT sources that are gone keep coming back: some are left after %d tries", straysTries)
}
