/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The hook for a guest: the program of another product of shunt's on the same interface. It gets the packets that
 * the balancer's programs pass to the stack unchanged, and passes on the ones it does not take:
 *
 *   frame ─► sh_xdp (─► sh_decap) ─► passes ─► guest ─► the program after (chain.h) ─► the stack
 *
 * Invariant: a frame that the balancer sends, answers or drops never comes here, and costs nothing more.
 */
#ifndef SHUNT_GUEST_H
#define SHUNT_GUEST_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* 0 -> the guest's program. One map for each interface (internal/kernel/guest.go). Written by user space
 * when a guest comes or goes; the kernel empties it when the last process that has it open is gone, so
 * that a guest ends with its process. Read by the tail call, which the kernel makes a jump, or no
 * operation while it is empty. Cannot be full. Made anew by each process: an upgrade meets no old one. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
} sh_guest SEC(".maps");

/* Hands a packet that passes to the guest; returns if there is none. For the place of the call, see
 * chain.h. */
static __always_inline void guest_hand_on(struct frame_ctx *ctx)
{
	bpf_tail_call_static(ctx, &sh_guest, 0);
}

#endif
