// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The backend's half of direct return: takes IPIP and GUE off at XDP.
 *
 *   frame ─► outer headers ─► tunnel to us? ─► inner header ─► for a VIP? ─► permitted? ─► stack
 *                                  │ no                            │ no           │ no
 *                                  ▼                               ▼              ▼
 *                                pass                            pass           drop
 *
 * Behind the program of a node of a cluster, what is decapsulated goes to sh_tunnelled instead of the stack.
 *
 * Invariant: a packet that no tunnel carries to a VIP leaves as it came, so that other
 * tunnels of the host go on working. A tunnel's packet to a VIP never reaches the stack if
 * its sender is not permitted or the tunnel must not carry it.
 *
 * The inner packet keeps its DSCP and its TTL; its ECN follows RFC 6040. An outer UDP
 * checksum is not verified.
 *
 * It is attached to an interface, or called by a balancer's program there (lb/hand.h).
 */
#include "../../ctx/xdp.h"

#include "../chain.h"
#include "../guest.h"
#include "tunnel.h"
#include "inner.h"
#include "outer.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Removes the headers between the Ethernet header and the inner packet. */
static __always_inline enum verdict outer_remove(struct frame_ctx *ctx, struct tunnel *t)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data, saved;

	if ((void *)(eth + 1) > data_end)
		return drop(&t->outer, REASON_INTERNAL);
	__builtin_memcpy(&saved, eth, sizeof(saved));
	saved.h_proto = t->outer.key.protocol == IPPROTO_IPIP ? bpf_htons(ETH_P_IP) :
								bpf_htons(ETH_P_IPV6);
	if (ctx_head_cut(ctx, (t->offset & OFFSET_MASK) - ETH_HLEN))
		return drop(&t->outer, REASON_INTERNAL);
	eth = data = ctx_data(ctx);
	data_end = ctx_data_end(ctx);
	if ((void *)(eth + 1) > data_end)
		return drop(&t->outer, REASON_INTERNAL);
	__builtin_memcpy(eth, &saved, sizeof(saved));
	return pass(&t->outer, t->is_gue ? REASON_DECAP_GUE : REASON_DECAP_IPIP);
}

static __always_inline enum verdict decap_stage(struct frame_ctx *ctx, struct tunnel *t)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data;
	enum verdict verdict;

	if ((void *)(eth + 1) > data_end)
		return pass(&t->outer, REASON_MALFORMED);
	switch (eth->h_proto) {
	case bpf_htons(ETH_P_IP):
		verdict = outer4_parse(ctx, t);
		break;
	case bpf_htons(ETH_P_IPV6):
		verdict = outer6_parse(ctx, t);
		break;
	case bpf_htons(ETH_P_8021Q):
	case bpf_htons(ETH_P_8021AD):
		return pass(&t->outer, REASON_VLAN);
	default:
		return pass(&t->outer, REASON_NOT_IP);
	}
	if (verdict == VERDICT_NEXT)
		verdict = tunnel_recognise(ctx, t);
	if (verdict == VERDICT_NEXT)
		verdict = t->outer.key.protocol == IPPROTO_IPIP ? inner4_parse(ctx, t) :
								  inner6_parse(ctx, t);
	return verdict == VERDICT_NEXT ? outer_remove(ctx, t) : verdict;
}

/* Whether the packet of the frame is one that was in a tunnel. */
static __always_inline int is_decapsulated(const struct tunnel *t)
{
	return t->outer.reason == REASON_DECAP_IPIP || t->outer.reason == REASON_DECAP_GUE;
}

SEC("xdp.frags")
int sh_decap(struct xdp_md *ctx)
{
	struct tunnel t = { .outer.frame_size = ctx_size_hint(ctx) };
	enum verdict verdict = decap_stage(ctx, &t);

	decap_count(t.outer.reason, t.outer.frame_size);
	if (verdict != VERDICT_PASS)
		return XDP_DROP;
	if (behind_balancer) {
		if (tunnelled_index != INTERFACE_ANY && is_decapsulated(&t)) {
			bpf_tail_call(ctx, &sh_tunnel_progs, tunnelled_index);
			decap_count(REASON_INTERNAL, t.outer.frame_size); /* there is no program */
			return XDP_DROP;
		}
		guest_hand_on(ctx);
		chain_after(ctx);
	}
	return XDP_PASS;
}
