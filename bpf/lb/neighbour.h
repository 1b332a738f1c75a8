/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ARP and neighbour solicitation for the addresses we own, answered in place.
 *
 * We answer for a VIP or NAT source while owned_until lies ahead, unless the host has the
 * address itself: then its kernel answers. Answers to probes for a duplicate defend an
 * address (RFC 5227, 2.1.1 and RFC 4862, 5.4.3). All other messages pass.
 */
#ifndef SHUNT_NEIGHBOUR_H
#define SHUNT_NEIGHBOUR_H

#include "csum_whole.h"
#include "lookup.h"
#include "own.h"

#define ND_SOLICITATION 135
#define ND_ADVERTISEMENT 136
#define ND_HOP_LIMIT 255 /* RFC 4861, 7.1.1: a routed packet has less */
#define ND_OPTIONS_MAX 8
#define ND_SOURCE_MAC 1
#define ND_TARGET_MAC 2
#define ND_SOLICITED 0x40
#define ND_OVERRIDE 0x20

static __always_inline int address_is_owned(const struct addr *a)
{
	struct address *address = bpf_map_lookup_elem(&sh_addresses, a);
	__u64 until = address ? *(volatile __u64 *)&address->owned_until : 0;
	__u32 flags = address_flags(a); /* read after until, so that a recycled element shows */

	return flags && !(flags & ADDRESS_HOST_OWN) && until > bpf_jiffies64();
}

static __always_inline struct interface *interface_own(const struct frame_ctx *ctx)
{
	__u32 index = own_index(ctx);

	return bpf_map_lookup_elem(&sh_interfaces, &index);
}

/* --- ARP, RFC 826 --------------------------------------------------------------- */

#define ARP_ETHERNET 1
#define ARP_REQUEST 1
#define ARP_REPLY 2

struct arp_ip4 {
	__be16 hardware;
	__be16 protocol;
	__u8 hardware_size;
	__u8 protocol_size;
	__be16 operation;
	__u8 sender_mac[ETH_ALEN];
	__u8 sender_ip[4];
	__u8 target_mac[ETH_ALEN];
	__u8 target_ip[4];
};

__stage enum verdict arp_answer(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct interface *own = interface_own(ctx);
	struct arp_ip4 *arp = data + L3_OFFSET;
	struct ethhdr *eth = data;
	__be32 sender, target;
	struct addr address;

	if (!p)
		return VERDICT_DROP;
	if ((void *)(arp + 1) > data_end || arp->hardware != bpf_htons(ARP_ETHERNET) ||
	    arp->protocol != bpf_htons(ETH_P_IP) || arp->hardware_size != ETH_ALEN ||
	    arp->protocol_size != 4 || arp->operation != bpf_htons(ARP_REQUEST))
		return pass(p, REASON_NEIGHBOUR_OTHER);
	__builtin_memcpy(&sender, arp->sender_ip, sizeof(sender));
	__builtin_memcpy(&target, arp->target_ip, sizeof(target));
	address = addr_from_ip4(target);
	/* The host's own probe looks for other hosts that answer (RFC 5227, 2.1.1). */
	if (ctx_is_outbound() && !sender)
		return pass(p, REASON_NEIGHBOUR_OTHER);
	/* An announcement is no request, and a station without a MAC of its own makes none. */
	if (sender == target || (arp->sender_mac[0] & 1) || !address_is_owned(&address))
		return pass(p, REASON_NEIGHBOUR_OTHER);
	if (!own)
		return drop(p, REASON_INTERNAL);

	arp->operation = bpf_htons(ARP_REPLY);
	__builtin_memcpy(arp->target_mac, arp->sender_mac, ETH_ALEN);
	__builtin_memcpy(arp->target_ip, &sender, sizeof(sender));
	__builtin_memcpy(eth->h_dest, arp->sender_mac, ETH_ALEN);
	__builtin_memcpy(arp->sender_mac, own->mac, ETH_ALEN);
	__builtin_memcpy(arp->sender_ip, &target, sizeof(target));
	__builtin_memcpy(eth->h_source, own->mac, ETH_ALEN);
	return answer(p, REASON_ARP_ANSWERED);
}

/* --- neighbour discovery, RFC 4861 ---------------------------------------------- */

struct nd_message {
	__u8 type;
	__u8 code;
	__sum16 checksum;
	__u8 flags; /* of an advertisement */
	__u8 reserved[3];
	struct addr target;
};

struct nd_advertisement {
	struct nd_message message;
	__u8 option_type;
	__u8 option_size; /* in units of 8 bytes */
	__u8 mac[ETH_ALEN];
};

/* RFC 4861, 7.1.1: no option is empty, and a probe for duplicates has no MAC in it. */
static __noinline int nd_options_are_valid(struct frame_ctx *ctx, struct packet *p, int is_probe)
{
	__u32 offset = p->l4_offset + sizeof(struct nd_message), end = p->l4_offset + p->l4_size;

	for (int i = 0; i < ND_OPTIONS_MAX && offset < end; i++) {
		__u8 option[2];

		if (ctx_load(ctx, offset, option, sizeof(option)))
			return 0;
		if (option[1] == 0 || (is_probe && option[0] == ND_SOURCE_MAC))
			return 0;
		offset += option[1] * 8;
	}
	return offset == end;
}

