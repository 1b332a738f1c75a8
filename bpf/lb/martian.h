/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Sources that a packet to a service cannot have: addresses that no host sends from (martians,
 * RFC 1812, 5.3.7), and addresses of our own, where the packet is forged or has come back to us.
 *
 * With NAT only first packets are checked, because no flow can have such a source. Direct return
 * keeps no flows, so there all are. With UDP a source of ours is refused too, for two services that
 * answer everything would answer each other for ever. TCP ends that by itself, with a reset.
 */
#ifndef SHUNT_MARTIAN_H
#define SHUNT_MARTIAN_H

#include "flow.h"

/* This network and loopback (RFC 1122, 3.2.1.3), groups and the broadcast address; RFC 4291,
 * 2.5.2, 2.5.3 and 2.7. The rest of 240/4 is in use in private networks, and Linux takes it. */
static __always_inline int source_is_martian(const struct packet *p)
{
	const __u64 loopback6 = 1ULL << 56; /* ::1 in wire order */
	const struct addr *a = &p->key.source;
	__u32 ip4 = addr_to_ip4(a);
	__u8 first = ip4; /* wire order: the lowest byte is the first octet */

	if (p->family == FAMILY_IP6)
		return (__u8)a->high == 0xff || (!a->high && (!a->low || a->low == loopback6));
	/* Most are in 1.0.0.0 to 126.255.255.255 or in 128.0.0.0 to 223.255.255.255. */
	if ((__u8)(first - 1) < 126 || (__u8)(first - 128) < 96)
		return 0;
	return first < 240 || ip4 == 0xffffffff;
}

/* Judges the source of a packet to a VIP by itself. VERDICT_NEXT: a host may have it. */
static __always_inline enum verdict source_check(struct packet *p)
{
	if (source_is_martian(p))
		return drop(p, REASON_MARTIAN);
	if (addr_equal(&p->key.source, &p->key.destination))
		return drop(p, REASON_LOOP);
	return VERDICT_NEXT;
}

/*
 * Judges it by our own addresses, too, for a packet that would begin a flow. An address that the
 * host itself has may be its own client's, whose packets a router brings back to us.
 */
__stage enum verdict source_check_whole(struct packet *p)
{
	struct addr source;
	__u32 flags;

	if (!p)
		return VERDICT_DROP;
	if (source_check(p) != VERDICT_NEXT)
		return VERDICT_DROP;
	source = p->key.source;
	flags = address_flags(&source);
	if ((flags & (ADDRESS_VIP | ADDRESS_SOURCE)) && !(flags & ADDRESS_HOST_OWN))
		return drop(p, REASON_LOOP);
	return VERDICT_NEXT;
}

/* Judges the source of a packet to a service with direct return. Clients' addresses seldom have
 * the bit of one of ours, and cost no look-up without. */
static __always_inline enum verdict source_check_direct(struct packet *p,
							const struct settings *settings)
{
	if (p->key.protocol == IPPROTO_UDP && addr_may_be_own(settings, &p->key.source))
		return source_check_whole(p);
	return source_check(p);
}

/* Whether the frame goes to the host that this hop leads to. */
static __always_inline int hop_is_taken(struct frame_ctx *ctx, __u64 hop)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data;
	__u64 destination = 0;

	if ((void *)(eth + 1) > data_end)
		return 0;
	__builtin_memcpy(&destination, eth->h_dest, ETH_ALEN);
	return destination == (hop & HOP_MAC_MASK);
}

/* Whether the frame was sent by the host that this hop leads to. With dsr-l2 no TTL ends a loop
 * between balancers, and a backend that has the VIP never sends to it. */
static __always_inline int hop_leads_back(struct frame_ctx *ctx, __u64 hop)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data;
	__u64 source = 0;

	if ((void *)(eth + 1) > data_end)
		return 0;
	__builtin_memcpy(&source, eth->h_source, ETH_ALEN);
	return source == (hop & HOP_MAC_MASK);
}

#endif
