/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which rules protect a process by the cgroup that it is in. That is asked at each attempt, of the process that it is
 * about: one that comes is protected from then on, and one that leaves is not. Nothing is noted of it, so a cgroup need
 * not be there when the policy is loaded, and may be made again.
 */
#ifndef SHUNT_GUARD_GROUP_H
#define SHUNT_GUARD_GROUP_H

#include "narrow.h"

/*
 * Rules that protect the processes of a cgroup. Key: the side of the generation; value: a mask of rules. User space
 * writes, programs read. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} sh_g_grouped SEC(".maps");

/*
 * Of which cgroup. Key: the side of the generation × GUARD_RULES_MAX + the rule; value: struct guard_narrow, which has
 * no user. User space writes, programs read. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * GUARD_RULES_MAX);
	__type(key, __u32);
	__type(value, struct guard_narrow);
} sh_g_groups SEC(".maps");

struct grouping {
	__u64 cgroup; /* its address */
	__u64 rules; /* that are looked at; at the end, those that protect it */
	__u32 side;
};

static long group_look(__u32 i, struct grouping *g)
{
	__u32 key = g->side * GUARD_RULES_MAX + i;
	struct guard_narrow *group;

	if (!(g->rules >> i & 1))
		return 0;
	group = bpf_map_lookup_elem(&sh_g_groups, &key);
	if (!group || !cgroup_is((struct cgroup *)g->cgroup, group))
		g->rules &= ~(1ULL << i);
	return 0;
}

/* The rules that protect processes of a cgroup, by the address of that. It is global, so that the verifier looks at it
 * once a program; then its arguments are numbers. */
__noinline __u64 groups_at(__u64 cgroup, __u32 side)
{
	__u32 key = side & 1;
	__u64 *mask = bpf_map_lookup_elem(&sh_g_grouped, &key);
	struct grouping g = { .cgroup = cgroup, .side = key };

	if (!mask || !*mask)
		return 0;
	g.rules = *mask;
	bpf_loop(GUARD_RULES_MAX, group_look, &g, 0);
	return g.rules;
}

/* The rules that protect a process by its cgroup, which is that of its first thread. */
static __always_inline __u64 groups_of(struct task_struct *leader, __u64 generation)
{
	return groups_at((__u64)cgroup_of((struct task_struct___narrow *)leader), generation & 1);
}

#endif
