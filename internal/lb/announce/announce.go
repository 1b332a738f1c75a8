// Package announce makes the network send packets for an address here: it asks whether
// another host has the address. If no host has it, the data plane answers for it, and the
// segment is told.
//
//	Announce ──► join group ──► probe ──► free ──► Own ──► gratuitous ARP / unsolicited NA
//	                 ▲            │
//	                 │            │                                        │
//	                 └── wait ◄── a host answers: Disown,       listen, ask ◄┘
//	                              condition address_in_use      now and then
//
// If another host turns out to have an address later, the address is defended, or left to another shunt:
// listen.go has the rule.
//
// A host may stand by for an address that another host is to have (StandBy): the standby asks later, takes the address when no host
// answers, and leaves it to any host that has it, and to the host that is to have it. The latter sends a bid to the host that answers
// its probes (wire.Bid).
//
// The data plane answers ordinary ARP requests and neighbour solicitations. The kernel answers
// for addresses that the host itself has; they are not given to this package.
//
// Invariant: Own is called only after a complete round of probes met silence.
//
// It opens packet sockets (CAP_NET_RAW) and changes IPv6 group membership over rtnetlink
// (CAP_NET_ADMIN).
package announce

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Options configure an Announcer. Zero durations and counts take the named defaults.
type Options struct {
	// Namespace is the network namespace to work in; nil is the calling thread's.
	Namespace *netns.NsHandle
	// Own makes the data plane answer for the address on the interface. It is called
	// before the first announcement, and again when the interface has come back. An
	// error keeps the address unannounced until a later try. Must be idempotent.
	Own func(addr netip.Addr, iface int) error
	// Disown makes the data plane stop answering. It is called when another host turns out to have the address,
	// whether or not Own was called before (a predecessor may have left the data plane answering), and by
	// Withdraw. Must be idempotent.
	Disown func(addr netip.Addr, iface int) error
	// Conditions receives address_in_use, address_contested, address_taken_over, announce_failed and multicast_link_only.
	Conditions *condition.Set
	// Log receives events that are no conditions; slog.Default() if nil.
	Log *slog.Logger

	// ProbeCount probes are sent ProbeInterval apart, and ProbeWait passes after the
	// last. RFC 5227 section 1.1 has 3 probes 1 to 2 s apart and 2 s of waiting, made
	// for hosts that boot on slow links; a balancer that takes over cannot wait 7 s.
	// 3, 200 ms and 400 ms by default.
	ProbeCount    int
	ProbeInterval time.Duration
	ProbeWait     time.Duration
	// AnnounceCount announcements are sent AnnounceInterval apart: 2 and 2 s, as in RFC 5227 section 1.1.
	AnnounceCount    int
	AnnounceInterval time.Duration
	// RetryInterval passes before an address in use is probed again, plus or minus a quarter, and longer with
	// more than 150 addresses. Together with the probes it is the time that a balancer takes to replace one
	// that has died. 3 s: an answer costs the segment two frames.
	RetryInterval time.Duration
	// CheckInterval passes between two questions whether another host has an address that is ours; longer with
	// more than 500 addresses. 10 s.
	CheckInterval time.Duration
	// DefendInterval passes between two announcements against a host that is no shunt: 10 s, as in RFC 5227
	// section 1.1.
	DefendInterval time.Duration
	// FailureInterval passes before a local failure is tried again. 2 s.
	FailureInterval time.Duration
}

