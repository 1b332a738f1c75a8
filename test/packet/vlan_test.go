package packet_test

import (
	"bytes"
	"fmt"
	"net"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/test/space"
	"github.com/shunt-lb/shunt/test/stranger"
)

// With -hook vlan the arms are VLANs: their frames come in with tags, and leave with them, at
// interfaces that have nothing else. The arms themselves stand for the kernel's VLAN devices, which
// do not exist here: only their names, addresses and numbers count.
var (
	trunkMAC = mac("02:00:00:00:0f:01")
	trunks   = map[string]store.VLAN{
		armA: {Parent: "trunk-a", Tags: []store.Tag{{Protocol: unix.ETH_P_8021Q, ID: 7}}},
		armC: {Parent: "trunk-c", Tags: []store.Tag{{Protocol: unix.ETH_P_8021AD, ID: 100}, {Protocol: unix.ETH_P_8021Q, ID: 8}}},
	}
)

// addTrunks makes the parent interfaces of the arms' VLANs, and attaches to them.
func (w *world) addTrunks(vlans map[string]store.VLAN) {
	w.Helper()
	w.trunks = vlans
	for _, arm := range []string{armA, armC} {
		trunk := vlans[arm].Parent
		w.ifindex[trunk] = space.AddArm(w, trunk, trunkMAC, 0).Attrs().Index
		_, err := w.d.Attach(trunk, model.AttachNative)
		must(w, err)
	}
}

const macs, tagSize = 12, 4 // bytes in front of the tags, and of one tag

// tagsOf are a VLAN's tags on the wire, with a priority.
func tagsOf(v store.VLAN, priority uint8) []byte {
	frame := packet.Must(packet.UDP4("198.51.100.7:40000", "192.0.2.77:9", packet.MACs(router, trunkMAC), func(p *packet.Packet) {
		for _, tag := range v.Tags {
			p.VLANs = append(p.VLANs, packet.VLAN{Type: tag.Protocol, Priority: priority, ID: tag.ID})
		}
	}))
	return frame[macs : macs+tagSize*len(v.Tags)]
}

// runTagged sends a frame of an arm in through its trunk, and removes the tags of the frame that
// leaves. It fails if these are wrong.
func (w *world) runTagged(arm string, frame []byte) (out result) {
	in := tagsOf(w.trunks[arm], 5)
	out.verdict, out.frame, out.err = w.d.RunPacket(w.trunks[arm].Parent, slices.Concat(frame[:macs], in, frame[macs:]))
	if out.err != nil || out.verdict == kernel.XDPDrop {
		return out
	}
	wanted := [][]byte{in} // for a packet that passes or goes back
	if out.verdict == kernel.XDPRedirect {
		for _, v := range w.trunks {
			wanted = append(wanted, tagsOf(v, 0))
		}
	}
	for _, tags := range wanted {
		if rest, ok := bytes.CutPrefix(out.frame[macs:], tags); ok {
			out.frame = slices.Concat(out.frame[:macs], rest)
			return out
		}
	}
	out.err = fmt.Errorf("verdict %d for a frame of %s, which begins with % x afterwards: want tags %x behind the addresses", out.verdict, arm, out.frame[:macs+8], wanted)
	return out
}

// tagged is an edit that puts tags on, the outer first.
func tagged(tags []packet.VLAN) packet.Edit {
	return func(p *packet.Packet) { p.VLANs = tags }
}

// provider is a tag of IEEE 802.1ad.
func provider(id uint16) packet.VLAN { return packet.VLAN{Type: packet.TypeQinQ, ID: id} }

var vlanMAC = mac("02:00:00:00:0d:01")

// newTagged is a world where armA has two VLANs, and addresses of its own.
func newTagged(t *testing.T) *world {
	vlans := map[string]store.VLAN{
		"shunt-v": {Parent: armA, Tags: []store.Tag{{Protocol: unix.ETH_P_8021Q, ID: 30}}},
		"shunt-q": {Parent: armA, Tags: []store.Tag{{Protocol: unix.ETH_P_8021AD, ID: 30}, {Protocol: unix.ETH_P_8021Q, ID: 4094}}},
	}
	w := newWorld(t, withMode(model.AttachNative), withVLANs(vlans))
	for name := range vlans {
		w.cpu.do(func() {
			w.ifindex[name] = space.AddArm(w, name, vlanMAC, 0).Attrs().Index
			_, err := w.d.Attach(name, model.AttachNative)
			must(w, err)
		})
	}
	return w
}

