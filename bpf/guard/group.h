/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Rules that protect processes by their cgroup. Each attempt looks up the cgroup of the target process: a process that
 * enters the cgroup is protected from then on, and a process that leaves it is not. No map has the cgroup's ID, so the
 * cgroup need not exist when the policy is loaded, and may be made again.
 */
#ifndef SHUNT_GUARD_GROUP_H
#define SHUNT_GUARD_GROUP_H

#include "narrow.h"

/*
 * The rules that protect processes by a cgroup. Key: the side of the generation; value: a mask of rules. User space
 * writes, programs read. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} sh_g_grouped SEC(".maps");

/*
 * The cgroup of each rule. Key: the side of the generation × GUARD_RULES_MAX + the rule; value: struct guard_narrow
 * without a user. User space writes, programs read. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * GUARD_RULES_MAX);
	__type(key, __u32);
	__type(value, struct guard_narrow);
} sh_g_groups SEC(".maps");

struct grouping {
	__u64 cgroup; /* the address of its struct cgroup */
	__u64 rules; /* the rules to compare; at the end, the rules that match */
	__u32 side;
	/* 1: a rule matches if its cgroup is below this one; 0: if it is this one or above it. */
	__u32 is_above;
};

static long group_look(__u32 i, struct grouping *g)
{
	__u32 key = g->side * GUARD_RULES_MAX + i;
	struct cgroup *cgroup = (void *)g->cgroup;
	struct guard_narrow *group;
	__u32 depth;

	if (!(g->rules >> i & 1))
		return 0;
	group = bpf_map_lookup_elem(&sh_g_groups, &key);
	if (!group)
		goto none;
	depth = group->depth;
	if (g->is_above) {
		__u32 level = BPF_CORE_READ(cgroup, level);

		if (level >= depth)
			goto none;
		depth = level;
	}
	if (cgroup_begins(cgroup, group, depth))
		return 0;
none:
	g->rules &= ~(1ULL << i);
	return 0;
}

/* The rules that protect the processes of a cgroup, by the cgroup's address; with is_above, the rules that protect the
 * processes of a cgroup below it, and not its own. The function is global, so that the verifier checks it once for each
 * program; arguments of global functions are numbers. */
__noinline __u64 groups_at(__u64 cgroup, __u32 side, __u32 is_above)
{
	__u32 key = side & 1;
	__u64 *mask = bpf_map_lookup_elem(&sh_g_grouped, &key);
	struct grouping g = { .cgroup = cgroup, .side = key, .is_above = is_above };

	if (!mask || !*mask)
		return 0;
	g.rules = *mask;
	bpf_loop(GUARD_RULES_MAX, group_look, &g, 0);
	return g.rules;
}

/* The rules that protect a process by its cgroup: the cgroup of its first thread. */
static __always_inline __u64 groups_of(struct task_struct *leader, __u64 generation)
{
	return groups_at((__u64)cgroup_of((struct task_struct___narrow *)leader), generation & 1,
			 0);
}

#endif
