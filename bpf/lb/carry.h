/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Flows of the ABI before, in the moments between the new programs' first packet and the end
 * of the carrying of its flow table. A flow from before the carrying began is in sh_flows; a
 * later flow is not, or has changed since. Packets of a later flow go to the program of the
 * ABI before, which has the flow, until it is carried: placed anew, it would be lost.
 */
#ifndef SHUNT_CARRY_H
#define SHUNT_CARRY_H

#include "flow.h"
#include "switch.h"

/*
 * The flow table of the ABI before, which only that ABI's programs write. Key: as in sh_flows. Of
 * the value only life is read, which is the second word in every ABI, and as struct flow has
 * it; user space sets the value's size. A program without FEATURE_CARRY has an empty map of
 * its own, which it never reads.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct flow_key);
	__type(value, struct flow);
	__uint(max_entries, 1);
} sh_flows_old SEC(".maps");

#define LIFE_WORD 1

/* Whether the flow of a key is still to be carried. found is its entry in sh_flows, or NULL. */
static __noinline int carry_is_due(const struct flow_key *key, const struct flow *found)
{
	__u64 *before, life;

	if (switch_state() != SWITCH_CARRYING)
		return 0;
	before = bpf_map_lookup_elem(&sh_flows_old, key);
	if (!before)
		return 0;
	life = *(volatile __u64 *)(before + LIFE_WORD);
	if (life_state(life) & FLOW_DEAD)
		return 0;
	return !found || !life_belongs(life, found->nonce);
}

/* Hands the packet to the program of the ABI before, and does not return if there is one. For
 * the place of the call, see chain.h. */
static __always_inline void carry_back(struct frame_ctx *ctx)
{
	if (features & FEATURE_CARRY)
		bpf_tail_call_static(ctx, &sh_gates, GATE_OLD);
}

#endif
