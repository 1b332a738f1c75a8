/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Rewriting a packet as its flow says, and sending it.
 *
 * Checksums: normally RFC 1624. Where the sender left the checksum to hardware (csum.h),
 * native XDP completes it, and generic XDP leaves it for the sk_buff's own completion with
 * the pseudo-header brought up to date. A complete checksum can look like an unfinished
 * one (1 in 65,536): then the whole segment is summed; a checksum that verifies is complete.
 */
#ifndef SHUNT_REWRITE_H
#define SHUNT_REWRITE_H

#include "csum_whole.h"
#include "flow.h"
#include "hop.h"

/* The packet's size, from its IP header on. */
static __always_inline __u32 packet_size(const struct packet *p)
{
	return p->l4_offset - L3_OFFSET + p->l4_size;
}

/* The excess of the frame over the packets that will leave: at tc it may stand for many. */
static __always_inline __u32 wire_surplus(struct frame_ctx *ctx, const struct packet *p)
{
	__u32 segment_size = ctx_segment_size(ctx);
	struct tcphdr *tcp;

	if (!segment_size)
		return 0;
	if (p->key.protocol != IPPROTO_TCP)
		return p->l4_size - sizeof(struct udphdr) - segment_size;
	tcp = ctx_data(ctx) + (p->l4_offset & L4_OFFSET_MAX);
	if ((void *)(tcp + 1) > ctx_data_end(ctx))
		return 0;
	return p->l4_size - tcp->doff * 4 - segment_size;
}

#define IP4_DF 0x4000 /* don't fragment, RFC 791 */

/* Ends a packet that is too long for the next hop. The sender is told the size that fits, unless
 * routers may fragment its packet: then it does not want to know its path's MTU. */
static __always_inline enum verdict size_refuse(struct frame_ctx *ctx, struct packet *p, __u32 mtu)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct iphdr *ip = data + L3_OFFSET;

	if (p->family == FAMILY_IP4 &&
	    ((void *)(ip + 1) > data_end || !(ip->frag_off & bpf_htons(IP4_DF))))
		return drop(p, REASON_TOO_BIG);
	p->mtu = mtu;
	return refuse(p, REFUSAL_SIZE);
}

/* Up the stack, as if it had come in by the interface of this index. */
static __always_inline enum verdict host_send(struct packet *p, __u32 index)
{
	p->egress = index;
	return ctx_is_outbound() ? drop(p, REASON_HOST_BACKEND) : VERDICT_HOST;
}

static __always_inline enum verdict ethernet_send(struct frame_ctx *ctx, struct packet *p,
						  __u64 hop, const struct interface *out)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	__u32 index = hop_index(hop);
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > data_end)
		return drop(p, REASON_INTERNAL);
	mac_store(eth->h_dest, hop);
	mac_store(eth->h_source, mac_load(out->mac));
	if (index == own_index(ctx))
		return VERDICT_SEND_BACK;
	p->egress = index;
	return VERDICT_SEND_ON;
}

/* To the host that the hop leads to, which may be this one. */
static __always_inline enum verdict hop_send(struct frame_ctx *ctx, struct packet *p, __u64 hop,
					     const struct interface *out)
{
	return hop_is_host(hop, out) ? host_send(p, hop_index(hop)) :
				       ethernet_send(ctx, p, hop, out);
}

static __always_inline int ip4_rewrite(void *data, void *data_end, const struct flow *f)
{
	struct iphdr *ip = data + L3_OFFSET;
	__be32 source = addr_to_ip4(&f->source), destination = addr_to_ip4(&f->destination);

	if ((void *)(ip + 1) > data_end)
		return -1;
	/* TTL is the high octet of its 16-bit word (RFC 1141 did this case first). */
	ip->check = csum_update(ip->check, (__u64)source + destination,
				(__u64)ip->saddr + ip->daddr + bpf_htons(0x0100));
	ip->saddr = source;
	ip->daddr = destination;
	ip->ttl--;
	return 0;
}

static __always_inline int ip6_rewrite(void *data, void *data_end, const struct flow *f)
{
	struct ipv6hdr *ip = data + L3_OFFSET;

	if ((void *)(ip + 1) > data_end)
		return -1;
	__builtin_memcpy(&ip->saddr, &f->source, sizeof(f->source));
	__builtin_memcpy(&ip->daddr, &f->destination, sizeof(f->destination));
	ip->hop_limit--;
	return 0;
}

/* The offset of the transport checksum in the frame. */
static __always_inline __u32 transport_csum_offset(const struct packet *p)
{
	return (p->l4_offset & L4_OFFSET_MAX) + (p->key.protocol == IPPROTO_TCP ?
							 offsetof(struct tcphdr, check) :
							 offsetof(struct udphdr, check));
}

