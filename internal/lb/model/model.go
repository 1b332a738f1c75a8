// Package model holds the configuration of the balancer as plain values: services, frontends,
// backends, and the configuration they come from. It imports nothing of ours, and
// every other package may use it. Its functions return only facts that follow from a value alone: its
// name, whether it equals another value, how the two differ.
package model

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/shunt-lb/shunt/internal/value"
)

// Protocol is an IP protocol number (IANA "Assigned Internet Protocol Numbers").
type Protocol uint8

// The protocols a service can have.
const (
	TCP Protocol = 6
	UDP Protocol = 17
)

// Fragments is added to a protocol in a frontend that is the data plane's own, not a client's: it names the
// service that gets the protocol's fragments without ports. Its port is 0.
const Fragments Protocol = 0x80

// Inside is added to a protocol in a frontend that only clients on this host use, at their sockets: all other
// clients use the frontend without it, of a service with Policy.Inside. If that service has Policy.Tunnelled, clients behind interfaces
// at tc use it, too.
const Inside Protocol = 0x40

// Tunnelled is added to a protocol in a frontend of the second level of direct return between nodes: only packets that came out of a
// tunnel use it, and packets of a service with Policy.Tunnelled that has chosen this machine. The unspecified address stands for any
// address. Such a frontend makes no address this machine's.
const Tunnelled Protocol = 0x20

// String returns the word used in configuration, output and metrics.
func (p Protocol) String() string {
	if p&Fragments != 0 {
		return (p &^ Fragments).String() + "-fragments"
	}
	if p&Inside != 0 {
		return (p &^ Inside).String() + "-inside"
	}
	if p&Tunnelled != 0 {
		return (p &^ Tunnelled).String() + "-tunnelled"
	}
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return "protocol-" + strconv.Itoa(int(p))
}

// Forwarding says how a packet reaches its backend. The value is the word used in
// configuration and output.
type Forwarding string

// The forwarding modes.
const (
	// ForwardingNAT rewrites source and destination: works from anywhere.
	ForwardingNAT Forwarding = "nat"
	// ForwardingNATDestination rewrites the destination only: the balancer must be
	// the backends' route back to the client.
	ForwardingNATDestination Forwarding = "nat-destination"
	// ForwardingDSRL2 sends the client's packet unchanged to the backend's MAC address: the backend is on the
	// same link and has the VIP itself.
	ForwardingDSRL2 Forwarding = "dsr-l2"
	// ForwardingDSRIPIP wraps the packet in another IP header (RFC 2003, 2473, 4213).
	ForwardingDSRIPIP Forwarding = "dsr-ipip"
	// ForwardingDSRGUE wraps it in UDP (Generic UDP Encapsulation, version 0).
	ForwardingDSRGUE Forwarding = "dsr-gue"
)

// Direct reports whether backends answer the client themselves (direct server return).
func (f Forwarding) Direct() bool {
	return f == ForwardingDSRL2 || f.Encapsulates()
}

// Encapsulates reports whether packets reach the backend inside others.
func (f Forwarding) Encapsulates() bool {
	return f == ForwardingDSRIPIP || f == ForwardingDSRGUE
}

// Tracking says which flows of a direct-return service are remembered. The value is the
// word used in configuration and output.
type Tracking string

// The tracking modes.
const (
	// TrackingAuto remembers flows only where the table has changed lately.
	TrackingAuto Tracking = "auto"
	// TrackingAlways remembers every flow from its first packet.
	TrackingAlways Tracking = "always"
	// TrackingNone remembers nothing: a flow goes where its slot points now.
	TrackingNone Tracking = "none"
)

// Announce says how the network learns where a VIP is.
type Announce string

// The announcement modes.
const (
	// AnnounceL2 answers ARP and neighbour solicitations for the VIP.
	AnnounceL2 Announce = "l2"
	// AnnounceStandby does so while no other host answers, because another host is to answer. No file can set it.
	AnnounceStandby Announce = "standby"
	// AnnounceNone leaves the VIP to routing.
	AnnounceNone Announce = "none"
)

// Answers reports whether this host may answer ARP and neighbour solicitations for the VIP.
func (a Announce) Answers() bool { return a == AnnounceL2 || a == AnnounceStandby }

// Attach is the hook and mode wanted on an interface.
type Attach string

// The attach modes.
const (
	AttachAuto    Attach = "auto"
	AttachNative  Attach = "native"
	AttachGeneric Attach = "generic"
	AttachTC      Attach = "tc"
)

