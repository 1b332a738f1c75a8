package upgrade

import (
	"fmt"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// conversions say how an element of a map is converted from one ABI to another.
type conversions map[string][]abi.Convert

// findConversions joins the steps from one ABI to another; false if one is missing.
func findConversions(steps []abi.Step, from, to uint32) (conversions, bool) {
	w := conversions{}
	for from != to {
		next := from + 1
		if to < from {
			next = from - 1
		}
		found := false
		for _, s := range steps {
			if s.From == from && s.To == next {
				for name, convert := range s.Maps {
					w[name] = append(w[name], convert)
				}
				found = true
			}
		}
		if !found {
			return nil, false
		}
		from = next
	}
	return w, true
}

// convert converts an element. A panic becomes an error: it must not end the process half-way.
func (w conversions) convert(name string, key, value []byte) (newKey, newValue []byte, err error) {
	defer func() {
		if fault := recover(); fault != nil {
			err = fmt.Errorf("convert an element of %s: panic: %v", name, fault)
		}
	}()
	for _, convert := range w[name] {
		if key, value, err = convert(key, value); err != nil {
			return nil, nil, fmt.Errorf("convert an element of %s: %w", name, err)
		}
		if key == nil {
			return nil, nil, nil
		}
	}
	return key, value, nil
}

// manner is how a map that a step names is copied.
type manner int

const (
	mannerRefused manner = iota // changing it takes more than there is; see docs/design/20
	mannerStill                 // not written during an upgrade, or small losses do no harm: copied before the switch
	mannerEmpty                 // holds nothing of worth: begins empty
	mannerCounter               // counted by the programs: copied before the switch, and the difference added after it
	mannerFlows                 // sh_flows
)

var manners = map[string]manner{
	abi.MapAddresses:   mannerStill,
	abi.MapFrontends:   mannerStill,
	abi.MapRanges:      mannerStill,
	abi.MapServices:    mannerStill,
	abi.MapBackends:    mannerStill,
	abi.MapSlots:       mannerStill,
	abi.MapSources:     mannerStill,
	abi.MapFilters:     mannerStill,
	abi.MapNames:       mannerStill,
	abi.MapSettings:    mannerStill,
	abi.MapInterfaces:  mannerStill,
	abi.MapIfindexes:   mannerStill,
	abi.MapHandshakes:  mannerStill,
	abi.MapTracked:     mannerStill,
	abi.MapFragments:   mannerEmpty,
	abi.MapMarks:       mannerEmpty,
	abi.MapSourceRates: mannerEmpty,
	abi.MapSvcTraffic:  mannerCounter,
	abi.MapBeTraffic:   mannerCounter,
	abi.MapReasons:     mannerCounter,
	abi.MapFlows:       mannerFlows,
}
