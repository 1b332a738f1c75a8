package neighbour

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The kernel alone needs half a minute to notice that a next hop is gone: it believes an
// answer for base_reachable_time (30 s, give or take half), waits delay_first_probe_time
// (5 s) and asks three times. So next hops are asked here as well, in rounds. The kernel
// reads the answers: each refreshes the time at which the neighbour was last confirmed
// (nda_cacheinfo of linux/neighbour.h). A round ends by reading these times.
const (
	// roundLeast is the least time that a round takes.
	roundLeast = 400 * time.Millisecond
	// questionsPerSecond bounds the questions to all next hops together: with more than 400
	// next hops rounds take longer.
	questionsPerSecond = 1000
	// tick divides a round: each tick sends a part of its questions.
	tick = 100 * time.Millisecond
	// After silentAfter questions without an answer a next hop counts as gone, 1.2 to 1.6 s after the first of
	// them; after heardAfter rounds with an answer it is back.
	silentAfter = 3
	heardAfter  = 2
	// patience is the number of rounds between two questions while there is no answer: these questions go to
	// every host on the link.
	patience = 5
	// grain is twice the resolution of the kernel's times (USER_HZ).
	grain = 20 * time.Millisecond
)

// asking is the state of a next hop that is asked.
type asking struct {
	unanswered int // questions since the last answer
	heard      int // rounds with an answer since it fell silent
	rest       int // rounds until it is asked again
	silent     bool
}

// rounds is the state of the rounds.
type rounds struct {
	order  []key     // the present round's next hops
	next   int       // in order
	began  time.Time // of the present round
	judged time.Time // when answers were last read
}

// length is the time that a round takes.
func (r *rounds) length() time.Duration {
	return max(roundLeast, time.Duration(len(r.order))*time.Second/questionsPerSecond)
}

// ask sends a tick's part of a round's questions, and judges the answers when the round is over.
func (w *Watcher) ask(now time.Time) {
	r := &w.rounds
	if r.next == len(r.order) && now.Sub(r.began) >= r.length() {
		w.judge(now)
		r.order = slices.SortedFunc(maps.Keys(w.asking), func(a, b key) int {
			return cmp.Or(cmp.Compare(a.iface, b.iface), a.addr.Compare(b.addr))
		})
		r.next, r.began = 0, now
	}
	part := (len(r.order)*int(tick) + int(r.length()) - 1) / int(r.length())
	for ; part > 0 && r.next < len(r.order); part-- {
		w.askOne(r.order[r.next])
		r.next++
	}
}

// askOne asks a next hop, unless its entry is fixed or it may rest.
func (w *Watcher) askOne(k key) {
	a := w.asking[k]
	if a == nil || w.table[k].state&fixed != 0 {
		return
	}
	if a.rest--; a.rest > 0 {
		return
	}
	switch {
	case a.silent && a.heard == 0:
		a.rest = patience
	case !a.silent && w.restsGateway(k):
		a.rest = gatewayRest
	}
	link := w.link(k.iface)
	source := link.source(k.addr, w.sourceTowards(k))
	if !source.IsValid() || len(link.mac) != 6 {
		return
	}
	// It asks the last hardware address first; then every host, because the next hop may have another address.
	to := w.table[k].mac
	if a.unanswered > 0 || len(to) != 6 {
		to = nil
	}
	frame, err := wire.Question(link.mac, to, source, k.addr)
	if err == nil {
		err = w.sender.Send(k.iface, frame)
	}
	if err != nil { // it was not asked, so its silence says nothing
		w.opts.Log.Debug("cannot ask a next hop whether it is there", "next_hop", k.addr, "error", err)
		return
	}
	a.unanswered++
}

