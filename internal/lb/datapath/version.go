package datapath

import (
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
)

// Version is a binary's part of an upgrade: its compiled objects, the ABI they have, and how to
// come to it from others.
type Version struct {
	ABI     uint32
	Objects map[string]func() (*ebpf.CollectionSpec, error) // by the name of the source: "xdp"
	Steps   []Step
	// At is called at each point of an upgrade, for tests: what it returns is a fault there.
	At func(Point) error
	// Load loads programs; kernel.Load if nil. For tests that have the kernel verify a program once.
	Load func(spec *ebpf.CollectionSpec, constants map[string]any, maps map[string]*ebpf.Map) (*ebpf.Collection, error)
}

// The objects of a version.
const (
	objectABI     = "abi"
	objectXDP     = "xdp"
	objectTC      = "tc"
	objectStopgap = "stopgap"
	objectSweep   = "sweep"
	objectDrops   = "drops"
	objectGate    = "gate"
	objectCheck   = "check"
	objectVLAN    = "vlan"
	objectDeliver = "deliver"
)

// built is the version of this process.
var built = &Version{
	ABI: uint32(abiConstantSHUNT_ABI), Steps: steps,
	Objects: map[string]func() (*ebpf.CollectionSpec, error){
		objectABI: loadAbi, objectXDP: loadXdp, objectTC: loadTc, objectStopgap: loadStopgap, objectSweep: loadSweep, objectDrops: loadDrops, objectGate: loadGate,
		objectCheck: loadCheck, objectVLAN: loadVlan, objectDeliver: loadDeliver,
	},
}

// Become makes a process another version than it was built as, before it opens anything. It is
// for tests of upgrades, which play the next version with objects of their own.
func Become(v *Version) { built = v }

// Built is the version of this process.
func Built() *Version { return built }

func (v *Version) load(object string) (*ebpf.CollectionSpec, error) {
	load, ok := v.Objects[object]
	if !ok {
		return nil, fmt.Errorf("version with ABI %d: it has no object %q", v.ABI, object)
	}
	return load()
}

func (v *Version) loader(object string) func() (*ebpf.CollectionSpec, error) {
	return func() (*ebpf.CollectionSpec, error) { return v.load(object) }
}

// only is the loader of an object with these of its programs alone.
func (v *Version) only(object string, programs ...string) func() (*ebpf.CollectionSpec, error) {
	return func() (*ebpf.CollectionSpec, error) {
		spec, err := v.load(object)
		if err == nil {
			maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !slices.Contains(programs, name) })
		}
		return spec, err
	}
}

// at is a point of an upgrade.
func (v *Version) at(p Point) error {
	if v.At == nil {
		return nil
	}
	return v.At(p)
}
