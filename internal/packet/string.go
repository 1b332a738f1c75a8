package packet

import (
	"fmt"
	"net/netip"
	"strings"
)

// String returns one line for a human, which names every fault of the packet:
//
//	198.51.100.7:40000 > 192.0.2.10:80 tcp SA seq 1 ack 2 win 64240 ttl 64 len 0 [tcp checksum partial]
func (p Packet) String() string {
	p = p.normal()
	var out strings.Builder
	for _, tag := range p.VLANs {
		fmt.Fprintf(&out, "%s ", tag)
	}
	switch {
	case p.ARP != nil:
		out.WriteString(p.ARP.String())
	case p.IPv4 == nil && p.IPv6 == nil:
		fmt.Fprintf(&out, "%s > %s type 0x%04x len %d", p.Ethernet.Source, p.Ethernet.Destination, p.Ethernet.Type, len(p.Payload))
	default:
		out.WriteString(p.flow())
		if p.IPv4 != nil {
			out.WriteString(p.IPv4.summary())
		} else {
			out.WriteString(p.IPv6.summary())
		}
		fmt.Fprintf(&out, " len %d", len(p.Payload))
		out.WriteString(p.faults())
	}
	return out.String()
}

// String is "vlan 7", or "vlan 7 priority 3 drop-eligible".
func (v VLAN) String() string {
	out := fmt.Sprintf("vlan %d", v.ID)
	if v.Type == TypeQinQ {
		out = fmt.Sprintf("qinq %d", v.ID)
	}
	if v.Priority != 0 {
		out += fmt.Sprintf(" priority %d", v.Priority)
	}
	if v.DropEligible {
		out += " drop-eligible"
	}
	return out
}

// String is "arp who has 10.0.0.2, tell 10.0.0.1 (02:…)" or "arp 10.0.0.2 is at 02:…".
func (a ARP) String() string {
	switch a.Operation {
	case 1:
		return fmt.Sprintf("arp who has %s, tell %s (%s)", a.TargetAddress, a.SenderAddress, a.SenderMAC)
	case 2:
		return fmt.Sprintf("arp %s is at %s, told %s", a.SenderAddress, a.SenderMAC, a.TargetAddress)
	}
	return fmt.Sprintf("arp operation %d from %s to %s", a.Operation, a.SenderAddress, a.TargetAddress)
}

// flow is addresses, ports and the fields of the transport header.
func (p Packet) flow() string {
	var source, destination netip.Addr
	number := uint8(0)
	if p.IPv4 != nil {
		source, destination, number = p.IPv4.Source, p.IPv4.Destination, p.IPv4.Protocol
	} else {
		source, destination, number = p.IPv6.Source, p.IPv6.Destination, p.IPv6.NextHeader
	}
	switch {
	case p.TCP != nil:
		t := p.TCP
		ends := fmt.Sprintf("%s > %s tcp", netip.AddrPortFrom(source, t.SourcePort), netip.AddrPortFrom(destination, t.DestinationPort))
		if t.Cut {
			return fmt.Sprintf("%s seq %d (cut)", ends, t.Seq)
		}
		return fmt.Sprintf("%s %s seq %d ack %d win %d", ends, orDot(t.sortedFlags()), t.Seq, t.Ack, t.Window)
	case p.UDP != nil:
		return fmt.Sprintf("%s > %s udp",
			netip.AddrPortFrom(source, p.UDP.SourcePort), netip.AddrPortFrom(destination, p.UDP.DestinationPort))
	case p.ICMP != nil:
		return fmt.Sprintf("%s > %s %s", source, destination,
			message("icmp", icmpNames, p.ICMP.Type, p.ICMP.Code, p.ICMP.Rest, p.ICMP.Quote))
	case p.ICMPv6 != nil:
		out := fmt.Sprintf("%s > %s %s", source, destination,
			message("icmp6", icmpv6Names, p.ICMPv6.Type, p.ICMPv6.Code, p.ICMPv6.Rest, p.ICMPv6.Quote))
		if n := p.ICMPv6.Neighbour; n != nil {
			out += fmt.Sprintf(" for %s (%s)", n.Target, n.LinkAddress)
		}
		return out
	}
	return fmt.Sprintf("%s > %s protocol %d", source, destination, number)
}

// orDot shows "no flags" the way tcpdump's readers know it.
func orDot(flags string) string {
	if flags == "" {
		return "."
	}
	return flags
}

// Names of ICMP types (RFC 792; RFC 4443, RFC 4861).
var (
	icmpNames = map[uint8]string{
		0: "echo reply", 3: "unreachable", 5: "redirect", 8: "echo request", 11: "time exceeded", 12: "parameter problem",
	}
	icmpv6Names = map[uint8]string{
		1: "unreachable", 2: "too big", 3: "time exceeded", 4: "parameter problem", 128: "echo request", 129: "echo reply",
		133: "router solicitation", 134: "router advertisement", 135: "neighbour solicitation", 136: "neighbour advertisement",
	}
)

func message(layer string, names map[uint8]string, kind, code uint8, rest uint32, quote []byte) string {
	name := names[kind]
	if name == "" {
		name = fmt.Sprintf("type %d", kind)
	}
	out := fmt.Sprintf("%s %s", layer, name)
	switch {
	case strings.HasPrefix(name, "echo"):
		out += fmt.Sprintf(" id %d seq %d", rest>>16, rest&0xffff)
	case name == "too big":
		out += fmt.Sprintf(" mtu %d", rest)
	case layer == "icmp" && kind == 3 && code == 4:
		out += fmt.Sprintf(" code 4 mtu %d", rest&0xffff)
	default:
		out += fmt.Sprintf(" code %d", code)
	}
	if len(quote) > 0 {
		if p, err := ParseQuote(quote); err == nil {
			out += fmt.Sprintf(" about (%s)", p)
		}
	}
	return out
}

func (ip IPv4) summary() string {
	out := fmt.Sprintf(" ttl %d", ip.TTL)
	if ip.DF {
		out += " df"
	}
	if ip.MF || ip.FragmentOffset != 0 {
		out += fmt.Sprintf(" fragment %d at %d", ip.ID, ip.FragmentOffset)
		if ip.MF {
			out += "+"
		}
	}
	if len(ip.Options) > 0 {
		out += fmt.Sprintf(" options %d", len(ip.Options))
	}
	return out
}

func (ip IPv6) summary() string {
	out := fmt.Sprintf(" hlim %d", ip.HopLimit)
	for _, e := range ip.Extensions {
		out += fmt.Sprintf(" ext %d", e.Type)
	}
	return out
}

// faults is every checksum and length that is not the right one, in brackets.
func (p Packet) faults() string {
	var out string
	note := func(layer string, c Checksum) {
		if c.Mode != Correct {
			out += fmt.Sprintf(" [%s checksum %s]", layer, c)
		}
	}
	if p.IPv4 != nil {
		note("ip", p.IPv4.Checksum)
	}
	switch {
	case p.TCP != nil:
		note("tcp", p.TCP.Checksum)
	case p.UDP != nil:
		note("udp", p.UDP.Checksum)
		if p.UDP.Length != 0 {
			out += fmt.Sprintf(" [udp length %d]", max(p.UDP.Length, 0))
		}
	case p.ICMP != nil:
		note("icmp", p.ICMP.Checksum)
	case p.ICMPv6 != nil:
		note("icmp6", p.ICMPv6.Checksum)
	}
	return out
}
