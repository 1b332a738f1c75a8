package hold_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/hold"
)

// TestTranslated: of the connections that the kernel tracks, those whose source it has changed are listed, with the port that the pod sees, and
// with the client's own.
func TestTranslated(t *testing.T) {
	b := newBed(t)
	b.translate()
	list := func() (ports []store.SourcePort) {
		t.Helper()
		b.onNode(func(*nftables.Conn) (err error) { ports, err = hold.Translated(); return err })
		return ports
	}
	b.connection()
	if ports := list(); len(ports) != 0 {
		t.Errorf("a connection whose destination alone has changed: %v", ports)
	}
	b.onNode(func(conn *nftables.Conn) error {
		out := conn.AddChain(&nftables.Chain{Table: rules, Name: "out", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
		conn.AddRule(&nftables.Rule{Table: rules, Chain: out, Exprs: []expr.Any{&expr.Masq{}}})
		return conn.Flush()
	})
	s := b.connection()
	answer, err := s.Ask(within(t), "/")
	b.must(err)
	backend := netip.AddrPortFrom(b.Backends[1].Addr4(), 8080)
	want := []store.SourcePort{
		{Protocol: model.TCP, Source: netip.MustParseAddrPort(answer.Remote), Backend: backend},
		{Protocol: model.TCP, Source: netip.MustParseAddrPort(s.LocalAddr().String()), Backend: backend},
	}
	if ports := list(); !slices.Equal(ports, want) {
		t.Errorf("listed is %v, want %v", ports, want)
	}
	var told int
	b.onNode(func(*nftables.Conn) (err error) { told, err = hold.Listed(); return err })
	if told != 1 { // the first connection is not among them
		t.Errorf("the kernel tells of %d connections, and the source of one is translated", told)
	}
	var forbidden error
	b.must(b.Balancer.Run(func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var all [2]unix.CapUserData
		if err := unix.Capget(&header, &all[0]); err != nil {
			return err
		}
		less := all
		less[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		if err := unix.Capset(&header, &less[0]); err != nil {
			return err
		}
		_, forbidden = hold.Translated()
		return unix.Capset(&header, &all[0])
	}))
	if !errors.Is(forbidden, unix.EPERM) {
		t.Errorf("without CAP_NET_ADMIN: %v", forbidden)
	}
}
