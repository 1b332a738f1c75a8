package store

import (
	"maps"

	"github.com/cilium/ebpf"
)

// LoadBeside loads an object of another package that reads this data plane's maps. own are maps of that
// package; maps of the data plane replace the object's maps of the same name, and maps that no program of the
// object uses are not made. The caller closes the result.
//
// An upgrade to another ABI makes some maps anew. Programs that were loaded before keep the old maps, to which
// nothing is written any more, so every start has to load them again.
func (v *View) LoadBeside(load func() (*ebpf.CollectionSpec, error), own map[string]*ebpf.Map) (*ebpf.Collection, error) {
	return v.LoadOnto(own, func() (*ebpf.CollectionSpec, error) {
		spec, err := load()
		if err == nil {
			used := usedMaps(spec)
			maps.DeleteFunc(spec.Maps, func(name string, _ *ebpf.MapSpec) bool { return name[0] != '.' && !used[name] })
		}
		return spec, err
	}, nil)
}

// usedMaps returns the maps that an object's programs refer to.
func usedMaps(spec *ebpf.CollectionSpec) map[string]bool {
	used := map[string]bool{}
	for _, program := range spec.Programs {
		for _, ins := range program.Instructions {
			if ins.IsLoadFromMap() {
				used[ins.Reference()] = true
			}
		}
	}
	return used
}
