package differential_test

import "github.com/shunt-lb/shunt/internal/kernel"

// reason tells why a packet was not simply forwarded: docs/reference/reasons.md.
type reason = kernel.Reason

// byName returns the reason with this name in the documents.
func byName(name string) reason {
	for _, r := range kernel.Reasons() {
		if r.String() == name {
			return r
		}
	}
	panic("there is no reason " + name)
}

// none is the reason of a packet that is simply forwarded.
const none = reason(0)

// The reasons that the configuration can reach with one packet after another and no time between
// them. A long run has to reach each.
var (
	notIP          = byName("not_ip")
	otherMAC       = byName("other_mac")
	multicast      = byName("multicast")
	notOurs        = byName("not_ours")
	noService      = byName("no_service")
	vlan           = byName("vlan")
	fragment       = byName("fragment")
	protocol       = byName("protocol")
	icmp           = byName("icmp")
	sourceRouted   = byName("source_routed")
	neighbourOther = byName("neighbour_other")
	malformed      = byName("malformed")

	malformedTransport = byName("malformed_transport")
	extensionLimit     = byName("extension_limit")
	mappedAddress      = byName("mapped_address")
	noBackend          = byName("no_backend")
	backendGone        = byName("backend_gone")
	noSource           = byName("no_source")
	portsExhausted     = byName("ports_exhausted")
	notResolved        = byName("unresolved")
	icmpLimited        = byName("icmp_limited")
	tooBig             = byName("too_big")
	fragmentEarly      = byName("fragment_early")
	fragmentTiny       = byName("fragment_tiny")
	martian            = byName("martian")
	loop               = byName("loop")
	denied             = byName("denied")
	sourceRate         = byName("source_rate")
	serviceFull        = byName("service_full")

	arpAnswered         = byName("arp_answered")
	ndAnswered          = byName("nd_answered")
	echoAnswered        = byName("echo_answered")
	ttlExceeded         = byName("ttl_exceeded")
	tooBigAnswered      = byName("too_big_answered")
	rejectedReset       = byName("rejected_reset")
	rejectedUnreachable = byName("rejected_unreachable")

	portTaken         = byName("port_taken")
	checksumCompleted = byName("checksum_completed")
	internal          = byName("internal") // an error about an open checksum that it cannot quote
	icmpTranslated    = byName("icmp_translated")
	fragmentFollowed  = byName("fragment_followed")
	icmpToBackend     = byName("icmp_to_backend")
	flowMoved         = byName("flow_moved")
)

var reachable = []reason{
	notIP, otherMAC, multicast, notOurs, noService, vlan, fragment,
	protocol, icmp, sourceRouted, neighbourOther, malformed, malformedTransport, extensionLimit,
	mappedAddress, noBackend, backendGone, noSource, portsExhausted, notResolved, icmpLimited,
	tooBig, fragmentEarly, fragmentTiny, martian, loop, denied, sourceRate,
	serviceFull, arpAnswered, ndAnswered, echoAnswered, ttlExceeded, tooBigAnswered, rejectedReset,
	rejectedUnreachable, portTaken, checksumCompleted, icmpTranslated, fragmentFollowed, icmpToBackend, flowMoved,
}
