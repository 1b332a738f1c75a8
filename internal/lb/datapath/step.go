package datapath

import (
	"fmt"
)

// Step turns what the maps of one ABI hold into what those of another hold, which is the one
// above or, where going back is to work, the one below.
//
// Maps that it does not name keep layout and meaning: both ABIs use the same map in the kernel,
// and nothing is copied. A map that only the new ABI has begins empty.
type Step struct {
	From, To uint32
	Maps     map[string]Convert
}

// Convert turns one element of a map. It is pure: it neither keeps nor changes what it gets. Of
// a per-CPU map it gets each CPU's value by itself. What it returns no key for is left out:
// elements that were changed while they were read (a seal that does not fit) come again.
type Convert func(key, value []byte) (newKey, newValue []byte, err error)

// steps are those of this version. A change of SHUNT_ABI adds one; CONTRIBUTING.md says how.
var steps []Step

// conversions say how an element of a map is converted from one ABI to another.
type conversions map[string][]Convert

// findConversions joins the steps from one ABI to another; false if one is missing.
func findConversions(steps []Step, from, to uint32) (conversions, bool) {
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

// manner is how a map is carried that a step names.
type manner int

const (
	mannerRefused manner = iota // changing it takes more than there is; see docs/design/20
	mannerStill                 // nobody writes it during an upgrade, or a little less is no harm: copied before the switch
	mannerEmpty                 // holds nothing of worth: begins empty
	mannerCounter               // counted by the programs: copied before the switch, and the difference added after it
	mannerFlows                 // sh_flows
)

var manners = map[string]manner{
	abiMapShAddresses:   mannerStill,
	abiMapShFrontends:   mannerStill,
	abiMapShRanges:      mannerStill,
	abiMapShServices:    mannerStill,
	abiMapShBackends:    mannerStill,
	abiMapShSlots:       mannerStill,
	abiMapShSources:     mannerStill,
	abiMapShFilters:     mannerStill,
	abiMapShNames:       mannerStill,
	abiMapShSettings:    mannerStill,
	abiMapShInterfaces:  mannerStill,
	abiMapShIfindexes:   mannerStill,
	abiMapShHandshakes:  mannerStill,
	abiMapShTracked:     mannerStill,
	abiMapShFragments:   mannerEmpty,
	abiMapShMarks:       mannerEmpty,
	abiMapShSourceRates: mannerEmpty,
	abiMapShSvcTraffic:  mannerCounter,
	abiMapShBeTraffic:   mannerCounter,
	abiMapShReasons:     mannerCounter,
	abiMapShFlows:       mannerFlows,
}
