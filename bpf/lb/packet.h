/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The work of the balancer's programs on a packet, which core/packet.h describes.
 */
#ifndef SHUNT_LB_PACKET_H
#define SHUNT_LB_PACKET_H

#include "../core/packet.h"
#include "types.h"

/* A function that is not inlined, and that some programs with its header do not call. */
#define __apart __attribute__((noinline, unused))

/* RFC 792; <linux/icmp.h> draws in the C library's socket headers. */
#define ICMP_ECHO 8

#define IP4_OFFSET_BITS 0x1fff /* RFC 791, 3.1 */
#define IP6_OFFSET_BITS 0xfff8 /* RFC 8200, 4.5 */

static __always_inline int verdict_sends(enum verdict verdict)
{
	return verdict == VERDICT_SEND_BACK || verdict == VERDICT_SEND_ON ||
	       verdict == VERDICT_HOST;
}

static __always_inline enum verdict refuse(struct packet *p, enum refusal refusal)
{
	p->refusal = refusal;
	return VERDICT_REFUSE;
}

/* Answered in place: the packet in the frame is now ours, going back where it came from. */
static __always_inline enum verdict answer(struct packet *p, enum reason reason)
{
	p->reason = reason;
	return VERDICT_ANSWER;
}

static __always_inline void mac_store(__u8 *mac, __u64 word)
{
	*(__u32 *)mac = word;
	*(__u16 *)(mac + 4) = word >> 32;
}

/* In the place of an Ethernet source, from sh_xdp to sh_tunnelled: the checksum of the packet, which its sender
 * had left to hardware, is whole now. A group's address, which no frame comes from (IEEE 802, 8.2.2). */
#define MAC_CSUM_FINISHED 1ULL

/* Whether an EtherType is that of a VLAN tag. */
static __always_inline int is_tag(__be16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD);
}

static __always_inline void frame_protocol_set(void *data, __be16 protocol)
{
	*(__be16 *)(data + offsetof(struct ethhdr, h_proto)) = protocol;
}

#endif
