/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Sending a client's packet on to a backend that answers the client itself.
 *
 *   dsr-l2     [eth | client → VIP …]                                   only MACs change
 *   dsr-ipip   [eth | source → backend | client → VIP …]                RFC 2003, 2473, 4213
 *   dsr-gue    [eth | source → backend | UDP | GUE | client → VIP …]    draft-ietf-intarea-gue-09
 *
 * DSCP and ECN are copied to the outer header (RFC 6040, normal mode). The inner TTL goes
 * down by one, because the packet is forwarded (RFC 2003, 3.1).
 *
 * Invariant: the inner packet is written to only in TTL, its checksum, and a transport
 * checksum that the sender had left to hardware.
 */
#ifndef SHUNT_ENCAP_H
#define SHUNT_ENCAP_H

#include "csum_whole.h"
#include "hop.h"
#include "rewrite.h"
#include "slot.h"

#define IPPROTO_IPIP_ 4
#define IPPROTO_IPV6_ 41
#define TUNNEL_TTL 64
#define GUE_PORT_BASE 0xc000 /* source ports carry 14 bits of entropy, RFC 6335's dynamic range */

/* The facts about the packet that its outer headers need, read before room is made for them. */
struct outer {
	struct addr source;
	const struct addr *destination;
	__u32 size;       /* of all outer headers */
	__u32 inner_size; /* of the client's packet */
	__u32 entropy;    /* differs from flow to flow, and is independent of the slot */
	__be32 ip4_second; /* IPv4's second word: identification, flags, offset */
	__u8 protocol;     /* of the inner packet */
	__u8 tos;
	__u8 is_gue;
	__u8 is_ip4; /* the outer header; a copy, for the compiler would read the map's memory again */
};

struct gue {
	struct udphdr udp;
	__u8 version_and_length; /* version 0, no control message, no optional fields */
	__u8 protocol;
	__be16 flags;
};

/* UDP and GUE headers. RFC 6935 and 6936 allow a tunnel over IPv6 a zero checksum: the inner
 * packet has its own. */
static __always_inline void gue_fill(struct gue *gue, const struct outer *o, __be16 port)
{
	gue->udp.source = bpf_htons(GUE_PORT_BASE | (o->entropy >> 18));
	gue->udp.dest = port;
	gue->udp.len = bpf_htons(sizeof(*gue) + o->inner_size);
	gue->udp.check = 0;
	gue->version_and_length = 0;
	gue->protocol = o->protocol;
	gue->flags = 0;
}

static __always_inline int ip4_push(void *data, void *data_end, const struct outer *o, __be16 port)
{
	struct iphdr *ip = data + L3_OFFSET;
	__u32 *words = (__u32 *)ip;

	if ((void *)(ip + 1) > data_end)
		return -1;
	frame_protocol_set(data, bpf_htons(ETH_P_IP));
	words[0] = bpf_htonl(0x45000000 | (__u32)o->tos << 16 | (o->size + o->inner_size));
	words[1] = o->ip4_second;
	words[2] = bpf_htonl(TUNNEL_TTL << 24 | (o->is_gue ? IPPROTO_UDP : o->protocol) << 16);
	words[3] = addr_to_ip4(&o->source);
	words[4] = addr_to_ip4(o->destination);
	ip->check = ~csum_fold_short((__u64)words[0] + words[1] + words[2] + words[3] + words[4]);
	if (o->is_gue) {
		struct gue *gue = (void *)(ip + 1);

		if ((void *)(gue + 1) > data_end)
			return -1;
		gue_fill(gue, o, port);
	}
	return 0;
}

static __always_inline int ip6_push(void *data, void *data_end, const struct outer *o, __be16 port)
{
	struct ipv6hdr *ip = data + L3_OFFSET;

	if ((void *)(ip + 1) > data_end)
		return -1;
	frame_protocol_set(data, bpf_htons(ETH_P_IPV6));
	/* RFC 6438: the flow label is the entropy that routers on the path may use. */
	*(__be32 *)ip = bpf_htonl(6U << 28 | (__u32)o->tos << 20 | o->entropy >> 12);
	ip->payload_len = bpf_htons(o->size - sizeof(*ip) + o->inner_size);
	ip->nexthdr = o->is_gue ? IPPROTO_UDP : o->protocol;
	ip->hop_limit = TUNNEL_TTL;
	__builtin_memcpy(&ip->saddr, &o->source, sizeof(o->source));
	__builtin_memcpy(&ip->daddr, o->destination, sizeof(*o->destination));
	if (o->is_gue) {
		struct gue *gue = (void *)(ip + 1);

		if ((void *)(gue + 1) > data_end)
			return -1;
		gue_fill(gue, o, port);
	}
	return 0;
}

