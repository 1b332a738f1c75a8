/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The switch between two ABIs while one takes over from the other.
 * docs/design/20-upgrade.md has the order of the steps.
 */
#ifndef SHUNT_SWITCH_H
#define SHUNT_SWITCH_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

/*
 * enum switch_word -> its value. Written by the daemon of the new ABI, and read by sh_gate and
 * by programs with FEATURE_CARRY. One word switches all interfaces at once. It is pinned with the
 * new ABI's maps, so the next daemon finds it if this one is killed. The map exists only during an
 * upgrade; a program without FEATURE_CARRY has an empty one of its own, which it never reads.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, SWITCH_WORDS);
	__uint(map_flags, BPF_F_MMAPABLE);
} sh_switch SEC(".maps");

/* enum gate -> program, one map for each interface. Written by the daemon before sh_gate is
 * attached, read by sh_gate and by programs with FEATURE_CARRY. Pinned during the upgrade as
 * gate-<interface>, because the kernel empties such a map when user space has released it
 * (prog_array_map_clear in kernel/bpf/arraymap.c). Cannot be full. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, GATE_COUNT);
} sh_gates SEC(".maps");

static __always_inline __u64 switch_state(void)
{
	__u32 word = SWITCH_STATE;
	__u64 *state = bpf_map_lookup_elem(&sh_switch, &word);

	return state ? *(volatile __u64 *)state : SWITCH_DONE;
}

#endif
