package datapath

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/model"
)

// abiPrefix begins the name of the directory with the maps of an ABI.
const abiPrefix = "abi-"

func (o *Options) mapDir(abi uint32) string {
	return filepath.Join(kernel.Directory(o.PinRoot, o.Instance), fmt.Sprintf("%s%d", abiPrefix, abi))
}

// size is a map's element count and what the user sets it with.
type size struct {
	count uint32
	limit string // field of limits; empty: fixed
	given uint32 // the limit's value
	per   uint32 // count = given*per + more
	more  uint32
}

// sizes derives every map's size from the limits. What is absent keeps the size it has in
// maps.h. Hashes without preallocation cost nothing until they are used.
func sizes(l model.Limits) map[string]size {
	fixed := func(n uint32) size { return size{count: n} }
	of := func(limit string, given, per, more uint32) size {
		return size{given*per + more, limit, given, per, more}
	}
	handshakes := max(1024, l.Flows/4)
	return map[string]size{
		abiMapShAddresses:  fixed(model.AddressesMax),
		abiMapShFrontends:  fixed(max(model.FrontendsMin, model.FrontendsPerService*l.Services)),
		abiMapShRanges:     fixed(model.RangePiecesMax),
		abiMapShSources:    fixed(model.SourcesMax),
		abiMapShServices:   of("services", l.Services, 1, 0),
		abiMapShSvcTraffic: of("services", l.Services, 1, 0),
		abiMapShSvcFlows:   of("services", l.Services, 1, 0),
		abiMapShNames:      of("services", l.Services, 2, 0),
		abiMapShBackends:   of("backends", l.Backends, 1, 1), // index 0 is nobody
		abiMapShBeTraffic:  of("backends", l.Backends, 1, 1),
		abiMapShSlots:      of("slots", l.Slots, 1, 0),
		abiMapShMarks:      fixed(l.Slots/64 + 1),
		abiMapShRemembered: of("remembered", l.Remembered, 1, 0),
		abiMapShFilters:    filterSize(l),
		abiMapShTracked:    of("flows", l.Flows, 1, 0),
		abiMapShHandshakes: fixed(handshakes),
		// two entries a flow, and room for claims that are being made
		abiMapShFlows: fixed(2*(l.Flows+handshakes) + 1024),
	}
}

// refusal says why a pinned map of another size cannot be taken over.
func (s size) refusal(name string, have uint32) error {
	const remedy = "run `shunt detach` first (this ends connections)"
	if s.limit == "" {
		return fmt.Errorf("map %s would have %d elements, but the loaded data plane's has %d: %s", name, s.count, have, remedy)
	}
	return fmt.Errorf("limits.%s is %d, but the loaded data plane was made for %d: %s or set it back", s.limit, s.given, (have-s.more)/s.per, remedy)
}

// mapSpecs is every map as it is to be made for the limits.
func mapSpecs(v *Version, l model.Limits) (map[string]*ebpf.MapSpec, error) {
	spec, err := v.load(objectABI)
	if err != nil {
		return nil, fmt.Errorf("read the embedded maps: %w", err)
	}
	all := map[string]*ebpf.MapSpec{}
	table := sizes(l)
	for name, m := range spec.Maps {
		if name[0] == '.' { // the compiler's own sections
			continue
		}
		if s, ok := table[name]; ok {
			if s.count == 0 {
				return nil, fmt.Errorf("limits.%s is 0, so map %s would be empty: set it to at least 1", s.limit, name)
			}
			m.MaxEntries = s.count
		}
		all[name] = m
	}
	return all, nil
}

// pinMaps opens every map of the instance, making what is missing. adopted is whether
// any was there. Nothing is left behind when it fails on a fresh instance.
func pinMaps(opts Options) (maps map[string]*ebpf.Map, adopted bool, err error) {
	specs, err := mapSpecs(opts.version, opts.Limits)
	if err != nil {
		return nil, false, err
	}
	dir := opts.mapDir(opts.version.ABI)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, false, fmt.Errorf("make the directory %s for the maps: %w; shunt must run as root", dir, err)
	}
	maps = map[string]*ebpf.Map{}
	var made []string
	defer func() {
		if err == nil {
			return
		}
		for _, name := range made {
			_ = maps[name].Unpin()
		}
		closeMaps(maps)
		if !adopted {
			_ = os.Remove(dir)
			_ = os.Remove(filepath.Dir(dir))
		}
	}()
	table := sizes(opts.Limits)
	for _, name := range sizedFirst(specs, table) {
		m, fresh, err := pinMap(specs[name], filepath.Join(dir, name), table[name])
		if err != nil {
			return nil, adopted, err
		}
		maps[name] = m
		if fresh {
			made = append(made, name)
		} else {
			adopted = true
		}
	}
	return maps, adopted, nil
}

// sizedFirst is the names of maps, those first that limits size: so a refusal names the limit.
func sizedFirst(specs map[string]*ebpf.MapSpec, table map[string]size) []string {
	return slices.SortedFunc(maps.Keys(specs), func(a, b string) int {
		if (table[a].limit == "") != (table[b].limit == "") {
			if table[a].limit != "" {
				return -1
			}
			return 1
		}
		return strings.Compare(a, b)
	})
}

// agrees says whether a pinned map is the one that a spec describes, and why not.
func agrees(m *ebpf.Map, spec *ebpf.MapSpec, s size, path string) error {
	if s.count != 0 && m.MaxEntries() != s.count {
		return s.refusal(spec.Name, m.MaxEntries())
	}
	if m.Type() != spec.Type || m.KeySize() != spec.KeySize || m.ValueSize() != spec.ValueSize || m.MaxEntries() != spec.MaxEntries {
		return fmt.Errorf("the map pinned at %s is not the one this version uses, though its ABI number is the same: run `shunt detach` with the version that made it, or remove the directory", path)
	}
	return nil
}

// pinMap opens the map at path, or makes it there.
func pinMap(spec *ebpf.MapSpec, path string, s size) (m *ebpf.Map, fresh bool, err error) {
	m, err = ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		if err := agrees(m, spec, s, path); err != nil {
			_ = m.Close()
			return nil, false, err
		}
		return m, false, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, false, fmt.Errorf("open the map pinned at %s: %w", path, err)
	}
	m, err = makeMap(spec, path)
	return m, err == nil, err
}

// makeMap makes a map and pins it.
func makeMap(spec *ebpf.MapSpec, path string) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("make map %s of %d elements: %w; if memory is short, lower `limits`", spec.Name, spec.MaxEntries, err)
	}
	if err := m.Pin(path); err != nil {
		_ = m.Close()
		return nil, fmt.Errorf("pin map %s at %s: %w", spec.Name, path, err)
	}
	return m, nil
}

func closeMaps(maps map[string]*ebpf.Map) {
	for _, m := range maps {
		_ = m.Close()
	}
}
