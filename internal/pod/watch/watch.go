// Package watch decides which pods may take the shortcut, and keeps deciding: a pod is left alone if the
// host would do something with its packets that the shortcut skips.
//
//	nf_tables tells of changes ─┐
//	links, qdiscs, routes      ─┼─► judge every pod ─► shortcut.Put
//	twice a second             ─┘   (programs at tc, iptables-legacy and IPVS announce no change)
//
// A connection that leaves the shortcut has bytes that conntrack has not seen. So before its first packet takes
// the shortcut, conntrack is told to be liberal with it, as it is with all under nf_conntrack_tcp_be_liberal:
// otherwise it would find its later packets outside of their windows.
package watch

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/pod/rules"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// period is the interval at which the watch looks for changes that are not announced.
const period = 500 * time.Millisecond

const (
	// trust is the time for which a judgement holds. Without a newer one no packet takes the shortcut after that.
	trust = time.Second
	// preparePeriod is the interval at which the watch looks for connections that ask for the shortcut.
	preparePeriod = 20 * time.Millisecond
)

// Pod is a workload in a network namespace of its own.
type Pod struct {
	Interface string // the host's end of its veth
	Addresses []netip.Addr
}

// Far is a network of pods of another machine, or a part of one with another route.
type Far struct {
	Network   netip.Prefix // the zero value: the uplink has none, and Why has the reason
	Interface string       // the uplink, towards the machine; empty: the way uses none
	NextHop   netip.Addr   // of the network's family, a neighbour at the interface
	MTU       int          // of the route, bytes; 0: the interface's
	// Left and Why are the reason why the network is left alone, before any other judgement; Taken: it is not.
	Left shortcut.Left
	Why  string
}

// FarStatus is the state of a network.
type FarStatus struct {
	Network   netip.Prefix `json:"network"`
	Interface string       `json:"interface,omitempty"`
	NextHop   netip.Addr   `json:"next_hop"`
	Attach    kernel.Mode  `json:"attach"` // of the program at the interface; empty: it is not there
	State     string       `json:"state"`  // as of a pod
	Why       string       `json:"why,omitempty"`
}

// Status is the state of the watch.
type Status struct {
	Mode   shortcut.Mode   `json:"mode"`
	Pods   []PodStatus     `json:"pods"`
	Far    []FarStatus     `json:"far,omitempty"`
	Steers []SteerStatus   `json:"steers,omitempty"`
	Counts shortcut.Counts `json:"counts"` // packets by outcome; "taken" took the shortcut
	// From has the counts of packets that came from the interfaces that are attached now, since then.
	From map[string]shortcut.Counts `json:"-"`
}

// NoRoute is the state of a pod without an address.
const NoRoute = "no_route"

// PodStatus is the state of one address of a pod.
type PodStatus struct {
	Address   netip.Addr  `json:"address"` // the zero value: the pod has none
	Interface string      `json:"interface"`
	Attach    kernel.Mode `json:"attach"`        // empty: it is not attached
	State     string      `json:"state"`         // "taken", or the reason why the pod is left alone
	Why       string      `json:"why,omitempty"` // the rule, qdisc or program
}

// Options select the pods that are watched.
type Options struct {
	Mode shortcut.Mode
	// Find returns the pods. It is called each time that interfaces or routes may have changed, by In.
	Find func() ([]Pod, error)
	// FindFar returns the networks of other machines' pods, at the same times; nil: none.
	FindFar func() ([]Far, error)
	// Steers are followed from Open on; SetSteers changes them. If there are none here, there can be none later.
	Steers []Steer
	// In runs a function on a thread in the host's network namespace.
	In func(func() error) error
}

// Watch judges pods until it is closed. Methods may be called at any time from several goroutines.
type Watch struct {
	in      func(func() error) error
	mode    shortcut.Mode
	sockets []*nl.NetlinkSocket
	wake    chan struct{} // holds an element when something may have changed
	end     chan struct{}
	ended   sync.WaitGroup

	mu        sync.Mutex
	findAll   func() ([]Pod, error)
	pods      []Pod
	findFar   func() ([]Far, error)
	fars      []Far
	farStates map[netip.Prefix]farState
	steers    steers
	moved     bool                   // interfaces or routes may have changed
	found     time.Time              // when pods were found last
	bare      map[string]state       // of the pods without an address, by interface
	behind    map[int][]netlink.Link // during a judgement: the links in each pod's namespace
	refused   map[netip.Addr]string  // reason why there is no room for an address
	short     *shortcut.Shortcut
	rules     *rules.Set
	unread    error // error of reading the rules
	stale     bool  // the rules may have changed
	suspended bool
	states    map[netip.Addr]state
	deaf      error // error after which changes are not announced any more
	failed    error // error of the last judgement
	untold    error // last error of telling conntrack
}

