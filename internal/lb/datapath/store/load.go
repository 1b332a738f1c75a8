package store

import (
	"fmt"
	"maps"
	"math/bits"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// Load loads an object's programs onto the instance's maps. constants are set if the object has them.
func (v *View) Load(load func() (*ebpf.CollectionSpec, error), constants map[string]any) (*ebpf.Collection, error) {
	return v.LoadOnto(nil, load, constants)
}

// LoadOnto does the same as Load, with maps of the program's own in addition to the instance's.
func (v *View) LoadOnto(own map[string]*ebpf.Map, load func() (*ebpf.CollectionSpec, error), constants map[string]any) (*ebpf.Collection, error) {
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
	if v.opts.Version.Load != nil {
		return v.opts.Version.Load(spec, constants, replacements)
	}
	return kernel.Load(spec, constants, replacements)
}

// Constants are the load-time values of lb/config.h for all programs that forward.
func (v *View) Constants() map[string]any {
	return map[string]any{
		"handshake_count":    v.maps[abi.MapHandshakes].MaxEntries(),
		"tracked_count":      v.maps[abi.MapTracked].MaxEntries(),
		"jiffies_per_second": v.rate,
		"tick_shift":         v.tickShift(),
	}
}

// tickShift makes a tick of 1 << tickShift jiffies: the shortest tick of at least a second.
func (v *View) tickShift() uint8 { return uint8(bits.Len32(v.rate - 1)) }

// ticks converts a duration to ticks, rounded up.
func (v *View) ticks(t time.Duration) uint32 {
	tick := time.Second << v.tickShift() / time.Duration(v.rate)
	return uint32((t + tick - 1) / tick)
}
