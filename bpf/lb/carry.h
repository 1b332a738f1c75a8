/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Flows of the ABI before, in the moments between the new programs' first packet and the end
 * of the carrying of its flow table. What was there when the carrying began is in sh_flows;
 * what came later is not, or is not as it was. Packets of such a flow go to the program of the
 * ABI before, which has it, until it is carried: placed anew, it would be lost.
 */
#ifndef SHUNT_CARRY_H
#define SHUNT_CARRY_H

#include "flow.h"
#include "switch.h"

/*
 * The flow table of the ABI before, which only that writes. Key: as in sh_flows. Of
 * the value only life is read, which is the second word in every ABI, and as struct flow has
 * it; user space sets the value's size. A program without FEATURE_CARRY has an empty one of
 * its own, which it never reads.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct flow_key);
	__type(value, struct flow);
	__uint(max_entries, 1);
} sh_flows_old SEC(".maps");

#define LIFE_WORD 1

/* Whether a key is of a flow that is still to be carried. found is what sh_flows has, or NULL. */
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

/* Hands the packet to the program of the ABI before, and does not return if that is there. For
 * the place of the call, see chain.h. */
static __always_inline void carry_back(struct frame_ctx *ctx)
{
	if (features & FEATURE_CARRY)
		bpf_tail_call_static(ctx, &sh_gates, GATE_OLD);
}

#endif
