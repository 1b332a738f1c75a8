package decap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/realserver"
	"github.com/vishvananda/netlink"
)

// AttachNone is for dsr-l2, which encapsulates nothing.
const AttachNone model.Attach = "none"

// Config says for which services the machine becomes a backend.
type Config struct {
	Options                // Mode may be AttachNone; Run gives the name; Log must be there
	Interval time.Duration // how often Observer is told of numbers
}

// Observer is informed of the work of Run. Its own errors are logged.
type Observer interface {
	Started(Started) error
	// Counted is called every interval, and once more at the end.
	Counted(n Numbers, stopping bool) error
}

// Started describes a tunnel end that Run has begun.
type Started struct {
	Attachment *kernel.Attachment // nil with AttachNone
	Added      []netip.Addr       // VIPs that were not there
	Settings   []host.Setting     // changed
}

// Numbers are packets since the start.
type Numbers struct {
	TakenOff uint64            `json:"taken_off"`
	Kinds    map[string]uint64 `json:"kinds"`   // taken off, by reason
	Refused  map[string]uint64 `json:"refused"` // by reason
}

// takenOff are the reasons of packets that were decapsulated.
var takenOff = []string{"decap_ipip", "decap_gue"}

// ordinary are the reasons of packets that have nothing to do with tunnels.
var ordinary = []string{"not_ip", "vlan", "decap_no_tunnel", "decap_ecn"}

// runner is a machine that is a backend.
type runner struct {
	Config
	record  *realserver.Record
	state   realserver.State
	program *Program // nil with AttachNone
}

// Run makes the machine a backend until ctx ends, and then undoes all its changes.
func Run(ctx context.Context, c Config, o Observer) (err error) {
	r := &runner{Config: c}
	if r.Name, err = host.Space(); err != nil {
		return err
	}
	if r.record, err = realserver.OpenRecord(realserver.RunDirectory, r.Name); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.record.Close()) }()
	changes, err := r.watch(ctx)
	if err != nil {
		return err
	}
	// A refusal before the first change leaves a predecessor's work unchanged.
	if _, err := net.InterfaceByName(r.Interface); err != nil {
		return fmt.Errorf("decapsulate on interface %q: it does not exist; `ip link` lists the interfaces", r.Interface)
	}
	if r.state, err = r.record.Read(); err != nil {
		return err
	}
	if err := r.start(); err != nil {
		return errors.Join(err, r.undo())
	}
	if err := o.Started(r.started()); err != nil {
		r.Log.Warn("cannot print the changes", "error", err)
	}
	r.loop(ctx, changes, o)
	r.count(o, true)
	if err := r.undo(); err != nil {
		return fmt.Errorf("not all changes were undone; %s lists the rest; start and stop again: %w", r.record.Path(), err)
	}
	r.Log.Info("stopped: everything is as it was before", "interface", r.Interface)
	return nil
}

// watch reports changes of addresses. It begins before the addresses are first read.
func (r *runner) watch(ctx context.Context) (<-chan netlink.AddrUpdate, error) {
	changes := make(chan netlink.AddrUpdate, 64)
	err := netlink.AddrSubscribeWithOptions(changes, ctx.Done(), netlink.AddrSubscribeOptions{
		ErrorCallback: func(err error) {
			if ctx.Err() == nil {
				r.Log.Warn("changes of addresses are not noticed at once any more", "error", err)
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to changes of addresses: %w", err)
	}
	return changes, nil
}

// start makes the machine a backend. If it fails, undo reverts its changes.
func (r *runner) start() error {
	if !r.state.IsZero() {
		r.Log.Info("taking over from an earlier start that did not end by itself")
	}
	var err error
	if r.state, err = realserver.Prepare([]string{r.Interface}, r.VIPs, r.state, r.record.Write); err != nil {
		return err
	}
	if r.Mode == AttachNone {
		return Remove("", r.Name)
	}
	r.program, err = Attach(r.Options)
	return err
}

// undo reverts the changes of this process and of killed predecessors. The program goes first, so that no
// packet meets a machine that is half a backend.
func (r *runner) undo() error {
	var errs []error
	if r.program != nil {
		errs = append(errs, r.program.Detach())
	} else {
		errs = append(errs, Remove("", r.Name))
	}
	left, err := r.state.Restore()
	return errors.Join(append(errs, err, r.record.Write(left))...)
}

// loop keeps the program's addresses up to date and reports numbers, until ctx ends.
func (r *runner) loop(ctx context.Context, changes <-chan netlink.AddrUpdate, o Observer) {
	tick := time.NewTicker(r.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case change, open := <-changes:
			if !open {
				changes = nil
			}
			r.Log.Debug("an address has changed", "address", change.LinkAddress.String(), "added", change.NewAddr)
		case <-tick.C:
			r.count(o, false)
		}
		if r.program == nil {
			continue
		}
		if err := r.program.Refresh(); err != nil {
			r.Log.Warn("cannot read the interface's addresses; tunnels still end at the addresses that it had before", "error", err)
		}
	}
}

func (r *runner) started() Started {
	s := Started{Added: r.state.Addresses, Settings: r.state.Settings}
	if r.program != nil {
		s.Attachment = &r.program.Attachment
	}
	return s
}

// count reads the numbers and reports them.
func (r *runner) count(o Observer, stopping bool) {
	n, err := r.numbers()
	if err == nil {
		err = o.Counted(n, stopping)
	}
	if err != nil {
		r.Log.Warn("cannot read or print the counters", "error", err)
	}
}

func (r *runner) numbers() (Numbers, error) {
	n := Numbers{Kinds: map[string]uint64{}, Refused: map[string]uint64{}}
	if r.program == nil {
		return n, nil
	}
	counters, err := r.program.Counters()
	for reason, c := range counters {
		switch {
		case slices.Contains(takenOff, reason):
			n.Kinds[reason] = c.Packets
			n.TakenOff += c.Packets
		case !slices.Contains(ordinary, reason):
			n.Refused[reason] = c.Packets
		}
	}
	return n, err
}
