package store

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// straysTries is the maximum number of walks in EndStrays. A flow survives if a packet comes in at the very
// moment in which it is ended.
const straysTries = 20

// EndStrays ends every flow, tracked or remembered, whose backend is not among members as a member of its
// service. Programs detect only by generations that a backend is gone, and a backend that has left a service
// may still belong to another one.
func (w *Writer) EndStrays(members []reconcile.Member) error {
	load := func() (*ebpf.CollectionSpec, error) {
		spec, err := w.opts.Version.Only(abi.ObjectSweep, "sh_strays")()
		if err == nil {
			spec.Maps["sh_members"].MaxEntries = uint32(max(len(members), 1))
		}
		return spec, err
	}
	coll, err := w.Load(load, w.ticking())
	if err != nil {
		return fmt.Errorf("load the program that ends flows of backends that have left their service: %w", err)
	}
	defer coll.Close()
	for _, m := range members {
		key := abi.Member{Service: abi.ToTenant(m.Service, m.Generation), Backend: abi.ToRef(m.Backend)}
		if err := coll.Maps["sh_members"].Put(key, uint8(1)); err != nil {
			return fmt.Errorf("write backend %d of the service at index %d: %w", m.Backend.Index, m.Service, err)
		}
	}
	var ended abi.Strays
	for range straysTries {
		if _, err := coll.Programs["sh_strays"].Run(&ebpf.RunOptions{Context: abi.Strays{}, ContextOut: &ended}); err != nil {
			return fmt.Errorf("run sh_strays to end flows of backends that have left their service: %w", err)
		}
		if ended == (abi.Strays{}) {
			return nil
		}
	}
	return fmt.Errorf("flows of backends that have left their service keep coming back: %d are left after %d tries", ended.Flows+ended.Remembered, straysTries)
}