// state is a verdict on an address.
type state struct {
	left    shortcut.Left
	why     string
	ifindex int
	mtu     int
}

// Open attaches the program to the pods' interfaces and judges them. If it fails, it leaves nothing behind.
func Open(opts Options) (*Watch, error) {
	w := &Watch{in: opts.In, mode: opts.Mode, findAll: opts.Find, findFar: opts.FindFar, steers: steers{wanted: opts.Steers}, farStates: map[netip.Prefix]farState{}, wake: make(chan struct{}, 1), end: make(chan struct{}), stale: true, moved: true, states: map[netip.Addr]state{}}
	err := w.in(func() (err error) {
		if w.short, err = shortcut.Open(opts.Mode, len(opts.Steers) > 0); err != nil {
			return err
		}
		// This comes before the rules are first read, so that changes meanwhile are announced.
		for protocol, groups := range map[int][]uint{
			unix.NETLINK_NETFILTER: {unix.NFNLGRP_NFTABLES},
			unix.NETLINK_ROUTE: {unix.RTNLGRP_LINK, unix.RTNLGRP_TC, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
				unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE},
		} {
			s, err := nl.Subscribe(protocol, groups...)
			if err != nil {
				return fmt.Errorf("listen to changes of rules and interfaces: %w", err)
			}
			w.sockets = append(w.sockets, s)
			w.ended.Go(func() { w.listen(s, protocol == unix.NETLINK_NETFILTER) })
		}
		return nil
	})
	if err == nil {
		err = w.Judge()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the pod shortcut: %w", err), w.Close())
	}
	w.ended.Go(w.run)
	w.ended.Go(w.prepare)
	return w, nil
}

// listen wakes the watch at each change.
func (w *Watch) listen(s *nl.NetlinkSocket, ofRules bool) {
	for {
		_, _, err := s.Receive()
		select {
		case <-w.end:
			return
		default:
		}
		if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) { // too many changes at once, or none
			w.mu.Lock()
			w.deaf = fmt.Errorf("listen to changes: %w", err)
			w.mu.Unlock()
			return
		}
		w.mu.Lock()
		if ofRules {
			w.stale = true
		} else {
			w.moved = true
		}
		w.mu.Unlock()
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

func (w *Watch) run() {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-w.end:
			return
		case <-w.wake:
		case <-tick.C:
		}
		err := w.Judge()
		w.mu.Lock()
		w.failed = err
		w.mu.Unlock()
	}
}

// Judge judges all pods now. After an error, which may leave some states as they were, it is tried again.
func (w *Watch) Judge() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.suspended {
		return nil
	}
	return w.in(w.judge)
}

func (w *Watch) judge() error {
	if err := w.findPods(); err != nil {
		return err
	}
	w.readRules()
	w.bare, w.behind = map[string]state{}, map[int][]netlink.Link{}
	next := map[netip.Addr]state{}
	links := map[string]rules.Link{}
	for _, p := range w.pods {
		s := w.judgeInterface(p)
		links[p.Interface] = rules.Link{Name: p.Interface, Index: s.ifindex}
		for _, a := range p.Addresses {
			next[a.Unmap()] = s
		}
		if len(p.Addresses) == 0 {
			w.bare[p.Interface] = s
		}
	}
	for _, p := range w.pods {
		for _, a := range p.Addresses {
			a = a.Unmap()
			if s := next[a]; s.left == shortcut.Taken {
				s.left, s.why = w.judgeRules(a, p.Interface, links)
				next[a] = s
			}
		}
	}
	if err := errors.Join(w.applyFar(w.judgeFar(links)), w.apply(next), w.applySteers(links)); err != nil {
		return err
	}
	return w.short.Watched(trust)
}

// findPods finds the pods. If routes change all the time, it does so only a few times in a second, because it
// lists all routes.
func (w *Watch) findPods() error {
	if !w.moved && w.deaf == nil || time.Since(w.found) < period/4 {
		return nil
	}
	w.moved = false // set before it looks, so that changes meanwhile are noticed
	pods, err := w.findAll()
	if err != nil {
		w.moved = true
		return fmt.Errorf("look for pods: %w", err)
	}
	var fars []Far
	if w.findFar != nil {
		if fars, err = w.findFar(); err != nil {
			w.moved = true
			return fmt.Errorf("look for pods of other machines: %w", err)
		}
	}
	w.pods, w.fars, w.found = pods, fars, time.Now()
	return nil
}

func (w *Watch) readRules() {
	if w.stale || w.unread != nil || w.deaf != nil {
		w.stale = false
		w.rules, w.unread = rules.Read()
	} else {
		w.unread = w.rules.Refresh()
	}
}

