/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The packet of one run, and how a run ends.
 *
 *   parse → address → flow → (service → new flow) → rewrite → send
 *
 * Every stage returns an enum verdict. VERDICT_NEXT hands on; every other value is the
 * end of the run, and the stage that returns it has set packet->reason (or sends the packet).
 */
#ifndef SHUNT_PACKET_H
#define SHUNT_PACKET_H

#include <linux/bpf.h>
#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "reasons.h"
#include "types.h"

/*
 * A function that the verifier checks once, for any arguments that its types allow, and not
 * again on each path to a call of it: so paths add up and do not multiply. The verifier thinks that
 * its pointers may be null, so it begins with a check.
 */
#define __stage __attribute__((noinline))

enum verdict {
	VERDICT_NEXT = 0,
	VERDICT_PASS,
	VERDICT_DROP,
	VERDICT_ANSWER,    /* back to its sender: the frame holds a packet that shunt made */
	VERDICT_SEND_BACK, /* out of the interface it is at: XDP_TX */
	VERDICT_SEND_ON,   /* redirect to packet->egress */
	VERDICT_HOST, /* to this host's stack, rewritten, as if it came in by packet->egress */
	VERDICT_REFUSE, /* an ICMP error is due: packet->refusal says which */
	VERDICT_REJECT, /* no backend takes the packet: lb/reject.h answers or drops it */
	VERDICT_FRAGMENT, /* a fragment that the ordinary stages cannot judge: fragment.h */
	VERDICT_CARRY, /* unchanged to the program of the ABI before: carry.h */
	VERDICT_TAGGED, /* not parsed: the frame has a VLAN tag; packet->reason is not set */
	VERDICT_ROUTE, /* at tc: out of packet->egress, by the kernel's next hop */
};

enum family {
	FAMILY_NONE = 0,
	FAMILY_IP4 = 4,
	FAMILY_IP6 = 6,
};

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

#define L3_OFFSET ((__u32)sizeof(struct ethhdr))
#define L4_OFFSET_MAX 0x7ff /* a bound for the verifier; longer header chains are refused */

#define IP4_FRAGMENT_BITS 0x3fff /* RFC 791, 3.1: the offset, and the flag for more fragments */

enum fragment {
	FRAGMENT_NONE = 0,
	FRAGMENT_FIRST = 1,
	FRAGMENT_LATER = 2,
};

enum refusal {
	REFUSAL_TTL = 0, /* the TTL or hop limit ended at this host */
	REFUSAL_SIZE = 1, /* the packet is too long for the next hop; packet->mtu bytes fit */
	REFUSAL_NO_BACKEND = 2,
};

struct packet {
	struct flow_key key; /* the tuple as it arrived; ports are zero for ICMP */
	__u16 l4_offset; /* from the start of the frame */
	__u16 l4_size; /* transport header and payload, as the IP header says */
	__u8 family; /* enum family */
	__u8 ttl;
	__u8 tcp_flags;
	__u8 has_payload; /* 1: bytes beyond the TCP or UDP header */
	__u8 reason; /* enum reason */
	__u8 fragment; /* enum fragment */
	__u8 refusal; /* enum refusal, for VERDICT_REFUSE */
	__u8 csum_finished; /* 1: the sender left the checksum to hardware; it is complete now */
	__u32 egress; /* index in sh_interfaces, for VERDICT_SEND_ON */
	__u32 frame_size;
	__u32 mtu; /* for REFUSAL_SIZE: bytes of the longest IP packet that fits */
};

_Static_assert(REASON_COUNT <= 256, "packet.reason has eight bits");

static __always_inline enum verdict pass(struct packet *p, enum reason reason)
{
	p->reason = reason;
	return VERDICT_PASS;
}

static __always_inline enum verdict drop(struct packet *p, enum reason reason)
{
	p->reason = reason;
	return VERDICT_DROP;
}

/*
 * A MAC address as the low 48 bits of a word, loaded as a word and a half: clang moves six octets
 * one by one if it does not know that they are aligned. Native XDP needs no alignment, and the
 * verifier asks for no more than the machine does, for maps and frames alike.
 */
static __always_inline __u64 mac_load(const __u8 *mac)
{
	return *(const __u32 *)mac | (__u64) * (const __u16 *)(mac + 4) << 32;
}

/* The EtherType, by the word: struct ethhdr is packed, and clang would take its octets one by one. */
static __always_inline __be16 frame_protocol(const void *data)
{
	return *(const __be16 *)(data + offsetof(struct ethhdr, h_proto));
}

#endif
