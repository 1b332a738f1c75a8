/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Counting packets by reason. Each product has a map of its own for that.
 */
#ifndef SHUNT_COUNT_H
#define SHUNT_COUNT_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "../core/types.h"

/* Counts a packet in a map enum reason -> struct count, which is per CPU. */
static __always_inline void count_in(void *reasons, __u32 reason, __u64 bytes)
{
	struct count *count = bpf_map_lookup_elem(reasons, &reason);

	if (!count)
		return;
	count->packets++;
	count->bytes += bytes;
}

#endif
