package attach

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// SetChain makes the program pinned at a path run before or after shunt's on an interface, and replaces the
// program in that position. It needs no daemon, and packets meet the old or the new program, never none. If it
// fails, nothing has changed. The program stays until ClearChain, Detach or Remove; the pin may be removed.
func SetChain(opts store.Options, iface string, position Position, pin string) error {
	doing := fmt.Sprintf("run the program pinned at %s %s shunt on interface %s", pin, position, iface)
	return changeChain(opts, iface, doing, func(c *chainChange) error {
		p, err := ebpf.LoadPinnedProgram(pin, nil)
		if errors.Is(err, os.ErrNotExist) {
			return errors.New("there is no such file; `bpftool prog load OBJECT PIN` loads and pins a program")
		}
		if err != nil {
			return fmt.Errorf("open it: %w", err)
		}
		defer p.Close()
		if err := c.check(p, position); err != nil {
			return err
		}
		return c.set(p, position)
	})
}

// ClearChain removes the program that runs before or after shunt's. It succeeds if there is none; was is the
// earlier entry.
func ClearChain(opts store.Options, iface string, position Position) (was *Chained, err error) {
	doing := fmt.Sprintf("remove the program %s shunt on interface %s", position, iface)
	err = changeChain(opts, iface, doing, func(c *chainChange) error {
		if was, err = elementOf(c.chain, position.index()); err != nil {
			return err
		}
		return c.clear(position)
	})
	return was, err
}

// chainChange is the chain of an interface, locked.
type chainChange struct {
	chain *ebpf.Map
	link  interface {
		Update(*ebpf.Program) error
	}
	own *ebpf.Program         // shunt's
	pin func(Position) string // where a program is pinned
}

func changeChain(opts store.Options, iface, doing string, change func(*chainChange) error) error {
	if err := opts.Complete(); err != nil {
		return err
	}
	unlock, err := kernel.Lock(opts.PinRoot, opts.Instance)
	if errors.Is(err, os.ErrNotExist) {
		err = notChained(opts, iface)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	defer unlock()
	m, l, err := chainAt(opts, iface)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	defer m.Close()
	defer l.Close()
	c := &chainChange{chain: m, link: l, pin: func(p Position) string { return p.path(opts.PinRoot, opts.Instance, iface) }}
	if err := m.Lookup(uint32(abi.CHAIN_NEXT), &c.own); err != nil {
		return fmt.Errorf("%s: open shunt's own program: %w; start `shunt run` again, which puts the program there", doing, err)
	}
	defer c.own.Close()
	if err := change(c); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

// check refuses programs that the kernel would accept, and that would then lose packets or loop.
func (c *chainChange) check(p *ebpf.Program, position Position) error {
	if p.Type() != ebpf.XDP {
		return fmt.Errorf("it is a program of type %s, and only XDP programs can be chained", p.Type())
	}
	info, err := p.Info()
	if err != nil {
		return fmt.Errorf("look at it: %w", err)
	}
	id, _ := info.ID()
	for name, index := range map[string]uint32{
		"shunt's own program": uint32(abi.CHAIN_NEXT), "the program before": uint32(abi.CHAIN_BEFORE), "the program after": uint32(abi.CHAIN_AFTER),
	} {
		there, err := elementOf(c.chain, index)
		if err != nil {
			return err
		}
		if there != nil && there.ID == uint32(id) && index != position.index() {
			return fmt.Errorf("it is %s already: packets would loop between the two", name)
		}
	}
	calls, err := c.refersTo(info)
	switch {
	case err != nil:
		return err
	case position == PositionBefore && !calls:
		return errors.New("it does not refer to this interface's chain, so no packet would ever get to shunt: load it with that map instead of its own sh_chain, and let it end with a tail call to element 1; docs/guide/chaining.md shows both")
	case position == PositionAfter && calls:
		return errors.New("it refers to this interface's chain, so it could call back into shunt, and packets would loop: a program after ends with a verdict, and needs no sh_chain")
	}
	return nil
}

// refersTo reports whether a program uses the chain.
func (c *chainChange) refersTo(info *ebpf.ProgramInfo) (bool, error) {
	id, err := mapID(c.chain)
	if err != nil {
		return false, fmt.Errorf("look at the chain: %w", err)
	}
	used, _ := info.MapIDs()
	return slices.Contains(used, id), nil
}

func mapID(m *ebpf.Map) (ebpf.MapID, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	id, _ := info.ID()
	return id, nil
}

// set records the program, and then makes the interface run it: the next process that attaches finds the
// record.
func (c *chainChange) set(p *ebpf.Program, position Position) error {
	var old *ebpf.Program
	if err := c.chain.Lookup(position.index(), &old); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("open the program that is in this position now: %w", err)
	}
	if old != nil {
		defer old.Close()
	}
	if err := c.chain.Put(position.index(), p); err != nil {
		return unfit(err)
	}
	if position != PositionBefore {
		return keepProgram(p, c.pin(position))
	}
	err := c.link.Update(p)
	if err == nil {
		return keepProgram(p, c.pin(position))
	}
	err = unfit(err)
	if old == nil {
		return errors.Join(err, c.chain.Delete(position.index()))
	}
	return errors.Join(err, c.chain.Put(position.index(), old))
}

// keepProgram pins a program of a chain, and replaces the earlier pin. Between the two steps, a process that
// attaches needs more capabilities, and loses nothing.
func keepProgram(p *ebpf.Program, pin string) error {
	if err := forgetProgram(pin); err != nil {
		return err
	}
	another, err := p.Clone() // pinning p itself would move the caller's pin
	if err != nil {
		return err
	}
	defer another.Close()
	if err := another.Pin(pin); err != nil {
		return fmt.Errorf("it runs, but a daemon without CAP_SYS_ADMIN could not take it over: pin it at %s: %w", pin, err)
	}
	return nil
}

func forgetProgram(pin string) error {
	if err := os.Remove(pin); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", pin, err)
	}
	return nil
}

// unfit explains the kernel's EINVAL (bpf_prog_map_compatible in kernel/bpf/core.c).
func unfit(err error) error {
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	return fmt.Errorf("the kernel refuses it beside shunt's program: %w; it has to be loaded in the same way as shunt's program, for frames in several buffers (SEC(\"xdp.frags\"), BPF_F_XDP_HAS_FRAGS) and with the attach type BPF_XDP, as libbpf does", err)
}

// clear removes the program from the interface first, and then its record.
func (c *chainChange) clear(position Position) error {
	if position == PositionBefore {
		if err := c.link.Update(c.own); err != nil {
			return fmt.Errorf("make the interface run shunt's own program again: %w", err)
		}
	}
	if err := c.chain.Delete(position.index()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return forgetProgram(c.pin(position))
}
