package rules

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// Link is an interface of the host.
type Link struct {
	Name  string
	Index int
}

// Packets describe the packets that would take the shortcut, as far as they are known: from any address of From to any of To.
type Packets struct {
	From, To []netip.Addr // all of one family
	In, Out  []Link       // the interfaces that these addresses are behind
	// FromBits and ToBits are the numbers of known first bits of the addresses, such as a network's; 0: all.
	FromBits, ToBits int
	// Established says that conntrack has seen both directions of each connection, as in the mode checked. Otherwise a packet
	// may be the first of a connection.
	Established bool
}

// Hazard is a rule that may do something with the packets.
type Hazard struct {
	Chain  string // "ip filter FORWARD"
	Handle uint64 // of the rule; 0: the chain's policy, or the whole chain
	What   string // "drop"
}

func (h *Hazard) String() string {
	if h.Handle == 0 {
		return fmt.Sprintf("%s: %s", h.Chain, h.What)
	}
	return fmt.Sprintf("%s handle %d: %s", h.Chain, h.Handle, h.What)
}

// The kernel's numbers.
const (
	netfilterAccept = 1
	hookPrerouting  = unix.NF_INET_PRE_ROUTING
	hookForward     = unix.NF_INET_FORWARD
	hookPostrouting = unix.NF_INET_POST_ROUTING
	hookIngress     = 5 // NF_INET_INGRESS
	// conntrackPriority is the priority at which conntrack looks at a packet: chains before it see no state.
	conntrackPriority = -200
	depthMax          = 16 // largest depth of calls of chains, as in the kernel (NFT_JUMP_STACK_SIZE)
	// stepsMax limits the work for a set of rules whose chains call each other in many ways.
	stepsMax = 1_000_000
)

// Find returns the first rule that may do more with the packets than let them pass, or change a mark that nothing reads
// later; nil if there is none. A rule that cannot be judged counts as such a rule.
func (s *Set) Find(p Packets) *Hazard {
	for _, table := range s.legacy {
		if h := table.judge(p); h != nil {
			return h
		}
	}
	if h := s.beside.judge(p); h != nil {
		return h
	}
	j := &judge{set: s, packets: p, mark: one(word(0))} // a veth clears the mark
	for _, c := range s.bases {
		if !c.sees(p) {
			continue
		}
		j.base, j.registers, j.doubt = c, map[uint32][][]byte{}, false
		accepted, h := j.walk(c, 0)
		if h == nil && !accepted && c.drops {
			h = &Hazard{Chain: c.String(), What: "the policy drops"}
		}
		if h != nil {
			return h
		}
	}
	return nil
}

// sees reports whether the packets pass a base chain.
func (c *chain) sees(p Packets) bool {
	is6 := len(p.From) > 0 && p.From[0].Is6()
	switch c.family {
	case unix.NFPROTO_INET:
	case unix.NFPROTO_IPV4:
		if is6 {
			return false
		}
	case unix.NFPROTO_IPV6:
		if !is6 {
			return false
		}
	case unix.NFPROTO_NETDEV:
		return c.onDevice(p)
	default:
		return false
	}
	if c.kind == "nat" && p.Established {
		return false // it sees only the first packet of a connection
	}
	switch c.hook {
	case hookPrerouting, hookForward, hookPostrouting:
		return true
	case hookIngress:
		return c.family == unix.NFPROTO_INET && c.onDevice(p)
	}
	return false
}

func (c *chain) onDevice(p Packets) bool {
	return slices.ContainsFunc(append(slices.Clone(p.In), p.Out...), func(l Link) bool { return slices.Contains(c.devices, l.Name) })
}

// answer is the share of the packets that an expression matches: all, none, or unknown.
type answer int

const (
	no answer = iota
	maybe
	yes
)

// judge walks one base chain with the packets. A register holds all values that it can have; none: unknown.
type judge struct {
	set       *Set
	packets   Packets
	base      *chain
	steps     int
	registers map[uint32][][]byte
	mark      [][]byte
	doubt     bool // an earlier rule may have taken packets out of the chain, so a value may not be set for all
}

