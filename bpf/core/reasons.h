/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The reasons why a packet was not simply forwarded. Numbers are given once and never reused. The
 * word in metrics, events, output and documentation is the name after REASON_, in lower
 * case; docs/reference/reasons.md is generated from this file, each comment with it.
 */
#ifndef SHUNT_REASONS_H
#define SHUNT_REASONS_H

enum reason {
	REASON_NONE = 0,

	/* pass: the packet goes on to the host's stack, unchanged */
	REASON_NOT_IP = 1,           /* pass: neither IPv4 nor IPv6, and no ARP request for an address of shunt */
	REASON_OTHER_MAC = 2,        /* pass: the frame is for another station */
	REASON_MULTICAST = 3,        /* pass: multicast or broadcast that shunt does not answer */
	REASON_NOT_OURS = 4,         /* pass: the destination is neither a VIP nor a NAT source address, or no flow of shunt has it */
	REASON_NO_SERVICE = 5,       /* pass: the destination is a VIP, but no service has this port and protocol */
	REASON_VLAN = 6,             /* pass: the frame has VLAN tags, and no interface in native mode is that VLAN */
	REASON_FRAGMENT = 7,         /* pass: a fragment to an address of shunt that is neither TCP nor UDP, or may belong to the host itself */
	REASON_PROTOCOL = 8,         /* pass: to an address of shunt, but neither TCP, UDP nor ICMP */
	REASON_ICMP = 9,             /* pass: ICMP to an address of shunt that belongs to no flow, and that shunt does not answer */
	REASON_SOURCE_ROUTED = 10,   /* pass: an IPv6 routing header has segments left */
	REASON_NEIGHBOUR_OTHER = 11, /* pass: ARP, ND or other ICMPv6 to a group that is for the host, or for an address that shunt does not own now */
	REASON_MALFORMED = 12,       /* pass: IP headers are truncated or contradict themselves */
	REASON_DECAP_NO_TUNNEL = 20, /* pass: at a backend, neither IPIP nor GUE */
	REASON_DECAP_NOT_LOCAL = 21, /* pass: at a backend, a tunnel to an address that the interface does not have */
	REASON_DECAP_FRAGMENT = 22,  /* pass: at a backend, a fragment of a tunnel's packet; only whole packets are decapsulated */
	REASON_DECAP_GUE_UNKNOWN = 23, /* pass: at a backend, to the GUE port, but no whole data packet of GUE version 0 without flags and with IP inside */
	REASON_DECAP_UNREADABLE = 24, /* pass: at a backend, the inner packet has no whole IP header of its version */
	REASON_DECAP_NOT_VIP = 25,   /* pass: at a backend, the inner packet is for an address that is no VIP here */
	REASON_BEGUN_BEFORE = 26,    /* pass: TCP of a connection that shunt has not seen begin, to a service that leaves such connections to the host while shunt takes over from kube-proxy (shunt-kube run --moving) */

	/* drop: the packet ends here */
	REASON_MALFORMED_TRANSPORT = 32, /* drop: to an address of shunt, with TCP, UDP or ICMP headers that are truncated or contradict the packet */
	REASON_EXTENSION_LIMIT = 33,     /* drop: to an address of shunt, behind more than 8 IPv6 extension headers, or too deep in the packet */
	REASON_MAPPED_ADDRESS = 34,      /* drop: an IPv6 packet with an IPv4-mapped address */
	REASON_NO_BACKEND = 35,          /* drop: the service has no backend that takes new flows, and on_no_backend is drop, or no answer is possible */
	REASON_BACKEND_GONE = 36,        /* drop: the slot named a backend that has just been removed */
	REASON_NO_SOURCE = 37,           /* drop: no NAT source address reaches this backend */
	REASON_PORTS_EXHAUSTED = 38,     /* drop: no free source port towards the backend was found */
	REASON_TABLE_FULL = 39,          /* drop: the flow table refused a new entry */
	REASON_UNRESOLVED = 40,          /* drop: the next hop has no known MAC address */
	REASON_EGRESS_UNLISTED = 41,     /* drop: the route to the next hop leaves by an interface that shunt is not attached to */
	REASON_ICMP_LIMITED = 42,        /* drop: an ICMP error or a reset was due, but their rate limit was reached, or none may answer a later fragment (RFC 1812) or go to this address (RFC 1122) */
	REASON_CLAIM_RACE = 43,          /* drop: another CPU was making the same flow, and did not finish in time */
	REASON_INTERNAL = 44,            /* drop: a helper of the kernel failed that must succeed; this is a bug, please report it */
	REASON_TOO_BIG = 45,             /* drop: longer than the MTU of the next link (with the outer header, if it gets one), and without "don't fragment", or a later fragment */
	REASON_FRAGMENT_EARLY = 46,      /* drop: to an address of shunt, a later fragment that arrived before the first one, and the addresses alone do not decide its backend */
	REASON_FRAGMENT_TINY = 47,       /* drop: to an address of shunt, a first fragment without its whole TCP or UDP header, or a fragment that would overwrite the header (RFC 1858, 3128, 7112) */
	REASON_MARTIAN = 48,             /* drop: to a service, from an address that no host sends from: loopback, zero, a group or broadcast */
	REASON_LOOP = 49,                /* drop: to a service, from the VIP itself (with NAT and UDP also from another address of shunt), or back to the host that sent it */
	REASON_DENIED = 50,              /* drop: allow_from or deny_from of the service excludes the source address */
	REASON_SOURCE_RATE = 51,         /* drop: the source address has begun more flows than max_new_flows_per_source */
	REASON_DECAP_SENDER = 52,        /* drop: at a backend, a packet to a VIP from a tunnel whose sender is not permitted */
	REASON_DECAP_LENGTH = 53,        /* drop: at a backend, the inner packet is longer than the tunnel's packet, or shorter than its own header */
	REASON_DECAP_CONGESTED = 54,     /* drop: at a backend, the outer header is marked as congested, but the inner packet does not support ECN (RFC 6040) */
	REASON_SERVICE_FULL = 55,        /* drop: the service has max_flows flows */
	REASON_MODE_CHANGE = 56,         /* drop: to an address of shunt, while the attach mode of its interface changed */
	REASON_HOST_BACKEND = 58,        /* drop: the backend is this host, whose answers do not pass shunt: set attach: tc for the interface; a client on this host needs another backend */
	REASON_MARK_FORGED = 59,         /* drop: the frame came in with the mark by which shunt's programs at XDP and tc know each other's frames */
	REASON_TUNNELLED_UNKNOWN = 60,   /* drop: to a service with direct return between the nodes of a cluster of which this node has no part, or in an outer header from another node, but neither TCP, UDP nor an ICMP error of a flow */

