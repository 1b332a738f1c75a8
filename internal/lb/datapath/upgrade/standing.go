package upgrade

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// ErrOtherABI says that an instance's data plane is of another ABI than this version's.
var ErrOtherABI = errors.New("the data plane has another ABI")

// standing lists the ABIs of an instance's maps. One ABI, without a switch, is the rule; with a switch it is
// being taken over from the other ABI, or has just been.
type standing struct {
	abis     []uint32
	switches map[uint32]abi.SwitchState
}

// look reads the ABIs. It changes nothing.
func look(opts store.Options) (s standing, err error) {
	s.switches = map[uint32]abi.SwitchState{}
	if s.abis, err = kernel.PinnedABIs(opts.PinRoot, opts.Instance); err != nil {
		return s, err
	}
	for _, number := range s.abis {
		lever, err := openLever(opts, number)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return s, err
		}
		s.switches[number] = lever.state()
		lever.close()
	}
	return s, nil
}

// charge returns the ABI whose programs forward; 0 is none.
func (s standing) charge() uint32 {
	for _, number := range s.abis {
		if state, ok := s.switches[number]; ok && state != abi.SWITCH_OLD {
			return number
		}
	}
	for _, number := range s.abis {
		if _, ok := s.switches[number]; !ok {
			return number
		}
	}
	return 0
}

// other returns an ABI with maps beside another one; 0 is none.
func (s standing) other(number uint32) uint32 {
	for _, o := range s.abis {
		if o != number {
			return o
		}
	}
	return 0
}

// RequireOwn returns an error for a data plane of another ABI. It accepts that there is none.
func RequireOwn(opts store.Options) error {
	s, err := look(opts)
	if err != nil {
		return err
	}
	if have := s.charge(); have != 0 && have != opts.Version.ABI {
		return fmt.Errorf("look at instance %q: %w: it has ABI %d, and this version of shunt knows ABI %d: use the version that made the data plane, or start `shunt run` of this version",
			opts.Instance, ErrOtherABI, have, opts.Version.ABI)
	}
	return nil
}

// Finish finishes or undoes an interrupted upgrade: it finishes if the new ABI is in charge, and undoes if the
// old one still is. It returns the ABI in charge; 0 is none.
func Finish(opts store.Options) (uint32, error) {
	s, err := look(opts)
	if err != nil {
		return 0, err
	}
	if len(s.switches) > 0 {
		unlock, err := kernel.Lock(opts.PinRoot, opts.Instance)
		if err != nil {
			return 0, err
		}
		defer unlock()
	}
	for number, state := range s.switches {
		switch state {
		case abi.SWITCH_OLD:
			opts.Log.Warn("an upgrade was cut short before it took effect; it is undone", "instance", opts.Instance, "abi", number)
			err = undo(opts, number)
		case abi.SWITCH_CARRYING:
			opts.Log.Warn("an upgrade was cut short after it took effect; it is finished", "instance", opts.Instance, "abi", number)
			err = resume(opts, s.other(number), number)
		default:
			err = finish(opts, number)
		}
		if err != nil {
			return 0, err
		}
	}
	if s, err = look(opts); err != nil {
		return 0, err
	}
	if len(s.abis) > 1 {
		return 0, fmt.Errorf("instance %q has maps of the ABIs %d, and nothing says which are in use: run `shunt detach` and start again (this ends connections)", opts.Instance, s.abis)
	}
	return s.charge(), nil
}

// resume carries the flows over that a killed process has left in the old table.
func resume(opts store.Options, from, to uint32) error {
	if to != opts.Version.ABI {
		return fmt.Errorf("an upgrade of instance %q from ABI %d to ABI %d was cut short, and this version of shunt has ABI %d: start the version with ABI %d, which finishes it, or run `shunt detach` first (this ends connections)",
			opts.Instance, from, to, opts.Version.ABI, to)
	}
	lever, err := openLever(opts, to)
	if err != nil {
		return err
	}
	defer lever.close()
	w, ok := findConversions(opts.Version.Steps, from, to)
	if !ok {
		return noSteps(opts, from)
	}
	if err := resumeFlows(opts, w, from, lever.since()); err != nil {
		return err
	}
	lever.set(abi.SWITCH_DONE)
	return finish(opts, to)
}

// undo gives the interfaces back to the old ABI's programs and removes the new ABI's maps.
func undo(opts store.Options, number uint32) error {
	if err := attach.PassGates(opts, opts.MapDir(number), abi.GATE_OLD); err != nil {
		return fmt.Errorf("undo an upgrade to ABI %d: %w", number, err)
	}
	if err := os.RemoveAll(opts.MapDir(number)); err != nil {
		return fmt.Errorf("undo an upgrade to ABI %d: %w", number, err)
	}
	return nil
}

// finish removes the old ABI's maps, and the gates. The switch goes last: while it exists, the next process
// does this again.
func finish(opts store.Options, number uint32) error {
	s, err := look(opts)
	if err != nil {
		return err
	}
	for old := s.other(number); old != 0; old = s.other(number) {
		if err := os.RemoveAll(opts.MapDir(old)); err != nil {
			return fmt.Errorf("remove the maps of ABI %d: %w", old, err)
		}
		if s, err = look(opts); err != nil {
			return err
		}
	}
	if err := opts.Version.Reach(abi.PointRemoved); err != nil {
		return err
	}
	if err := attach.PassGates(opts, opts.MapDir(number), abi.GATE_NEW); err != nil {
		return err
	}
	dir := opts.MapDir(number)
	return errors.Join(attach.RemoveGates(dir), os.Remove(filepath.Join(dir, abi.MapSwitch)))
}

// lever is sh_switch.
type lever struct {
	m      *ebpf.Map
	memory []byte
	words  []uint64
}

func leverPath(opts store.Options, number uint32) string {
	return filepath.Join(opts.MapDir(number), abi.MapSwitch)
}

// openLever opens the switch of an ABI; the error is os.ErrNotExist if there is none.
func openLever(opts store.Options, number uint32) (*lever, error) {
	m, err := ebpf.LoadPinnedMap(leverPath(opts, number), nil)
	if err != nil {
		return nil, fmt.Errorf("open the switch of an upgrade: %w", err)
	}
	return newLever(m)
}

func newLever(m *ebpf.Map) (*lever, error) {
	if m.ValueSize() != 8 || m.MaxEntries() < uint32(abi.SWITCH_WORDS) {
		_ = m.Close()
		return nil, errors.New("open the switch of an upgrade: this version cannot read it: run `shunt detach` with the version that made it")
	}
	memory, err := store.MapArray(m, abi.MapSwitch, 0, m.MaxEntries(), unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the switch of an upgrade: %w", err), m.Close())
	}
	return &lever{m, memory, abi.Array[uint64](memory)}, nil
}

func (l *lever) state() abi.SwitchState {
	return abi.SwitchState(atomic.LoadUint64(&l.words[abi.SWITCH_STATE]))
}

func (l *lever) set(s abi.SwitchState) {
	atomic.StoreUint64(&l.words[abi.SWITCH_STATE], uint64(s))
}

// take puts the new ABI in charge, at a moment in jiffies.
func (l *lever) take(now uint64) {
	atomic.StoreUint64(&l.words[abi.SWITCH_SINCE], now)
	l.set(abi.SWITCH_CARRYING)
}

// since returns the time at which the new ABI took over, in the low bits of jiffies that flows have.
func (l *lever) since() uint32 {
	return uint32(atomic.LoadUint64(&l.words[abi.SWITCH_SINCE]))
}

func (l *lever) close() {
	_ = unix.Munmap(l.memory)
	_ = l.m.Close()
}