// walk goes through a chain. accepted means that no packet comes out of its end.
func (j *judge) walk(c *chain, depth int) (accepted bool, h *Hazard) {
	if depth > depthMax {
		return false, &Hazard{Chain: c.String(), What: "chains call each other deeper than the kernel allows"}
	}
	for i := range c.rules {
		if j.steps++; j.steps > stepsMax {
			return false, &Hazard{Chain: c.String(), What: "there are too many rules to judge"}
		}
		done, what, target := j.rule(&c.rules[i])
		if what != "" {
			return false, &Hazard{Chain: c.String(), Handle: c.rules[i].handle, What: what}
		}
		if target != nil {
			next := j.set.chains[chainKey{c.family, c.table, target.chain}]
			if next == nil {
				return false, &Hazard{Chain: c.String(), Handle: c.rules[i].handle, What: "it calls a chain that is not there"}
			}
			sure, h := j.walk(next, depth+1)
			if h != nil || sure && target.match == yes {
				return sure, h
			}
			done = ending(0)
			if target.isGoto && target.match == yes {
				done = returns
			}
		}
		switch done {
		case accepts:
			return true, nil
		case returns:
			return false, nil
		}
	}
	return false, nil
}

// ending is the way in which a rule ends a chain for all packets.
type ending int

const (
	accepts ending = iota + 1
	returns
)

// call is a jump or goto.
type call struct {
	chain  string
	isGoto bool
	match  answer
}

// rule judges one rule. what names its possible effect on the packets; empty: none.
func (j *judge) rule(r *rule) (done ending, what string, target *call) {
	match := yes
	for i := range r.expressions {
		e := &r.expressions[i]
		if e.name == "immediate" && len(e.attributes[unix.NFTA_IMMEDIATE_DATA]) > 0 {
			code, chain, isVerdict := verdictOf(e)
			if isVerdict {
				j.doubt = j.doubt || match != yes
				done, what, target = j.verdict(code, chain, match)
				return done, what, target
			}
		}
		a, what := j.expression(e, match)
		if what != "" {
			return 0, what, nil
		}
		match = min(match, a)
		if match == no {
			return 0, "", nil
		}
	}
	return 0, "", nil
}

// verdictOf reads an immediate that is a verdict.
func verdictOf(e *expression) (code int32, chain string, ok bool) {
	data, err := parse(e.attributes[unix.NFTA_IMMEDIATE_DATA])
	if err != nil || data[unix.NFTA_DATA_VERDICT] == nil {
		return 0, "", false
	}
	parts, err := parse(data[unix.NFTA_DATA_VERDICT])
	if err != nil || len(parts[unix.NFTA_VERDICT_CODE]) != 4 {
		return unix.NFT_BREAK - 100, "", true // no known verdict
	}
	return int32(binary.BigEndian.Uint32(parts[unix.NFTA_VERDICT_CODE])), text(parts[unix.NFTA_VERDICT_CHAIN]), true
}

func (j *judge) verdict(code int32, chain string, match answer) (done ending, what string, target *call) {
	switch code {
	case netfilterAccept:
		if match == yes {
			return accepts, "", nil
		}
		return 0, "", nil
	case unix.NFT_CONTINUE, unix.NFT_BREAK:
		return 0, "", nil
	case unix.NFT_RETURN:
		if match == yes {
			return returns, "", nil
		}
		return 0, "", nil
	case unix.NFT_JUMP, unix.NFT_GOTO:
		return 0, "", &call{chain, code == unix.NFT_GOTO, match}
	case 0:
		return 0, "drop", nil
	}
	return 0, fmt.Sprintf("the verdict %d", code), nil
}

// one returns a set of one value.
func one(b []byte) [][]byte { return [][]byte{b} }

