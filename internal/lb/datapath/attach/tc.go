package attach

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// direction is one of the two directions through an interface at tc.
type direction struct {
	prefix   string // of the pin's name
	name     string // part of the pin's
	program  string // the kernel's name for the program
	outbound bool
	handle   uint32 // of the filter in clsact
}

// directions lists both. No program between the wire and the stack runs before the balancer.
var directions = [2]direction{
	{tcPrefix, "in", "sh_tc_in", false, filterHandle},
	{tcPrefix, "out", "sh_tc_out", true, filterHandle},
}

// tcPrefix begins the names of pins: tc-in-<interface>, tc-out-<interface>. Each pin is a link or, with clsact,
// which the kernel keeps by itself, the program, as a note that it is attached.
const tcPrefix = "tc-"

// clsactPrefix begins the name of the note that the qdisc on an interface was made by shunt, and is removed
// with shunt.
const clsactPrefix = "clsact-"

// filterHandle tells our filters in clsact from others of their priority.
const filterHandle = 0x5348

// side is the attach point of an instance at tc of an interface; ifindex may be 0 if the kernel reports that
// the point is unused.
func (d direction) side(root, instance, iface string, ifindex int) kernel.TCSide {
	pin := func(prefix string) string {
		return filepath.Join(kernel.Directory(root, instance), prefix+kernel.ToPin(iface))
	}
	return kernel.TCSide{Interface: iface, Ifindex: ifindex, Outbound: d.outbound, Program: d.program, Owner: instance, Handle: d.handle,
		Pin: pin(d.prefix + d.name + "-"), QdiscPin: pin(clsactPrefix)}
}

// putSide makes the interface run the program at an attach point, and replaces an earlier program of ours in
// one step.
func (d *Plane) putSide(a *attached, at direction, p *ebpf.Program) (s kernel.TCProgram, fresh bool, err error) {
	return at.side(d.opts.PinRoot, d.opts.Instance, a.Interface, a.ifindex).Put(p, d.withoutTCX)
}

// loadTC loads an interface's two programs.
func (d *Plane) loadTC(a *attached) (err error) {
	if a.isPod {
		return d.loadShared()
	}
	for i, at := range directions {
		if a.programs[i], err = d.loadStages(a, at); err != nil {
			return errors.Join(err, a.closePrograms())
		}
	}
	return nil
}

// loadStages loads the balancer's stages at tc. The program for incoming packets stamps probes if that is switched on.
func (d *Plane) loadStages(a *attached, at direction) (*ebpf.Program, error) {
	constants := d.constants(a)
	constants["outbound"] = abi.Bool(at.outbound)
	constants["generic_mode"] = abi.Bool(true)
	constants["redirect_back"] = abi.Bool(false)
	stamps := d.stampsProbes() && !at.outbound
	load := func() (*ebpf.CollectionSpec, error) {
		spec, err := d.opts.Version.Spec(abi.ObjectTC)
		if err == nil {
			err = d.fitStamps(spec, abi.ProgramTC, abi.ProgramTCStamps, stamps)
		}
		if err == nil {
			spec.Programs[abi.ProgramTC].Name = at.program
		}
		return spec, err
	}
	var own map[string]*ebpf.Map
	if stamps {
		own = d.stamps
	}
	coll, err := d.LoadOnto(own, load, constants)
	if err != nil {
		return nil, fmt.Errorf("load %s for %s: %w", at.program, a, err)
	}
	defer coll.Close()
	return kernel.TakeProgram(coll, abi.ProgramTC)
}

// attachTC attaches the programs at tc, or replaces old ones, each in one step.
func (d *Plane) attachTC(a *attached) error {
	a.Mode = kernel.ModeTCX // for the constants; which of the two it is turns out
	if err := d.loadTC(a); err != nil {
		return err
	}
	var fresh []kernel.TCProgram
	for i, at := range directions {
		s, isFresh, err := d.putSide(a, at, d.programOf(a, i))
		if isFresh {
			fresh = append(fresh, s)
		}
		if err != nil {
			for _, s := range fresh {
				err = errors.Join(err, s.Drop())
			}
			return errors.Join(err, a.closePrograms())
		}
		a.sides[i] = s
	}
	a.Mode = a.sides[0].Mode()
	return nil
}

// dropTC detaches the programs of a predecessor from an interface. It succeeds if there are none.
func dropTC(root, instance, iface string, ifindex int) error {
	return dropSides(root, instance, iface, ifindex, directions)
}

func dropSides(root, instance, iface string, ifindex int, sides [len(directions)]direction) error {
	var errs []error
	for _, at := range sides {
		errs = append(errs, at.side(root, instance, iface, ifindex).Drop())
	}
	return errors.Join(errs...)
}

// pinnedSides finds the interfaces that have programs at tc, by the pins of sh_tc_in.
func pinnedSides(root, instance string) ([]string, error) {
	return pinnedAt(root, instance, directions[0])
}

// pinnedAt finds the interfaces that have a program at an attach point.
func pinnedAt(root, instance string, at direction) ([]string, error) {
	entries, err := os.ReadDir(kernel.Directory(root, instance))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list the pins in %s: %w", kernel.Directory(root, instance), err)
	}
	var names []string
	for _, e := range entries {
		if name, ok := strings.CutPrefix(e.Name(), at.prefix+at.name+"-"); ok {
			names = append(names, kernel.FromPin(name))
		}
	}
	return names, nil
}
