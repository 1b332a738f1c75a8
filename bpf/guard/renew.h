/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Programs that are replaced: a package manager writes a new file and renames it over the old one.
 *
 *   updater makes a file ─► sh_g_born ─► it renames the file over a trusted program ─► the new one is trusted
 *                              │ another process opens it to write, or truncates it
 *                              └► gone: the new one is not trusted
 *
 * Invariant: a file that gets trust here has been written by the process that renames it, and by no other.
 */
#ifndef SHUNT_GUARD_RENEW_H
#define SHUNT_GUARD_RENEW_H

#include "trust.h"

#define OPEN_CREATED \
	0x100000 /* FMODE_CREATED of linux/fs.h, 6.1 to 6.18: this open has created the file */

/*
 * Files that an updater has made, and no other process has opened to write. Key: the inode; value: struct
 * guard_process, the updater. Programs write and read. Never full; without memory, the file is not noted. Goes with
 * the inode. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_INODE_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct guard_process);
} sh_g_born SEC(".maps");

/*
 * The renewals of a policy. Key: the side of the generation; value: struct guard_renews. User space writes,
 * programs read. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct guard_renews);
} sh_g_renews SEC(".maps");

/* The renewals that a side's policy has; NULL: none. */
static __always_inline struct guard_renews *renews_get(__u32 i)
{
	struct guard_renews *renews = bpf_map_lookup_elem(&sh_g_renews, &i);

	return renews && renews->by ? renews : NULL;
}

static __always_inline int is_same(struct guard_process *a, struct guard_process *b)
{
	return a->id == b->id && a->start == b->start;
}

/* A process writes to a file from now on; is_new: it has just made the file. */
static __noinline int birth_note(struct inode *inode, int is_new)
{
	struct guard_state *state = state_get();
	struct task_struct *task = bpf_get_current_task_btf();
	struct guard_process process, *born;
	struct guard_renews *renews;

	if (!state || !inode)
		return 0;
	renews = renews_get(state->generation & 1);
	if (!renews)
		return 0;
	process = process_of(task->group_leader);
	if (is_new && trust_of(task->group_leader, state->generation) & renews->by) {
		bpf_inode_storage_get(&sh_g_born, inode, &process, BPF_LOCAL_STORAGE_GET_F_CREATE);
		return 0;
	}
	born = bpf_inode_storage_get(&sh_g_born, inode, 0, 0);
	if (born && !is_same(born, &process))
		bpf_inode_storage_delete(&sh_g_born, inode);
	return 0;
}

/* The rules that hold on for a file that takes the place of another one: on a side, of a generation. */
static __always_inline __u64 renewed(struct inode *inode, __u32 i, __u64 generation)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct guard_process process = process_of(task->group_leader), *born;
	struct guard_renews *renews = renews_get(i);

	if (!renews || !(trust_of(task->group_leader, generation) & renews->by))
		return 0;
	born = bpf_inode_storage_get(&sh_g_born, inode, 0, 0);
	return born && is_same(born, &process) ? renews->rules : 0;
}

/* A file takes the place of another one. A file that replaces an interpreter counts as one in any case. */
static __noinline int side_renew(struct inode *inode, struct inode *replaced, __u32 i)
{
	struct guard_side *from = side_find(replaced, i), *own, next = {};
	struct guard_state *state = state_get();
	__u64 rules;

	if (!from || !state || from->generation < state->generation)
		return 0;
	if (!(from->trusts | from->guards | from->interprets))
		return 0;
	rules = renewed(inode, i, from->generation);
	next.trusts = from->trusts & rules;
	next.guards = from->guards & rules;
	next.interprets = from->interprets;
	next.generation = from->generation;
	own = side_find(inode, i);
	if (own && own->generation > from->generation)
		return 0;
	if (own && own->generation == from->generation) {
		next.rules = own->rules;
		next.above = own->above;
		next.trusts |= own->trusts;
		next.guards |= own->guards;
		next.interprets |= own->interprets;
	}
	side_keep(inode, &next, i);
	own = side_cache(inode, &next, i);
	if (!own)
		return 0;
	if (own->generation != next.generation) {
		*own = next;
		return 0;
	}
	__sync_fetch_and_or(&own->trusts, next.trusts);
	__sync_fetch_and_or(&own->guards, next.guards);
	__sync_fetch_and_or(&own->interprets, next.interprets);
	return 0;
}

#endif
