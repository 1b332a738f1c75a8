package store

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// OpenFlows is how many flows are in use: connections of NAT that have been answered and are not
// closed, and conversations over UDP. Direct return keeps no entry for each flow, so it has none.
type OpenFlows struct {
	Services []uint64 // by service index
	Backends []uint64 // by backend index
}

// OpenFlows walks through the flow table and counts. Flows come and go meanwhile.
func (v *View) OpenFlows() (OpenFlows, error) {
	o := OpenFlows{Services: make([]uint64, len(v.services)), Backends: make([]uint64, len(v.backends))}
	counts := map[string][]uint64{"sh_svc_open": o.Services, "sh_be_open": o.Backends}
	load := func() (*ebpf.CollectionSpec, error) {
		spec, err := v.opts.Version.Only(abi.ObjectSweep, "sh_count")()
		if err == nil {
			for name, of := range counts {
				spec.Maps[name].MaxEntries = uint32(len(of))
			}
		}
		return spec, err
	}
	coll, err := v.Load(load, map[string]any{"jiffies_per_second": v.rate})
	if err != nil {
		return o, fmt.Errorf("load the program that counts open flows: %w", err)
	}
	defer coll.Close()
	if _, err := coll.Programs["sh_count"].Run(&ebpf.RunOptions{}); err != nil {
		return o, fmt.Errorf("run sh_count to count open flows: %w", err)
	}
	for name, of := range counts {
		var cursor ebpf.MapBatchCursor
		indexes := make([]uint32, len(of))
		// The kernel says that the key does not exist where the batch reaches the end of the map.
		if n, err := coll.Maps[name].BatchLookup(&cursor, indexes, of, nil); n != len(of) {
			return o, fmt.Errorf("read %d elements of %s, got %d: %w", len(of), name, n, err)
		}
	}
	return o, nil
}