/* ff02::1:ffXX:XXXX of an address, RFC 4291, 2.7.1 */
static __always_inline int is_solicited_node(const struct addr *group, const struct addr *a)
{
	const __u64 bits24 = 0xffffff;
	__u64 low = bpf_be64_to_cpu(group->low);

	return group->high == bpf_cpu_to_be64(0xff02000000000000ULL) && low >> 24 == 0x1ff &&
	       (low & bits24) == (bpf_be64_to_cpu(a->low) & bits24);
}

/* Reads the solicitation and judges it. 1: it asks for the address in *target, which is ours. */
static __noinline int nd_solicits_us(struct frame_ctx *ctx, struct packet *p, struct addr *target)
{
	int is_probe = !p->key.source.high && !p->key.source.low;
	struct nd_message message;
	__u64 sum = 0;

	if (p->l4_offset != L3_OFFSET + sizeof(struct ipv6hdr) || p->ttl != ND_HOP_LIMIT ||
	    p->l4_size < sizeof(message) || ctx_load(ctx, p->l4_offset, &message, sizeof(message)))
		return 0;
	if (ctx_is_outbound() && is_probe) /* the host's own probe, as with ARP */
		return 0;
	if (message.type != ND_SOLICITATION || message.code != 0 ||
	    (__u8)p->key.source.high == 0xff || addr_is_mapped(&message.target) ||
	    !address_is_owned(&message.target))
		return 0;
	if (is_probe && !is_solicited_node(&p->key.destination, &message.target))
		return 0;
	if (!nd_options_are_valid(ctx, p, is_probe) ||
	    csum_whole(ctx, p->l4_offset, p->l4_size, &sum))
		return 0;
	sum += pseudo_sum(&p->key.source, &p->key.destination, p->l4_size, IPPROTO_ICMPV6);
	*target = message.target;
	return csum_fold(sum) == 0xffff;
}

/*
 * Gives the frame exactly this size; its contents are no longer needed. It grows at its
 * head, where every driver leaves room; not all do at the tail.
 */
static __always_inline int frame_resize(struct frame_ctx *ctx, const struct packet *p, __u32 size)
{
	__s32 change = size - p->frame_size;

	if (change > 0)
		return ctx_head_grow(ctx, change);
	return change < 0 ? ctx_tail_cut(ctx, -change) : 0;
}

/* Makes the frame an advertisement of target, to the station with this MAC. */
static __noinline int nd_advertise(struct frame_ctx *ctx, struct packet *p,
				   const struct addr *target, const struct interface *own)
{
	const __u32 size = sizeof(struct nd_advertisement);
	int is_probe = !p->key.source.high && !p->key.source.low;
	struct nd_advertisement nd = { .message = { .type = ND_ADVERTISEMENT, .target = *target },
				       .option_type = ND_TARGET_MAC,
				       .option_size = 1 };
	struct ipv6hdr ip = { .version = 6,
			      .nexthdr = IPPROTO_ICMPV6,
			      .hop_limit = ND_HOP_LIMIT,
			      .payload_len = bpf_htons(size) };
	struct addr destination = p->key.source;
	struct ethhdr eth;
	__u64 sum;

	if (ctx_load(ctx, 0, &eth, sizeof(eth)))
		return -1;
	__builtin_memcpy(eth.h_dest, eth.h_source, ETH_ALEN);
	__builtin_memcpy(eth.h_source, own->mac, ETH_ALEN);
	__builtin_memcpy(nd.mac, own->mac, ETH_ALEN);
	nd.message.flags = ND_OVERRIDE | ND_SOLICITED;
	if (is_probe) { /* its sender has no address yet: tell all nodes, RFC 4861, 7.2.4 */
		const __u8 all_nodes[ETH_ALEN] = { 0x33, 0x33, 0, 0, 0, 1 };

		__builtin_memcpy(eth.h_dest, all_nodes, ETH_ALEN);
		destination.high = bpf_cpu_to_be64(0xff02000000000000ULL);
		destination.low = bpf_cpu_to_be64(1);
		nd.message.flags = ND_OVERRIDE;
	}
	__builtin_memcpy(&ip.saddr, target, sizeof(ip.saddr));
	__builtin_memcpy(&ip.daddr, &destination, sizeof(ip.daddr));
	sum = pseudo_sum(target, &destination, size, IPPROTO_ICMPV6);
	sum += (__u32)bpf_csum_diff(0, 0, (__be32 *)&nd, sizeof(nd), 0);
	nd.message.checksum = ~csum_fold(sum);
	if (frame_resize(ctx, p, L3_OFFSET + sizeof(ip) + size) ||
	    ctx_store(ctx, 0, &eth, sizeof(eth)) || ctx_store(ctx, L3_OFFSET, &ip, sizeof(ip)) ||
	    ctx_store(ctx, L3_OFFSET + sizeof(ip), &nd, sizeof(nd)))
		return -1;
	return 0;
}

/*
 * Answers a neighbour solicitation, whether it came to a group or to us. The answer goes to
 * the MAC the question came from.
 */
__stage enum verdict nd_answer(struct frame_ctx *ctx, struct packet *p)
{
	struct interface *own = interface_own(ctx);
	struct addr target;

	if (!p)
		return VERDICT_DROP;
	if (!nd_solicits_us(ctx, p, &target))
		return pass(p, REASON_NEIGHBOUR_OTHER);
	if (!own || nd_advertise(ctx, p, &target, own))
		return drop(p, REASON_INTERNAL);
	return answer(p, REASON_ND_ANSWERED);
}

#endif