func (o *Options) defaults() {
	if o.Own == nil {
		o.Own = func(netip.Addr, int) error { return nil }
	}
	if o.Disown == nil {
		o.Disown = func(netip.Addr, int) error { return nil }
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&o.ProbeInterval, 200 * time.Millisecond},
		{&o.ProbeWait, 400 * time.Millisecond},
		{&o.AnnounceInterval, 2 * time.Second},
		{&o.RetryInterval, 3 * time.Second},
		{&o.CheckInterval, 10 * time.Second},
		{&o.DefendInterval, 10 * time.Second},
		{&o.FailureInterval, 2 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if o.ProbeCount == 0 {
		o.ProbeCount = 3
	}
	if o.AnnounceCount == 0 {
		o.AnnounceCount = 2
	}
}

// State is the progress of an address.
type State struct {
	Address   netip.Addr
	Interface int
	Owned     bool             // the data plane answers for it
	Owner     net.HardwareAddr // of another host that has it; nil if none is known
	Err       string           // why asking or announcing failed; empty if it did not
}

// known reports whether the question is decided: the address is ours, or another host's.
func (s State) known() bool { return s.Owned || s.Owner != nil || s.Err != "" }

// probesAtOnce limits how many addresses are probed at the same time, and so how many
// packet sockets are open.
const probesAtOnce = 64

// Announcer announces addresses. Its methods may be called concurrently.
type Announcer struct {
	opts    Options
	ns      netns.NsHandle // ours; closed or not: see netns.None
	handle  *netlink.Handle
	sender  *wire.Sender
	probing chan struct{} // a semaphore of probesAtOnce
	stop    context.CancelFunc
	ctx     context.Context
	running sync.WaitGroup

	groups sync.Mutex // held while group membership is read or changed

	mu   sync.Mutex
	work map[location]*job
	// listening is closed when a goroutine reads the frames of other hosts, or is about to.
	listening map[segment]chan struct{}
	changed   chan struct{} // closed and replaced when a state changes
}

// location is an address on an interface.
type location struct {
	addr  netip.Addr
	iface int
}

// job is an address being announced.
type job struct {
	location
	stop  context.CancelFunc
	done  chan struct{} // closed when its goroutine has ended
	again chan struct{} // capacity 1: start over now

	// Fields guarded by Announcer.mu:
	standby   bool   // another host is to have the address
	bid       bool   // a bid was sent to a host that has the address, and the address is not here yet
	waits     bool   // a standby is to leave the address, and not to ask before the host for which it stands by has asked
	name      string // of the interface, as last seen
	state     State
	defended  time.Time // time of the last announcement against another host
	contested time.Time // time at which another host was last heard; zero: none is known
	// lost: another shunt has the address and keeps it, after a comparison of both hardware addresses.
	lost, ours net.HardwareAddr
}

// New starts an announcer that announces nothing yet.
func New(opts Options) (*Announcer, error) {
	opts.defaults()
	ns, err := namespace.Keep(opts.Namespace)
	if err != nil {
		return nil, err
	}
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		namespace.Close(ns)
		return nil, fmt.Errorf("open a netlink socket to announce addresses: %w", err)
	}
	sender, err := wire.OpenSender(ns)
	if err != nil {
		handle.Close()
		namespace.Close(ns)
		return nil, err
	}
	a := &Announcer{
		opts: opts, ns: ns, handle: handle, sender: sender,
		probing:   make(chan struct{}, probesAtOnce),
		work:      map[location]*job{},
		listening: map[segment]chan struct{}{},
		changed:   make(chan struct{}),
	}
	a.ctx, a.stop = context.WithCancel(context.Background())
	if err := a.watchLinks(); err != nil {
		a.stop()
		sender.Close()
		handle.Close()
		namespace.Close(ns)
		return nil, err
	}
	return a, nil
}

// Announce begins to announce an address on an interface and returns at once. It does nothing if the address is
// being announced there already. A standby that has it keeps it.
func (a *Announcer) Announce(addr netip.Addr, iface int) {
	a.begin(location{addr.Unmap(), iface}, false)
}

// StandBy begins to announce an address on an interface once no host answers for it, and returns at once. It does nothing if this host
// stands by already. If this host has announced the address, it leaves the address for a moment, in which the host that is to have it asks.
func (a *Announcer) StandBy(addr netip.Addr, iface int) { a.begin(location{addr.Unmap(), iface}, true) }

func (a *Announcer) begin(p location, standby bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ctx.Err() != nil {
		return
	}
	if j := a.work[p]; j != nil {
		a.become(j, standby)
		return
	}
	ctx, stop := context.WithCancel(a.ctx)
	j := &job{
		location: p, stop: stop, done: make(chan struct{}), again: make(chan struct{}, 1),
		name:  fmt.Sprintf("interface %d", p.iface),
		state: State{Address: p.addr, Interface: p.iface}, standby: standby, waits: standby,
	}
	a.work[p] = j
	a.running.Go(func() {
		defer close(j.done)
		a.run(ctx, j)
	})
}

// become makes this host stand by for an address, or ends that. The caller holds mu.
func (a *Announcer) become(j *job, standby bool) {
	if j.standby == standby {
		return
	}
	j.standby, j.waits = standby, standby
	a.opts.Conditions.Clear(condition.AddressTakenOver, j.subject())
	a.opts.Conditions.Clear(condition.AddressInUse, j.subject())
	if standby || !j.state.Owned {
		j.startOver()
	}
}

// Reannounce asks again whether the address is free and tells the segment again, without
// taking it from the data plane meanwhile. Unknown addresses are ignored.
func (a *Announcer) Reannounce(addr netip.Addr, iface int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if j := a.work[location{addr.Unmap(), iface}]; j != nil {
		j.startOver()
	}
}

func (j *job) startOver() {
	select {
	case j.again <- struct{}{}:
	default: // already asked to
	}
}

