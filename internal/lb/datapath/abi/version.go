package abi

import (
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// Version is a binary's part of an upgrade: its compiled objects, their ABI, and the steps that lead to it from
// other ABIs.
type Version struct {
	ABI     uint32
	Objects map[string]func() (*ebpf.CollectionSpec, error) // by the name of the source: "xdp"
	Steps   []Step
	// At is called at each point of an upgrade, for tests: its error is a fault at that point.
	At func(Point) error
	// Load loads programs; kernel.Load if nil. For tests that have the kernel verify a program once.
	Load func(spec *ebpf.CollectionSpec, constants map[string]any, maps map[string]*ebpf.Map) (*ebpf.Collection, error)
}

// The objects of a version.
const (
	ObjectABI       = "abi"
	ObjectXDP       = "xdp"
	ObjectTC        = "tc"
	ObjectStopgap   = "stopgap"
	ObjectSweep     = "sweep"
	ObjectDrops     = "drops"
	ObjectGate      = "gate"
	ObjectCheck     = "check"
	ObjectVLAN      = "vlan"
	ObjectDeliver   = "deliver"
	ObjectTunnelled = "tunnelled"
)

// The names of programs and maps that exist in one object only.
const (
	ProgramXDP        = xdpProgShXdp
	ProgramXDPStamps  = xdpProgShXdpStamps
	ProgramTC         = tcProgShTc
	ProgramTCStamps   = tcProgShTcStamps
	ProgramDeliver    = deliverProgShDeliver
	ProgramTunnelled  = tunnelledProgShTunnelled
	ProgramSourceless = sweepProgShSourceless
	MapDeparted       = sweepMapShDeparted
	MapSwitch         = gateMapShSwitch
	MapGates          = gateMapShGates
	MapStamping       = xdpMapShStamping
)

// Sourceless is the context of ProgramSourceless.
type Sourceless = sweepSourceless

// built is the version of this process.
var built = &Version{
	ABI: uint32(SHUNT_ABI), Steps: steps,
	Objects: map[string]func() (*ebpf.CollectionSpec, error){
		ObjectABI: kernel.ParseOnce(loadAbi), ObjectXDP: kernel.ParseOnce(loadXdp), ObjectTC: kernel.ParseOnce(loadTc),
		ObjectStopgap: kernel.ParseOnce(loadStopgap), ObjectSweep: kernel.ParseOnce(loadSweep), ObjectDrops: kernel.ParseOnce(loadDrops),
		ObjectGate: kernel.ParseOnce(loadGate), ObjectCheck: kernel.ParseOnce(loadCheck), ObjectVLAN: kernel.ParseOnce(loadVlan),
		ObjectDeliver: kernel.ParseOnce(loadDeliver), ObjectTunnelled: kernel.ParseOnce(loadTunnelled),
	},
}

// Become changes a process's version, before it opens anything. It is for tests of upgrades, which play the
// next version with objects of their own.
func Become(v *Version) { built = v }

// Built returns the version of this process.
func Built() *Version { return built }

// Spec returns an object of the version, a copy of the caller's own.
func (v *Version) Spec(object string) (*ebpf.CollectionSpec, error) {
	load, ok := v.Objects[object]
	if !ok {
		return nil, fmt.Errorf("version with ABI %d: it has no object %q", v.ABI, object)
	}
	return load()
}

// Loader returns a function that calls Spec later.
func (v *Version) Loader(object string) func() (*ebpf.CollectionSpec, error) {
	return func() (*ebpf.CollectionSpec, error) { return v.Spec(object) }
}

// Only returns the loader of an object with only these of its programs.
func (v *Version) Only(object string, programs ...string) func() (*ebpf.CollectionSpec, error) {
	return func() (*ebpf.CollectionSpec, error) {
		spec, err := v.Spec(object)
		if err == nil {
			maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !slices.Contains(programs, name) })
		}
		return spec, err
	}
}

// Reach reports that an upgrade has reached a point. An error is a fault there.
func (v *Version) Reach(p Point) error {
	if v.At == nil {
		return nil
	}
	return v.At(p)
}

// Point is a point of an upgrade.
type Point string

// The points, in their order.
const (
	PointMaps     Point = "maps"
	PointCopied   Point = "copied"
	PointGate     Point = "gate" // once for each interface
	PointSwitched Point = "switched"
	PointCarried  Point = "carried"
	PointDone     Point = "done"
	PointRemoved  Point = "removed"
)

// Points returns all points.
var Points = []Point{PointMaps, PointCopied, PointGate, PointSwitched, PointCarried, PointDone, PointRemoved}
