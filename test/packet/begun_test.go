package packet_test

import (
	"fmt"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
)

// TestBegunBefore: a service that leaves older connections to the host passes packets from the middle of a connection
// without a flow. It takes new connections, and goes on with them; a service that does not leave them takes all.
func TestBegunBefore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	left, taken := ways[0], ways[2]
	w.applyWith("nat", func(s *model.Service) { s.Policy.PassesBegun = true })
	clientPort := uint16(40000)
	for _, six := range []bool{false, true} {
		k := kind{six: six}
		for _, flags := range []string{"A", "PA", "FA", "SA", "", "R"} {
			clientPort++
			in := k.fromClient(clientPort, left.port, flags, packet.Data("in the middle"))
			reason := "begun_before"
			if flags == "R" {
				reason = "not_ours" // for any service
			}
			before := len(w.flowTable())
			trial{name: fmt.Sprintf("%s/%q", k, flags), in: in, end: passes, reason: reason}.try(t, w)
			if now := len(w.flowTable()); now != before {
				t.Errorf("%s/%q: there were %d flows, and are %d", k, flags, before, now)
			}
			if flags != "R" {
				in = k.fromClient(clientPort, taken.port, flags, packet.Data("in the middle"))
				trial{name: fmt.Sprintf("%s/%q, taken", k, flags), in: in, end: leaves, want: taken.expected(w, k, in)}.try(t, w)
			}
		}
		syn := k.fromClient(clientPort, left.port, "S")
		trial{name: k.String() + "/begins", in: syn, end: leaves, want: left.expected(w, k, syn)}.try(t, w)
		in := k.fromClient(clientPort, left.port, "A")
		trial{name: k.String() + "/goes on", in: in, end: leaves, want: left.expected(w, k, in)}.try(t, w)
		u := kind{six: six, udp: true}
		in = u.fromClient(clientPort, left.port, "")
		trial{name: u.String() + "/datagram", in: in, end: leaves, want: left.expected(w, u, in)}.try(t, w)
	}
	w.apply(services())
	in := kind{}.fromClient(40100, left.port, "A")
	trial{name: "no more", in: in, end: leaves, want: left.expected(w, kind{}, in)}.try(t, w)
}
