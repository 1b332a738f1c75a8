package store

import (
	"maps"

	"github.com/cilium/ebpf"
)

// LoadBeside loads an object of another package that reads this data plane's maps. own are maps that
// it brings along; those of the data plane take the place of the object's of the same name, and what
// no program of the object uses is not made. The caller closes what it gets.
//
// An upgrade to another ABI makes some maps anew. What was loaded before goes on with the old ones,
// which nobody writes to any more, so every start has to load again.
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

// usedMaps are the maps that an object's programs refer to.
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
