/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The mark of frames that XDP has balanced and cannot send: they leave by an interface at tc, such
 * as a bridge, which takes no frames from XDP. They go up, and sh_deliver, at the tc ingress of the
 * interface where they came in, sends them.
 *
 *   frame ─► sh_xdp: rewrites, marks ─► XDP_PASS ─► sk_buff, GRO ─► sh_deliver ─► bridge, veth, pod
 *
 * The mark stands in the place of the Ethernet source address, which means nothing until the frame
 * leaves. So it needs no driver's help (some do not pass on metadata in front of a frame), it is the
 * same for all frames of a flow, which GRO compares, and it is complete: the destination is already
 * the next hop's. The stack takes such a frame for another station's: without sh_deliver it is lost.
 *
 * Invariant: no marked frame is from outside. sh_xdp drops frames that come in with a mark, and
 * sh_deliver is attached only while sh_xdp is.
 */
#ifndef SHUNT_MARK_H
#define SHUNT_MARK_H

#include <linux/if_ether.h>

#include "packet.h"
#include "config.h"

/* A locally administered address (IEEE 802, 8.2), in wire order: its first 28 bits are 06:73:68:7.
 * In halves, because an Ethernet source address is aligned to 2 bytes only. */
#define MARK_FIRST bpf_htons(0x0673)
#define MARK_SECOND bpf_htons(0x6870)
#define MARK_SECOND_MASK bpf_htons(0xfff0)
#define MARK_INDEX_HIGH bpf_htons(0x0003) /* bits 8 and 9 of the index */
#define MARK_TCP bpf_htons(0x0004) /* the checksum of TCP at l4_offset is finished */
#define MARK_UDP bpf_htons(0x0008) /* the checksum of UDP at l4_offset is finished */

_Static_assert(INDEX_MAX == 1 << 10, "a mark has ten bits for the interface");

struct mark {
	__be16 first; /* MARK_FIRST */
	__be16 second; /* MARK_SECOND, MARK_INDEX_HIGH, MARK_TCP and MARK_UDP */
	__u8 index_low;
	__u8 l4_offset; /* with MARK_TCP or MARK_UDP: from the start of the frame */
};

static __always_inline struct mark *mark_of(struct ethhdr *eth)
{
	return (struct mark *)eth->h_source;
}

/* Whether an address begins as a mark does. */
static __always_inline int mark_is_there(const struct mark *mark)
{
	return mark->first == MARK_FIRST && (mark->second & MARK_SECOND_MASK) == MARK_SECOND;
}

/* Whether a frame that would go up has the mark, although we have not marked it. */
static __always_inline int mark_is_forged(struct frame_ctx *ctx)
{
	struct ethhdr *eth = ctx_data(ctx);

	return (void *)(eth + 1) <= ctx_data_end(ctx) && mark_is_there(mark_of(eth));
}

static __always_inline int interface_is_tc(__u32 index)
{
	return index >= INTERFACE_MAX || (tc_interfaces >> index & 1);
}

static __always_inline __u32 mark_index(const struct mark *mark)
{
	return (__u32)bpf_ntohs(mark->second & MARK_INDEX_HIGH) << 8 | mark->index_low;
}

/* Marks a frame for p->egress. Returns 0, or -1. */
static __always_inline int mark_put(struct frame_ctx *ctx, const struct packet *p)
{
	struct ethhdr *eth = ctx_data(ctx);
	struct mark mark = { .first = MARK_FIRST,
			     .second = MARK_SECOND | (bpf_htons(p->egress >> 8) & MARK_INDEX_HIGH),
			     .index_low = p->egress };

	if ((void *)(eth + 1) > ctx_data_end(ctx))
		return -1;
	if (p->csum_finished) {
		mark.second |= p->key.protocol == IPPROTO_TCP ? MARK_TCP : MARK_UDP;
		mark.l4_offset = p->l4_offset;
	}
	__builtin_memcpy(eth->h_source, &mark, sizeof(mark));
	return 0;
}

#endif
