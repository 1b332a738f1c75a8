package broker

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/lease"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// Offer is the administrator's permission to lease: to one program at a time, under a name. A program gives the name
// and nothing else.
type Offer struct {
	Name      string
	Interface string
	Addresses []netip.AddrPort // up to proto.AddressesMax
	Queues    []int            // of the interface; nil: all
	Mode      xsk.Mode         // auto, zero-copy, copy or lease.Generic
	RingSize  uint32           // entries of each receive ring: xsk.RingSize(delay, rate)
	Transmit  bool             // whether the holder can send: any frame
	Stamped   bool             // whether each datagram comes with the time at which XDP saw it
	CPUs      []int            // CPUs that the holder should work on, for the queues in turn; nil: any
	BusyPoll  time.Duration    // if not 0, the holder makes the driver work, and interrupts stay off for this long after the driver has worked: see tuning
	Drop      bool             // whether datagrams that no socket takes are dropped, also while nobody holds the offer; otherwise they pass to the kernel's stack
	Wait      proto.Wait       // the advice to the holder how to wait for datagrams
	Allow     []Rule           // at least one of them must hold; none: no process may lease
	// Kill ends a process that keeps a lease which has ended: it still has the sockets, so it keeps the
	// queues from other programs, and with Transmit it can still send.
	Kill bool
}

// check refuses an offer that no lease could have.
func (o Offer) check() error {
	switch {
	case o.Name == "" || len(o.Name) > proto.NameMax:
		return fmt.Errorf("the name %q of an offer must have 1 to %d bytes", o.Name, proto.NameMax)
	case len(o.Addresses) == 0 || len(o.Addresses) > proto.AddressesMax:
		return fmt.Errorf("the offer %s has %d addresses; 1 to %d are possible", o.Name, len(o.Addresses), proto.AddressesMax)
	case !slices.Contains([]xsk.Mode{xsk.Auto, xsk.ZeroCopy, xsk.Copy, lease.Generic}, o.Mode):
		return fmt.Errorf("the offer %s has the unknown mode %q; use auto, zero-copy, copy or generic", o.Name, o.Mode)
	}
	for _, a := range o.Addresses {
		if !a.IsValid() || a.Addr().IsUnspecified() || a.Port() == 0 {
			return fmt.Errorf("the offer %s has the address %s; write an address and a port", o.Name, a)
		}
	}
	for i, q := range o.Queues {
		if q < 0 || q >= hook.MaxQueues || slices.Contains(o.Queues[:i], q) {
			return fmt.Errorf("the offer %s has queue %d twice, or out of range; queues are 0 to %d", o.Name, q, hook.MaxQueues-1)
		}
	}
	if o.Queues != nil && len(o.Queues) == 0 {
		return fmt.Errorf("the offer %s has an empty list of queues; name some, or leave the list out for all queues", o.Name)
	}
	if _, err := xsk.Plan(o.RingSize, 2048, o.Transmit); err != nil {
		return fmt.Errorf("the offer %s: %w", o.Name, err)
	}
	for _, r := range o.Allow {
		if err := r.check(); err != nil {
			return fmt.Errorf("the offer %s: %w", o.Name, err)
		}
	}
	return nil
}

// checkAll refuses offers that contradict each other.
func checkAll(offers []Offer) error {
	names, addresses, modes := map[string]bool{}, map[string]string{}, map[string]kernel.Mode{}
	for _, o := range offers {
		if err := o.check(); err != nil {
			return err
		}
		if names[o.Name] {
			return fmt.Errorf("two offers have the name %s", o.Name)
		}
		names[o.Name] = true
		for _, a := range o.Addresses {
			key := o.Interface + " " + netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String()
			if other, taken := addresses[key]; taken {
				return fmt.Errorf("the offers %s and %s both have %s on interface %s", other, o.Name, a, o.Interface)
			}
			addresses[key] = o.Name
		}
		if mode, known := modes[o.Interface]; known && mode != o.hookMode() {
			return fmt.Errorf("the offer %s has the mode %s, and another offer of interface %s has another mode: an interface has one program, so either all of its offers are generic, or none is", o.Name, o.Mode, o.Interface)
		}
		modes[o.Interface] = o.hookMode()
	}
	return nil
}

func (o Offer) hookMode() kernel.Mode {
	if o.Mode == lease.Generic {
		return kernel.ModeGeneric
	}
	return kernel.ModeAuto
}

// spec does not read Drop, because Apply may change it meanwhile.
func (o *Offer) spec() lease.Spec {
	mode := o.Mode
	if mode == lease.Generic {
		mode = xsk.Copy
	}
	return lease.Spec{Addresses: o.Addresses, Queues: o.Queues, Mode: mode, RingSize: o.RingSize, Transmit: o.Transmit, Stamped: o.Stamped, BusyPoll: o.BusyPoll > 0}
}

// spared returns a copy that nothing changes.
func (o *Offer) spared() Offer {
	c := *o
	c.Drop = false // belongs to a guard
	return c
}

// equal reports whether a lease of one offer is also a lease of the other.
func (o Offer) equal(other Offer) bool {
	other.Drop = o.Drop // belongs to a guard, which leases know nothing of
	return reflect.DeepEqual(o, other)
}

// allows reports whether a rule allows a process.
func (o Offer) allows(i Identity) bool {
	return slices.ContainsFunc(o.Allow, func(r Rule) bool { return r.allows(i) })
}

// shares reports whether two offers of an interface have a queue in common.
func (o Offer) shares(other Offer) bool {
	return o.Interface == other.Interface && (o.Queues == nil || other.Queues == nil ||
		slices.ContainsFunc(o.Queues, func(q int) bool { return slices.Contains(other.Queues, q) }))
}