func TestTags(t *testing.T) {
	t.Parallel()
	w := newTagged(t)
	for _, c := range []struct {
		name   string
		to     net.HardwareAddr
		tags   []packet.VLAN
		known  bool
		reason string // of unknown tags
	}{
		{"one tag", vlanMAC, []packet.VLAN{{ID: 30}}, true, ""},
		{"one tag, priority and drop eligible", vlanMAC, []packet.VLAN{{Priority: 7, DropEligible: true, ID: 30}}, true, ""},
		{"two tags", vlanMAC, []packet.VLAN{provider(30), {ID: 4094}}, true, ""},
		{"two tags, priorities", vlanMAC, []packet.VLAN{{Type: packet.TypeQinQ, Priority: 3, ID: 30}, {Priority: 7, ID: 4094}}, true, ""},
		{"priority alone", ownA, []packet.VLAN{{Priority: 7}}, true, ""},
		{"priority alone, of the other kind", ownA, []packet.VLAN{provider(0)}, true, ""},
		{"priority outside", vlanMAC, []packet.VLAN{{Priority: 1}, {ID: 30}}, true, ""},
		{"priority inside", vlanMAC, []packet.VLAN{{ID: 30}, {Priority: 1}}, true, ""},
		{"priority twice", ownA, []packet.VLAN{{}, {}}, true, ""},
		{"priority thrice", ownA, []packet.VLAN{{}, provider(0), {}}, false, "vlan"},
		{"priority without end", ownA, make([]packet.VLAN, 60), false, "vlan"},
		{"another VLAN", vlanMAC, []packet.VLAN{{ID: 31}}, false, "vlan"},
		{"of the other kind", vlanMAC, []packet.VLAN{provider(30)}, false, "vlan"},
		{"another VLAN inside", vlanMAC, []packet.VLAN{provider(30), {ID: 1}}, false, "vlan"},
		{"the same outside", vlanMAC, []packet.VLAN{{ID: 30}, {ID: 4094}}, false, "vlan"},
		{"three tags", vlanMAC, []packet.VLAN{provider(30), {ID: 4094}, {ID: 1}}, false, "vlan"},
		{"another station", ownA, []packet.VLAN{{ID: 30}}, false, "other_mac"},
		{"priority to another station", vlanMAC, []packet.VLAN{{}}, false, "other_mac"},
		{"another VLAN, another station", router, []packet.VLAN{{ID: 31}}, false, "vlan"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ask := packet.Must(packet.NewARPRequest(router, addr("192.0.2.7"), vip4, packet.MACs(router, c.to), tagged(c.tags)))
			before := w.reasons()
			r := w.cpu.run(armA, ask)
			must(t, r.err)
			counted := w.moved(before)
			if !c.known {
				if r.verdict != kernel.XDPPass || !bytes.Equal(r.frame, ask) || counted[c.reason] != 1 || len(counted) != 1 {
					t.Errorf("verdict %d, reasons %v, and the frame\n% x, want it to pass as\n% x", r.verdict, counted, r.frame, ask)
				}
				return
			}
			wire := ask[macs : macs+tagSize*len(c.tags)]
			if r.verdict != kernel.XDPRedirect || !bytes.HasPrefix(r.frame[macs:], wire) || counted["arp_answered"] != 1 {
				t.Errorf("verdict %d, reasons %v, and the frame\n% x, want an answer with tags % x", r.verdict, counted, r.frame, wire)
			}
		})
	}
}

// TestTagsBeforeOthers: a packet that passes meets the program after shunt's once, with its original
// tags.
func TestTagsBeforeOthers(t *testing.T) {
	t.Parallel()
	w := newTagged(t)
	chain := w.chain(armA)
	count, packets := stranger.Count(t, "count")
	drop := stranger.Drop(t, "drop")
	for _, c := range []struct {
		name   string
		to     net.HardwareAddr
		tags   []packet.VLAN
		reason string
	}{
		{"a VLAN", vlanMAC, []packet.VLAN{{ID: 30}}, "not_ours"},
		{"two tags", vlanMAC, []packet.VLAN{provider(30), {ID: 4094}}, "not_ours"},
		{"priority alone", ownA, []packet.VLAN{{Priority: 3}}, "not_ours"},
		{"another VLAN", ownA, []packet.VLAN{{ID: 31}}, "vlan"},
		{"no tag", ownA, nil, "not_ours"},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := packet.Must(packet.UDP4("198.51.100.7:40000", "192.0.2.77:9", packet.MACs(router, c.to), tagged(c.tags)))
			must(t, chain.Put(uint32(2), count)) // CHAIN_AFTER
			before, was := w.reasons(), packets()
			r := w.cpu.run(armA, in)
			must(t, r.err)
			if counted := w.moved(before); r.verdict != kernel.XDPPass || !bytes.Equal(r.frame, in) || counted[c.reason] != 1 {
				t.Errorf("verdict %d, reasons %v, and the frame\n% x, want it to pass for the reason %s as\n% x", r.verdict, counted, r.frame, c.reason, in)
			}
			if n := packets() - was; n != 1 {
				t.Errorf("the program after saw %d packets, want 1", n)
			}
			must(t, chain.Put(uint32(2), drop))
			if r = w.cpu.run(armA, in); r.err != nil || r.verdict != kernel.XDPDrop {
				t.Errorf("verdict %d, %v, with a program after that drops all", r.verdict, r.err)
			}
		})
	}
}