// Withdraw stops announcing an address on an interface, takes the address from the data plane unless it is ours
// on another interface, and leaves its group. It does the same for an address that only a predecessor
// announced.
func (a *Announcer) Withdraw(addr netip.Addr, iface int) error {
	p := location{addr.Unmap(), iface}
	a.mu.Lock()
	j := a.work[p]
	a.mu.Unlock()
	subject := ""
	if j != nil {
		j.stop()
		<-j.done
		a.mu.Lock()
		delete(a.work, p)
		subject = j.subject()
		a.mu.Unlock()
	}
	var err error
	if !a.ownedBeside(p) {
		err = a.opts.Disown(p.addr, p.iface)
	}
	err = errors.Join(err, a.leave(p))
	if j != nil {
		for _, code := range []string{condition.AddressInUse, condition.AddressContested, condition.AddressTakenOver, condition.AnnounceFailed, condition.MulticastLinkOnly} {
			a.opts.Conditions.Clear(code, subject)
		}
		a.tellWaiters()
	}
	return err
}

// ownedBeside reports whether the address is ours on another interface. The data plane answers for an address
// on all its interfaces.
func (a *Announcer) ownedBeside(p location) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for other, j := range a.work {
		if other != p && other.addr == p.addr && j.state.Owned {
			return true
		}
	}
	return false
}

// States returns every announced address, sorted.
func (a *Announcer) States() []State {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.states()
}

func (a *Announcer) states() []State {
	list := make([]State, 0, len(a.work))
	for _, j := range a.work {
		list = append(list, j.state)
	}
	slices.SortFunc(list, func(x, y State) int {
		if c := x.Address.Compare(y.Address); c != 0 {
			return c
		}
		return x.Interface - y.Interface
	})
	return list
}

// Owned reports whether the address is announced and the data plane answers for it.
func (a *Announcer) Owned(addr netip.Addr, iface int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	j := a.work[location{addr.Unmap(), iface}]
	return j != nil && j.state.Owned
}

// Wait returns when each announced address is known to be ours or another host's, or when ctx ends. It returns
// the states of the addresses that are not ours.
func (a *Announcer) Wait(ctx context.Context) []State {
	for {
		a.mu.Lock()
		states, changed := a.states(), a.changed
		a.mu.Unlock()
		known := !slices.ContainsFunc(states, func(s State) bool { return !s.known() })
		if !known && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-changed:
			}
			continue
		}
		return slices.DeleteFunc(states, func(s State) bool { return s.Owned })
	}
}

// Close ends the announcer. With keep the data plane continues to answer and the groups stay joined; without
// keep, every address is withdrawn first.
func (a *Announcer) Close(keep bool) error {
	var err error
	if !keep {
		for _, s := range a.States() {
			err = errors.Join(err, a.Withdraw(s.Address, s.Interface))
		}
	}
	a.mu.Lock() // so that no Announce starts anything after the wait below began
	a.stop()
	a.mu.Unlock()
	a.running.Wait()
	a.sender.Close()
	a.handle.Close()
	namespace.Close(a.ns)
	return err
}

// run takes one address through the steps drawn above until ctx ends.
func (a *Announcer) run(ctx context.Context, j *job) {
	for {
		pause := a.round(ctx, j)
		for again := false; !again; {
			owned := a.Owned(j.addr, j.iface)
			if owned && pause == 0 {
				a.mu.Lock()
				pause = aboutAs(a.paced(a.opts.CheckInterval))
				a.mu.Unlock()
			}
			select {
			case <-ctx.Done():
				return
			case <-j.again:
				again = true
			case <-time.After(pause):
				if again = !owned || j.failing(a); !again {
					a.check(j)
					pause = 0
				}
			}
		}
	}
}

// untilRetry returns the time to wait before an address in use is probed again.
func (a *Announcer) untilRetry() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return aboutAs(a.paced(a.opts.RetryInterval))
}

// aboutAs returns a time, plus or minus a quarter.
func aboutAs(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.75 + rand.Float64()/2))
}

// failing reports whether the last round has failed.
func (j *job) failing(a *Announcer) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return j.state.Err != ""
}

