package packet

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net"
	"strings"
)

// Diff lists the differing fields, one per line ("ip.ttl: want 63, got 64"), and is empty when the
// two packets are the same on the wire.
func Diff(want, got Packet) string {
	var out strings.Builder
	w, g := want.normal().layers(), got.normal().layers()
	for i := range w {
		diffLayer(&out, w[i], g[i])
	}
	diffTags(&out, want.normal().VLANs, got.normal().VLANs)
	diffBytes(&out, "payload", want.Payload, got.Payload)
	diffBytes(&out, "trailer", want.Trailer, got.Trailer)
	return out.String()
}

// DiffBytes is Diff for a received frame; a frame that does not parse is a difference too.
func DiffBytes(want Packet, got []byte) string {
	p, err := Parse(got)
	if err != nil {
		return fmt.Sprintf("frame: %v\n%s", err, Diff(want, p))
	}
	return Diff(want, p)
}

// layer is one header as names and values; absent layers have no fields.
type layer struct {
	name   string
	fields []field
}

type field struct {
	name  string
	value string
}

func text(name string, value any) field { return field{name, fmt.Sprint(value)} }
func bits(name string, value any) field { return field{name, fmt.Sprintf("0x%x", value)} }
func hexed(name string, b []byte) field { return field{name, "[" + hex.EncodeToString(b) + "]"} }
func hardware(name string, a net.HardwareAddr) field {
	return field{name, a.String()}
}

// size shows a length that may have been left to Build.
func size(name string, length int) field {
	switch length {
	case 0:
		return field{name, "correct"}
	case LengthZero:
		return field{name, "0 (written)"}
	}
	return text(name, length)
}

// layers is every header a packet can have, present or not, always in the same order.
func (p Packet) layers() []layer {
	return []layer{
		{"eth", []field{
			hardware("source", p.Ethernet.Source), hardware("destination", p.Ethernet.Destination),
			bits("type", p.Ethernet.Type),
		}},
		{"arp", p.ARP.fields()},
		{"ip", p.IPv4.fields()},
		{"ip6", p.IPv6.fields()},
		{"tcp", p.TCP.fields()},
		{"udp", p.UDP.fields()},
		{"icmp", p.ICMP.fields()},
		{"icmp6", p.ICMPv6.fields()},
	}
}

func (a *ARP) fields() []field {
	if a == nil {
		return nil
	}
	return []field{
		text("operation", a.Operation),
		hardware("sender_mac", a.SenderMAC), text("sender_address", a.SenderAddress),
		hardware("target_mac", a.TargetMAC), text("target_address", a.TargetAddress),
	}
}

func (ip *IPv4) fields() []field {
	if ip == nil {
		return nil
	}
	return []field{
		text("source", ip.Source), text("destination", ip.Destination),
		text("ttl", ip.TTL), bits("tos", ip.TOS), text("id", ip.ID),
		text("reserved_flag", ip.ReservedFlag), text("df", ip.DF), text("mf", ip.MF),
		text("fragment_offset", ip.FragmentOffset), hexed("options", ip.Options),
		text("protocol", ip.Protocol), size("length", ip.Length), text("checksum", ip.Checksum),
	}
}

func (ip *IPv6) fields() []field {
	if ip == nil {
		return nil
	}
	var extensions []string
	for _, e := range ip.Extensions {
		extensions = append(extensions, fmt.Sprintf("%d[%x]%d", e.Type, e.Body, e.Reserved))
	}
	return []field{
		text("source", ip.Source), text("destination", ip.Destination),
		text("hop_limit", ip.HopLimit), bits("traffic_class", ip.TrafficClass), bits("flow_label", ip.FlowLabel),
		text("extensions", extensions), text("next_header", ip.NextHeader), size("length", ip.Length),
	}
}

func (t *TCP) fields() []field {
	if t == nil {
		return nil
	}
	return []field{
		text("source_port", t.SourcePort), text("destination_port", t.DestinationPort),
		text("seq", t.Seq), text("ack", t.Ack), text("flags", t.sortedFlags()), bits("reserved", t.Reserved),
		text("window", t.Window), text("urgent", t.Urgent), hexed("options", t.Options),
		text("checksum", t.Checksum), text("cut", t.Cut),
	}
}

