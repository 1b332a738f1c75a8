package hold_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/kube/hold"
)

// patience bounds waits for steps that take milliseconds, on a machine that does much else.
const patience = 30 * time.Second

// bed is a node between a client and two pods, and translates as kube-proxy has it do:
//
//	client ─── lb ─── switch ─┬─ b1
//	                          └─ b2
type bed struct {
	*lab.Topology
	*testing.T
}

func newBed(t *testing.T) bed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root: run the tests with sudo")
	}
	topology, err := lab.Build(within(t), lab.Options{ID: fmt.Sprintf("h%d", os.Getpid()), Layout: lab.TwoArm, Forwarding: true})
	if err != nil {
		t.Fatal(err)
	}
	b := bed{topology, t}
	t.Cleanup(func() { b.must(b.Close()) })
	for _, pod := range b.Backends {
		if _, err := pod.ServeHTTP(":8080", pod.Name()); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func (b bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// onNode runs in the node's network namespace.
func (b bed) onNode(do func(conn *nftables.Conn) error) {
	b.Helper()
	b.must(b.Balancer.Run(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		return do(conn)
	}))
}

var rules = &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "rules"}

// translate sends packets for the VIP to b2.
func (b bed) translate() {
	b.Helper()
	b.onNode(func(conn *nftables.Conn) error {
		conn.AddTable(rules)
		in := conn.AddChain(&nftables.Chain{Table: rules, Name: "in", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest})
		const addressOffset = 16 // of the destination in IPv4's header
		conn.AddRule(&nftables.Rule{Table: rules, Chain: in, Exprs: []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: addressOffset, Len: 4},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: lab.VIP4.AsSlice()},
			&expr.Immediate{Register: 1, Data: b.Backends[1].Addr4().AsSlice()},
			&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(8080)},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1, RegProtoMin: 2},
		}})
		return conn.Flush()
	})
}

func (b bed) translateNoMore() {
	b.Helper()
	b.onNode(func(conn *nftables.Conn) error {
		conn.DelTable(rules)
		return conn.Flush()
	})
}

// connection is an established one that the rules have translated.
func (b bed) connection() *lab.Session {
	b.Helper()
	s, err := b.Client.OpenSession(within(b.T), "tcp", netip.AddrPort{}, netip.AddrPortFrom(lab.VIP4, 80).String())
	b.must(err)
	b.Cleanup(func() { _ = s.Close() })
	b.goesOn(s)
	return s
}

func (b bed) goesOn(s *lab.Session) {
	b.Helper()
	answer, err := s.Ask(within(b.T), "/")
	if err != nil || answer.Backend != "b2" {
		b.Fatalf("the connection is answered by %q, %v", answer.Backend, err)
	}
}

// breaks expects no answer. A packet that is not translated has no destination here, and is not even refused.
func (b bed) breaks(s *lab.Session) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), time.Second)
	defer cancel()
	if answer, err := s.Ask(ctx, "/"); err == nil {
		b.Fatalf("the connection goes on: %+v", answer)
	}
}

func (b bed) take(made bool) {
	b.Helper()
	b.onNode(func(*nftables.Conn) error {
		is, err := hold.Take()
		if err == nil && is != made {
			err = fmt.Errorf("Take has made the table: %t", is)
		}
		return err
	})
}

func (b bed) release(was bool) {
	b.Helper()
	b.onNode(func(*nftables.Conn) error {
		is, err := hold.Release()
		if err == nil && is != was {
			err = fmt.Errorf("Release has removed the table: %t", is)
		}
		return err
	})
}

// TestHeld: an established connection outlives the rules that made it, while the table is there, taken once or more often, and no
// longer.
func TestHeld(t *testing.T) {
	b := newBed(t)
	b.translate()
	s := b.connection()
	b.take(true)
	b.translateNoMore()
	b.goesOn(s)
	b.take(false)
	b.goesOn(s)
	b.onNode(func(conn *nftables.Conn) error {
		all, err := conn.GetRules(&nftables.Table{Family: nftables.TableFamilyINet, Name: hold.Table}, &nftables.Chain{Name: "track"})
		if err == nil && len(all) != 1 {
			err = fmt.Errorf("taken twice, it has %d rules", len(all))
		}
		return err
	})
	b.release(true)
	b.breaks(s)
}

// TestNotHeld: without the table the kernel stops translating, which is the reason for the table.
func TestNotHeld(t *testing.T) {
	b := newBed(t)
	b.translate()
	s := b.connection()
	b.translateNoMore()
	b.breaks(s)
}

// TestRepaired: a table that has lost its chains is made complete.
func TestRepaired(t *testing.T) {
	b := newBed(t)
	b.onNode(func(conn *nftables.Conn) error {
		conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: hold.Table})
		return conn.Flush()
	})
	b.translate()
	s := b.connection()
	b.take(false)
	b.translateNoMore()
	b.goesOn(s)
}

// TestRelease leaves nothing of its own, everything of others, and succeeds where nothing is.
func TestRelease(t *testing.T) {
	b := newBed(t)
	b.release(false)
	b.translate()
	b.take(true)
	b.release(true)
	b.release(false)
	b.onNode(func(conn *nftables.Conn) error {
		chains, err := conn.ListChains()
		if err != nil {
			return err
		}
		if len(chains) != 1 || !slices.ContainsFunc(chains, func(c *nftables.Chain) bool { return c.Table.Name == rules.Name }) {
			return fmt.Errorf("there are %d chains, and one was there before", len(chains))
		}
		return nil
	})
	b.connection()
}

// TestTakeFails: a user who may not make the table gets the reason, and no table is there.
func TestTakeFails(t *testing.T) {
	b := newBed(t)
	b.onNode(func(conn *nftables.Conn) error {
		t := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: hold.Table})
		conn.AddChain(&nftables.Chain{Table: t, Name: "nat", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter})
		return conn.Flush()
	})
	b.onNode(func(conn *nftables.Conn) error {
		if made, err := hold.Take(); err == nil || made {
			return fmt.Errorf("somebody else's chain of that name is taken for shunt's: %t, %w", made, err)
		}
		chains, err := conn.ListChains()
		if err == nil && len(chains) != 1 {
			err = fmt.Errorf("%d chains are there after a failure", len(chains))
		}
		return err
	})
}

// TestForbidden: without CAP_NET_ADMIN both errors name the operation; a table that may be there is not called absent.
func TestForbidden(t *testing.T) {
	b := newBed(t)
	b.take(true)
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
		_, takeErr := hold.Take()
		_, releaseErr := hold.Release()
		if err := unix.Capset(&header, &all[0]); err != nil {
			return err
		}
		for attempted, err := range map[string]error{"make the nftables table inet shunt-moving": takeErr, "remove the nftables table inet shunt-moving": releaseErr} {
			if !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), attempted) {
				t.Errorf("%s, forbidden: %v", attempted, err)
			}
		}
		return nil
	}))
	b.release(true)
}