// apply tells the program the changes.
func (w *Watch) apply(next map[netip.Addr]state) error {
	var errs []error
	w.refused = map[netip.Addr]string{}
	for a, s := range next {
		if before, known := w.states[a]; known && before == s {
			continue
		}
		if s.ifindex != 0 {
			if err := w.short.Attach(s.ifindex); err != nil {
				errs = append(errs, err)
				s.left, s.why = shortcut.TC, err.Error()
			}
		}
		err := w.short.Put(shortcut.Pod{Address: a, Ifindex: s.ifindex, MTU: s.mtu, Left: s.left})
		if _, known := w.states[a]; err != nil && !known { // the address is left alone, and all others may go on
			w.refused[a] = err.Error()
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		w.states[a] = s
	}
	for a := range w.states {
		if _, is := next[a]; !is {
			errs = append(errs, w.short.Remove(a))
		}
	}
	return errors.Join(append(errs, w.forget(next))...)
}

// forget removes addresses that are no pod any more, and detaches the program from interfaces without pods.
func (w *Watch) forget(next map[netip.Addr]state) error {
	used := map[int]bool{}
	for _, s := range next {
		used[s.ifindex] = true
	}
	for _, s := range w.farStates {
		used[s.ifindex] = true
	}
	for _, s := range append(slices.Clone(w.steers.all), w.steers.ending...) {
		used[s.ifindex] = true
	}
	for a := range w.states {
		if _, is := next[a]; !is {
			delete(w.states, a)
		}
	}
	return w.short.Detach(slices.DeleteFunc(w.short.Attached(), func(ifindex int) bool { return used[ifindex] })...)
}

// judgeInterface judges the host's end of a pod's veth.
func (w *Watch) judgeInterface(p Pod) state {
	link, err := netlink.LinkByName(p.Interface)
	if err != nil {
		return state{left: shortcut.Down, why: err.Error()}
	}
	attrs := link.Attrs()
	s := state{ifindex: attrs.Index, mtu: attrs.MTU}
	leave := func(left shortcut.Left, format string, args ...any) state {
		s.left, s.why = left, fmt.Sprintf(format, args...)
		return s
	}
	if !kernel.LeadsAway(link) {
		return leave(shortcut.NotVeth, "%s is of kind %s and does not lead into another network namespace", p.Interface, link.Type())
	}
	if attrs.MasterIndex != 0 {
		return leave(shortcut.Bridged, "%s is a port of interface %d", p.Interface, attrs.MasterIndex)
	}
	if attrs.OperState != netlink.OperUp {
		return leave(shortcut.Down, "%s is %s", p.Interface, attrs.OperState)
	}
	qdiscs, err := netlink.QdiscList(link)
	if err != nil {
		return leave(shortcut.Qdisc, "list the qdiscs of %s: %v", p.Interface, err)
	}
	for _, q := range qdiscs {
		if kind := q.Type(); kind != "noqueue" && kind != "clsact" && kind != "ingress" { // the latter two only hold filters
			return leave(shortcut.Qdisc, "%s has the qdisc %s", p.Interface, kind)
		}
	}
	if s = w.judgeTC(s, p.Interface); s.left != shortcut.Taken {
		return s
	}
	return w.judgePeer(s, attrs)
}

// judgeTC leaves an interface alone that has programs of others at tc.
func (w *Watch) judgeTC(s state, name string) state {
	switch foreign, err := w.short.ForeignTC(s.ifindex); {
	case err != nil:
		s.left, s.why = shortcut.TC, err.Error()
	case len(foreign) > 0:
		s.left, s.why = shortcut.TC, fmt.Sprintf("%s has %s", name, foreign[0])
	}
	return s
}

// judgeRules looks for a rule that may act on packets that an address sends to other pods, or gets from them. It
// asks about all others at once and, if that finds a rule, about each: rules for one pair of interface and
// address look like rules for any.
func (w *Watch) judgeRules(a netip.Addr, iface string, links map[string]rules.Link) (shortcut.Left, string) {
	if w.unread != nil {
		return shortcut.RulesUnread, w.unread.Error()
	}
	own := end{[]netip.Addr{a}, []rules.Link{links[iface]}}
	var all end
	var each []end
	for _, p := range w.pods {
		if p.Interface == iface {
			continue
		}
		one := end{links: []rules.Link{links[p.Interface]}}
		for _, other := range p.Addresses {
			if other = other.Unmap(); other.Is4() == a.Is4() {
				one.addresses = append(one.addresses, other)
			}
		}
		if len(one.addresses) > 0 {
			each = append(each, one)
			all = end{append(all.addresses, one.addresses...), append(all.links, one.links...)}
		}
	}
	// Without other pods there is no shortcut to take.
	if len(each) == 0 || w.find(own, all) == nil {
		return shortcut.Taken, ""
	}
	for _, other := range each {
		if h := w.find(own, other); h != nil {
			return shortcut.Rule, h.String()
		}
	}
	return shortcut.Taken, ""
}

// end is one side of connections.
type end struct {
	addresses []netip.Addr
	links     []rules.Link
}

// find looks for a rule in both directions.
func (w *Watch) find(a, b end) *rules.Hazard {
	established := w.mode == shortcut.Checked
	h := w.rules.Find(rules.Packets{From: a.addresses, To: b.addresses, In: a.links, Out: b.links, Established: established})
	if h == nil {
		h = w.rules.Find(rules.Packets{From: b.addresses, To: a.addresses, In: b.links, Out: a.links, Established: established})
	}
	return h
}

// Set changes the watched pods and networks; see Options.
func (w *Watch) Set(find func() ([]Pod, error), findFar func() ([]Far, error)) error {
	w.mu.Lock()
	w.findAll, w.findFar, w.moved, w.found = find, findFar, true, time.Time{}
	w.mu.Unlock()
	return w.Judge()
}

// SetSteers changes the steers; see Options. Connections keep their ways as long as these are good.
func (w *Watch) SetSteers(all []Steer) error {
	w.mu.Lock()
	w.steers.wanted = slices.Clone(all)
	w.mu.Unlock()
	return w.Judge()
}

// Suspend detaches the program from all interfaces. Connections go on through the stack.
func (w *Watch) Suspend() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.suspended = true
	return w.in(w.letGo)
}

