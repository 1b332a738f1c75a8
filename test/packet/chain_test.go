package packet_test

import (
	"bytes"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/test/stranger"
)

// chain opens the chain of an interface, as the author of a program for it does.
func (w *world) chain(arm string) *ebpf.Map {
	w.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(w.options.PinRoot, "shunt", w.options.Instance, "chain-"+arm), nil)
	must(w, err)
	w.Cleanup(func() { _ = m.Close() })
	return m
}

// through sends a frame into a program as the kernel does if the program is on the interface.
func (r *runner) through(p *ebpf.Program, arm string, frame []byte) (out result) {
	r.do(func() {
		options := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256),
			Context: struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }{ // struct xdp_md
				DataEnd: uint32(len(frame)), Ingress: uint32(r.w.ifindex[arm])}}
		out.verdict, out.err = p.Run(&options)
		out.frame = options.DataOut
	})
	return out
}

// TestChainBefore: a program before shunt's decides about its own packets, and the packets
// that it hands on get the same result as without it.
func TestChainBefore(t *testing.T) {
	t.Parallel()
	for _, mode := range []model.Attach{model.AttachNative, model.AttachGeneric} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, withMode(mode))
			filter := stranger.Filter(t, "filter", w.chain(armA))
			discard := packet.UDP4("198.51.100.7:40000", "192.0.2.10:9", packet.MACs(router, ownA), packet.Data("data"))
			before := w.reasons()
			if r := w.cpu.through(filter, armA, packet.Must(discard)); r.err != nil || r.verdict != kernel.XDPDrop {
				t.Errorf("to the port that is filtered: verdict %d, %v; want drop", r.verdict, r.err)
			}
			if moved := w.moved(before); len(moved) != 0 {
				t.Errorf("shunt counted %v for a packet that it never saw", moved)
			}
			for _, v := range ways {
				for _, k := range kinds {
					in := k.fromClient(41000, v.port, "S", packet.Data("data"))
					w.send(armA, in) // makes the flow, so that there is one right result
					alone := w.cpu.run(armA, packet.Must(in))
					chained := w.cpu.through(filter, armA, packet.Must(in))
					must(t, alone.err)
					must(t, chained.err)
					if alone.verdict != chained.verdict || !bytes.Equal(alone.frame, chained.frame) {
						t.Errorf("%s, %s: verdict %d and\n%x\nalone, %d and\n%x\nbehind a filter", v.name, k, alone.verdict, alone.frame, chained.verdict, chained.frame)
					}
					if alone.verdict != kernel.XDPTx && alone.verdict != kernel.XDPRedirect {
						t.Errorf("%s, %s: verdict %d, so nothing was forwarded", v.name, k, alone.verdict)
					}
				}
			}
		})
	}
}

// TestChainAfter: a program after shunt's sees only the packets that shunt passes, unchanged;
// its verdict counts.
func TestChainAfter(t *testing.T) {
	t.Parallel()
	for _, mode := range []model.Attach{model.AttachNative, model.AttachGeneric} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, withMode(mode))
			chain := w.chain(armA)
			count, packets := stranger.Count(t, "count")
			syn := kinds[0].fromClient(40000, portNAT, "S")
			other := syn.With(between(sourceOf(syn), netip.AddrPortFrom(addr("192.0.2.77"), portNAT)))
			run := func(p packet.Packet, verdict uint32, reason string, seen uint64) {
				t.Helper()
				before, was := w.reasons(), packets()
				r := w.cpu.run(armA, packet.Must(p))
				must(t, r.err)
				if r.verdict != verdict || verdict == kernel.XDPPass && !bytes.Equal(r.frame, packet.Must(p)) {
					t.Errorf("%s: verdict %d and %x, want %d", p, r.verdict, r.frame, verdict)
				}
				if n := packets() - was; n != seen {
					t.Errorf("%s: the program after saw %d packets, want %d", p, n, seen)
				}
				if moved := w.moved(before); reason != "" && moved[reason] != 1 {
					t.Errorf("%s: counted %v, want %s", p, moved, reason)
				}
			}
			run(other, kernel.XDPPass, "not_ours", 0)
			must(t, chain.Put(uint32(2), count)) // CHAIN_AFTER
			run(other, kernel.XDPPass, "not_ours", 1)
			run(kinds[0].fromClient(40000, portNothing, "S"), kernel.XDPPass, "no_service", 1)
			run(kinds[0].fromClient(40000, portNobody, "S"), kernel.XDPDrop, "no_backend", 0)
			w.send(armA, syn)
			if n := packets(); n != 2 {
				t.Errorf("the program after saw %d packets, want the 2 that were passed", n)
			}
			must(t, chain.Put(uint32(2), stranger.Drop(t, "drop")))
			run(other, kernel.XDPDrop, "not_ours", 0)
			w.send(armA, syn)
			must(t, chain.Delete(uint32(2)))
			run(other, kernel.XDPPass, "not_ours", 0)
		})
	}
}
