/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The hook for foreign XDP programs on the same interface. A tail call does not come back, so
 * each program hands on by calling the next:
 *
 *   frame ─► before ──CHAIN_NEXT──► sh_xdp ─┬─► sends, drops
 *                                           └─► passes ──CHAIN_AFTER──► after ─► the stack
 *
 * The program before is the one that user space attaches to the interface, in the place of
 * sh_xdp: so sh_xdp has no code for it.
 */
#ifndef SHUNT_CHAIN_H
#define SHUNT_CHAIN_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

/*
 * enum chain_position -> program. One map for each interface, pinned as chain-<interface>
 * beside its link, because sh_xdp is loaded for each. CHAIN_NEXT is written when the program
 * is attached or replaced, the others by `shunt chain`. All programs in it, and all that call
 * into it, must be loaded with BPF_F_XDP_HAS_FRAGS as sh_xdp is, or the kernel refuses them
 * (EINVAL). Cannot be full. Outlives the daemon and an upgrade to any ABI.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, CHAIN_COUNT);
} sh_chain SEC(".maps");

/* Hands a packet that is not ours to the program after; returns if there is none. The position
 * is a constant in the instruction, so the kernel can turn the call into a jump, or into no
 * operation (prog_array_map_poke_run in kernel/bpf/arraymap.c). Only from a program's own
 * function: a call from a subprogram leaves 256 bytes of stack for all frames before it. */
static __always_inline void chain_after(struct frame_ctx *ctx)
{
	bpf_tail_call_static(ctx, &sh_chain, CHAIN_AFTER);
}

#endif
