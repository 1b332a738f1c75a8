// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The load balancer at XDP. One copy is loaded per interface (lb/config.h).
 *
 *   frame ─► stages (lb/balance.h) ─┬─► passes ─► another XDP program, if there is one ─► stack
 *                                    ├─► passes ─► another product of shunt's, if there is one
 *                                    ├─► passes, a tunnel's ─► sh_decap, if this host is a backend
 *                                    ├─► for this node of a cluster ─► sh_tunnelled
 *                                    ├─► back ───► out of the same interface
 *                                    ├─► on ─────► out of another one, or to sh_deliver (mark.h)
 *                                    ├─► tagged ─► sh_vlan, if there is one, else as passes
 *                                    └─► dropped, counted
 */
#include "../ctx/xdp.h"

#include "balance.h"
#include "carry.h"
#include "chain.h"
#include "hand.h"
#include "mark.h"
#include "redirect.h"
#include "stamping.h"

char _license[] SEC("license") = "Dual BSD/GPL";

static __always_inline int drop_forged(const struct packet *p)
{
	count_reason(REASON_MARK_FORGED, p->frame_size);
	return XDP_DROP;
}

/* Carries out the verdict of the stages. A part of each program's main function, because it calls
 * other programs (chain.h). */
static __always_inline int frame_finish(struct frame_ctx *ctx, const struct packet *p,
					enum verdict verdict)
{
	if (p->reason)
		count_reason(p->reason, p->frame_size);
	switch (verdict) {
	case VERDICT_PASS:
		if (features & (FEATURE_DECAP | FEATURE_TC_INTERFACES)) {
			if ((features & FEATURE_TC_INTERFACES) && mark_is_forged(ctx))
				return drop_forged(p);
			if (features & FEATURE_DECAP)
				tunnel_hand_on(ctx, p);
		}
		guest_hand_on(ctx);
		chain_after(ctx);
		return XDP_PASS;
	case VERDICT_HOST:
		if ((features & FEATURE_TC_INTERFACES) && mark_is_forged(ctx))
			return drop_forged(p);
		if ((features & FEATURE_TUNNELLED) && is_tunnelled(p, verdict)) {
			tunnelled_hand_on(ctx, p);
			count_reason(REASON_TUNNELLED_UNKNOWN, p->frame_size);
			return XDP_DROP;
		}
		chain_after(ctx);
		return XDP_PASS;
	case VERDICT_ANSWER:
	case VERDICT_SEND_BACK:
		if (redirect_back)
			return port_redirect(interface_index, p->frame_size);
		return XDP_TX;
	case VERDICT_SEND_ON:
		return frame_redirect(ctx, p);
	case VERDICT_CARRY:
		carry_back(ctx);
		return XDP_DROP;
	case VERDICT_TAGGED:
		if (features & (FEATURE_VLAN | FEATURE_TC_INTERFACES)) {
			if ((features & FEATURE_TC_INTERFACES) && mark_is_forged(ctx))
				return drop_forged(p);
			if (features & FEATURE_VLAN)
				vlan_hand_on(ctx);
		}
		count_reason(REASON_VLAN, p->frame_size);
		chain_after(ctx);
		return XDP_PASS;
	default:
		return XDP_DROP;
	}
}

SEC("xdp.frags")
int sh_xdp(struct xdp_md *ctx)
{
	struct packet p = { .frame_size = ctx_size_hint(ctx) };
	enum verdict verdict = frame_stage(ctx, &p);

	return frame_finish(ctx, &p, verdict);
}

/* The same with stamps of probes. The daemon loads it in sh_xdp's place, with FEATURE_STAMPS. It is a
 * program of its own, because sh_xdp would ask for the feature twice for each packet: a constant that is
 * 0 removes the branches, but not its loads. */
SEC("xdp.frags")
int sh_xdp_stamps(struct xdp_md *ctx)
{
	struct packet p = { .frame_size = ctx_size_hint(ctx) };
	enum verdict verdict;

	stamp_begin(ctx);
	verdict = frame_stage(ctx, &p);
	stamp_end(verdict, p.reason);
	return frame_finish(ctx, &p, verdict);
}
