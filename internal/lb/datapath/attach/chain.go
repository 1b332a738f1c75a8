package attach

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// Position is where a program runs on an interface, relative to the others.
type Position string

// The positions. Before is the program that the interface runs, which calls shunt's; After gets the packets
// that shunt passes to the stack.
const (
	PositionBefore Position = "before"
	PositionShunt  Position = "shunt"
	PositionGuest  Position = "guest"
	PositionAfter  Position = "after"
)

// Positions are the positions of other programs, in a packet's order.
var Positions = []Position{PositionBefore, PositionAfter}

// index returns the element of a chain's map.
func (p Position) index() uint32 {
	switch p {
	case PositionBefore:
		return uint32(abi.CHAIN_BEFORE)
	case PositionShunt:
		return uint32(abi.CHAIN_NEXT)
	default:
		return uint32(abi.CHAIN_AFTER)
	}
}

// Chained is a program of a chain.
type Chained struct {
	ID   uint32 `json:"id"`
	Name string `json:"name"` // at most 15 characters
	Tag  string `json:"tag"`  // hash of its instructions
}

func (c Chained) String() string { return fmt.Sprintf("%q (program %d)", c.Name, c.ID) }

// Chain lists the programs on an interface, in a packet's order.
type Chain struct {
	Interface string   `json:"interface"`
	Map       string   `json:"map"` // the file of the map that a program before calls on
	Before    *Chained `json:"before"`
	Shunt     *Chained `json:"shunt"`
	// Guest is the program of another product of the daemon; shunt's program passes packets to it before After.
	Guest *Chained `json:"guest,omitempty"`
	After *Chained `json:"after"`
	// Attached is the id of the program that the interface runs: Before's, or else Shunt's. It differs during a
	// change, or after an interrupted one; attaching repairs that.
	Attached uint32 `json:"attached"`
}

// Entry is a position of a chain, and its program; nil if the position is empty.
type Entry struct {
	Position Position
	Program  *Chained
}

// Entries lists all positions of a chain, in a packet's order; the guest's only if there is a guest.
func (c *Chain) Entries() []Entry {
	entries := []Entry{{PositionBefore, c.Before}, {PositionShunt, c.Shunt}}
	if c.Guest != nil {
		entries = append(entries, Entry{PositionGuest, c.Guest})
	}
	return append(entries, Entry{PositionAfter, c.After})
}

const (
	chainMap    = "sh_chain"
	chainPrefix = "chain-"
)

func chainPath(root, instance, iface string) string {
	return filepath.Join(kernel.Directory(root, instance), chainPrefix+kernel.ToPin(iface))
}

// openChain opens an interface's chain; fresh reports whether it had to be made. The caller holds the
// instance's lock.
func (d *Plane) openChain(iface string) (m *ebpf.Map, fresh bool, err error) {
	path := chainPath(d.opts.PinRoot, d.opts.Instance, iface)
	m, err = ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		if m.Type() != ebpf.ProgramArray || m.MaxEntries() != uint32(abi.CHAIN_COUNT) {
			_ = m.Close()
			return nil, false, fmt.Errorf("the map pinned at %s is not a chain of this version: run `shunt detach` with the version that made it, or remove the file", path)
		}
		return m, false, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, false, fmt.Errorf("open the chain pinned at %s: %w", path, err)
	}
	m, err = ebpf.NewMap(&ebpf.MapSpec{Name: chainMap, Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: uint32(abi.CHAIN_COUNT)})
	if err != nil {
		return nil, false, fmt.Errorf("make the chain of interface %s: %w", iface, err)
	}
	if err := m.Pin(path); err != nil {
		_ = m.Close()
		return nil, false, fmt.Errorf("pin the chain at %s: %w", path, err)
	}
	return m, true, nil
}

// removeChain removes an interface's chain, together with the programs in it. It succeeds if there is none.
func removeChain(root, instance, iface string) error {
	paths := []string{chainPath(root, instance, iface)}
	for _, position := range Positions {
		paths = append(paths, position.path(root, instance, iface))
	}
	for _, path := range paths {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove the chain of interface %s: %w", iface, err)
		}
	}
	return nil
}

// pinPrefix begins the names of the pins of programs in that position. A process that cannot turn an id in the
// chain into a program, which takes CAP_SYS_ADMIN, opens the pin.
func (p Position) pinPrefix() string { return string(p) + "-" }

