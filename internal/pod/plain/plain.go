// Package plain builds the path that the shortcut is compared with: a host with netfilter rules like the rules of
// kube-proxy and Calico. Demos, tests and measurements use it.
//
//	prerouting   nat     50 services with 3 endpoints each: every new connection is compared with all
//	forward      filter  established is accepted, invalid is dropped; new connections go by the pods' chains,
//	                     which accept packets that come from or go to a pod and drop all others
//	postrouting  nat     masquerade of packets with the mark of services
package plain

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

const (
	// Services and Endpoints are the numbers of services, and of endpoints of each.
	Services  = 50
	Endpoints = 3
	// masqueradeMark is the bit that kube-proxy marks with by default.
	masqueradeMark = 0x4000
)

// Pod is a pod that the rules know.
type Pod struct {
	Interface string
	Addresses []netip.Addr
}

// Service is a further service, with one endpoint.
type Service struct {
	Address, Endpoint netip.AddrPort
	Protocol          uint8
}

// Rules are the rules of a host. Its methods are called on a thread in the host's network namespace.
type Rules struct {
	conn  *nftables.Conn
	table *nftables.Table
	fwd   *nftables.Chain
	all   *nftables.Chain // counts forwarded packets
	ports *nftables.Chain // counts those of connections that Count has named
}

// Install writes the rules.
func Install(pods []Pod, more ...Service) (*Rules, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("write netfilter rules: %w", err)
	}
	r := &Rules{conn: conn}
	err = r.services(more)
	r.filter(pods)
	if err = errors.Join(err, conn.Flush()); err != nil {
		return nil, fmt.Errorf("write netfilter rules: %w", err)
	}
	return r, nil
}

func (r *Rules) base(t *nftables.Table, name string, kind nftables.ChainType, hook *nftables.ChainHook, priority *nftables.ChainPriority) *nftables.Chain {
	return r.conn.AddChain(&nftables.Chain{Name: name, Table: t, Type: kind, Hooknum: hook, Priority: priority})
}

func (r *Rules) add(c *nftables.Chain, parts ...[]expr.Any) {
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	r.conn.AddRule(&nftables.Rule{Table: c.Table, Chain: c, Exprs: all})
}

func verdict(kind expr.VerdictKind, chain string) []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: kind, Chain: chain}}
}

// state matches the states of a connection.
func state(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

// mark matches packets with a bit of the mark.
func mark(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

// Name matches an interface: key is expr.MetaKeyIIFNAME or expr.MetaKeyOIFNAME.
func Name(key expr.MetaKey, name string) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data}}
}

// Destination matches the address that packets go to.
func Destination(a netip.Addr) []expr.Any { return network(a, 16, 24) }

// Source matches the address that packets come from.
func Source(a netip.Addr) []expr.Any { return network(a, 12, 8) }

func network(a netip.Addr, at4, at6 uint32) []expr.Any {
	family, at := byte(unix.NFPROTO_IPV4), at4
	if a.Is6() {
		family, at = unix.NFPROTO_IPV6, at6
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: at, Len: uint32(len(a.AsSlice()))},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: a.AsSlice()},
	}
}

// Port matches a protocol and a destination port.
func Port(protocol uint8, port uint16) []expr.Any { return portAt(2, protocol, port) }

func portAt(offset uint32, protocol uint8, port uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocol}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(port)},
	}
}

// Drop ends packets, and counts them.
func Drop() []expr.Any { return verdict(expr.VerdictDrop, "") }

// services makes a chain for each service, with a rule for each endpoint.
func (r *Rules) services(more []Service) (err error) {
	nat := r.conn.AddTable(&nftables.Table{Name: "plain-nat", Family: nftables.TableFamilyINet})
	pre := r.base(nat, "prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest)
	post := r.base(nat, "postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource)
	for i := range Services {
		vip := netip.AddrFrom4([4]byte{10, 96, byte(i / 250), byte(1 + i%250)})
		c := r.conn.AddChain(&nftables.Chain{Name: fmt.Sprintf("service-%d", i), Table: nat})
		for e := range Endpoints {
			r.endpoint(c, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(200 + e), byte(i)}), 8080), Endpoints-e)
		}
		r.add(pre, Destination(vip), Port(unix.IPPROTO_TCP, 80), verdict(expr.VerdictJump, c.Name))
		if i%10 == 9 { // the kernel answers to each rule, and the socket has room for some hundred answers
			err = errors.Join(err, r.conn.Flush())
		}
	}
	for i, s := range more {
		c := r.conn.AddChain(&nftables.Chain{Name: fmt.Sprintf("more-%d", i), Table: nat})
		r.endpoint(c, s.Endpoint, 1)
		r.add(pre, Destination(s.Address.Addr()), Port(s.Protocol, s.Address.Port()), verdict(expr.VerdictJump, c.Name))
	}
	r.add(post, mark(masqueradeMark), []expr.Any{&expr.Counter{}, &expr.Masq{}})
	return err
}

