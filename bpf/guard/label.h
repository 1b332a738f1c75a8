/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Labels: the rules that an inode is under, and the rules that trust a process.
 *
 *   user space, at load ─► sh_g_filesN ─► sh_g_labelsN ◄─ new name in a labelled folder
 *                            the inode has left memory, and comes back
 *
 * A label is the inode's own, so no other name, mount or namespace leads around it. It lives as long as
 * the inode is in memory. sh_g_filesN keeps it by device, inode number and generation for the time after.
 * N is the side of the policy's generation.
 *
 * Invariant: an inode that has ever had a label has one in sh_g_labelsN or in sh_g_filesN, and user space never
 * writes the labels of the policy in force.
 */
#ifndef SHUNT_GUARD_LABEL_H
#define SHUNT_GUARD_LABEL_H

#include "inode.h"

#define MODE_TYPE 0170000 /* S_IFMT of linux/stat.h */
#define MODE_FOLDER 0040000 /* S_IFDIR */

/*
 * Labels of inodes in memory, of generations with an even number. Key: the inode; value: struct guard_side. User
 * space writes those of a generation that is not in force, programs write for new files; programs read. Never
 * full; without memory, sh_g_files0 is read instead. Goes with the inode. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_INODE_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct guard_side);
} sh_g_labels0 SEC(".maps");

/*
 * Labels of all inodes, of generations with an even number. Key: struct guard_file; value: struct guard_side. User
 * space writes those of a generation that is not in force, programs write for new files, and take deleted ones
 * away. Full: a load is refused, and a new file is counted in sh_g_counts. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, GUARD_FILES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct guard_file);
	__type(value, struct guard_side);
} sh_g_files0 SEC(".maps");

/*
 * Labels of inodes in memory, of generations with an odd number. Key: the inode; value: struct guard_side. User
 * space writes those of a generation that is not in force, programs write for new files; programs read. Never
 * full; without memory, sh_g_files1 is read instead. Goes with the inode. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_INODE_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct guard_side);
} sh_g_labels1 SEC(".maps");

/*
 * Labels of all inodes, of generations with an odd number. Key: struct guard_file; value: struct guard_side. User
 * space writes those of a generation that is not in force, programs write for new files, and take deleted ones
 * away. Full: a load is refused, and a new file is counted in sh_g_counts. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, GUARD_FILES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct guard_file);
	__type(value, struct guard_side);
} sh_g_files1 SEC(".maps");

/*
 * Trusted and protected processes. No task storage: in 6.1 a look-up in it fails while another task of the same
 * CPU is in one. Key: struct guard_process; value: struct guard_trust. Programs write at exec, fork and ptrace,
 * read, and delete entries of ended processes; so does user space. Full: the process is not trusted, and is
 * counted in sh_g_counts. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, GUARD_TASKS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct guard_process);
	__type(value, struct guard_trust);
} sh_g_tasks SEC(".maps");

/*
 * The same for processes that ran already when a policy was loaded, of generations with an even number. Key:
 * struct guard_process; value: struct guard_given. User space writes that of the generation that is not in
 * force; programs read, and take it away at exec and at the end. Full: a load is refused. Upgrade: pinned, and
 * taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, GUARD_TASKS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct guard_process);
	__type(value, struct guard_given);
} sh_g_given0 SEC(".maps");

/*
 * Of generations with an odd number. Key: struct guard_process; value: struct guard_given. User space writes,
 * programs read, and take it away at exec and at the end. Full: a load is refused. Upgrade: pinned, and taken
 * over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, GUARD_TASKS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct guard_process);
	__type(value, struct guard_given);
} sh_g_given1 SEC(".maps");

/*
 * The trust that a process keeps when it executes a file. Key: the address of the thread's struct task_struct,
 * which stays when the thread becomes the process's first; value: struct guard_trust. Programs write when the
 * file is opened, and read when the process runs it. Full: the oldest entry goes, and its process keeps no
 * trust. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, GUARD_EXECS_MAX);
	__type(key, __u64);
	__type(value, struct guard_trust);
} sh_g_execs SEC(".maps");

/*
 * The rules whose trust goes on to the programs that a trusted program starts. Key: the side of the generation;
 * value: a mask of rules. User space writes, programs read. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} sh_g_children SEC(".maps");

/*
 * The policy in force. Key: 0; value: struct guard_state. User space writes, programs read. Never full.
 * Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct guard_state);
} sh_g_state SEC(".maps");

/*
 * The number of folders that were moved into protected ones. Files in them have no label of their own, so with
 * any such folder programs look upwards. Key: 0; value: a count. Programs write and read. Never full. Upgrade:
 * pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sh_g_moved SEC(".maps");

/*
 * The record that agents keep of their work. Key: 0; value: struct guard_agent. User space writes and reads.
 * Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct guard_agent);
} sh_g_agent SEC(".maps");

/*
 * Counts of denied and audited attempts, and of labels and trust without room. Key: 0; value: struct guard_count
 * of a CPU. Programs write, user space reads. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct guard_count);
} sh_g_counts SEC(".maps");

/*
 * The rules, for people. Key: the side of the generation × GUARD_RULES_MAX + the rule; value: struct guard_rule.
 * User space writes and reads. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * GUARD_RULES_MAX);
	__type(key, __u32);
	__type(value, struct guard_rule);
} sh_g_rules SEC(".maps");

static __always_inline struct guard_state *state_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sh_g_state, &zero);
}

static __always_inline __u64 *moved_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sh_g_moved, &zero);
}

static __always_inline struct guard_count *count_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sh_g_counts, &zero);
}

/* The label of a side that is in memory. This function and the next two return a label of any generation. */
static __always_inline struct guard_side *side_cached(struct inode *inode, __u64 i)
{
	if (i & 1)
		return bpf_inode_storage_get(&sh_g_labels1, inode, 0, 0);
	return bpf_inode_storage_get(&sh_g_labels0, inode, 0, 0);
}