// letGo detaches the program.
func (w *Watch) letGo() error {
	var errs []error
	for a := range w.states {
		errs = append(errs, w.short.Remove(a))
	}
	clear(w.states)
	for n := range w.farStates {
		errs = append(errs, w.short.RemoveFar(n))
	}
	clear(w.farStates)
	errs = append(errs, w.letSteersGo())
	return errors.Join(append(errs, w.short.Detach(w.short.Attached()...))...)
}

// Resume attaches the program again.
func (w *Watch) Resume() error {
	w.mu.Lock()
	w.suspended, w.stale = false, true
	w.mu.Unlock()
	return w.Judge()
}

// Status returns the present status. Its error says why the last judgement failed, or conntrack could not be told.
func (w *Watch) Status() (Status, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := Status{Mode: w.mode, Pods: []PodStatus{}, From: map[string]shortcut.Counts{}}
	counts, from, err := w.short.Counts()
	s.Counts = counts
	for _, p := range w.pods {
		for _, a := range p.Addresses {
			st, known := w.states[a.Unmap()]
			if !known {
				st = state{left: shortcut.Unjudged, why: w.refused[a.Unmap()]}
			}
			s.Pods = append(s.Pods, PodStatus{a, p.Interface, w.short.Mode(st.ifindex), st.left.String(), st.why})
			s.From[p.Interface] = from[st.ifindex]
		}
		if st, is := w.bare[p.Interface]; is {
			s.Pods = append(s.Pods, bareStatus(p.Interface, st))
		}
	}
	for _, f := range w.fars {
		st, known := w.farStates[f.Network]
		switch {
		case f.Left != shortcut.Taken:
			st.left, st.why = f.Left, f.Why
		case !known:
			st.left = shortcut.Unjudged
		}
		s.Far = append(s.Far, FarStatus{f.Network, f.Interface, f.NextHop, w.short.Mode(st.ifindex), st.left.String(), st.why})
		if st.ifindex != 0 {
			s.From[f.Interface] = from[st.ifindex]
		}
	}
	var ofSteers error
	s.Steers, ofSteers = w.steersStatus()
	return s, errors.Join(err, ofSteers, w.deaf, w.failed, w.untold)
}

// bareStatus returns the status of a pod without an address.
func bareStatus(iface string, s state) PodStatus {
	if s.left == shortcut.Taken {
		return PodStatus{Interface: iface, State: NoRoute, Why: fmt.Sprintf("no route of this host leads to a single address by %s", iface)}
	}
	return PodStatus{Interface: iface, State: s.left.String(), Why: s.why}
}

// Close detaches the program. Connections go on through the stack.
func (w *Watch) Close() error {
	close(w.end)
	for _, s := range w.sockets {
		s.Close()
	}
	w.ended.Wait()
	if w.short == nil {
		return nil
	}
	err := w.in(func() error { return errors.Join(w.letGo(), w.short.Close()) })
	if err != nil {
		return fmt.Errorf("close the pod shortcut: %w", err)
	}
	return nil
}