// round joins, probes and announces once. It returns the time to wait before the next round; 0: no further
// round until it is requested, and the address is ours.
func (a *Announcer) round(ctx context.Context, j *job) time.Duration {
	was := a.Owned(j.addr, j.iface)
	if a.yields(j) {
		return a.untilRetry()
	}
	if pause := a.standsBack(j); pause > 0 {
		return pause
	}
	owner, err := a.claim(ctx, j)
	if ctx.Err() != nil {
		return 0
	}
	switch {
	case err != nil:
		a.failed(j, err)
		return a.opts.FailureInterval
	case owner != nil && was: // perhaps two hosts had it while they were apart, and both have left it now
		a.inUse(j, owner, "")
		a.bid(j, owner)
		return a.opts.RetryInterval / 6
	case owner != nil:
		a.inUse(j, owner, "")
		if a.bid(j, owner) { // a standby leaves the address at once
			return a.opts.RetryInterval / 6
		}
		return a.untilRetry()
	}
	a.listen(ctx, j.location)
	if err := a.opts.Own(j.addr, j.iface); err != nil {
		a.failed(j, fmt.Errorf("make the data plane answer: %w", err))
		return a.opts.FailureInterval
	}
	a.set(j, func(s *State) { s.Owned, s.Owner, s.Err = true, nil, "" })
	a.mu.Lock()
	j.bid = false
	a.mu.Unlock()
	a.sayTakenOver(j)
	a.opts.Conditions.Clear(condition.AddressInUse, j.subjectIn(a))
	a.opts.Conditions.Clear(condition.AnnounceFailed, j.subjectIn(a))
	if err := a.tell(ctx, j); err != nil && ctx.Err() == nil {
		a.failed(j, err)
		return a.opts.FailureInterval
	}
	return 0
}

// claim joins the address's group and asks whether another host has the address. It returns the hardware
// address of that host, or nil.
func (a *Announcer) claim(ctx context.Context, j *job) (net.HardwareAddr, error) {
	select {
	case a.probing <- struct{}{}:
		defer func() { <-a.probing }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	link, err := a.link(j.iface)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	j.name = link.Attrs().Name
	a.mu.Unlock()
	if err := a.join(j, link); err != nil {
		return nil, err
	}
	return a.probe(ctx, link, j)
}

// link reads the interface and refuses one that cannot carry an announcement.
func (a *Announcer) link(index int) (netlink.Link, error) {
	link, err := a.handle.LinkByIndex(index)
	if err != nil {
		return nil, fmt.Errorf("read interface %d: %w", index, err)
	}
	attrs := link.Attrs()
	if attrs.EncapType != "ether" {
		return nil, fmt.Errorf("%s is not an Ethernet interface (%s): it has neither ARP nor neighbour discovery", attrs.Name, attrs.EncapType)
	}
	if attrs.Flags&net.FlagUp == 0 {
		return nil, fmt.Errorf("interface %s is down", attrs.Name)
	}
	return link, nil
}

func (a *Announcer) failed(j *job, err error) {
	a.set(j, func(s *State) { s.Err = err.Error() })
	a.opts.Conditions.Raise(condition.Condition{
		Code: condition.AnnounceFailed, Subject: j.subjectIn(a),
		Text: fmt.Sprintf("cannot announce %s: %v; trying again every %s", j.subjectIn(a), err, a.opts.FailureInterval),
	})
}

// inUse leaves the address to its owner. how describes the conflict; empty: the owner answered a probe.
func (a *Announcer) inUse(j *job, owner net.HardwareAddr, how string) {
	if how == "" {
		how = fmt.Sprintf("is in use: %s answered when asked who has it", owner)
	}
	if err := a.opts.Disown(j.addr, j.iface); err != nil {
		a.opts.Log.Error("cannot make the data plane stop answering for an address that another host uses",
			"address", j.addr, "owner", owner, "error", err)
	}
	a.set(j, func(s *State) { s.Owned, s.Owner, s.Err = false, owner, "" })
	a.opts.Conditions.Clear(condition.AnnounceFailed, j.subjectIn(a))
	a.opts.Conditions.Clear(condition.AddressContested, j.subjectIn(a))
	a.mu.Lock()
	defer a.mu.Unlock()
	a.opts.Conditions.Clear(condition.AddressTakenOver, j.subject())
	if j.standby { // the other host is the one that is to have the address
		return
	}
	a.opts.Conditions.Raise(condition.Condition{
		Code: condition.AddressInUse, Subject: j.subject(),
		Text: fmt.Sprintf("%s %s, so it is not announced; asking again about every %s", j.subject(), how, a.opts.RetryInterval),
	})
}

func (a *Announcer) set(j *job, change func(*State)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	old := j.state
	change(&j.state)
	if old.Owned != j.state.Owned || old.Err != j.state.Err || !bytes.Equal(old.Owner, j.state.Owner) {
		close(a.changed)
		a.changed = make(chan struct{})
	}
}

func (a *Announcer) tellWaiters() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.changed)
	a.changed = make(chan struct{})
}

// subject names the address in conditions: "192.0.2.10 on eth0". Announcer.mu is held.
func (j *job) subject() string { return fmt.Sprintf("%s on %s", j.addr, j.name) }

func (j *job) subjectIn(a *Announcer) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return j.subject()
}