func (p Position) path(root, instance, iface string) string {
	return filepath.Join(kernel.Directory(root, instance), p.pinPrefix()+kernel.ToPin(iface))
}

// firstProgram returns the program that an interface has to run: the program before, which is pinned at a path,
// or else shunt's own. The caller closes it.
func firstProgram(chain *ebpf.Map, own *ebpf.Program, pin string) (*ebpf.Program, error) {
	before, err := programAt(chain, PositionBefore, pin)
	if err == nil && before == nil {
		return own.Clone()
	}
	return before, err
}

// programAt opens the program before or after shunt's in a chain, by its pin if the pin is right; nil if there
// is none. The caller closes it.
func programAt(chain *ebpf.Map, position Position, pin string) (*ebpf.Program, error) {
	var id uint32
	err := chain.Lookup(position.index(), &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if pinned, err := ebpf.LoadPinnedProgram(pin, nil); err == nil {
		if is, err := describe(pinned); err == nil && is.ID == id {
			return pinned, nil
		}
		_ = pinned.Close() // of a change that was cut short
	}
	var p *ebpf.Program
	if err == nil {
		err = chain.Lookup(position.index(), &p)
	}
	if err != nil {
		return nil, fmt.Errorf("open the program that runs %s shunt's: %w", position, err)
	}
	return p, nil
}

// chainAt opens the chain of an interface that any process has attached to, with its link.
func chainAt(opts store.Options, iface string) (*ebpf.Map, link.Link, error) {
	path := chainPath(opts.PinRoot, opts.Instance, iface)
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil, notChained(opts, iface)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("open the chain pinned at %s: %w", path, err)
	}
	l, err := link.LoadPinnedLink(linkPath(opts.PinRoot, opts.Instance, iface), nil)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open the link of interface %s: %w; `shunt run` attaches", iface, err), m.Close())
	}
	return m, l, nil
}

// notChained returns an error that explains why an interface has no chain.
func notChained(opts store.Options, iface string) error {
	links, err := pinnedLinks(opts.PinRoot, opts.Instance)
	names := slices.Sorted(maps.Keys(links))
	sides, sidesErr := pinnedSides(opts.PinRoot, opts.Instance)
	parent, parentErr := store.ParentOf(opts, iface)
	switch {
	case err != nil || sidesErr != nil || parentErr != nil:
		return errors.Join(err, sidesErr, parentErr)
	case slices.Contains(sides, iface):
		return fmt.Errorf("look for the chain of interface %s: shunt is attached there at tc, which runs programs one after the other without a chain: `bpftool net` lists them", iface)
	case parent != "":
		return fmt.Errorf("look for the chain of interface %s: its frames are taken in native mode at %s, whose chain they meet", iface, parent)
	case len(names) == 0:
		return fmt.Errorf("look for the chain of interface %s: instance %q is attached to no interface; `shunt run` attaches", iface, opts.Instance)
	case slices.Contains(names, iface):
		return fmt.Errorf("look for the chain of interface %s: the version that attached there has none; start `shunt run` of this version again", iface)
	}
	return fmt.Errorf("look for the chain of interface %s: instance %q is not attached to it, but to %s", iface, opts.Instance, strings.Join(names, ", "))
}

