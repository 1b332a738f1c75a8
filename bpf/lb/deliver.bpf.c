// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Sends the frames that sh_xdp has balanced and marked, because they leave by an interface at tc
 * (mark.h). One copy is loaded for each interface at XDP while there are interfaces at tc, at its tc ingress.
 *
 *   sk_buff ─► sh_deliver ─┬─► no mark ────► the next program at tc ─► stack
 *                          ├─► veth of a pod ─► into the pod's network namespace
 *                          └─► others ─────► out of the interface: a bridge finds the port
 */
#include "../ctx/skb.h"

#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "csum.h"
#include "lookup.h"
#include "mark.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Bit 1 << index in sh_interfaces: a veth whose other end is in another network namespace. All from
 * INTERFACE_MAX on are such. */
volatile const __u64 tc_peers = 0;

#define PACKET_TO_HOST 0 /* PACKET_HOST of linux/if_packet.h */

/* The sum of the addresses of the packet, and of its transport's length and protocol. */
static __always_inline __u16 pseudo_sum_of(const struct frame_ctx *ctx, const struct addr *source,
					   const struct addr *destination, const struct mark *mark)
{
	return csum_fold(pseudo_sum(source, destination, ctx->len - mark->l4_offset,
				    mark->second & MARK_TCP ? IPPROTO_TCP : IPPROTO_UDP));
}

/*
 * sh_xdp has finished a checksum that the sender left to hardware. A driver that made the frame from an
 * sk_buff, as veth does, has kept the note that it is unfinished, and a device that acts on the note would
 * sum the sum. The kernel leaves a field with that note alone when we say that payload has changed,
 * which shows whether the note is there (inet_proto_csum_replace_by_diff); then the field gets the value
 * that the note announces, the pseudo-header's sum. Else the field stays as it was. Returns 0, or -1.
 */
static __noinline int csum_reopen(struct frame_ctx *ctx, const struct mark *mark)
{
	struct addr source, destination;
	__u32 offset;
	__u16 before, now;
	__be32 ip4[2];
	__be16 protocol;

	if (!mark)
		return -1;
	offset = mark->l4_offset + (mark->second & MARK_TCP ? offsetof(struct tcphdr, check) :
							      offsetof(struct udphdr, check));
	if (bpf_skb_load_bytes(ctx, offset, &before, sizeof(before)) ||
	    bpf_l4_csum_replace(ctx, offset, 0, 1, 0) ||
	    bpf_skb_load_bytes(ctx, offset, &now, sizeof(now)))
		return -1;
	if (now == before) {
		if (bpf_skb_load_bytes(ctx, offsetof(struct ethhdr, h_proto), &protocol,
				       sizeof(protocol)))
			return -1;
		if (protocol == bpf_htons(ETH_P_IP)) {
			if (bpf_skb_load_bytes(ctx, L3_OFFSET + offsetof(struct iphdr, saddr), ip4,
					       sizeof(ip4)))
				return -1;
			source = addr_from_ip4(ip4[0]);
			destination = addr_from_ip4(ip4[1]);
		} else if (bpf_skb_load_bytes(ctx, L3_OFFSET + offsetof(struct ipv6hdr, saddr),
					      &source, sizeof(source)) ||
			   bpf_skb_load_bytes(ctx, L3_OFFSET + offsetof(struct ipv6hdr, daddr),
					      &destination, sizeof(destination))) {
			return -1;
		}
		before = pseudo_sum_of(ctx, &source, &destination, mark);
	}
	return bpf_skb_store_bytes(ctx, offset, &before, sizeof(before), 0) ? -1 : 0;
}

static __always_inline int drop_counted(struct frame_ctx *ctx, enum reason reason)
{
	count_reason(reason, ctx->len);
	return TC_ACT_SHOT;
}

SEC("tc")
int sh_deliver(struct frame_ctx *ctx)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data;
	struct interface *out;
	struct mark mark;
	__u32 index;

	if ((void *)(eth + 1) > data_end || !mark_is_there(mark_of(eth)))
		return TC_ACT_UNSPEC;
	mark = *mark_of(eth);
	index = mark_index(&mark);
	out = bpf_map_lookup_elem(&sh_interfaces, &index);
	if (!out || !out->ifindex || !interface_is_tc(index))
		return drop_counted(ctx, REASON_EGRESS_UNLISTED);
	__builtin_memcpy(eth->h_source, out->mac, ETH_ALEN);
	/* The tags are the ones that the frame came in with: sh_vlan has put them on again. */
	if (ctx->vlan_present && bpf_skb_vlan_pop(ctx))
		return drop_counted(ctx, REASON_INTERNAL);
	if (ctx->vlan_present && bpf_skb_vlan_pop(ctx))
		return drop_counted(ctx, REASON_INTERNAL);
	if ((mark.second & (MARK_TCP | MARK_UDP)) && csum_reopen(ctx, &mark))
		return drop_counted(ctx, REASON_INTERNAL);
	if (index < INTERFACE_MAX && !(tc_peers >> index & 1))
		return bpf_redirect(out->ifindex, 0);
	/* The stack there handles the frame next; this host's took it for another station's. */
	if (bpf_skb_change_type(ctx, PACKET_TO_HOST))
		return drop_counted(ctx, REASON_INTERNAL);
	return bpf_redirect_peer(out->ifindex, 0);
}