// judge reads the kernel's table and finds the next hops that have fallen silent, or are back.
func (w *Watcher) judge(now time.Time) {
	if len(w.asking) == 0 {
		return
	}
	table, err := w.neigh.list()
	if err != nil {
		w.opts.Log.Warn("cannot read the neighbour table; next hops that do not answer are detected later", "error", err)
		return
	}
	w.listed, w.listedAt = table, now
	w.lookAtRoom()
	since := now.Sub(w.rounds.judged) + grain
	w.rounds.judged = now
	for k, a := range w.asking {
		e, ok := table[k]
		if ok {
			w.table[k] = e
		} else {
			delete(w.table, k)
		}
		if e.state&netlink.NUD_FAILED != 0 {
			a.unanswered++ // so its silence is found even if it cannot be asked from here
			// The kernel would ask again after interval_probe_time_ms, 5 s, and takes no
			// IPv6 answer to another's question until then (ndisc_recv_na in net/ipv6/ndisc.c).
			if err := w.neigh.ask(k, !w.plain); err != nil {
				w.opts.Log.Debug("cannot make the kernel ask for a next hop", "next_hop", k.addr, "error", err)
			}
		}
		switch {
		case e.state&fixed != 0:
			*a = asking{}
		case e.state&usable != 0 && e.confirmed <= since:
			if a.unanswered = 0; a.silent {
				a.rest = 0
			}
			if a.heard++; a.heard >= heardAfter {
				*a = asking{rest: a.rest}
			}
		default:
			a.heard = 0
			a.silent = a.silent || a.unanswered >= silentAfter
			if a.unanswered > 0 && !a.silent {
				a.rest = 0
			}
		}
		w.tell(k)
	}
	w.tellGateways()
}

// tell resolves the addresses behind a next hop again if its state has changed, and reports the changes. Tens of
// thousands of addresses may be behind one router, and each round calls tell.
func (w *Watcher) tell(k key) {
	if users := w.users[k]; len(users) > 0 {
		f := w.find(k)
		if before, ok := w.told[k]; !ok || before != f {
			for _, a := range users {
				if h, ok := w.Hop(a); ok {
					w.report(w.resolve(h, h, f))
				}
			}
			w.told[k] = f
		}
	}
	if w.gateways[k] != nil {
		w.keepGateway(k)
	}
}

// silent reports whether a next hop has stopped answering.
func (w *Watcher) silent(k key) bool { return w.asking[k] != nil && w.asking[k].silent }

// sourceTowards returns an address of this host that is the source of packets through a next hop.
func (w *Watcher) sourceTowards(k key) netip.Addr {
	for _, a := range w.users[k] {
		if h, ok := w.Hop(a); ok && h.Source.IsValid() {
			return h.Source
		}
	}
	if g := w.gateways[k]; g != nil {
		return g.source
	}
	return netip.Addr{}
}

// ownLink is this host's end of a link.
type ownLink struct {
	name      string
	mac       net.HardwareAddr
	prefixes  []netip.Prefix // with the host's own addresses
	linkLocal netip.Addr     // of IPv6, once it is no longer being checked
	err       error          // why it has no neighbours
}

// link reads an interface, once for each review.
func (w *Watcher) link(index int) ownLink {
	if l, known := w.links[index]; known {
		return l
	}
	l := w.readLink(index)
	w.links[index] = l
	return l
}

func (w *Watcher) readLink(index int) (l ownLink) {
	link, err := w.handle.LinkByIndex(index)
	if err != nil {
		l.name = fmt.Sprint("interface ", index)
		l.err = fmt.Errorf("interface %d, which cannot be read: %s", index, errnoText(err))
		return l
	}
	l.name = link.Attrs().Name
	if link.Attrs().EncapType != "ether" {
		l.err = fmt.Errorf("interface %s, which is not Ethernet (%s) and so has no neighbours", link.Attrs().Name, link.Attrs().EncapType)
		return l
	}
	l.mac = link.Attrs().HardwareAddr
	list, err := w.handle.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return l
	}
	for _, own := range list {
		ones, _ := own.Mask.Size()
		addr, ok := netip.AddrFromSlice(own.IP)
		if !ok || own.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 {
			continue
		}
		addr = addr.Unmap()
		if addr.IsLinkLocalUnicast() && addr.Is6() {
			l.linkLocal = addr
		}
		l.prefixes = append(l.prefixes, netip.PrefixFrom(addr, ones))
	}
	return l
}

// source returns the address to ask from, as the kernel would choose it: for IPv4 an address of the target's
// subnet, for IPv6 the link-local address; or else the source of packets, if it has the same family.
func (l ownLink) source(target, otherwise netip.Addr) netip.Addr {
	if target.Is6() && l.linkLocal.IsValid() {
		return l.linkLocal
	}
	for _, p := range l.prefixes {
		if p.Contains(target) {
			return p.Addr()
		}
	}
	if otherwise.Is4() == target.Is4() {
		return otherwise
	}
	return netip.Addr{}
}
