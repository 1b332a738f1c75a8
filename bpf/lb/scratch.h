/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Working memory, for each stage its own: the stack is 512 bytes for the whole chain of calls,
 * and before Linux 6.4 no map takes its key from an argument of a __stage.
 */
#ifndef SHUNT_SCRATCH_H
#define SHUNT_SCRATCH_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* One element a CPU. XDP runs with bottom halves off, and one sweep runs at a time, so no two runs
 * of a program share it. Written and read within one run, unless its type says otherwise; not
 * pinned. */
#define SCRATCH(name, content)                           \
	struct {                                         \
		__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY); \
		__type(key, __u32);                      \
		__type(value, content);                  \
		__uint(max_entries, 1);                  \
	} name SEC(".maps")

/* The element of this CPU; NULL for the verifier alone. */
static __always_inline void *scratch_of(void *map)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(map, &zero);
}

#endif
