package cost

import (
	"math"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/udp/hook"
)

// TestGuestTakesItsTime prints the nanoseconds for a packet that the balancer passes, without a guest and
// with the UDP path as one, if no lease has the packet. It is the minimum of interleaved rounds; the machine
// decides how exact that is. A balanced packet never comes to the guest: packets.txt shows that it costs no
// instruction more.
func TestGuestTakesItsTime(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes a network namespace")
	}
	w := newWorld(t, "guest", services(false))
	packets := []struct {
		name string
		in   packet.Packet
	}{
		{"tcp4", fromClient(client4, "192.0.2.1:22", "PA")},
		{"tcp6", fromClient(client6, "[2001:db8:1::1]:22", "PA")},
		{"udp4, another port", datagram(client4, "192.0.2.1:5001")},
		{"udp6, another port", datagram(client6, "[2001:db8:1::1]:5001")},
		{"udp4, another address", datagram(client4, "192.0.2.2:5000")},
		{"udp6, another address", datagram(client6, "[2001:db8:1::2]:5000")},
		{"arp", packet.NewARPRequest(router, "192.0.2.254", "192.0.2.1")},
	}
	const rounds, repeat = 15, 20000
	alone, beside := make([]float64, len(packets)), make([]float64, len(packets))
	for i := range packets {
		alone[i], beside[i] = math.Inf(1), math.Inf(1)
	}
	run := func(into []float64) {
		for i, p := range packets {
			verdict, took, err := w.running.Benchmark(packet.Must(p.in), repeat, nil)
			must(t, err)
			if verdict != kernel.XDPPass {
				t.Fatalf("%s: verdict %d", p.name, verdict)
			}
			into[i] = min(into[i], float64(took)/float64(time.Nanosecond))
		}
	}
	for range rounds {
		run(alone)
		h, err := hook.Attach(hook.Options{Interface: w.link.Attrs().Name, Mode: kernel.ModeAuto})
		must(t, err)
		if !h.Hosted() {
			t.Fatal("the guest is not behind the balancer's program")
		}
		lease, err := h.Begin()
		must(t, err)
		must(t, h.Serve(lease, netip.MustParseAddrPort("192.0.2.1:5000")))
		must(t, h.Serve(lease, netip.MustParseAddrPort("[2001:db8:1::1]:5000")))
		run(beside)
		must(t, h.Close())
	}
	for i, p := range packets {
		t.Logf("%-22s %5.0f ns without a guest, %5.0f ns with one: %+.0f", p.name, alone[i], beside[i], beside[i]-alone[i])
	}
}
