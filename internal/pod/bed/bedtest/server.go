package bedtest

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/bed"
)

// Server is a machine that two cables connect to a bed's node. The node's routes lead to its address by eth2; its
// own routes lead to the pods by eth1.
//
//	node eth1  192.168.50.1  2001:db8:50::1 ══ 192.168.50.2  2001:db8:50::2  eth1 server  10.50.0.53
//	node eth2  192.168.60.1  2001:db8:60::1 ══ 192.168.60.2  2001:db8:60::2  eth2         2001:db8:53::53
type Server struct{ *lab.Host }

// NewServer connects a server, which lasts until the bed is closed.
func NewServer(t *testing.T, b *bed.Bed) Server {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	host, err := b.Lab.AddHost("server")
	must(err)
	s := Server{host}
	for _, cable := range []struct {
		name             string
		subnet4, subnet6 string
	}{{"eth1", "192.168.50.", "2001:db8:50::"}, {"eth2", "192.168.60.", "2001:db8:60::"}} {
		end := func(of *lab.Host, number string) lab.End {
			return lab.End{Host: of, Interface: cable.name, IPv4: netip.MustParsePrefix(cable.subnet4 + number + "/24"), IPv6: netip.MustParsePrefix(cable.subnet6 + number + "/64")}
		}
		must(b.Lab.Connect(end(b.Node, "1"), end(host, "2"), lab.Cable{}))
	}
	must(s.Lead(b, "eth1"))
	for _, is6 := range []bool{false, true} {
		own := netip.PrefixFrom(s.Address(is6), s.Address(is6).BitLen())
		must(host.AddAddress("eth2", own))
		must(b.Node.AddRoute(lab.Route{To: own, Via: s.hop(is6, "2001:db8:60::2", "192.168.60.2"), Interface: "eth2"}))
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	must(b.Lab.Ready(ctx))
	return s
}

// Lead makes the server's routes to the pods lead by eth1 or eth2.
func (s Server) Lead(b *bed.Bed, by string) error {
	for _, is6 := range []bool{false, true} {
		via := s.hop(is6, "2001:db8:50::1", "192.168.50.1")
		if by == "eth2" {
			via = s.hop(is6, "2001:db8:60::1", "192.168.60.1")
		}
		if err := s.AddRoute(lab.Route{To: b.Network(is6), Via: via, Interface: by}); err != nil {
			return err
		}
	}
	return nil
}

func (Server) hop(is6 bool, six, four string) netip.Addr {
	if is6 {
		return netip.MustParseAddr(six)
	}
	return netip.MustParseAddr(four)
}

// Address returns the server's address, which does not depend on the cable.
func (s Server) Address(is6 bool) netip.Addr { return s.hop(is6, "2001:db8:53::53", "10.50.0.53") }

// NextHop returns the server's end of the cable by which no route of the node leads to its address.
func (s Server) NextHop(is6 bool) netip.Addr { return s.hop(is6, "2001:db8:50::2", "192.168.50.2") }
