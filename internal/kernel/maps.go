package kernel

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
)

// abiPrefix begins the name of the directory with the maps of an ABI.
const abiPrefix = "abi-"

// MapDirectory returns the directory in which an instance, or a product, pins the maps of an ABI.
func MapDirectory(root, instance string, abi uint32) string {
	return filepath.Join(Directory(root, instance), abiPrefix+strconv.FormatUint(uint64(abi), 10))
}

// PinnedABIs returns the ABIs of the maps that an instance, or a product, has pinned, in ascending order.
func PinnedABIs(root, instance string) (abis []uint32, err error) {
	dir := Directory(root, instance)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the pins in %s: %w", dir, err)
	}
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), abiPrefix)
		abi, err := strconv.ParseUint(number, 10, 32)
		if !ok || err != nil {
			continue
		}
		pins, err := os.ReadDir(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("list the pins in %s: %w", filepath.Join(dir, e.Name()), err)
		}
		if len(pins) > 0 { // a process that is killed just before it makes the first leaves none
			abis = append(abis, uint32(abi))
		}
	}
	slices.Sort(abis)
	return abis, nil
}

// Size is a map's element count, and its origin.
type Size struct {
	Count uint32
	Limit string // the field of the configuration, "limits.flows"; empty: it is fixed
	Given uint32 // that field's value
	Per   uint32 // Count = Given*Per + More
	More  uint32
}

// MapSet is the maps of one ABI that a product pins, in one directory, each under its name.
type MapSet struct {
	dir    string
	specs  map[string]*ebpf.MapSpec
	sizes  map[string]Size
	remedy string
}

// NewMapSet returns the maps of an object, to be pinned in a directory. A map that sizes does not list has the
// size in the object. remedy is the instruction that removes maps which are pinned there and do not fit: "run
// `shunt detach` first".
func NewMapSet(object *ebpf.CollectionSpec, dir string, sizes map[string]Size, remedy string) (*MapSet, error) {
	s := &MapSet{dir, map[string]*ebpf.MapSpec{}, sizes, remedy}
	for name, spec := range object.Maps {
		if name[0] == '.' { // the compiler's own sections
			continue
		}
		s.specs[name] = spec
		size, ok := sizes[name]
		if !ok {
			continue
		}
		if size.Count == 0 {
			return nil, fmt.Errorf("%s is 0, so map %s would be empty: set it to at least 1", size.Limit, name)
		}
		spec.MaxEntries = size.Count
	}
	return s, nil
}

// Names returns the names of the maps; maps that a field of the configuration sizes come first, so that a
// refusal names the field.
func (s *MapSet) Names() []string {
	return slices.SortedFunc(maps.Keys(s.specs), func(a, b string) int {
		if (s.sizes[a].Limit == "") != (s.sizes[b].Limit == "") {
			if s.sizes[a].Limit != "" {
				return -1
			}
			return 1
		}
		return strings.Compare(a, b)
	})
}

// Path returns the path at which a map is pinned.
func (s *MapSet) Path(name string) string { return filepath.Join(s.dir, name) }

// MakeDirectory makes the directory of the pins.
func (s *MapSet) MakeDirectory() error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("make the directory %s for the maps: %w; shunt must run as root", s.dir, err)
	}
	return nil
}

// Open opens every map, and makes the missing ones. adopted reports whether any map existed. If it fails and
// none existed, nothing is left behind.
func (s *MapSet) Open() (opened map[string]*ebpf.Map, adopted bool, err error) {
	if err := s.MakeDirectory(); err != nil {
		return nil, false, err
	}
	opened = map[string]*ebpf.Map{}
	var made []string
	for _, name := range s.Names() {
		m, fresh, err := s.openOrMake(name)
		if err != nil {
			s.abandon(opened, made)
			return nil, false, err
		}
		opened[name] = m
		if fresh {
			made = append(made, name)
		}
	}
	return opened, len(made) < len(opened), nil
}

func (s *MapSet) openOrMake(name string) (m *ebpf.Map, fresh bool, err error) {
	m, err = OpenMap(s.Path(name))
	if errors.Is(err, os.ErrNotExist) {
		m, err = s.Make(name)
		return m, true, err
	}
	if err == nil {
		if err = s.Check(m, name, s.Path(name)); err != nil {
			_ = m.Close()
		}
	}
	return m, false, err
}

// abandon removes the new maps, and the directories if they are empty then.
func (s *MapSet) abandon(opened map[string]*ebpf.Map, made []string) {
	for _, name := range made {
		_ = opened[name].Unpin()
	}
	CloseMaps(opened)
	_ = os.Remove(s.dir)
	_ = os.Remove(filepath.Dir(s.dir))
}

// Remove removes all pins of the set, and the directories if nothing else is in them.
func (s *MapSet) Remove() error {
	if err := os.RemoveAll(s.dir); err != nil {
		return fmt.Errorf("remove the maps in %s: %w", s.dir, err)
	}
	_ = os.Remove(filepath.Dir(s.dir))
	return nil
}

// OpenPinned opens every map and makes none: it returns os.ErrNotExist if one is missing.
func (s *MapSet) OpenPinned() (map[string]*ebpf.Map, error) {
	opened := map[string]*ebpf.Map{}
	for name := range s.specs {
		m, err := OpenMap(s.Path(name))
		if err != nil {
			CloseMaps(opened)
			return nil, err
		}
		opened[name] = m
	}
	return opened, nil
}

// Check refuses a map, pinned at path, that differs from the set's map of that name.
func (s *MapSet) Check(m *ebpf.Map, name, path string) error {
	spec, size, have := s.specs[name], s.sizes[name], m.MaxEntries()
	switch {
	case m.Type() != spec.Type || m.KeySize() != spec.KeySize || m.ValueSize() != spec.ValueSize:
	case have == spec.MaxEntries:
		return nil
	case size.Limit != "":
		return fmt.Errorf("%s is %d, but the loaded data plane was made for %d: %s or set it back", size.Limit, size.Given, (have-size.More)/size.Per, s.remedy)
	case size.Count != 0:
		return fmt.Errorf("map %s would have %d elements, but the loaded data plane's has %d: %s", name, size.Count, have, s.remedy)
	}
	return fmt.Errorf("the map pinned at %s is not the one this version uses, though its ABI number is the same: %s, with the version that made it; or remove the directory", path, s.remedy)
}

// Make makes the map of a name and pins it.
func (s *MapSet) Make(name string) (*ebpf.Map, error) { return MakeMap(s.specs[name], s.Path(name)) }

// MakeMap makes a map and pins it.
func MakeMap(spec *ebpf.MapSpec, path string) (*ebpf.Map, error) {
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

// OpenMap opens the map that is pinned at path; the error is os.ErrNotExist if there is none.
func OpenMap(path string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("open the map pinned at %s: %w", path, err)
	}
	return m, nil
}

// CloseMaps closes maps; pinned maps stay.
func CloseMaps(all map[string]*ebpf.Map) {
	for _, m := range all {
		_ = m.Close()
	}
}