/* Takes one off the TTL or hop limit, and notes the fields that the outer header copies. */
static __always_inline int inner_prepare(struct frame_ctx *ctx, const struct packet *p,
					 struct outer *o)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ipv6hdr *ip6 = data + L3_OFFSET;
	struct iphdr *ip = data + L3_OFFSET;

	o->inner_size = packet_size(p);
	o->ip4_second = bpf_htonl(IP4_DF);
	if (p->family == FAMILY_IP4) {
		if ((void *)(ip + 1) > data_end)
			return -1;
		o->protocol = IPPROTO_IPIP_;
		o->tos = ip->tos;
		/* DF is copied. The identification matters only to fragments: RFC 6864, 4.1. */
		if (!(ip->frag_off & bpf_htons(IP4_DF)))
			o->ip4_second = (__u16)bpf_get_prandom_u32();
		ip->check = csum_ttl_update(ip->check);
		ip->ttl--;
		return 0;
	}
	if ((void *)(ip6 + 1) > data_end)
		return -1;
	o->protocol = IPPROTO_IPV6_;
	o->tos = bpf_ntohs(*(__be16 *)ip6) >> 4;
	ip6->hop_limit--;
	return 0;
}

/* The outer source: configured, or the interface's own. 0: there is none. */
static __always_inline int outer_source(struct outer *o, const struct settings *settings,
					const struct interface *out)
{
	__u64 vary;

	if (o->is_ip4) {
		o->source.high = 0;
		o->source.low = settings->tunnel_source4.low;
		if (!o->source.low)
			o->source.low = out->address4.low;
		if (settings->tunnel_vary4)
			o->source.low ^= (__u64)o->entropy << 32 & settings->tunnel_vary4;
		return !!o->source.low;
	}
	o->source = settings->tunnel_source6;
	if (!o->source.high)
		o->source = out->address6;
	vary = (__u64)o->entropy << 32 | o->entropy;
	o->source.low ^= vary & settings->tunnel_vary6;
	/* The host bits, the low word, may all be zero. */
	return !!(o->source.high | o->source.low);
}

/*
 * Completes a transport checksum that the sender left to hardware (csum.h), where the next
 * host would see it as wrong: generic XDP keeps the sk_buff's note, and the kernel finishes it.
 * A checksum that only looks unfinished sums up to itself. Returns 0, or -1.
 */
static __apart int csum_complete(struct frame_ctx *ctx, struct packet *p)
{
	void *data, *data_end;
	__sum16 *check;
	__u64 sum = 0, pseudo;
	__u16 value;

	pseudo = pseudo_sum(&p->key.source, &p->key.destination, p->l4_size, p->key.protocol);
	if (csum_whole(ctx, p->l4_offset, p->l4_size, &sum))
		return -1;
	if (csum_fold(sum + pseudo) == 0xffff)
		return 0; /* the checksum is right: the sender had completed it */
	data = ctx_data(ctx);
	data_end = ctx_data_end(ctx);
	check = data + transport_csum_offset(p);
	if ((void *)(check + 1) > data_end)
		return -1;
	/* The sum holds the field, which is the pseudo-header's sum. */
	value = ~csum_fold(sum);
	*check = value || p->key.protocol == IPPROTO_TCP ? value : 0xffff;
	p->csum_finished = 1; /* for NAT, which may follow (tunnelled.h) */
	count_reason(REASON_CHECKSUM_COMPLETED, p->frame_size);
	return 0;
}

static __always_inline int csum_is_unfinished(struct frame_ctx *ctx, const struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	__sum16 *check = data + transport_csum_offset(p);

	if ((void *)(check + 1) > data_end)
		return 0;
	return *check == csum_fold_short(packet_pseudo_sum(p));
}

/* Puts the outer headers in front, with room for the Ethernet header before them. */
static __always_inline int outer_push(struct frame_ctx *ctx, const struct outer *o, __be16 port)
{
	void *data, *data_end;

	if (ctx_outer_push(ctx, o->size, !o->is_ip4,
			   o->is_gue ? sizeof(struct gue) - sizeof(struct udphdr) : 0))
		return -1;
	data = ctx_data(ctx);
	data_end = ctx_data_end(ctx);
	return o->is_ip4 ? ip4_push(data, data_end, o, port) : ip6_push(data, data_end, o, port);
}

/* Wraps the packet as the forwarding mode says. With VERDICT_REFUSE the packet is unchanged. */
static __always_inline enum verdict packet_wrap(struct frame_ctx *ctx, struct packet *p,
						const struct settings *settings, __u32 forwarding,
						const struct addr *backend,
						const struct interface *out, __u32 entropy)
{
	struct outer o;

	o.destination = backend;
	o.entropy = entropy;
	o.is_gue = forwarding == FORWARDING_DSR_GUE;
	o.is_ip4 = addr_is_mapped(o.destination);
	o.size = (o.is_ip4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr)) +
		 (o.is_gue ? sizeof(struct gue) : 0);
	if (!outer_source(&o, settings, out))
		return drop(p, REASON_NO_SOURCE);
	if (packet_size(p) - wire_surplus(ctx, p) + o.size > out->mtu)
		return size_refuse(ctx, p, out->mtu - o.size);
	if (inner_prepare(ctx, p, &o) || outer_push(ctx, &o, settings->gue_port))
		return drop(p, REASON_INTERNAL);
	return VERDICT_NEXT;
}

#endif