// Chains lists the programs on each interface of an instance, by name, with or without a daemon. It waits for a
// change that is under way. It returns ErrNotLoaded if the instance is attached to no interface.
func Chains(opts store.Options) ([]Chain, error) {
	if err := opts.Complete(); err != nil {
		return nil, err
	}
	interfaces, err := chained(opts)
	if err != nil || len(interfaces) == 0 {
		return nil, err
	}
	unlock, err := kernel.Lock(opts.PinRoot, opts.Instance)
	if err != nil {
		return nil, fmt.Errorf("list the chains of instance %q: %w", opts.Instance, err)
	}
	defer unlock()
	var all []Chain
	for _, iface := range interfaces {
		c, err := readChain(opts, iface)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

// chained returns the interfaces of an instance that have a chain, by name. It returns ErrNotLoaded if the
// instance is attached to no interface.
func chained(opts store.Options) ([]string, error) {
	found, err := pinnedLinks(opts.PinRoot, opts.Instance)
	if err != nil {
		return nil, err
	}
	if sides, err := pinnedSides(opts.PinRoot, opts.Instance); len(found) == 0 && (err != nil || len(sides) > 0) {
		return nil, err // attached, and without chains
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("list the chains of instance %q: %w; start it with `shunt run`", opts.Instance, store.ErrNotLoaded)
	}
	return slices.Sorted(maps.Keys(found)), nil
}

func readChain(opts store.Options, iface string) (Chain, error) {
	c := Chain{Interface: iface}
	m, l, err := chainAt(opts, iface)
	if err != nil {
		return c, err
	}
	defer m.Close()
	defer l.Close()
	var own *ebpf.Program
	if err := m.Lookup(PositionShunt.index(), &own); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return c, fmt.Errorf("read the chain of interface %s: open shunt's own program: %w", iface, err)
	}
	if own != nil {
		defer own.Close()
	}
	if c, err = describeChain(opts, m, iface, own); err != nil {
		return c, fmt.Errorf("read the chain of interface %s: %w", iface, err)
	}
	info, err := l.Info()
	if err != nil {
		return c, fmt.Errorf("look at the link of interface %s: %w", iface, err)
	}
	c.Attached = uint32(info.Program)
	return c, c.meetGuest()
}

// Chain lists the programs on an interface to which this process has attached at XDP. Unlike Chains, it needs no CAP_SYS_ADMIN.
func (d *Plane) Chain(iface string) (c Chain, err error) {
	own, err := d.ownProgram(iface)
	if err != nil {
		return c, err
	}
	defer own.Close()
	m, err := ebpf.LoadPinnedMap(chainPath(d.opts.PinRoot, d.opts.Instance, iface), nil)
	if err != nil {
		return c, fmt.Errorf("open the chain of interface %s: %w", iface, err)
	}
	defer m.Close()
	if c, err = describeChain(store.Options{PinRoot: d.opts.PinRoot, Instance: d.opts.Instance}, m, iface, own); err != nil {
		return c, fmt.Errorf("read the chain of interface %s: %w", iface, err)
	}
	name, id, err := kernel.GuestBehind(iface)
	if name != "" {
		c.Guest = &Chained{ID: id, Name: name}
	}
	return c, err
}

// ownProgram returns shunt's program on an interface at XDP. The caller closes it.
func (d *Plane) ownProgram(iface string) (*ebpf.Program, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	a := d.attached[iface]
	if a == nil || a.link == nil {
		return nil, fmt.Errorf("read the chain of interface %s: this process is not attached there at XDP", iface)
	}
	return a.programs[0].Clone()
}

// describeChain makes a Chain of the programs in an interface's map, without the guest; the interface runs them
// from the first. own is shunt's program, nil if the map has none.
func describeChain(opts store.Options, chain *ebpf.Map, iface string, own *ebpf.Program) (c Chain, err error) {
	c = Chain{Interface: iface, Map: chainPath(opts.PinRoot, opts.Instance, iface)}
	if c.Before, err = chainedAt(opts, chain, iface, PositionBefore); err != nil {
		return c, err
	}
	if own != nil {
		if c.Shunt, err = describe(own); err != nil {
			return c, err
		}
	}
	if c.After, err = chainedAt(opts, chain, iface, PositionAfter); err != nil {
		return c, err
	}
	if first := cmp.Or(c.Before, c.Shunt, c.After); first != nil {
		c.Attached = first.ID
	}
	return c, nil
}

// chainedAt returns the program before or after shunt's; nil if there is none.
func chainedAt(opts store.Options, chain *ebpf.Map, iface string, position Position) (*Chained, error) {
	p, err := programAt(chain, position, position.path(opts.PinRoot, opts.Instance, iface))
	if p == nil || err != nil {
		return nil, err
	}
	defer p.Close()
	return describe(p)
}

// elementOf returns the program in an element of the chain's map; nil if it is empty.
func elementOf(chain *ebpf.Map, index uint32) (*Chained, error) {
	var p *ebpf.Program
	err := chain.Lookup(index, &p)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer p.Close()
	return describe(p)
}

func describe(p *ebpf.Program) (*Chained, error) {
	info, err := p.Info()
	if err != nil {
		return nil, err
	}
	id, _ := info.ID()
	return &Chained{ID: uint32(id), Name: info.Name, Tag: info.Tag}, nil
}
