package store

import (
	"fmt"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// filterExtra is the room for prefixes of length 0: one for each possible service, and one for each service
// that leaves.
const filterExtra = 2 << 16

// filterSize has room for all lists twice, because new lists are written beside the old ones.
func filterSize(l model.Limits) kernel.Size { return sized("filters", l.Filters, 2, filterExtra) }

// PutFilter says whether a prefix of sources may use a service.
func (w *Writer) PutFilter(f reconcile.Filter, allow bool) error {
	if !f.Prefix.IsValid() || int(f.Service) >= len(w.services) {
		return fmt.Errorf("write source prefix %s of the service at index %d: the indexes are 0 to %d", f.Prefix, f.Service, len(w.services)-1)
	}
	if err := w.maps[abi.MapFilters].Put(abi.ToFilterKey(f), abi.ToFilter(f, allow)); err != nil {
		return fmt.Errorf("write source prefix %s of the service at index %d: %w", f.Prefix, f.Service, NoRoom(err, "limits.filters sizes the table: raise it"))
	}
	return nil
}

// DeleteFilter removes a prefix.
func (w *Writer) DeleteFilter(f reconcile.Filter) error {
	return w.remove(abi.MapFilters, abi.ToFilterKey(f), "source prefix "+f.Prefix.String())
}

func (v *View) readFilters(c *reconcile.Contents) error {
	c.Filters = map[reconcile.Filter]bool{}
	var key abi.FilterKey
	var value abi.Filter
	all := v.maps[abi.MapFilters].Iterate()
	for all.Next(&key, &value) {
		c.Filters[abi.FromFilterKey(key)] = value.Verdict&uint32(abi.FILTER_ALLOWS) != 0
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read %s: %w", abi.MapFilters, err)
	}
	return nil
}

// clearFlows resets the count of a service's flows for the next tenant.
func (w *Writer) clearFlows(index uint32, generation uint8) error {
	if err := w.maps[abi.MapSvcFlows].Put(index, abi.ServiceFlows{Generation: uint32(generation)}); err != nil {
		return fmt.Errorf("set element %d of %s to zero: %w", index, abi.MapSvcFlows, err)
	}
	return nil
}
