// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The load balancer at XDP. One copy is loaded per interface (lb/config.h).
 *
 *   frame ─► stages (lb/balance.h) ─┬─► passes ─► another XDP program, if there is one ─► stack
 *                                    ├─► back ───► out of the same interface
 *                                    ├─► on ─────► out of another one
 *                                    └─► dropped, counted
 */
#include "ctx/xdp.h"

#include "lb/balance.h"
#include "lb/carry.h"
#include "lb/chain.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Out of an interface of ours. One that has gone has left the device map, too. */
static __always_inline int frame_redirect(const struct packet *p, __u32 index)
{
	int action = bpf_redirect_map(&sh_tx_ports, index, XDP_DROP);

	if (action == XDP_DROP)
		count_reason(REASON_EGRESS_UNLISTED, p->frame_size);
	return action;
}

SEC("xdp.frags")
int sh_xdp(struct xdp_md *ctx)
{
	struct packet p = { .frame_size = ctx_size_hint(ctx) };
	enum verdict verdict = frame_stage(ctx, &p);

	if (p.reason)
		count_reason(p.reason, p.frame_size);
	switch (verdict) {
	case VERDICT_HOST:
	case VERDICT_PASS:
		chain_after(ctx);
		return XDP_PASS;
	case VERDICT_ANSWER:
	case VERDICT_SEND_BACK:
		if (redirect_back)
			return frame_redirect(&p, interface_index);
		return XDP_TX;
	case VERDICT_SEND_ON:
		return frame_redirect(&p, p.egress);
	case VERDICT_CARRY:
		carry_back(ctx);
		return XDP_DROP;
	default:
		return XDP_DROP;
	}
}
