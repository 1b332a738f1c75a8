// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The load balancer at tc, for interfaces that XDP cannot serve. Two copies are loaded per interface, or for the
 * interfaces of all pods together, and named for their direction: sh_tc_in and sh_tc_out (ctx/skb.h, outbound).
 *
 *   wire ─► sh_tc_in ──► stages (lb/balance.h) ─┬─► passes ─► the next program at tc ─► stack
 *                                                ├─► back, on ─► out of an interface
 *                                                └─► dropped, counted
 *   host ─► sh_tc_out ─► the same stages ────────┬─► passes, changed or not ─► wire
 *                                                ├─► on ─────► out of another interface
 *                                                ├─► answered ─► in again, to the host
 *                                                └─► dropped, counted
 *
 * Invariant: a packet that the host has not sent itself, and that so has come in somewhere before,
 * leaves sh_tc_out as it came. So does a health check's packet.
 */
#include "../ctx/skb.h"

#include <linux/pkt_cls.h>

#include "balance.h"
#include "stamping.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Out of an interface of ours, or into it with BPF_F_INGRESS. */
static __always_inline int frame_redirect(const struct packet *p, __u32 index, __u64 flags)
{
	struct interface *out = bpf_map_lookup_elem(&sh_interfaces, &index);

	if (!out || !out->ifindex) {
		count_reason(REASON_EGRESS_UNLISTED, p->frame_size);
		return TC_ACT_SHOT;
	}
	return bpf_redirect(out->ifindex, flags);
}

/* Out of an interface of ours, to the next hop that the kernel finds there. */
static __always_inline int frame_route(const struct packet *p)
{
	__u32 index = p->egress;
	struct interface *out = bpf_map_lookup_elem(&sh_interfaces, &index);

	return out && out->ifindex ? bpf_redirect_neigh(out->ifindex, 0, 0, 0) : TC_ACT_SHOT;
}

/* To another interface of this host, as if it had come in there: the host may expect the source
 * address only there (RFC 3704, rp_filter). */
static __always_inline int frame_move(struct frame_ctx *ctx, const struct packet *p)
{
	__u32 index = p->egress;
	struct interface *in = bpf_map_lookup_elem(&sh_interfaces, &index);

	if (!in || ctx_store(ctx, 0, in->mac, ETH_ALEN))
		return TC_ACT_SHOT;
	return frame_redirect(p, index, BPF_F_INGRESS);
}

/* Notes the interface that the frame is at, for own_index. Returns 0, or -1: it is no interface of ours any more. */
static __always_inline int interface_find(struct frame_ctx *ctx)
{
	__u32 ifindex = ctx->ifindex, *index;

	if (interface_index != INTERFACE_ANY)
		return 0;
	index = bpf_map_lookup_elem(&sh_ifindexes, &ifindex);
	if (!index)
		return -1;
	ctx_note_put(ctx, *index);
	return 0;
}

/* Carries out the verdict of the stages. */
static __always_inline int frame_finish(struct frame_ctx *ctx, const struct packet *p,
					enum verdict verdict)
{
	switch (verdict) {
	case VERDICT_PASS:
		return TC_ACT_UNSPEC;
	case VERDICT_HOST:
		if (p->egress == own_index(ctx))
			return TC_ACT_UNSPEC;
		return frame_move(ctx, p);
	case VERDICT_ANSWER:
		return frame_redirect(p, own_index(ctx), outbound ? BPF_F_INGRESS : 0);
	case VERDICT_SEND_BACK:
		if (outbound) /* the frame is already leaving by this interface */
			return TC_ACT_UNSPEC;
		return frame_redirect(p, own_index(ctx), 0);
	case VERDICT_SEND_ON:
		return frame_redirect(p, p->egress, 0);
	case VERDICT_ROUTE:
		return frame_route(p);
	case VERDICT_TAGGED:
		if (!outbound)
			count_reason(REASON_VLAN, p->frame_size);
		return TC_ACT_UNSPEC;
	default:
		return TC_ACT_SHOT;
	}
}

SEC("tc")
int sh_tc(struct __sk_buff *ctx)
{
	struct packet p = {};
	enum verdict verdict;

	/* A health check's packet has its backend (check.bpf.c). */
	if (outbound && (ctx->ingress_ifindex || ctx->mark >> CHECK_MARK_SHIFT == CHECK_MARK))
		return TC_ACT_UNSPEC;
	if (interface_find(ctx))
		return TC_ACT_UNSPEC;
	ctx_headers_pull(ctx);
	p.frame_size = ctx_size_hint(ctx);
	verdict = frame_stage(ctx, &p);
	/* Most of the host's own packets are not for us, and not ours to count. */
	if (p.reason && !(outbound && verdict == VERDICT_PASS))
		count_reason(p.reason, p.frame_size);
	return frame_finish(ctx, &p, verdict);
}

/* The same with stamps of probes, in the place of sh_tc_in. A probe that the host sends itself has not
 * been on a wire yet, where its client looks for a balancer: sh_tc_out has no such copy. */
SEC("tc")
int sh_tc_stamps(struct __sk_buff *ctx)
{
	struct packet p = {};
	enum verdict verdict;

	if (interface_find(ctx))
		return TC_ACT_UNSPEC;
	ctx_headers_pull(ctx);
	p.frame_size = ctx_size_hint(ctx);
	stamp_begin(ctx);
	verdict = frame_stage(ctx, &p);
	stamp_end(verdict, p.reason);
	if (p.reason)
		count_reason(p.reason, p.frame_size);
	return frame_finish(ctx, &p, verdict);
}
