// Package daemon is the UDP path as a node runs it: it makes offers of the file's entries, has a broker lend them to
// programs, and reports the offers' state.
//
//	file ──► build ──► entries ──► keep ──► broker ──► leases
//	                                 ▲        │
//	        every second ────────────┘        └──► conditions, status, metrics
//
// An entry that cannot be offered yet, because its interface is missing for example, is a condition and is tried again; the
// other entries are not disturbed. If the node is killed or keeps its state (--on-exit keep), leases go on without it, and the
// next node takes them over. Otherwise they end with the node: the kernel's sockets get the datagrams, and programs ask for
// new leases.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/udp/broker"
	"github.com/shunt-lb/shunt/internal/udp/lease"
	"github.com/shunt-lb/shunt/internal/udp/tuning"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/internal/value"
)

const (
	// Name is the product's name.
	Name = "udp"
	// lookInterval is the interval at which interfaces, users and leases are looked at.
	lookInterval = time.Second
	// part is the node's name for the goroutine that looks.
	part = "the UDP path"
)

// Product returns the UDP path as a node's product.
func Product() node.Product {
	return node.Product{
		Name: Name, Part: config.NewTop(Name, build),
		Remove: remove,
		Left: func() ([]string, error) {
			left, err := LeftLeases()
			return slices.Collect(maps.Keys(left)), err
		},
		Unnamed:   remove,
		Needs:     needs,
		CheckHost: func(s any, how node.HostCheck) { s.(*parsed).checkHost(how) },
		Describe:  func(s any) (string, []string) { return s.(*parsed).describe() },
		Open: func(_ context.Context, host *node.Host, s any) (node.Instance, error) {
			return open(host, s.(*parsed).settings)
		},
	}
}

// daemon is an open product.
type daemon struct {
	host   *node.Host
	broker *broker.Broker
	stop   context.CancelFunc
	ended  chan struct{}

	applying sync.Mutex // held through a whole change; it guards the fields that follow
	wanted   settings
	trouble  map[string]string // by entry: reason why it is not offered, or not to all accounts
	tuner    *tuning.Tuner
	untuned  map[string]error  // by interface: reason why its interrupts are not kept off; "": of all interfaces
	missed   map[string]uint64 // by entry: datagrams on queues that the lease does not have, at the last look
}

func open(host *node.Host, s settings) (*daemon, error) {
	options := broker.Options{Socket: s.socket, Keep: keep(host.Instance)}
	if err := kernel.Mount(kernel.DefaultPinRoot, host.Log); err != nil {
		host.Log.Warn("UDP leases end with this process, also when it is killed: shunt has no bpffs to keep them in", "error", err)
		options.Keep = nil
	}
	b, err := broker.Open(options)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	d := &daemon{host: host, broker: b, stop: stop, tuner: tuning.New(tuningRecord(host.Instance), tuning.Net), ended: make(chan struct{}), missed: map[string]uint64{}}
	if err := d.bring(s); err != nil {
		stop()
		return nil, errors.Join(err, d.tuner.PutBack(), b.Close())
	}
	go d.look(ctx)
	return d, nil
}

// pinsFolder has a folder for each instance, in shunt's of bpffs.
const pinsFolder = "_udp"

// keptSuffix ends the name of the file in which an instance writes down its leases.
const keptSuffix = ".udp-leases"

func keep(instance string) *broker.Keep {
	return &broker.Keep{Pins: filepath.Join(kernel.Directory(kernel.DefaultPinRoot, pinsFolder), instance), Record: filepath.Join(node.RunDirectory, instance+keptSuffix)}
}

// LeftLeases returns the folders in which nodes that were killed, or kept leases, have left them, by instance. Product's
// Remove ends these leases.
func LeftLeases() (map[string]string, error) {
	_, _ = kernel.SharePins()
	entries, err := os.ReadDir(kernel.Directory(kernel.DefaultPinRoot, pinsFolder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the UDP leases of an earlier daemon: %w", err)
	}
	left := map[string]string{}
	for _, e := range entries {
		left[e.Name()] = keep(e.Name()).Pins
	}
	return left, nil
}

// bring brings settings into force. An entry that lacks something is no error.
func (d *daemon) bring(s settings) error {
	d.applying.Lock()
	defer d.applying.Unlock()
	if err := d.keep(s); err != nil {
		return err
	}
	d.wanted = s
	d.tell()
	return nil
}

// keep has the broker lend the file's entries, as far as this machine allows.
func (d *daemon) keep(s settings) error {
	trouble := map[string]string{}
	offers := make([]broker.Offer, 0, len(s.entries))
	for i := range s.entries {
		offer, missing := s.entries[i].resolve()
		if len(missing) > 0 {
			trouble[offer.Name] = fmt.Sprintf("the lease %s is not open to all processes in allow: this machine has no %s", offer.Name, config.Join(missing, "and no"))
		}
		if offer.Kill && !mayKill() && trouble[offer.Name] == "" {
			trouble[offer.Name] = fmt.Sprintf("cannot kill processes that keep the sockets of the lease %s: the daemon does not have CAP_KILL (with systemd: `shunt check --unit` prints a drop-in with it)", offer.Name)
		}
		offers = append(offers, offer)
	}
	err := d.broker.Apply(offers)
	var unattached *broker.Unattached
	var unguarded *broker.Unguarded
	errors.As(err, &unattached)
	errors.As(err, &unguarded)
	for _, o := range offers {
		if unguarded != nil && unguarded.By[o.Name] != nil {
			trouble[o.Name] = fmt.Sprintf("cannot drop the datagrams of %s for which there is no socket, or let them pass again: %v", o.Name, unguarded.By[o.Name])
		}
		if unattached != nil && unattached.By[o.Interface] != nil {
			trouble[o.Name] = fmt.Sprintf("cannot lend %s: %v", o.Name, unattached.By[o.Interface])
		}
	}
	if err != nil && unattached == nil && unguarded == nil {
		return fmt.Errorf("bring the file's udp entries into force: %w", err)
	}
	d.trouble = trouble
	d.tune(s)
	return nil
}

// mayKill reports whether the process may signal processes of other users.
func mayKill() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	return unix.Capget(&header, &sets[0]) == nil && sets[0].Effective&(1<<unix.CAP_KILL) != 0
}