func word(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

// meta returns the packets' values of a key of nft's meta; nil: unknown.
func (j *judge) meta(key uint32) (values [][]byte) {
	p := j.packets
	in, out := p.In, p.Out
	if j.base.hook == hookPrerouting || j.base.hook == hookIngress {
		out = nil
	}
	if j.base.hook == hookPostrouting {
		in = nil
	}
	names := func(links []Link) {
		for _, l := range links {
			name := make([]byte, unix.IFNAMSIZ)
			copy(name, l.Name)
			values = append(values, name)
		}
	}
	is6 := p.From[0].Is6()
	switch key {
	case unix.NFT_META_IIFNAME:
		names(in)
	case unix.NFT_META_OIFNAME:
		names(out)
	case unix.NFT_META_IIF, unix.NFT_META_OIF:
		links := in
		if key == unix.NFT_META_OIF {
			links = out
		}
		for _, l := range links {
			values = append(values, word(uint32(l.Index)))
		}
	case unix.NFT_META_L4PROTO:
		values = [][]byte{{unix.IPPROTO_TCP}, {unix.IPPROTO_UDP}}
	case unix.NFT_META_NFPROTO:
		values = one([]byte{unix.NFPROTO_IPV4})
		if is6 {
			values = one([]byte{unix.NFPROTO_IPV6})
		}
	case unix.NFT_META_PROTOCOL:
		values = one([]byte{unix.ETH_P_IP >> 8, unix.ETH_P_IP & 0xff})
		if is6 {
			values = one([]byte{unix.ETH_P_IPV6 >> 8, unix.ETH_P_IPV6 & 0xff})
		}
	case unix.NFT_META_MARK:
		values = j.mark
	}
	return values
}

// payload returns the packets' bytes at an offset of the network header; nil: unknown.
func (j *judge) payload(base, offset, size uint32) (values [][]byte) {
	if base != unix.NFT_PAYLOAD_NETWORK_HEADER {
		return nil
	}
	p := j.packets
	pick := func(list []netip.Addr, bits int, skip, size uint32) {
		if bits > 0 { // octets behind the known ones are cut off
			size = min(size, uint32(max(bits/8-int(skip), 0)))
		}
		if size == 0 {
			return
		}
		for _, a := range list {
			values = append(values, a.AsSlice()[skip:skip+size])
		}
	}
	source, width := uint32(12), uint32(4) // RFC 791, 3.1
	if p.From[0].Is6() {
		source, width = 8, 16 // RFC 8200, 3
	}
	switch {
	case offset >= source && offset+size <= source+width:
		pick(p.From, p.FromBits, offset-source, size)
	case offset >= source+width && offset+size <= source+2*width:
		pick(p.To, p.ToBits, offset-source-width, size)
	case !p.From[0].Is6() && offset == 9 && size == 1:
		return [][]byte{{unix.IPPROTO_TCP}, {unix.IPPROTO_UDP}}
	case p.From[0].Is6() && offset == 6 && size == 1:
		return [][]byte{{unix.IPPROTO_TCP}, {unix.IPPROTO_UDP}}
	}
	return values
}

// States of a connection, as nft and xt_conntrack number them.
const (
	stateEstablished = 2
	stateNew         = 8
)

func (j *judge) states() [][]byte {
	switch {
	case j.base.priority <= conntrackPriority:
		return nil
	case j.packets.Established:
		return one(word(stateEstablished))
	}
	return [][]byte{word(stateEstablished), word(stateNew)}
}

// compare judges nft's cmp.
func compare(values [][]byte, op uint32, data []byte) answer {
	if len(values) == 0 {
		return maybe
	}
	count := 0
	for _, v := range values {
		v = v[:min(len(v), len(data))]
		order := bytes.Compare(v, data)
		if len(v) < len(data) { // only the first octets of a value are known
			if order = bytes.Compare(v, data[:len(v)]); order == 0 || op != unix.NFT_CMP_EQ && op != unix.NFT_CMP_NEQ {
				return maybe
			}
		}
		is := map[uint32]bool{
			unix.NFT_CMP_EQ: order == 0, unix.NFT_CMP_NEQ: order != 0, unix.NFT_CMP_LT: order < 0, unix.NFT_CMP_LTE: order <= 0,
			unix.NFT_CMP_GT: order > 0, unix.NFT_CMP_GTE: order >= 0,
		}
		if is[op] {
			count++
		}
	}
	return among(count, len(values))
}

// among returns the answer if count of all values match.
func among(count, all int) answer {
	switch count {
	case 0:
		return no
	case all:
		return yes
	}
	return maybe
}