// sortedFlags is Flags in the order Parse uses, each letter once.
func (t *TCP) sortedFlags() string {
	var out string
	for _, letter := range flagLetters {
		if strings.ContainsRune(t.Flags, letter) {
			out += string(letter)
		}
	}
	return out
}

func (u *UDP) fields() []field {
	if u == nil {
		return nil
	}
	return []field{
		text("source_port", u.SourcePort), text("destination_port", u.DestinationPort),
		size("length", u.Length), text("checksum", u.Checksum),
	}
}

func (c *ICMP) fields() []field {
	if c == nil {
		return nil
	}
	return []field{
		text("type", c.Type), text("code", c.Code), bits("rest", c.Rest),
		{"quote", quoteText(c.Quote)}, text("checksum", c.Checksum),
	}
}

func (c *ICMPv6) fields() []field {
	if c == nil {
		return nil
	}
	fields := []field{
		text("type", c.Type), text("code", c.Code), bits("rest", c.Rest),
		{"quote", quoteText(c.Quote)}, text("checksum", c.Checksum),
	}
	if n := c.Neighbour; n != nil {
		fields = append(fields,
			text("target", n.Target), text("router", n.Router), text("solicited", n.Solicited),
			text("override", n.Override), hardware("link_address", n.LinkAddress), hexed("options", n.Options))
	}
	return fields
}

// quoteText is a quote as a packet and as bytes: the first is for the reader, the second
// makes the comparison exact.
func quoteText(b []byte) string {
	if len(b) == 0 {
		return "none"
	}
	p, err := ParseQuote(b)
	if err != nil {
		return hex.EncodeToString(b)
	}
	return fmt.Sprintf("(%s) [%x]", p, b)
}

// diffLayer compares by position where both have the same fields, otherwise by presence.
func diffLayer(out *strings.Builder, want, got layer) {
	switch {
	case len(want.fields) == 0 && len(got.fields) == 0:
		return
	case len(got.fields) == 0:
		fmt.Fprintf(out, "%s: want one, got none\n", want.name)
		return
	case len(want.fields) == 0:
		fmt.Fprintf(out, "%s: want none, got one\n", want.name)
		return
	}
	for i := range max(len(want.fields), len(got.fields)) {
		name, w, g := "", "nothing", "nothing"
		if i < len(want.fields) {
			name, w = want.fields[i].name, want.fields[i].value
		}
		if i < len(got.fields) {
			name, g = got.fields[i].name, got.fields[i].value
		}
		if w != g {
			fmt.Fprintf(out, "%s.%s: want %s, got %s\n", want.name, name, orEmpty(w), orEmpty(g))
		}
	}
}

func orEmpty(s string) string {
	if s == "" {
		return "nothing"
	}
	return s
}

func diffTags(out *strings.Builder, want, got []VLAN) {
	for i := range max(len(want), len(got)) {
		w, g := "none", "none"
		if i < len(want) {
			w = want[i].String()
		}
		if i < len(got) {
			g = got[i].String()
		}
		if w != g {
			fmt.Fprintf(out, "vlan[%d]: want %s, got %s\n", i, w, g)
		}
	}
}

// diffBytes shows the lengths and a few bytes around the first difference.
func diffBytes(out *strings.Builder, name string, want, got []byte) {
	if bytes.Equal(want, got) {
		return
	}
	at := 0
	for at < len(want) && at < len(got) && want[at] == got[at] {
		at++
	}
	fmt.Fprintf(out, "%s: want %d bytes, got %d; first difference at byte %d: want %s, got %s\n",
		name, len(want), len(got), at, window(want, at), window(got, at))
}

// window is up to 16 bytes of b from at.
func window(b []byte, at int) string {
	if at >= len(b) {
		return "the end"
	}
	return fmt.Sprintf("%q", b[at:min(len(b), at+16)])
}
