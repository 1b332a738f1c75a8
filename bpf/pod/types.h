/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types that the pod shortcuts' program and user space share. Go is generated from it (internal/pod/shortcut).
 */
#ifndef SHUNT_POD_TYPES_H
#define SHUNT_POD_TYPES_H

#include "../core/types.h"

enum pod_limit {
	PODS_MAX = 4096, /* addresses of pods on this machine */
	ASKING_MAX = 4096, /* connections that wait until user space has told conntrack */
	FAR_MAX = 4096, /* networks of pods of other machines */
	STEERS_MAX = 4096, /* steers: protocols with ports and networks, for a chosen interface */
	HOPS_MAX = 1024, /* hops of steers, present and earlier ones */
	PINS_MAX = 65536, /* connections of these hops */
};

/* How much of netfilter a connection must have gone through. */
enum pod_mode {
	POD_MODE_CHECKED = 0, /* conntrack has seen both directions, and translates nothing */
	POD_MODE_BYPASS =
		1, /* conntrack translates nothing, whether it knows the connection or not */
};

/* A pod by its address. Elements are recycled without a grace period, so each word has the key's check
 * in its upper half (pod_check()), and is read at once: a wrong check is a miss. */
struct pod {
	__u64 link; /* check << 32 | index of the pod's interface on the host */
	__u64 state; /* check << 32 | enum pod_left << 16 | MTU of that interface, bytes */
};

/* A network of pods of another machine: the first bits of an address. Packed, as the kernel's tries want it. */
struct pod_far_key {
	__u32 bits;
	__u32 address[4]; /* as struct addr, wire order */
};

/* The route to such a network. Elements of a trie never change in place, so a reader sees a whole element. */
struct pod_far {
	struct addr next_hop; /* a neighbour at the interface, of the network's family */
	__u32 ifindex; /* the interface towards it, by which its packets also come in */
	__u16 left; /* enum pod_left */
	__u16 mtu; /* of the route, bytes */
};

/*
 * The fate of a packet. The first is the shortcut; with all others the packet went on to the stack as
 * it came. Those from POD_UNJUDGED to POD_NOT_VETH are states of a pod, which user space sets.
 */
enum pod_left {
	POD_TAKEN = 0, /* given to the other pod, or sent to its machine */
	POD_NOT_IP = 1, /* ARP, a VLAN tag, or not sent to the host */
	POD_NOT_LOCAL = 2, /* the destination is no known pod, and in no known network */
	POD_SOURCE = 3, /* the source is neither a pod nor in a network behind the interface */
	POD_MALFORMED = 4, /* truncated headers, or IPv6 from or to ::ffff:a.b.c.d */
	POD_FRAGMENT = 5,
	POD_OPTIONS = 6, /* IPv4 options, IPv6 extension headers */
	POD_PROTOCOL = 7, /* neither TCP nor UDP */
	POD_TTL = 8, /* the host would answer "time exceeded" */
	POD_OVERSIZE = 9, /* a segment is longer than the destination's MTU */
	POD_MTU = 10, /* the two pods' interfaces have different MTUs */
	POD_HANDSHAKE = 11, /* checked: for conntrack the TCP connection is not established yet */
	POD_UNKNOWN = 12, /* checked: conntrack does not know the connection */
	POD_UNANSWERED = 13, /* checked: conntrack has seen no answer yet */
	POD_NAT = 14, /* conntrack translates the connection */

	POD_UNJUDGED = 15, /* nothing is known about the pod yet */
	POD_RULE = 16, /* a netfilter rule may do something with its packets */
	POD_RULES_UNREAD = 17, /* shunt cannot read or judge the rules */
	POD_QDISC = 18, /* its interface has a qdisc, which shapes or counts */
	POD_TC = 19, /* another project's program is at its interface */
	POD_BRIDGED = 20, /* its interface is a port of a bridge */
	POD_DOWN = 21, /* its interface has no carrier */
	POD_NOT_VETH = 22, /* its interface is no veth into another namespace */

	/* Of packets again. */
	POD_UNWATCHED = 23, /* user space has not judged the pods for a second */
	POD_UNPREPARED =
		24, /* conntrack would refuse the connection's packets after the shortcut */

	/* Of a network, as user space sets it. */
	POD_ROUTE = 25, /* the host's route there is not one plain next hop */

	/* Of packets that a steer would send, as it counts them. */
	POD_PINNED =
		26, /* the connection goes through the stack, because it began there, or its hop was removed */

	/* Of a steer, as user space sets it. */
	POD_NEXT_HOP = 27, /* its next hop does not answer */
	POD_LEFT_COUNT = 28,
};

/* The fates of the packets that came in by one interface, by enum pod_left. */
struct pod_counts {
	struct count of[POD_LEFT_COUNT];
};

/* A connection. Of sh_pd_asking: the end with the smaller address is the source. Of sh_pd_pins: as its first packet
 * has it. */
struct pod_flow {
	struct addr source, destination;
	__be16 source_port, destination_port;
	__u32 protocol; /* IPPROTO_ */
};

/* Packets to a port in a network, for a steer. Packed, as the kernel's tries want it. */
struct pod_steer_key {
	__u32 bits; /* 32, and the network's bits */
	__u8 protocol; /* IPPROTO_ */
	__u8 zero;
	__be16 port;
	__u32 address[4]; /* as struct addr, wire order */
};

/* The hop for packets to such a port. Elements of a trie never change in place. */
struct pod_steer {
	__u32 hop; /* for new connections */
	__u16 left; /* enum pod_left */
	__u16 number; /* number of the steer, for its counters */
};

/* A hop: an interface and a next hop, as long as both work. Hops never change: another hop gets another
 * number, so that a connection whose hop was removed does not come back to it. */
struct pod_hop {
	struct addr next_hop; /* a neighbour at the interface, of the network's family */
	__u32 ifindex;
	__u16 mtu; /* of the interface, bytes */
	__u16 number; /* of the steer */
};

/* The hop of a connection. */
struct pod_pin {
	__u64 seen_ns; /* CLOCK_MONOTONIC: when its last packet came, to within a second */
	__u32 hop;
	__u32 zero;
};

#endif
