/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The frame at tc: an sk_buff. xdp.h explains each function.
 *
 * An sk_buff has more than its bytes, and these facts have to stay true:
 *
 *   checksum  the transport's may still be open (CHECKSUM_PARTIAL). The kernel's helper knows,
 *             and updates the field: no program has to learn the state from the bytes.
 *   segments  a frame may stand for many (up to 64 KB). The size of one of them has to fit, and
 *             a tunnel's headers come with the note that each segment needs its own.
 *   VLAN tag  is not in the frame but beside it.
 */
#ifndef SHUNT_CTX_SKB_H
#define SHUNT_CTX_SKB_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "sk_buff.h"

#define frame_ctx __sk_buff

/* Fixed when the program is loaded. 1: the program sees the frames that the host sends, and none that
 * it receives. Read by ctx_is_outbound. */
volatile const __u8 outbound = 0;

static __always_inline int ctx_is_tc(void)
{
	return 1;
}

static __always_inline int ctx_is_outbound(void)
{
	return outbound;
}

static __always_inline int ctx_sees_host(void)
{
	return 1;
}

/* A word beside the frame, for as long as the program runs. Other programs at tc use that word, too. */
static __always_inline void ctx_note_put(struct frame_ctx *ctx, __u32 note)
{
	ctx->cb[0] = note;
}

static __always_inline __u32 ctx_note(const struct frame_ctx *ctx)
{
	return ctx->cb[0];
}

/* All headers lie within so many bytes, as at XDP (core/parse.h). */
#define LINEAR_SIZE 256

/* Headers may lie in pages of the sk_buff, where no pointer reaches. */
static __always_inline void ctx_headers_pull(struct frame_ctx *ctx)
{
	__u32 size = ctx->len < LINEAR_SIZE ? ctx->len : LINEAR_SIZE;

	if (ctx->data_end - ctx->data < size)
		bpf_skb_pull_data(ctx, size);
}

static __always_inline void *ctx_data(const struct frame_ctx *ctx)
{
	return (void *)(long)ctx->data;
}

static __always_inline void *ctx_data_end(const struct frame_ctx *ctx)
{
	return (void *)(long)ctx->data_end;
}

static __always_inline __u32 ctx_size_hint(const struct frame_ctx *ctx)
{
	return ctx->len;
}

static __always_inline __u32 ctx_size(struct frame_ctx *ctx)
{
	return ctx->len;
}

static __always_inline __u32 ctx_segment_size(const struct frame_ctx *ctx)
{
	return ctx->gso_size;
}

static __always_inline int ctx_has_tag(const struct frame_ctx *ctx)
{
	return ctx->vlan_present;
}

static __always_inline int ctx_load(struct frame_ctx *ctx, __u32 offset, void *to, __u32 size)
{
	return bpf_skb_load_bytes(ctx, offset, to, size);
}

static __always_inline int ctx_store(struct frame_ctx *ctx, __u32 offset, void *from, __u32 size)
{
	return bpf_skb_store_bytes(ctx, offset, from, size, 0);
}

static __always_inline int ctx_head_grow(struct frame_ctx *ctx, __u32 size)
{
	return bpf_skb_change_head(ctx, size, 0);
}

/* BPF_F_ADJ_ROOM_FIXED_GSO: segments keep their size, so that one datagram stays one datagram;
 * their size has been checked before. The kernel takes the bytes after the UDP header for an inner
 * link-layer header, and copies them into each segment (__skb_udp_tunnel_segment). */
static __always_inline int ctx_outer_push(struct frame_ctx *ctx, __u32 size, int is_ip6,
					  __u32 udp_shim_size)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO |
		      (is_ip6 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV4);

	if (udp_shim_size)
		flags |= BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2(udp_shim_size);
	return bpf_skb_adjust_room(ctx, size, BPF_ADJ_ROOM_MAC, flags);
}

static __always_inline int ctx_tail_cut(struct frame_ctx *ctx, __u32 size)
{
	return bpf_skb_change_tail(ctx, ctx->len - size, 0);
}

/* The kernel compares the length in the request with the MTU. Without one it takes the frame's, but
 * a frame that is too long is ours to judge (bpf_skb_fib_lookup in net/core/filter.c). */
static __always_inline long ctx_route(struct frame_ctx *ctx, struct bpf_fib_lookup *fib)
{
	fib->tot_len = 1;
	return bpf_fib_lookup(ctx, fib, sizeof(*fib), 0);
}

static __always_inline int ctx_csum_replace(struct frame_ctx *ctx, __u32 offset, __u32 addresses,
					    __u32 ports, int is_udp)
{
	/* UDP's zero says that there is none: RFC 768, and RFC 6935 for tunnels over IPv6. */
	__u64 flags = is_udp ? BPF_F_MARK_MANGLED_0 : 0;

	return bpf_l4_csum_replace(ctx, offset, 0, ports, flags) ||
			       bpf_l4_csum_replace(ctx, offset, 0, addresses,
						   flags | BPF_F_PSEUDO_HDR) ?
		       -1 :
		       0;
}

#endif
