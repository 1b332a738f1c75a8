// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The second level of direct return between the nodes of a cluster (tunnelled.h). One copy is loaded for each
 * interface at XDP while this machine is such a node:
 *
 *   frame ─► sh_xdp ─┬─► passes, a tunnel's ─► sh_decap ─┬─► sh_tunnelled ─┬─► a pod, as sh_xdp sends
 *                    └─► this node is the backend ───────┘                 ├─► this host's stack, for a server on it
 *                                                                          └─► dropped, counted
 */
#include "../ctx/xdp.h"

#include "arrive.h"
#include "chain.h"
#include "redirect.h"

char _license[] SEC("license") = "Dual BSD/GPL";

SEC("xdp.frags")
int sh_tunnelled(struct xdp_md *ctx)
{
	struct packet p = { .frame_size = ctx_size_hint(ctx) };
	enum verdict verdict = arrival_stage(ctx, &p);

	if (p.reason)
		count_reason(p.reason, p.frame_size);
	switch (verdict) {
	case VERDICT_HOST:
		chain_after(ctx);
		return XDP_PASS;
	case VERDICT_SEND_BACK:
		if (redirect_back)
			return port_redirect(interface_index, p.frame_size);
		return XDP_TX;
	case VERDICT_SEND_ON:
		return frame_redirect(ctx, &p);
	default:
		return XDP_DROP;
	}
}