	/* answer: we replied in the packet's place */
	REASON_ARP_ANSWERED = 64,  /* answer: an ARP request for an address that shunt owns */
	REASON_ND_ANSWERED = 65,   /* answer: a neighbour solicitation for an address that shunt owns */
	REASON_ECHO_ANSWERED = 66, /* answer: ping to a VIP */
	REASON_TTL_EXCEEDED = 67,  /* answer: the TTL or hop limit ended here; "time exceeded" was sent */
	REASON_TOO_BIG_ANSWERED = 68, /* answer: longer than the MTU of the next link (with the outer header, if it gets one); the size that fits was sent */
	REASON_REJECTED_RESET = 69,   /* answer: TCP to a service without a backend that takes new flows; a reset was sent */
	REASON_REJECTED_UNREACHABLE = 70, /* answer: UDP to a service without a backend that takes new flows; "port unreachable" was sent */

	/* note: something worth counting on the way; the packet goes on */
	REASON_FLOW_RECYCLED = 96,    /* note: an entry changed while it was read, and was treated as missing */
	REASON_HANDSHAKE_EVICTED = 97, /* note: the oldest unfinished handshake made room for a new one */
	REASON_FLOWS_FULL = 98,       /* note: no room to keep a flow as established; it keeps the handshake's timeout */
	REASON_PORT_TAKEN = 99,       /* note: no port was free, and the port of the flow that was closed longest, or of an unfinished handshake, was reused early */
	REASON_FIB_FALLBACK = 100,    /* note: the daemon is silent, so the kernel's routing table was asked */
	REASON_CHECKSUM_COMPLETED = 101, /* note: the sender had left the checksum to hardware that never saw the packet */
	REASON_ICMP_TRANSLATED = 102, /* note: an ICMP error was translated by the NAT */
	REASON_FLOW_MOVED = 103,      /* note: a flow's backend or service was removed or is down, so the packet began a new flow */
	REASON_NOT_REMEMBERED = 104,  /* note: no room or budget to remember a flow whose slot changes; it stays with the previous backend */
	REASON_FRAGMENT_FOLLOWED = 105, /* note: a later fragment was sent to where the first fragment of its datagram went */
	REASON_ICMP_TO_BACKEND = 106, /* note: an ICMP error to a VIP went to the backend that answers clients itself */
	REASON_DECAP_IPIP = 108,      /* note: at a backend, IPIP was decapsulated, and the packet went on to the host's stack, or to the services of a cluster's node */
	REASON_DECAP_GUE = 109,       /* note: at a backend, GUE was decapsulated, and the packet went on to the host's stack, or to the services of a cluster's node */
	REASON_DECAP_ECN = 110,       /* note: at a backend, the outer header's ECN mark was copied into the inner packet (RFC 6040) */
	REASON_CARRYING = 111,        /* note: an upgrade has not carried the flow over yet, so the program of the version before handled the packet */

	/* refused: the kernel dropped the frame after our verdict */
	REASON_TX_REFUSED = 112,       /* refused: sending back out of the same interface failed; on veth the peer needs GRO or XDP */
	REASON_REDIRECT_REFUSED = 113, /* refused: sending out of another interface failed; the frame is too long for its MTU, or the peer of a veth has neither GRO nor XDP */

	REASON_COUNT = 128,
};

#endif
