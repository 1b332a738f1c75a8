package vdisk

import (
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/sensor"
)

// Probe is a point inside a layer that the user asks for: the beginning of a function.
type Probe struct {
	In     string // ProbeQemu or ProbeKernel
	Symbol string
}

// The places of probes.
const (
	ProbeQemu   = "qemu"
	ProbeKernel = "kernel"
)

// probesMax limits the probes of a recording: each is a breakpoint.
const probesMax = 16

func (p Probe) String() string { return p.In + ":" + p.Symbol }

// ParseProbe reads "qemu:SYMBOL" or "kernel:FUNCTION".
func ParseProbe(text string) (p Probe, err error) {
	in, symbol, _ := strings.Cut(text, ":")
	if in != ProbeQemu && in != ProbeKernel || symbol == "" || strings.ContainsAny(symbol, " \t\n:") {
		return p, fmt.Errorf("%q is no probe: write qemu:SYMBOL for a function of qemu, or kernel:FUNCTION for one of the kernel", text)
	}
	return Probe{in, symbol}, nil
}

// checkProbes refuses impossible probes, and names similar symbols. program is the file with qemu's symbols.
func checkProbes(probes []Probe, guest bool, program string) error {
	if len(probes) > probesMax {
		return fmt.Errorf("attach %d probes: %d are possible", len(probes), probesMax)
	}
	symbols := map[string][]string{}
	for i, p := range probes {
		if slices.Contains(probes[:i], p) {
			return fmt.Errorf("the probe %v is named twice", p)
		}
		if guest && p.In == ProbeQemu {
			return fmt.Errorf("the probe %v is for the host: qemu does not run inside the guest", p)
		}
		if symbols[p.In] == nil {
			var err error
			if symbols[p.In], err = functionsIn(p.In, program); err != nil {
				return fmt.Errorf("look for the probe %v: %w", p, err)
			}
		}
		if slices.Contains(symbols[p.In], p.Symbol) {
			continue
		}
		text := "no symbol is like it"
		if near := nearSymbols(p.Symbol, symbols[p.In]); len(near) > 0 {
			text = "like it: " + config.Join(near, "and")
		}
		of := "the kernel"
		if p.In == ProbeQemu {
			of = "qemu, which is " + program + ","
		}
		return fmt.Errorf("attach the probe %v: %s has no function %s; %s", p, of, p.Symbol, text)
	}
	return nil
}

// functionsIn returns the names of all functions that a probe may be at.
func functionsIn(in, program string) ([]string, error) {
	if in == ProbeKernel {
		names, err := symbol.Functions()
		// The kernel also names the room before its functions, if it may patch them.
		return slices.DeleteFunc(names, func(s string) bool { return strings.HasPrefix(s, "__pfx_") }), err
	}
	file, err := elf.Open(program)
	if err != nil {
		return nil, fmt.Errorf("read the symbols of %s: %w", program, err)
	}
	defer file.Close() //nolint:errcheck // only read
	names := []string{}
	for _, table := range []func() ([]elf.Symbol, error){file.DynamicSymbols, file.Symbols} {
		all, err := table()
		if err != nil && !errors.Is(err, elf.ErrNoSymbols) {
			return nil, fmt.Errorf("read the symbols of %s: %w", program, err)
		}
		for _, s := range all {
			if elf.ST_TYPE(s.Info) == elf.STT_FUNC && s.Section != elf.SHN_UNDEF {
				names = append(names, s.Name)
			}
		}
	}
	return names, nil
}

// nearMax is the number of similar symbols that are named.
const nearMax = 4

// nearSymbols returns the shortest symbols that contain the word, and the most likely one if the word is mistyped.
func nearSymbols(word string, symbols []string) (near []string) {
	for _, s := range symbols {
		if strings.Contains(s, word) {
			near = append(near, s)
		}
	}
	slices.SortFunc(near, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	near = slices.Compact(near)
	near = near[:min(len(near), nearMax)]
	if meant := config.Nearest(word, symbols); meant != "" && !slices.Contains(near, meant) {
		near = append(near, meant)
	}
	return near
}

// probeSensors returns the sensors of probes, whose numbers are their cookies.
func probeSensors(probes []Probe) (all []sensor.Sensor) {
	for i, p := range probes {
		way := sensor.Way{Kind: sensor.Uprobe, Target: p.Symbol, Program: "sh_vd_point", Cookie: uint64(i)}
		if p.In == ProbeKernel {
			way.Kind, way.Program = sensor.Kprobe, "sh_vd_kpoint"
		}
		all = append(all, sensor.Sensor{Name: "probe " + p.String(), Watches: "requests that pass the function", Ways: []sensor.Way{way}, Without: "the point is not seen"})
	}
	return all
}

// unattached returns the error if a probe was not attached: the user asked for it, so nothing is recorded without it.
func unattached(probes []Probe, results []sensor.Result) error {
	for _, r := range results[len(results)-len(probes):] {
		if r.Got == nil {
			return fmt.Errorf("attach the %s: the kernel refuses: %s. Record without it, or on a kernel that allows it", r.Sensor.Name, r.Refused[0].Reason)
		}
	}
	return nil
}