// endpoint translates to one endpoint with a chance of 1 in of.
func (r *Rules) endpoint(c *nftables.Chain, to netip.AddrPort, of int) {
	var chance []expr.Any
	if of > 1 {
		chance = []expr.Any{
			&expr.Numgen{Register: 1, Type: unix.NFT_NG_RANDOM, Modulus: uint32(of)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: make([]byte, 4)},
		}
	}
	family := uint32(unix.NFPROTO_IPV4)
	if to.Addr().Is6() {
		family = unix.NFPROTO_IPV6
	}
	r.add(c, chance, []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: 1, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: 1, RegProtoMin: 2},
	})
}

// filter makes a chain for each direction of each pod.
func (r *Rules) filter(pods []Pod) {
	r.table = r.conn.AddTable(&nftables.Table{Name: "plain-filter", Family: nftables.TableFamilyINet})
	r.fwd = r.base(r.table, "forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter)
	before := nftables.ChainPriorityRef(*nftables.ChainPriorityFilter - 1)
	r.all = r.base(r.table, "count", nftables.ChainTypeFilter, nftables.ChainHookForward, before)
	r.add(r.all, []expr.Any{&expr.Counter{}})
	r.ports = r.base(r.table, "count-ports", nftables.ChainTypeFilter, nftables.ChainHookForward, before)
	from := r.conn.AddChain(&nftables.Chain{Name: "from-pods", Table: r.table})
	to := r.conn.AddChain(&nftables.Chain{Name: "to-pods", Table: r.table})
	r.add(r.fwd, mark(masqueradeMark), verdict(expr.VerdictAccept, ""))
	r.add(r.fwd, state(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), verdict(expr.VerdictAccept, ""))
	r.add(r.fwd, state(expr.CtStateBitINVALID), Drop())
	r.add(r.fwd, verdict(expr.VerdictJump, from.Name))
	r.add(r.fwd, verdict(expr.VerdictJump, to.Name))
	for _, p := range pods {
		in := r.conn.AddChain(&nftables.Chain{Name: "from-" + p.Interface, Table: r.table})
		out := r.conn.AddChain(&nftables.Chain{Name: "to-" + p.Interface, Table: r.table})
		for _, a := range p.Addresses {
			r.add(in, Source(a), verdict(expr.VerdictReturn, ""))
			r.add(out, Destination(a), verdict(expr.VerdictAccept, ""))
		}
		r.add(in, Drop())
		r.add(out, Drop())
		r.add(from, Name(expr.MetaKeyIIFNAME, p.Interface), verdict(expr.VerdictJump, in.Name))
		r.add(to, Name(expr.MetaKeyOIFNAME, p.Interface), verdict(expr.VerdictJump, out.Name))
	}
}

// Insert puts a rule before all others of the forward chain, and returns a function that removes it.
func (r *Rules) Insert(parts ...[]expr.Any) (remove func() error, err error) {
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	r.conn.InsertRule(&nftables.Rule{Table: r.table, Chain: r.fwd, Exprs: all})
	if err := r.conn.Flush(); err != nil {
		return nil, fmt.Errorf("insert a rule: %w", err)
	}
	list, err := r.conn.GetRules(r.table, r.fwd)
	if err != nil || len(list) == 0 {
		return nil, fmt.Errorf("read the rule that was inserted: %w", err)
	}
	return func() error {
		if err := r.conn.DelRule(list[0]); err != nil {
			return err
		}
		return r.conn.Flush()
	}, nil
}

// Seen returns the number of packets that the host has forwarded.
func (r *Rules) Seen() (packets uint64, err error) {
	return r.sum(r.all, nil)
}

// Count counts, from now on, the forwarded TCP packets that come from a port or go to it.
func (r *Rules) Count(port uint16) error {
	for _, offset := range []uint32{0, 2} {
		parts := append(portAt(offset, unix.IPPROTO_TCP, port), &expr.Counter{})
		r.conn.AddRule(&nftables.Rule{Table: r.table, Chain: r.ports, Exprs: parts, UserData: portLabel(port)})
	}
	if err := r.conn.Flush(); err != nil {
		return fmt.Errorf("count the packets of port %d: %w", port, err)
	}
	return nil
}

// Counted returns the number of a port's packets since Count.
func (r *Rules) Counted(port uint16) (packets uint64, err error) {
	return r.sum(r.ports, portLabel(port))
}

func portLabel(port uint16) []byte { return binaryutil.BigEndian.PutUint16(port) }

// sum adds the counters of a chain's rules with a label.
func (r *Rules) sum(c *nftables.Chain, label []byte) (packets uint64, err error) {
	list, err := r.conn.GetRules(r.table, c)
	if err != nil {
		return 0, fmt.Errorf("read the rules' counters: %w", err)
	}
	for _, one := range list {
		if !bytes.Equal(one.UserData, label) {
			continue
		}
		for _, e := range one.Exprs {
			if c, is := e.(*expr.Counter); is {
				packets += c.Packets
			}
		}
	}
	return packets, nil
}
