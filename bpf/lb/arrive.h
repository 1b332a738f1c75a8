/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The stages of packets that level 1 has placed at this node of a cluster, and that have come out of a
 * tunnel for the most part:
 *
 *   packet       ─► parse ─┬─► TCP, UDP ─► service of level 2 ─► NAT ───► send
 *                          ├─► first fragment ─► likewise, and a note
 *                          ├─► later fragment ─► note of the first ─────► send
 *                          ├─► ICMP error ─► flow of the quote ─────────► send
 *                          └─► all others ──────────────────────────────► drop
 *
 * Invariant: nothing passes. The host's stack would forward the packet to the node that it came from,
 * and that node would send it here again.
 */
#ifndef SHUNT_ARRIVE_H
#define SHUNT_ARRIVE_H

#include "balance.h"
#include "tunnelled.h"

/* The end of a packet that the stages would leave to the stack. */
static __always_inline enum verdict arrival_drop(struct packet *p)
{
	return drop(p, p->fragment == FRAGMENT_LATER ? REASON_FRAGMENT_EARLY :
						       REASON_TUNNELLED_UNKNOWN);
}

/* A fragment: VERDICT_NEXT, if it is a first one. Notes of level 1 are for packets that came here bare: by
 * one of them the packet would be encapsulated again. */
static __always_inline enum verdict arrival_fragment(struct frame_ctx *ctx, struct packet *p)
{
	struct noting *noting;
	enum verdict verdict;

	/* With the latter flag no later fragment is placed without a note, and the epoch is not used. */
	verdict = fragment_stage(ctx, p, ADDRESS_VIP | ADDRESS_HOST_OWN, 0);
	noting = scratch_of(&sh_noting);
	if (verdict != VERDICT_FRAGMENT)
		return verdict;
	if (!noting || noting->note.kind != NOTE_NAT)
		return VERDICT_PASS;
	return fragment_forward(ctx, p);
}

static __always_inline enum verdict arrival_place(struct frame_ctx *ctx, struct packet *p)
{
	enum verdict verdict = transport_parse(ctx, p);
	struct settings *settings;
	__u32 index = SERVICE_NONE;

	if (verdict == VERDICT_FRAGMENT)
		verdict = arrival_fragment(ctx, p);
	if (verdict == VERDICT_NEXT) {
		if (p->key.protocol == IPPROTO_ICMP || p->key.protocol == IPPROTO_ICMPV6) {
			verdict = icmp_error_translate(ctx, p);
		} else {
			index = tunnelled_find(p);
			/* Not sooner: what is kept during the call takes stack, and there is no more. */
			settings = settings_get();
			if (index != SERVICE_NONE && settings)
				verdict = nat_stage(ctx, p, settings, 1, index);
		}
	}
	if (verdict == VERDICT_NEXT || verdict == VERDICT_PASS)
		verdict = arrival_drop(p);
	if (verdict == VERDICT_REJECT)
		verdict = reject_answer(ctx, p, index);
	return verdict == VERDICT_REFUSE ? error_answer(ctx, p) : verdict;
}

/* An answer of ours goes to the client, as a backend's does. The frame came from a node, which may have the VIP
 * itself and would take such a packet for a forged one. */
__stage enum verdict arrival_answer(struct frame_ctx *ctx, struct packet *p)
{
	enum reason reason = REASON_UNRESOLVED;
	struct interface *out;
	__u64 hop;

	if (!p)
		return VERDICT_DROP;
	hop = hop_lookup(ctx, &p->key.destination, &p->key.source, &reason);
	if (!hop)
		return drop(p, reason);
	out = hop_interface(hop);
	return out ? ethernet_send(ctx, p, hop, out) : drop(p, REASON_INTERNAL);
}

static __always_inline enum verdict arrival_stage(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data;
	enum verdict verdict;

	if ((void *)(eth + 1) > data_end)
		return drop(p, REASON_INTERNAL);
	p->csum_finished = mac_load(eth->h_source) == MAC_CSUM_FINISHED;
	/* The frame's sender may be a node, and the way to the client is not by it: see hop_back. */
	mac_store(eth->h_source, 0);
	switch (frame_protocol(data)) {
	case bpf_htons(ETH_P_IP):
		verdict = ip4_parse(ctx, p, data, data_end);
		break;
	case bpf_htons(ETH_P_IPV6):
		verdict = ip6_parse(ctx, p, data, data_end);
		break;
	default:
		return drop(p, REASON_INTERNAL);
	}
	if (verdict != VERDICT_NEXT)
		return verdict == VERDICT_PASS ? drop(p, REASON_TUNNELLED_UNKNOWN) : verdict;
	verdict = arrival_place(ctx, p);
	return verdict == VERDICT_ANSWER ? arrival_answer(ctx, p) : verdict;
}

#endif
