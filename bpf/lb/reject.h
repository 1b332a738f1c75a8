/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A service without a backend that takes new flows answers at once, as a host without the
 * service would: TCP with a reset, UDP with "port unreachable" (icmp.h makes that).
 *
 *   client → VIP, a flow that no backend knows       becomes   VIP → client, a reset
 *
 * Where the service is to be silent, and where RFC 9293 or RFC 1122 ask for silence, the
 * packet ends as no_backend.
 */
#ifndef SHUNT_REJECT_H
#define SHUNT_REJECT_H

#include "csum.h"
#include "icmp.h"

/* A reset is no longer than the segment it answers, so the limit protects only this machine:
 * a flood of first packets must not become as many packets sent. */
#define RESET_RATE 10000 /* resets per second and CPU, and also the largest burst; our choice */

#define TCP_HEADER_WORDS 5 /* without options */

/* RFC 9293, 3.10.7.1: the reset that answers a segment without a connection. */
static __always_inline void reset_fill(struct tcphdr *reset, const struct tcphdr *segment,
				       const struct packet *p)
{
	__u32 size = p->l4_size - segment->doff * 4 + segment->syn + segment->fin;

	__builtin_memset(reset, 0, sizeof(*reset));
	reset->source = segment->dest;
	reset->dest = segment->source;
	reset->doff = TCP_HEADER_WORDS;
	reset->rst = 1;
	if (segment->ack) {
		reset->seq = segment->ack_seq;
		return;
	}
	reset->ack = 1;
	reset->ack_seq = bpf_htonl(bpf_ntohl(segment->seq) + size);
}

/* The network header of the answer. Returns 0, or -1. */
static __noinline int reset_address(struct frame_ctx *ctx, const struct packet *p)
{
	struct ipv6hdr ip6 = { .version = 6,
			       .payload_len = bpf_htons(sizeof(struct tcphdr)),
			       .nexthdr = IPPROTO_TCP,
			       .hop_limit = ANSWER_TTL };
	struct iphdr ip = { .version = 4,
			    .ihl = 5,
			    .tot_len = bpf_htons(sizeof(ip) + sizeof(struct tcphdr)),
			    .frag_off = bpf_htons(0x4000), /* don't fragment */
			    .ttl = ANSWER_TTL,
			    .protocol = IPPROTO_TCP };

	if (p->family == FAMILY_IP6) {
		__builtin_memcpy(&ip6.saddr, &p->key.destination, sizeof(ip6.saddr));
		__builtin_memcpy(&ip6.daddr, &p->key.source, sizeof(ip6.daddr));
		return ctx_store(ctx, L3_OFFSET, &ip6, sizeof(ip6)) ? -1 : 0;
	}
	ip.saddr = addr_to_ip4(&p->key.destination);
	ip.daddr = addr_to_ip4(&p->key.source);
	ip.check = ~csum_fold((__u32)bpf_csum_diff(0, 0, (__be32 *)&ip, sizeof(ip), 0));
	return ctx_store(ctx, L3_OFFSET, &ip, sizeof(ip)) ? -1 : 0;
}

/* Turns the segment into its reset. Returns 0, or -1. */
static __noinline int reset_make(struct frame_ctx *ctx, const struct packet *p)
{
	__u32 header_size = p->family == FAMILY_IP4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	struct tcphdr segment, reset;
	struct ethhdr eth;
	__s32 surplus;
	__u64 pseudo;
	int partial;

	if (ctx_load(ctx, 0, &eth, sizeof(eth)) ||
	    ctx_load(ctx, p->l4_offset, &segment, sizeof(segment)))
		return -1;
	/* The kernel completes the checksum at the segment's offset, so the offset has to stay the same. */
	partial = p->l4_offset == L3_OFFSET + header_size && csum_is_open(ctx, p);
	reset_fill(&reset, &segment, p);
	pseudo = pseudo_sum(&p->key.source, &p->key.destination, sizeof(reset), IPPROTO_TCP);
	if (partial)
		reset.check = csum_fold(pseudo);
	else
		reset.check = ~csum_fold(
			pseudo + (__u32)bpf_csum_diff(0, 0, (__be32 *)&reset, sizeof(reset), 0));
	surplus = p->frame_size - L3_OFFSET - header_size - sizeof(reset);
	if (surplus > 0 && ctx_tail_cut(ctx, surplus))
		return -1;
	macs_swap(&eth);
	if (ctx_store(ctx, 0, &eth, sizeof(eth)) || reset_address(ctx, p))
		return -1;
	return ctx_store(ctx, L3_OFFSET + header_size, &reset, sizeof(reset)) ? -1 : 0;
}

/*
 * Ends a packet that no backend takes. The packet is still as it arrived. VERDICT_REFUSE: an
 * ICMP error is due.
 */
__stage enum verdict reject_answer(struct frame_ctx *ctx, struct packet *p, __u32 service_index)
{
	struct service *service = bpf_map_lookup_elem(&sh_services, &service_index);

	if (!p)
		return VERDICT_DROP;
	if (!service || !(service->flags & SERVICE_REJECTS) || (p->tcp_flags & TCP_RST) ||
	    !source_is_answerable(&p->key.source))
		return drop(p, REASON_NO_BACKEND);
	if (p->key.protocol == IPPROTO_UDP)
		return refuse(p, REFUSAL_NO_BACKEND);
	if (!token_take(TOKEN_RESET, RESET_RATE))
		return drop(p, REASON_ICMP_LIMITED);
	if (reset_make(ctx, p))
		return drop(p, REASON_INTERNAL);
	return answer(p, REASON_REJECTED_RESET);
}

#endif