/*
 * A checksum field that equals the folded pseudo-header: finishes it if the sender did not
 * (returns 1), or finds that it only looks so (returns 0; the caller updates it as usual).
 * -1: the frame could not be read. Addresses and ports in the frame are still the old ones.
 */
static __noinline int csum_finish(struct frame_ctx *ctx, struct packet *p, const struct flow *f,
				  __u64 ports_plus, __u64 ports_minus)
{
	__u64 segment = 0,
	      old = pseudo_sum(&p->key.source, &p->key.destination, p->l4_size, p->key.protocol);
	__u64 new = pseudo_sum(&f->source, &f->destination, p->l4_size, p->key.protocol);
	void *data, *data_end;
	__sum16 *check;
	__u16 value;

	if (p->fragment) /* the frame has only a part of the summed bytes; see fragment.h */
		return 0;
	if (csum_whole(ctx, p->l4_offset, p->l4_size, &segment))
		return -1;
	if (csum_fold(segment + old) == 0xffff)
		return 0; /* the checksum is right: the sender had completed it */
	if (generic_mode)
		value = csum_fold(new);
	else /* segment includes the field, which holds the old pseudo-header's sum */
		value = ~csum_fold(segment + ports_plus + (__u16)~csum_fold(ports_minus) +
				   (__u16)~csum_fold(old) + new);
	if (!generic_mode && value == 0 && p->key.protocol == IPPROTO_UDP)
		value = 0xffff;
	data = ctx_data(ctx);
	data_end = ctx_data_end(ctx);
	check = data + transport_csum_offset(p);
	if ((void *)(check + 1) > data_end)
		return -1;
	*check = value;
	p->csum_finished = !generic_mode;
	count_reason(REASON_CHECKSUM_COMPLETED, p->frame_size);
	return 1;
}

/* Brings the transport checksum up to date where the hook does not know its state.
 * Returns 0, or -1. */
static __always_inline int csum_rewrite(struct frame_ctx *ctx, struct packet *p,
					const struct flow *f, __u64 ports_plus, __u64 ports_minus)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	__u64 old = addr_sum(&p->key.source) + addr_sum(&p->key.destination);
	__u64 new = addr_sum(&f->source) + addr_sum(&f->destination);
	__sum16 *check = data + transport_csum_offset(p);
	int finished = 0;

	if ((void *)(check + 1) > data_end)
		return -1;
	/* UDP's zero says that there is none: RFC 768, and RFC 6935 for tunnels over IPv6. */
	if (*check == 0 && p->key.protocol == IPPROTO_UDP)
		return 0;
	if (*check == csum_fold_short(packet_pseudo_sum(p)))
		finished = csum_finish(ctx, p, f, ports_plus, ports_minus);
	if (finished)
		return finished < 0 ? -1 : 0;
	data = ctx_data(ctx);
	data_end = ctx_data_end(ctx);
	check = data + transport_csum_offset(p);
	if ((void *)(check + 1) > data_end)
		return -1;
	*check = csum_update(*check, new + ports_plus, old + ports_minus);
	if (*check == 0 && p->key.protocol == IPPROTO_UDP)
		*check = 0xffff; /* RFC 768: zero would mean none */
	return 0;
}

static __always_inline int transport_rewrite(struct frame_ctx *ctx, struct packet *p,
					     const struct flow *f)
{
	__u64 ports_plus = (__u64)f->source_port + f->destination_port;
	__u64 ports_minus = (__u64)p->key.source_port + p->key.destination_port;
	__u64 plus = addr_sum(&f->source) + addr_sum(&f->destination);
	__u64 minus = addr_sum(&p->key.source) + addr_sum(&p->key.destination);
	__be16 *ports;
	int err;

	err = ctx_csum_replace(ctx, transport_csum_offset(p), csum_gain(plus, minus),
			       csum_gain(ports_plus, ports_minus), p->key.protocol == IPPROTO_UDP);
	if (err > 0)
		err = csum_rewrite(ctx, p, f, ports_plus, ports_minus);
	if (err)
		return -1;
	ports = ctx_data(ctx) + (p->l4_offset & L4_OFFSET_MAX);
	if ((void *)(ports + 2) > ctx_data_end(ctx))
		return -1;
	ports[0] = f->source_port;
	ports[1] = f->destination_port;
	return 0;
}

/* Rewrites all of the packet but its Ethernet header. has_transport is 0 for a later fragment. */
static __always_inline int packet_rewrite(struct frame_ctx *ctx, struct packet *p,
					  const struct flow *f, int has_transport)
{
	void *data, *data_end;

	if (has_transport && transport_rewrite(ctx, p, f))
		return -1;
	data = ctx_data(ctx);
	data_end = ctx_data_end(ctx);
	return p->family == FAMILY_IP4 ? ip4_rewrite(data, data_end, f) :
					 ip6_rewrite(data, data_end, f);
}

#endif
