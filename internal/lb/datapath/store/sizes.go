package store

import (
	"fmt"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// MapDir returns the folder of the maps of an ABI.
func (o *Options) MapDir(number uint32) string {
	return kernel.MapDirectory(o.PinRoot, o.Instance, number)
}

// sizes derives every map's size from the limits. Maps that are not listed keep the size in maps.h. Hashes
// without preallocation take memory only as entries are added.
func sizes(l model.Limits) map[string]kernel.Size {
	fixed := func(n uint32) kernel.Size { return kernel.Size{Count: n} }
	handshakes := max(1024, l.Flows/4)
	return map[string]kernel.Size{
		abi.MapAddresses:  fixed(model.AddressesMax),
		abi.MapFrontends:  fixed(max(model.FrontendsMin, model.FrontendsPerService*l.Services)),
		abi.MapRanges:     fixed(model.RangePiecesMax),
		abi.MapSources:    fixed(model.SourcesMax),
		abi.MapServices:   sized("services", l.Services, 1, 0),
		abi.MapSvcTraffic: sized("services", l.Services, 1, 0),
		abi.MapSvcFlows:   sized("services", l.Services, 1, 0),
		abi.MapNames:      sized("services", l.Services, 2, 0),
		abi.MapBackends:   sized("backends", l.Backends, 1, 1), // index 0 is no backend
		abi.MapBeTraffic:  sized("backends", l.Backends, 1, 1),
		abi.MapSlots:      sized("slots", l.Slots, 1, 0),
		abi.MapMarks:      fixed(l.Slots/64 + 1),
		abi.MapRemembered: sized("remembered", l.Remembered, 1, 0),
		abi.MapFilters:    filterSize(l),
		abi.MapTracked:    sized("flows", l.Flows, 1, 0),
		abi.MapHandshakes: fixed(handshakes),
		// two entries a flow, and room for claims that are being made
		abi.MapFlows: fixed(2*(l.Flows+handshakes) + 1024),
	}
}

// sized is a size of given*per + more elements.
func sized(limit string, given, per, more uint32) kernel.Size {
	return kernel.Size{Count: given*per + more, Limit: "limits." + limit, Given: given, Per: per, More: more}
}

// MapSet is every map of the options' version, with the sizes that follow from the limits.
func (o *Options) MapSet() (*kernel.MapSet, error) { return o.mapSetOf(sizes(o.Limits)) }

func (o *Options) mapSetOf(sizes map[string]kernel.Size) (*kernel.MapSet, error) {
	object, err := o.Version.Spec(abi.ObjectABI)
	if err != nil {
		return nil, fmt.Errorf("read the embedded maps: %w", err)
	}
	return kernel.NewMapSet(object, o.MapDir(o.Version.ABI), sizes, "run `shunt detach` first (this ends connections)")
}
