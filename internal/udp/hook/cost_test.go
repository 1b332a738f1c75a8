package hook

import (
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/packet"
)

// TestOthersTakeTheirTime prints the nanoseconds of a packet that is for no lease, and of one that is for a lease: with
// a program that only passes, and with ours without a lease, with one, and with the largest number. It is the minimum
// of interleaved rounds; the machine decides how much that is worth. test/cost limits the instructions of a packet.
func TestOthersTakeTheirTime(t *testing.T) {
	inHost(t, func(t *testing.T) {
		own := macOf(t)
		pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, kernel.XDPPass), asm.Return()}})
		if err != nil {
			t.Error(err)
			return
		}
		defer pass.Close()
		datagram := func(from, to string) []byte {
			return packet.Must(packet.NewUDP(from, to, packet.Data("hello"), packet.MACs([]byte{2, 9, 9, 9, 9, 9}, own)))
		}
		const from4, from6 = "198.51.100.7:40000", "[2001:db8:c::7]:40000"
		packets := []struct {
			name  string
			frame []byte
		}{
			{"UDP, another port", datagram(from4, "192.0.2.10:53")},
			{"UDP, another address", datagram(from4, "192.0.2.99:5000")},
			{"UDP over IPv6, another port", datagram(from6, "[2001:db8::10]:53")},
			{"UDP over IPv6, another address", datagram(from6, "[2001:db8::99]:5000")},
			{"UDP, another address with the same hash", datagram(from4, beside("192.0.2.10:5000", "192.0.2.11:5000", true))},
			{"UDP, a lease without a socket", datagram(from4, "192.0.2.10:5000")},
			{"UDP over IPv6, a lease without a socket", datagram(from6, "[2001:db8::10]:5000")},
			{"TCP", packet.Must(packet.NewTCP(from4, "192.0.2.10:5000", "S", packet.MACs([]byte{2, 9, 9, 9, 9, 9}, own)))},
			{"ARP", packet.Must(packet.NewARPRequest([]byte{2, 9, 9, 9, 9, 9}, "192.0.2.1", "192.0.2.10"))},
		}
		rounds, repeat := 15, 20000
		if testing.Short() { // in an emulated machine, where times mean nothing
			rounds, repeat = 2, 500
		}
		leases := []int{-1, 0, 1, MaxLeases} // -1: the program that only passes
		least := map[string]float64{}
		for range rounds {
			for _, n := range leases {
				program, done := pass, func() error { return nil }
				if n >= 0 {
					h := withLeases(t, n)
					program, done = h.program, h.Close
				}
				for _, p := range packets {
					verdict, took, err := program.Benchmark(p.frame, repeat, nil)
					must(t, err)
					if verdict != kernel.XDPPass {
						t.Errorf("%s, with %d leases: verdict %d", p.name, n, verdict)
					}
					key := fmt.Sprint(p.name, n)
					if _, known := least[key]; !known {
						least[key] = math.Inf(1)
					}
					least[key] = min(least[key], float64(took)/float64(time.Nanosecond))
				}
				must(t, done())
			}
		}
		for _, p := range packets {
			of := func(n int) float64 { return least[fmt.Sprint(p.name, n)] }
			t.Logf("%-40s %5.1f ns where all is passed; %5.1f without a lease, %5.1f with 1 (%+.1f), %5.1f with %d (%+.1f)",
				p.name, of(-1), of(0), of(1), of(1)-of(0), of(MaxLeases), MaxLeases, of(MaxLeases)-of(0))
		}
	})
}

// withLeases is a hook with so many leases of an address of each family.
func withLeases(t *testing.T, n int) *Hook {
	t.Helper()
	h, err := Attach(Options{Interface: "eth0", Mode: kernel.ModeAuto})
	if err != nil {
		t.Error(err)
		panic("no hook")
	}
	for i := range n {
		lease, err := h.Begin()
		must(t, err)
		for _, address := range []string{"192.0.2.10", "2001:db8::10"} {
			must(t, h.Serve(lease, netip.AddrPortFrom(netip.MustParseAddr(address), uint16(5000+i))))
		}
	}
	return h
}
