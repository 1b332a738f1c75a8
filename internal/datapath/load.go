package datapath

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"strings"
	"time"

	"github.com/cilium/ebpf"
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
	for name, value := range constants {
		variable, ok := spec.Variables[name]
		if !ok {
			continue
		}
		if err := variable.Set(value); err != nil {
			return nil, fmt.Errorf("set the constant %s to %v: %w", name, value, err)
		}
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
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replacements})
	if err != nil {
		return nil, shortened(err)
	}
	return coll, nil
}

// constants are what lb/config.h fixes at load, for one interface's program.
func (d *Datapath) constants(a *attached) map[string]any {
	return map[string]any{
		"features":           uint32(d.features),
		"interface_slot":     a.slot,
		"generic_mode":       asByte(a.Mode != ModeNative),
		"redirect_back":      asByte(a.Mode == ModeNative && a.redirectBack),
		"handshake_count":    d.maps[abiMapShHandshakes].MaxEntries(),
		"tracked_count":      d.maps[abiMapShTracked].MaxEntries(),
		"jiffies_per_second": d.rate,
		"tick_shift":         d.tickShift(),
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

// shortened cuts a verifier's log to its end, where the complaint is.
func shortened(err error) error {
	const lines = 12
	var v *ebpf.VerifierError
	if !errors.As(err, &v) || len(v.Log) == 0 {
		return err
	}
	log, omitted := v.Log, 0
	if len(log) > lines {
		omitted = len(log) - lines
		log = log[omitted:]
	}
	return fmt.Errorf("the kernel's verifier refused a program: %w\n\t(%d lines omitted)\n\t%s", v.Cause, omitted, strings.Join(log, "\n\t"))
}