// look retries failed steps, and reports changes, until ctx ends.
func (d *daemon) look(ctx context.Context) {
	defer close(d.ended)
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		d.applying.Lock()
		if len(d.trouble)+len(d.untuned) > 0 || d.broker.Stale() {
			if err := d.keep(d.wanted); err != nil {
				d.host.Log.Error("shunt cannot bring the UDP path to the state in the file", "error", err)
			}
		}
		d.tell()
		d.applying.Unlock()
		d.host.Alive(part)
	}
}

// tell sets and clears the conditions.
func (d *daemon) tell() {
	var failed, idle, dropped, reduced, missed []condition.Condition
	for _, o := range d.broker.Status().Offers {
		if why := d.trouble[o.Name]; why != "" {
			failed = append(failed, condition.Condition{Subject: o.Name, Text: why})
		}
		if o.Failed != "" {
			continue
		}
		if text := reducedText(&o); text != "" {
			reduced = append(reduced, condition.Condition{Subject: o.Name, Text: text})
		}
		if o.Awaited != nil { // the holder's sockets have the datagrams
			continue
		}
		if o.Lease == nil {
			list, fate := &idle, "the kernel's socket gets its datagrams"
			if o.Dropping {
				list, fate = &dropped, "its datagrams are dropped"
			}
			*list = append(*list, condition.Condition{Subject: o.Name, Text: fmt.Sprintf("no program has the lease %s, so %s%s", o.Name, fate, lastEnd(&o))})
			delete(d.missed, o.Name)
			continue
		}
		// The condition holds while such datagrams come.
		if n := o.Lease.Elsewhere.Matched; n > d.missed[o.Name] {
			fate := "go to the kernel's socket"
			if o.Dropping {
				fate = "are dropped"
			}
			missed = append(missed, condition.Condition{Subject: o.Name, Text: fmt.Sprintf("datagrams of the lease %s arrive on queues that are not in the lease, and %s", o.Name, fate)})
			d.missed[o.Name] = n
		}
	}
	d.host.Conditions.Only(condition.UDPLeaseFailed, failed)
	d.host.Conditions.Only(condition.UDPBusyPollOff, d.untunedConditions())
	d.host.Conditions.Only(condition.UDPKernelSocket, idle)
	d.host.Conditions.Only(condition.UDPDropped, dropped)
	d.host.Conditions.Only(condition.UDPModeReduced, reduced)
	d.host.Conditions.Only(condition.UDPQueueMissed, missed)
}

// reducedText describes an offer that has less than its mode asks for; "": it has all of it.
func reducedText(o *broker.OfferStatus) string {
	if o.Reason != "" { // the program is generic although native was tried
		return fmt.Sprintf("lend %s in the mode %s: interface %s has the program in generic mode: %s", o.Name, lease.Generic, o.Interface, o.Reason)
	}
	if o.Lease != nil && o.Lease.Mode == xsk.Copy && o.Lease.Reason != "" {
		return fmt.Sprintf("lend %s in the mode %s: %s", o.Name, o.Lease.Mode, o.Lease.Reason)
	}
	return ""
}

// lastEnd describes the ends of an offer's leases.
func lastEnd(o *broker.OfferStatus) string {
	if o.LastEnd == "" {
		return ""
	}
	return fmt.Sprintf(" (the last one ended: %s)", o.LastEnd)
}

// Refuses implements node.Instance.
func (d *daemon) Refuses(s any) error {
	d.applying.Lock()
	defer d.applying.Unlock()
	changes := value.DifferentSettings(d.wanted.list(), s.(*parsed).list())
	return value.Fixed(changes, "udp_socket", "the socket's path cannot change while programs have leases; restart shunt")
}

// Apply implements node.Instance.
func (d *daemon) Apply(_ context.Context, s any) (node.Difference, error) {
	after := s.(*parsed).settings
	d.applying.Lock()
	before := d.wanted.list()
	d.applying.Unlock()
	if err := d.bring(after); err != nil {
		return node.Difference{}, err
	}
	return node.Difference{Settings: value.DifferentSettings(before, after.list())}, nil
}

// Summary implements node.Instance.
func (d *daemon) Summary() string {
	return "lending " + value.Counted(len(d.broker.Status().Offers), "UDP lease")
}

// Close implements node.Instance.
func (d *daemon) Close(keep bool) error {
	d.stop()
	<-d.ended
	var err error
	if keep { // interrupts also stay as the leases need them
		err = d.broker.Leave()
	} else {
		err = errors.Join(d.broker.Close(), d.tuner.PutBack())
	}
	for _, code := range []string{condition.UDPBusyPollOff, condition.UDPLeaseFailed, condition.UDPDropped, condition.UDPKernelSocket, condition.UDPModeReduced, condition.UDPQueueMissed} {
		d.host.Conditions.Only(code, nil)
	}
	return err
}
