package neighbour

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The kernel has one table of neighbours per family, for all network namespaces together. From gc_thresh3
// entries on (1,024 by default) it accepts no new one (neigh_alloc of net/core/neighbour.c); before that it
// removes neighbours that do not answer.

// room describes one table: its number of entries, its limit, and the number that it always keeps (gc_thresh1).
type room struct{ entries, most, kept int }

// crowded reports whether the table is nearly full, or would be with all needed entries.
func (r room) crowded(needed int) bool { return 10*max(r.entries, needed) >= 9*r.most }

// roomy reports whether the table is so far from full that it will not be full again at once.
func (r room) roomy(needed int) bool { return 4*max(r.entries, needed) < 3*r.most }

// Attributes of linux/neighbour.h that the library leaves out, all u32 but the configuration,
// a struct ndt_config whose entries are its second word.
const (
	ndtaThresh1 = 2
	ndtaThresh3 = 4
	ndtaConfig  = 5
)

// family is 4 or 6.
func family(a netip.Addr) int {
	if a.Is4() {
		return 4
	}
	return 6
}

// rooms reads the kernel's limits, by family. It may be called in any network namespace.
func (n *neighbours) rooms() (map[int]room, error) {
	req := n.request(unix.RTM_GETNEIGHTBL, unix.NLM_F_DUMP)
	req.AddData(&nl.RtGenMsg{})
	msgs, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGHTBL)
	if err != nil {
		return nil, fmt.Errorf("read how much room the neighbour tables have: %w", err)
	}
	rooms := map[int]room{}
	for _, m := range msgs {
		if name, r, ok := parseRoom(m); ok {
			rooms[name] = r
		}
	}
	return rooms, nil
}

// parseRoom reads the payload of RTM_NEWNEIGHTBL. False: it is about one interface, or another
// kind of neighbours.
func parseRoom(b []byte) (name int, r room, ok bool) {
	const header = 4 // struct ndtmsg of linux/neighbour.h, the family first
	if len(b) < header {
		return 0, r, false
	}
	switch b[0] {
	case unix.AF_INET:
		name = 4
	case unix.AF_INET6:
		name = 6
	default:
		return 0, r, false
	}
	attrs, err := nl.ParseRouteAttr(b[header:])
	if err != nil {
		return 0, r, false
	}
	for _, a := range attrs {
		switch {
		case a.Attr.Type == ndtaThresh1 && len(a.Value) >= 4:
			r.kept = int(binary.NativeEndian.Uint32(a.Value))
		case a.Attr.Type == ndtaThresh3 && len(a.Value) >= 4:
			r.most = int(binary.NativeEndian.Uint32(a.Value))
		case a.Attr.Type == ndtaConfig && len(a.Value) >= 8:
			r.entries = int(binary.NativeEndian.Uint32(a.Value[4:]))
		}
	}
	return name, r, r.most > 0
}

// lookAtRoom finds out whether a table is short of room, and reports that if it may be the reason for a missing
// next hop.
func (w *Watcher) lookAtRoom() {
	rooms, err := w.opts.rooms()
	if err != nil {
		w.opts.Log.Debug("cannot find out whether the neighbour tables have room", "error", err)
		return
	}
	needed := map[int]int{}
	for k := range w.users {
		needed[family(k.addr)]++
	}
	for f, r := range rooms {
		w.probing.collected[f] = r.entries >= r.kept
		before := w.crowded[f]
		remedy := ""
		if r.crowded(needed[f]) || w.refused[f] || before != "" && !r.roomy(needed[f]) {
			remedy = makeRoom(f, r.most, needed[f])
		}
		delete(w.refused, f)
		if remedy == before {
			continue
		}
		w.crowded[f] = remedy
		for _, h := range w.Hops() {
			h, wanted := w.Hop(h.Address) // still
			if wanted && h.unreachable() && h.NextHop.IsValid() && family(h.NextHop) == f {
				w.raise(h)
			}
		}
	}
}

// makeRoom returns the remedy for a table with room for most entries, of which needed are needed.
func makeRoom(family, most, needed int) string {
	// Twice the needed number, so that other programs have room too, and as a power of two, so that the number
	// stays the same while backends come and go.
	fits := 1 << bits.Len(uint(2*max(most, needed)-1))
	name := fmt.Sprintf("net.ipv%d.neigh.default.gc_thresh", family)
	usual, _ := condition.Lookup(condition.NeighbourUnresolved)
	return fmt.Sprintf("the kernel's table of IPv%d neighbours, one for all network namespaces, has room for %d (%s3) and is nearly full, or too small for all next hops: "+
		"`sysctl -w %[3]s2=%[4]d %[3]s3=%[5]d` on the host makes room, and the same settings in /etc/sysctl.d keep it after a reboot; if there is room already, %[6]s",
		family, most, name, fits/2, fits, usual.Remedy)
}
