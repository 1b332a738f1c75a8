package datapath

import (
	"fmt"
	"maps"
	"math/bits"
	"time"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// loadCollection loads an object's programs onto the instance's maps. constants are set
// where the object has them.
func (v *View) loadCollection(load func() (*ebpf.CollectionSpec, error), constants map[string]any) (*ebpf.Collection, error) {
	return v.loadOnto(nil, load, constants)
}

// loadOnto is loadCollection with maps of the program's own beside the instance's.
func (v *View) loadOnto(own map[string]*ebpf.Map, load func() (*ebpf.CollectionSpec, error), constants map[string]any) (*ebpf.Collection, error) {
	spec, err := load()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object: %w", err)
	}
	replacements := maps.Clone(own)
	if replacements == nil {
		replacements = map[string]*ebpf.Map{}
	}
	for name, m := range spec.Maps {
		if have, ok := v.maps[name]; ok {
			m.MaxEntries = have.MaxEntries()
			replacements[name] = have
		}
	}
	if v.version.Load != nil {
		return v.version.Load(spec, constants, replacements)
	}
	return kernel.Load(spec, constants, replacements)
}

// constants are the values that lb/config.h fixes at load, for one interface's program.
func (d *Datapath) constants(a *attached) map[string]any {
	ways := d.waysOf(a)
	features := d.features
	if ways != 0 {
		features |= abi.FEATURE_TC_WAYS
	}
	return map[string]any{
		"features":           uint32(features),
		"interface_index":    a.index,
		"generic_mode":       asByte(a.Mode != kernel.ModeNative),
		"redirect_back":      asByte(a.Mode == kernel.ModeNative && a.redirectBack),
		"handshake_count":    d.maps[abi.MapHandshakes].MaxEntries(),
		"tracked_count":      d.maps[abi.MapTracked].MaxEntries(),
		"jiffies_per_second": d.rate,
		"tick_shift":         d.tickShift(),
		"tc_ways":            ways,
	}
}

// tickShift makes a tick of 1 << tickShift jiffies: the shortest that lasts a second.
func (v *View) tickShift() uint8 { return uint8(bits.Len32(v.rate - 1)) }

// ticks is a duration in ticks, rounded up.
func (v *View) ticks(t time.Duration) uint32 {
	tick := time.Second << v.tickShift() / time.Duration(v.rate)
	return uint32((t + tick - 1) / tick)
}

func asByte(on bool) uint8 {
	if on {
		return 1
	}
	return 0
}
