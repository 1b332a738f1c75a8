/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From bytes to struct packet: the transport headers that services have. The network layer is
 * core/parse.h's.
 */
#ifndef SHUNT_TRANSPORT_H
#define SHUNT_TRANSPORT_H

#include "../core/parse.h"
#include "packet.h"

static __always_inline enum verdict tcp_parse(struct packet *p, void *l4, void *data_end)
{
	struct tcphdr *tcp = l4;
	__u32 header_size;

	if ((void *)(tcp + 1) > data_end || p->l4_size < sizeof(*tcp))
		return drop(p, REASON_MALFORMED_TRANSPORT);
	header_size = tcp->doff * 4;
	if (header_size < sizeof(*tcp) || header_size > p->l4_size)
		return drop(p, REASON_MALFORMED_TRANSPORT);
	p->key.source_port = tcp->source;
	p->key.destination_port = tcp->dest;
	p->tcp_flags = ((__u8 *)tcp)[13];
	p->has_payload = p->l4_size > header_size;
	return VERDICT_NEXT;
}

static __always_inline enum verdict udp_parse(struct packet *p, void *l4, void *data_end)
{
	struct udphdr *udp = l4;
	__u32 size;

	if ((void *)(udp + 1) > data_end || p->l4_size < sizeof(*udp))
		return drop(p, REASON_MALFORMED_TRANSPORT);
	size = bpf_ntohs(udp->len);
	if (size < sizeof(*udp) || size > p->l4_size)
		return drop(p, REASON_MALFORMED_TRANSPORT);
	p->key.source_port = udp->source;
	p->key.destination_port = udp->dest;
	p->has_payload = size > sizeof(*udp);
	return VERDICT_NEXT;
}

/*
 * The transport header of a packet that may be ours. A packet that is neither TCP nor UDP ends
 * here, except ICMP, whose ports stay zero.
 */
static __always_inline enum verdict transport_parse(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	void *l4 = data + (p->l4_offset & L4_OFFSET_MAX);

	/* First, because the compiler would search a switch's cases from the middle. */
	if (p->key.protocol == IPPROTO_TCP)
		return tcp_parse(p, l4, data_end);
	if (p->key.protocol == IPPROTO_UDP)
		return udp_parse(p, l4, data_end);
	switch (p->key.protocol) {
	case IPPROTO_ICMP:
		return p->family == FAMILY_IP4 ? VERDICT_NEXT : pass(p, REASON_PROTOCOL);
	case IPPROTO_ICMPV6:
		return p->family == FAMILY_IP6 ? VERDICT_NEXT : pass(p, REASON_PROTOCOL);
	case IPPROTO_FRAGMENT:
		return VERDICT_FRAGMENT;
	case IPPROTO_ROUTING:
		return pass(p, REASON_SOURCE_ROUTED);
	case IPPROTO_RAW:
		return drop(p, REASON_EXTENSION_LIMIT);
	}
	return pass(p, REASON_PROTOCOL);
}

#endif