// Frontend is a destination of clients' packets: one address, ports, one protocol.
type Frontend struct {
	Address  netip.Addr // unmapped: an IPv4 address is 4 bytes
	Ports    value.PortRange
	Protocol Protocol
}

// Configured reports whether clients talk to the frontend.
func (f Frontend) Configured() bool { return f.Protocol&Fragments == 0 }

// Tunnelled reports whether only packets of services with Policy.Tunnelled use the frontend. Its address is then no
// address of this machine's: it is not announced, and nothing else has to know it.
func (f Frontend) Tunnelled() bool { return f.Protocol&Tunnelled != 0 }

// Covers reports whether the frontend contains all of another one.
func (f Frontend) Covers(g Frontend) bool {
	return f.Address == g.Address && f.Protocol == g.Protocol && f.Ports.First <= g.Ports.First && g.Ports.Last <= f.Ports.Last
}

// String returns "tcp 192.0.2.10:80" or "udp [2001:db8::10]:8000-8099".
func (f Frontend) String() string {
	if f.Address.Is6() {
		return fmt.Sprintf("%s [%s]:%s", f.Protocol, f.Address, f.Ports)
	}
	return fmt.Sprintf("%s %s:%s", f.Protocol, f.Address, f.Ports)
}

// Service is a set of frontends that share backends and a table.
type Service struct {
	Name       string // unique, 1 to 63 characters
	Pool       string // the pool of its backends and their health; "": they are its own
	Source     string // the source that declared it; package state sets it, not the source
	Frontends  []Frontend
	Forwarding Forwarding
	Announce   Announce
	TableSize  uint32 // Maglev table size in slots; 0 lets the backend count decide
	// Tracking matters for direct return and for affinity.
	Tracking Tracking
	// AffinityTimeout is how long a client stays with its backend after its last packet, even if the table
	// changes meanwhile; 0: no affinity, flows are placed one by one.
	AffinityTimeout time.Duration
	// ClosesDown ends the flows of a backend when it goes down, as if it were removed; otherwise established
	// flows stay.
	ClosesDown bool
	Policy     Policy
	// AllowFrom and DenyFrom say which sources may use the service, masked and unmapped. The longest prefix
	// that contains a source decides; a source in no prefix may use the service if AllowFrom is empty.
	AllowFrom, DenyFrom []netip.Prefix
	Backends            []Backend
	// Names stand for more backends. A look-up of the names adds these to Backends.
	Names  []BackendName
	Health Health
}

// Identity returns the identity of a backend within the service, which no two may share: address and port, or with
// direct return, which ignores a backend's port, the address.
func (s *Service) Identity(b BackendAddress) BackendAddress {
	if s.Forwarding.Direct() {
		b.Port = 0
	}
	return b
}

// NamesServe reports whether the names' addresses of a family can be backends of the service: with direct return,
// addresses of both families can.
func (s *Service) NamesServe(is4 bool) bool {
	return s.Forwarding.Direct() || slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return f.Address.Is4() == is4 })
}

// Policy has the properties of a service beyond plain balancing. The zero value is plain balancing.
type Policy struct {
	// Rejects answers at once if no backend takes new flows, with a reset or an ICMP error.
	Rejects bool
	// HashAddresses makes the two addresses alone decide a flow's slot, as affinity does with the client's
	// address: fragments without ports then have the slot of their packet.
	HashAddresses bool
	// Filters reports whether only some sources may use the service. The reconciler sets it, from
	// Service.AllowFrom and DenyFrom and for each family separately.
	Filters bool
	// Inside reports whether clients on this host use another service at frontends of this one: the service
	// that has them with the protocol Inside.
	Inside bool
	// Tunnelled reports whether the backends are nodes that have a service of their own for the packet: the one that has its destination
	// with the protocol Tunnelled. If the chosen backend is this machine, the packet goes on with this machine's. It needs forwarding that
	// encapsulates.
	Tunnelled bool
	// Draws places a client of affinity that is not, or no longer, remembered by its flow: after its time it
	// may get another backend. Otherwise its address decides, and it gets the same backend. It needs
	// TrackingAlways.
	Draws bool
	// PassesBegun leaves TCP connections whose beginning shunt has not seen to the host: the host's connection
	// tracking knows them from before shunt had the service. It matters for forwarding that translates.
	PassesBegun bool
	// FlowsMax bounds the service's tracked flows; 0: no bound of its own.
	FlowsMax uint32
	// SourceRate bounds the new flows of one source address per second; 0: no bound.
	SourceRate uint32
	// TCPMSS bounds TCP's segments, in bytes of payload; 0: no bound, the two sides agree on the size.
	TCPMSS uint16
}

