/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The frame at XDP. The stages know a hook only by the functions here or, with the same names, in
 * skb.h for tc: each program includes one of the two, before all other headers.
 *
 *   struct frame_ctx    the program's argument, with the frame in it
 *   ctx_data, ctx_data_end    the part of the frame that a pointer reaches
 *   ctx_size_hint, ctx_size    bytes of the frame: a lower bound, and the exact number
 *   ctx_segment_size    bytes of payload in each packet that the frame stands for; 0: one packet
 *   ctx_has_tag    whether there is a VLAN tag that is not in the frame
 *   ctx_load, ctx_store    copies from and to any offset of the frame
 *   ctx_head_grow    room for bytes in front of the frame; their contents are undefined
 *   ctx_outer_push    room for headers behind the Ethernet header, whose contents are undefined
 *   ctx_head_cut, ctx_tail_cut    remove bytes at either end
 *   ctx_route    asks the routing table
 *   ctx_csum_replace    updates the transport checksum at offset by the growth of the sums of
 *                       addresses and ports; 1: only the bytes tell the checksum's state
 *
 *   ctx_note    a word that the program has put beside the frame, at tc alone
 *   ctx_is_tc    whether the program is at tc
 *   ctx_is_outbound    whether the frame is one that the host sends
 *   ctx_sees_host    whether a program of ours sees frames that the host sends by the same interface
 *
 * All other functions that return int return 0, or another value if the frame is too short or the
 * kernel has no memory. A function that changes the frame's size makes all pointers into it invalid.
 */
#ifndef SHUNT_CTX_XDP_H
#define SHUNT_CTX_XDP_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* By its own name, because the verifier knows the argument of a __stage by that. */
#define frame_ctx xdp_md

static __always_inline int ctx_is_tc(void)
{
	return 0;
}

static __always_inline __u32 ctx_note(const struct frame_ctx *ctx)
{
	return 0;
}

static __always_inline int ctx_is_outbound(void)
{
	return 0;
}

static __always_inline int ctx_sees_host(void)
{
	return 0;
}

static __always_inline void *ctx_data(const struct frame_ctx *ctx)
{
	return (void *)(long)ctx->data;
}

static __always_inline void *ctx_data_end(const struct frame_ctx *ctx)
{
	return (void *)(long)ctx->data_end;
}

/* Only a multi-buffer frame has more than its linear part, and the helper is worth its call only
 * if the caller needs more than that part. */
static __always_inline __u32 ctx_size_hint(const struct frame_ctx *ctx)
{
	return ctx->data_end - ctx->data;
}

static __always_inline __u32 ctx_size(struct frame_ctx *ctx)
{
	return bpf_xdp_get_buff_len(ctx);
}

static __always_inline __u32 ctx_segment_size(const struct frame_ctx *ctx)
{
	return 0;
}

static __always_inline int ctx_has_tag(const struct frame_ctx *ctx)
{
	return 0;
}

static __always_inline int ctx_load(struct frame_ctx *ctx, __u32 offset, void *to, __u32 size)
{
	return bpf_xdp_load_bytes(ctx, offset, to, size);
}

static __always_inline int ctx_store(struct frame_ctx *ctx, __u32 offset, void *from, __u32 size)
{
	return bpf_xdp_store_bytes(ctx, offset, from, size);
}

static __always_inline int ctx_head_grow(struct frame_ctx *ctx, __u32 size)
{
	return bpf_xdp_adjust_head(ctx, -(int)size);
}

static __always_inline int ctx_outer_push(struct frame_ctx *ctx, __u32 size, int is_ip6,
					  __u32 udp_shim_size)
{
	return bpf_xdp_adjust_head(ctx, -(int)size);
}

static __always_inline int ctx_head_cut(struct frame_ctx *ctx, __u32 size)
{
	return bpf_xdp_adjust_head(ctx, size);
}

static __always_inline int ctx_tail_cut(struct frame_ctx *ctx, __u32 size)
{
	return bpf_xdp_adjust_tail(ctx, -(int)size);
}

static __always_inline long ctx_route(struct frame_ctx *ctx, struct bpf_fib_lookup *fib)
{
	return bpf_fib_lookup(ctx, fib, sizeof(*fib), 0);
}

static __always_inline int ctx_csum_replace(struct frame_ctx *ctx, __u32 offset, __u32 addresses,
					    __u32 ports, int is_udp)
{
	return 1;
}

#endif