/* The same; if memory has no label of the inode, it gets this one. */
static __always_inline struct guard_side *side_cache(struct inode *inode, struct guard_side *side,
						     __u64 i)
{
	if (i & 1)
		return bpf_inode_storage_get(&sh_g_labels1, inode, side,
					     BPF_LOCAL_STORAGE_GET_F_CREATE);
	return bpf_inode_storage_get(&sh_g_labels0, inode, side, BPF_LOCAL_STORAGE_GET_F_CREATE);
}

static __always_inline struct guard_side *side_find(struct inode *inode, __u64 i)
{
	struct guard_side *side = side_cached(inode, i);
	struct guard_file file;

	if (side)
		return side;
	file = file_of(inode);
	side = i & 1 ? bpf_map_lookup_elem(&sh_g_files1, &file) :
		       bpf_map_lookup_elem(&sh_g_files0, &file);
	if (side)
		side_cache(inode, side, i);
	return side;
}

static __always_inline struct guard_side *side_if(struct guard_side *side, __u64 generation)
{
	return side && side->generation == generation ? side : NULL;
}

/* The rules of a folder above, for a file that was moved in with a folder and has no label of its own. */
static __noinline __u64 rules_above(struct dentry *dentry, __u64 generation)
{
	for (int i = 0; i < GUARD_DEPTH_MAX; i++) {
		struct dentry *parent = dentry->d_parent;
		struct guard_side *side;
		struct inode *inode;

		if (!parent || parent == dentry)
			return 0;
		inode = parent->d_inode;
		if (!inode)
			return 0;
		side = side_if(side_cached(inode, generation), generation);
		if (side && side->rules)
			return side->rules;
		dentry = parent;
	}
	return 0;
}

static __always_inline void side_keep(struct inode *inode, struct guard_side *side, __u64 i)
{
	struct guard_file file = file_of(inode);
	struct guard_count *count;
	long err;

	err = i & 1 ? bpf_map_update_elem(&sh_g_files1, &file, side, BPF_ANY) :
		      bpf_map_update_elem(&sh_g_files0, &file, side, BPF_ANY);
	if (!err)
		return;
	count = count_get();
	if (count)
		count->unrecorded++;
}

/* Gives an inode the rules of the folder that it gets a name in; of the policy in force, and of the next one if
 * user space is writing that. Returns whether there are any. */
static __noinline int side_join(struct inode *inode, struct inode *folder, __u32 i)
{
	struct guard_side *from = side_find(folder, i), *own, joined = {};
	struct guard_state *state = state_get();

	if (!from || !state || !from->rules || from->generation < state->generation)
		return 0;
	own = side_find(inode, i);
	if (own && own->generation > from->generation)
		return 1;
	if (own && own->generation == from->generation)
		joined = *own;
	if ((joined.rules & from->rules) == from->rules)
		return 1;
	joined.rules |= from->rules;
	joined.generation = from->generation;
	side_keep(inode, &joined, i);
	own = side_cache(inode, &joined, i);
	if (own && own->generation == joined.generation)
		__sync_fetch_and_or(&own->rules, joined.rules);
	else if (own)
		*own = joined;
	return 1;
}

static __always_inline int label_join(struct inode *inode, struct inode *folder)
{
	return side_join(inode, folder, 0) | side_join(inode, folder, 1);
}

#endif
