package datapath

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
)

// EndSources ends every flow that full NAT sends from one of these addresses, which no backend names
// any more, and says how many of them were in use. It may be called again for the same addresses.
func (d *Datapath) EndSources(addresses []netip.Addr) (open uint64, err error) {
	if len(addresses) == 0 {
		return 0, nil
	}
	if err := d.Grace(); err != nil { // a running program may have read who named them
		return 0, err
	}
	load := func() (*ebpf.CollectionSpec, error) {
		spec, err := d.version.only(objectSweep, sweepProgShSourceless)()
		if err == nil {
			spec.Maps[sweepMapShDeparted].MaxEntries = uint32(len(addresses))
		}
		return spec, err
	}
	coll, err := d.loadCollection(load, d.ticking())
	if err != nil {
		return 0, fmt.Errorf("load the program that ends flows of NAT sources that are gone: %w", err)
	}
	defer coll.Close()
	for _, a := range addresses {
		if err := coll.Maps[sweepMapShDeparted].Put(toAddr(a), uint8(1)); err != nil {
			return 0, fmt.Errorf("write the NAT source %s, which is gone: %w", a, err)
		}
	}
	for range straysTries {
		var found sweepSourceless
		if _, err := coll.Programs[sweepProgShSourceless].Run(&ebpf.RunOptions{Context: found, ContextOut: &found}); err != nil {
			return open, fmt.Errorf("run %s to end flows of NAT sources that are gone: %w", sweepProgShSourceless, err)
		}
		if open += found.Open; found.Entries == 0 {
			return open, nil
		}
	}
	return open, fmt.Errorf("flows of NAT sources that are gone keep coming back: some are left after %d tries", straysTries)
}