// Tracked reports whether the service's slots go through transitions when they change. If not, flows have
// entries of their own (NAT) or are not to be kept.
func (s Service) Tracked() bool {
	return s.Tracking != TrackingNone && (s.Forwarding.Direct() || s.AffinityTimeout > 0)
}

// Interface is a network interface shunt attaches to.
type Interface struct {
	Name   string // or a pattern
	Attach Attach
}

// Timeouts end idle flows. Each is counted from the last packet in either direction.
type Timeouts struct {
	TCPEstablished time.Duration // RFC 5382 REQ-5: at least 2 h 4 min
	TCPHandshake   time.Duration
	TCPClosing     time.Duration // after a reset
	TCPHalfClosed  time.Duration // after a FIN of one side; at most TCPEstablished; 0: 4 min
	UDP            time.Duration // RFC 4787 REQ-5: 5 min recommended
	// Settle is the time for which flows are remembered after a change of their slot: a flow that is idle for
	// longer after the change may be lost.
	Settle time.Duration
}

// Limits size the maps. They are fixed when the data plane is first loaded.
type Limits struct {
	Flows    uint32 // established flows tracked at once
	Services uint32
	Backends uint32
	Slots    uint32 // Maglev slots of all services together, rebuilds included
	// Remembered flows of direct return and clients of affinity, at once.
	Remembered uint32
	Filters    uint32 // prefixes of Service.AllowFrom and DenyFrom, of all services together
}

// DefaultGUEPort is IANA's for GUE (Service Name and Transport Protocol Port Number Registry).
const DefaultGUEPort = 6080

// Encapsulation configures the outer headers of dsr-ipip and dsr-gue.
type Encapsulation struct {
	// Sources4 and Sources6 are the outer source addresses: one address, or a prefix whose host bits vary
	// with the flow. Zero: the address of the interface towards the backend.
	Sources4, Sources6 netip.Prefix
	GUEPort            uint16 // UDP destination port, host byte order
}

// SNAT says where source addresses and ports of full NAT come from.
type SNAT struct {
	Addresses []netip.Addr    // empty: the addresses of the interface towards the backend
	Ports     value.PortRange // zero value: chosen outside net.ipv4.ip_local_port_range
}

// Config is the content of a configuration file: this machine, and services.
type Config struct {
	Node
	Services []Service
}

// Node is the description of this machine, for services of all sources. One source declares it.
type Node struct {
	Interfaces    []Interface
	Timeouts      Timeouts
	Limits        Limits
	SNAT          SNAT
	Encapsulation Encapsulation
	Decapsulation Decapsulation
	Sockets       Sockets
	StampProbes   bool // the programs stamp probes of `shunt diag ping`
}

// Decapsulation lists the senders of tunnels for this machine's own servers, if it is itself a backend of
// services with direct return.
type Decapsulation struct {
	From []netip.Prefix // outer sources; empty: it decapsulates nothing
	// Tunnelled gives decapsulated packets to services with frontends of the protocol Tunnelled, not to the host's stack. Then From
	// lists the other nodes of a cluster.
	Tunnelled bool
	// Nodes are inner destinations, in addition to the addresses of those frontends: addresses of all nodes, at
	// whose ports a frontend with the unspecified address may be. They matter only with Tunnelled.
	Nodes []netip.Addr
}

// Equal reports whether two decapsulations are equal. The order of their lists matters.
func (d Decapsulation) Equal(o Decapsulation) bool {
	return d.Tunnelled == o.Tunnelled && slices.Equal(d.From, o.From) && slices.Equal(d.Nodes, o.Nodes)
}

// Sockets says which programs of this machine reach services at their sockets.
type Sockets struct {
	Cgroup string // path of a folder in a cgroup2 file system; "": none
}

// Sizes of maps that no field of Limits sets directly. The data plane sizes its maps by these, and sources
// refuse a configuration that does not fit.
const (
	// AddressesMax is for VIPs and source addresses of NAT together.
	AddressesMax = 16384
	// FrontendsMin frontends with an exact port always fit, and FrontendsPerService for each of Limits.Services
	// if that is more.
	FrontendsMin        = 16384
	FrontendsPerService = 16
	// RangePiecesMax is for ranges of ports and value.AnyPort, each cut into aligned blocks whose
	// size is a power of two: a range is at most 30 of them (2*(16-1)).
	RangePiecesMax = 30 * 1024
	// SourcesMax is for source addresses of NAT.
	SourcesMax = 1024
)
