/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The inner header: is it for a VIP, may its sender send it, and which ECN mark does it take
 * from the outer header. As soon as the destination is known to be a VIP the packet is ours,
 * and a fault in it is a reason to drop it.
 */
#ifndef SHUNT_DECAP_INNER_H
#define SHUNT_DECAP_INNER_H

#include "../csum.h"
#include "tunnel.h"

/* RFC 3168, 5 */
#define ECN_NOT_ECT 0
#define ECN_ECT1 1
#define ECN_ECT0 2
#define ECN_CE 3

static __always_inline int sender_is_permitted(const struct tunnel *t)
{
	struct sender_key key = { .prefix_length = 128 };

	__builtin_memcpy(key.address, &t->outer.key.source, sizeof(key.address));
	return bpf_map_lookup_elem(&sh_dc_senders, &key) != 0;
}

/*
 * The ECN field of a packet that leaves its tunnel (RFC 6040, figure 4), or -1 where the
 * packet has to be dropped: a router marked it instead of dropping it, and the
 * packet's own ends would not understand the mark.
 */
static __always_inline int ecn_combine(__u8 outer, __u8 inner)
{
	if (outer == ECN_CE)
		return inner == ECN_NOT_ECT ? -1 : ECN_CE;
	if (outer == ECN_ECT1 && inner == ECN_ECT0)
		return ECN_ECT1;
	return inner;
}

static __always_inline void ecn_write4(struct iphdr *ip, __u8 ecn)
{
	__u8 *bytes = (__u8 *)ip;
	__u16 old = *(__u16 *)bytes;

	bytes[1] = (bytes[1] & ~3) | ecn;
	ip->check = csum_update(ip->check, *(__u16 *)bytes, old);
}

/* The checks that remain once the inner packet is known to be for a VIP. */
static __always_inline enum verdict inner_accept(struct tunnel *t, __u32 size, __u32 header_size,
						 int ecn)
{
	if (!sender_is_permitted(t))
		return drop(&t->outer, REASON_DECAP_SENDER);
	if (size < header_size || t->offset + size > t->end)
		return drop(&t->outer, REASON_DECAP_LENGTH);
	if (ecn < 0)
		return drop(&t->outer, REASON_DECAP_CONGESTED);
	return VERDICT_NEXT;
}

static __always_inline enum verdict inner4_parse(struct frame_ctx *ctx, struct tunnel *t)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct iphdr *ip = data + (t->offset & OFFSET_MASK);
	enum verdict verdict;
	struct addr destination;
	int ecn;

	if ((void *)(ip + 1) > data_end || t->offset + sizeof(*ip) > t->end || ip->version != 4 ||
	    ip->ihl < 5)
		return pass(&t->outer, REASON_DECAP_UNREADABLE);
	destination = addr_from_ip4(ip->daddr);
	if (!bpf_map_lookup_elem(&sh_dc_vips, &destination))
		return pass(&t->outer, REASON_DECAP_NOT_VIP);
	ecn = ecn_combine(t->ecn, ip->tos & 3);
	verdict = inner_accept(t, bpf_ntohs(ip->tot_len), ip->ihl * 4, ecn);
	if (verdict == VERDICT_NEXT && ecn != (ip->tos & 3)) {
		ecn_write4(ip, ecn);
		decap_count(REASON_DECAP_ECN, t->outer.frame_size);
	}
	return verdict;
}

static __always_inline enum verdict inner6_parse(struct frame_ctx *ctx, struct tunnel *t)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ipv6hdr *ip = data + (t->offset & OFFSET_MASK);
	struct addr source, destination;
	enum verdict verdict;
	__u8 *bytes = (__u8 *)ip;
	int ecn;

	if ((void *)(ip + 1) > data_end || t->offset + sizeof(*ip) > t->end || ip->version != 6)
		return pass(&t->outer, REASON_DECAP_UNREADABLE);
	destination = addr_from_ip6(&ip->daddr);
	if (addr_is_mapped(&destination) || !bpf_map_lookup_elem(&sh_dc_vips, &destination))
		return pass(&t->outer, REASON_DECAP_NOT_VIP);
	source = addr_from_ip6(&ip->saddr);
	if (addr_is_mapped(&source))
		return drop(&t->outer, REASON_MAPPED_ADDRESS);
	ecn = ecn_combine(t->ecn, bytes[1] >> 4 & 3);
	verdict = inner_accept(t, sizeof(*ip) + bpf_ntohs(ip->payload_len), sizeof(*ip), ecn);
	if (verdict == VERDICT_NEXT && ecn != (bytes[1] >> 4 & 3)) {
		bytes[1] = (bytes[1] & ~0x30) | ecn << 4;
		decap_count(REASON_DECAP_ECN, t->outer.frame_size);
	}
	return verdict;
}

#endif
