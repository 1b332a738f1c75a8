/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether a program's trust holds for the user that it runs as, and the cgroup that it is in. Each attempt asks this of
 * its own thread: one that has dropped a user's rights, or has left a cgroup, is not trusted from then on.
 *
 *   trust of the executable ─► rule names a user, or a cgroup? ─ no ──► trusted
 *                                └ yes ─► both of the thread's? ─ yes ─┘
 */
#ifndef SHUNT_GUARD_NARROW_H
#define SHUNT_GUARD_NARROW_H

#include "trust.h"

#define CGROUP_LEVELS_MAX \
	32 /* levels that a process's cgroup may be below the cgroup that a rule names */

struct kernfs_node {
	const char *name;
	void *priv;
} KERNEL_STRUCT;

struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
} KERNEL_STRUCT;

struct cgroup {
	struct cgroup_subsys_state self;
	int level;
	struct kernfs_node *kn;
} KERNEL_STRUCT;

struct css_set {
	struct cgroup *dfl_cgrp; /* of the second hierarchy */
} KERNEL_STRUCT;

typedef struct {
	__u32 val;
} KERNEL_STRUCT kuid_t;

struct cred {
	kuid_t uid;
	kuid_t euid;
} KERNEL_STRUCT;

struct task_struct___narrow {
	const struct cred *real_cred;
	struct css_set *cgroups;
} KERNEL_STRUCT;

/*
 * Rules whose trust is narrower than their programs. Key: the side of the generation; value: a mask of rules. User
 * space writes, programs read. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} sh_g_narrowed SEC(".maps");

/*
 * Their limits. Key: the side of the generation × GUARD_RULES_MAX + the rule; value: struct guard_narrow. User
 * space writes, programs read. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * GUARD_RULES_MAX);
	__type(key, __u32);
	__type(value, struct guard_narrow);
} sh_g_narrows SEC(".maps");

/* Real and effective: a program with the set-user-ID bit is neither its starter's nor its owner's. The task's own
 * credentials, and not the ones that a file system or io_uring has taken for the moment. */
static __always_inline int user_is(struct task_struct___narrow *task, __u32 user)
{
	return BPF_CORE_READ(task, real_cred, uid.val) == user &&
	       BPF_CORE_READ(task, real_cred, euid.val) == user;
}

/* The zero at the end of a text, in eight bytes of it as the machine reads them: the bits of the bytes up to the
 * first zero, that one included; 0: there is none. */
static __always_inline __u64 end_mask(__u64 word)
{
	__u64 zeros = (word - 0x0101010101010101ULL) & ~word & 0x8080808080808080ULL;

	return zeros ? zeros ^ (zeros - 1) : 0;
}

/* By words, because a name does not fit on the stack at this depth of calls (6.1: 512 bytes for all calls). The
 * kernel's copy of a name begins at a word, so none of these reads leaves its page. */
static __always_inline int name_is(struct cgroup *cgroup, const char *want)
{
	const char *name = BPF_CORE_READ(cgroup, kn, name);
	const __u64 *words = (const __u64 *)want;

	for (int i = 0; i < GUARD_CGROUP_BYTES / 8; i++) {
		__u64 have, end = end_mask(words[i]);

		if (bpf_probe_read_kernel(&have, sizeof(have), name + 8 * i))
			return 0;
		if (end)
			return !((have ^ words[i]) & end);
		if (have != words[i])
			return 0;
	}
	return 0;
}

static __always_inline struct cgroup *cgroup_of(struct task_struct___narrow *task)
{
	return BPF_CORE_READ(task, cgroups, dfl_cgrp);
}

/* Whether a cgroup's path begins with the first names of a rule's cgroup, as many as depth says. Names are compared,
 * and no IDs: a service that starts again has the same name and another ID. */
static __always_inline int cgroup_begins(struct cgroup *cgroup, struct guard_narrow *narrow,
					 __u32 depth)
{
	int above = BPF_CORE_READ(cgroup, level) - (int)depth;

	if (above < 0 || above > CGROUP_LEVELS_MAX)
		return 0;
	for (int i = 0; i < CGROUP_LEVELS_MAX && i < above; i++)
		cgroup = BPF_CORE_READ(cgroup, self.parent, cgroup);
	for (__u32 i = 0; i < GUARD_CGROUP_DEPTH_MAX; i++) {
		__u64 at = depth - 1 - i;

		if (i >= depth)
			return 1; /* all names have been compared */
		/* clang-19 loses the bound between its check and the sum; 6.1's verifier needs it. */
		asm volatile("%0 &= %1" : "+r"(at) : "i"(GUARD_CGROUP_DEPTH_MAX - 1));
		if (!name_is(cgroup, narrow->names[at]))
			return 0;
		cgroup = BPF_CORE_READ(cgroup, self.parent, cgroup);
	}
	return 1;
}

/* Whether a cgroup is the cgroup of a rule, or below it. */
static __always_inline int cgroup_is(struct cgroup *cgroup, struct guard_narrow *narrow)
{
	return cgroup_begins(cgroup, narrow, narrow->depth);
}

struct narrowing {
	__u64 trusts;
	__u32 side;
};

static long trust_narrow(__u32 i, struct narrowing *n)
{
	struct task_struct___narrow *task = (void *)bpf_get_current_task();
	__u32 key = n->side * GUARD_RULES_MAX + i;
	struct guard_narrow *narrow;

	if (!(n->trusts >> i & 1))
		return 0;
	narrow = bpf_map_lookup_elem(&sh_g_narrows, &key);
	if (!narrow || (narrow->has_user && !user_is(task, narrow->user)) ||
	    (narrow->depth && !cgroup_is(cgroup_of(task), narrow)))
		n->trusts &= ~(1ULL << i);
	return 0;
}

/* Of the rules that trust the current process's program, the ones whose user and cgroup it has now. The function is
 * global, so that the verifier checks it once a program. */
__noinline __u64 trust_here(__u64 trusts, __u32 side)
{
	__u32 key = side & 1;
	__u64 *mask = bpf_map_lookup_elem(&sh_g_narrowed, &key);
	struct narrowing n = { .side = key };

	if (!mask || !(trusts & *mask))
		return trusts;
	n.trusts = trusts & *mask;
	bpf_loop(GUARD_RULES_MAX, trust_narrow, &n, 0);
	return (trusts & ~*mask) | n.trusts;
}

#endif
