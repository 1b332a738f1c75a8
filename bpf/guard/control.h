/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Files through which a cgroup ends, stops or limits its processes, or takes others in: a program that may not send a
 * protected process a signal may not write to these either.
 *
 *   the file's inode ─► its cgroup ─► that of a rule, or below it ─► any file but those of pressure ─► kill
 *                                     above that of a rule ─► cgroup.kill, cgroup.freeze, memory.max ─► kill
 *                                                             a process goes through it to another ──► move
 */
#ifndef SHUNT_GUARD_CONTROL_H
#define SHUNT_GUARD_CONTROL_H

#include "judge.h"

#define CGROUP2_MAGIC 0x63677270 /* CGROUP2_SUPER_MAGIC of linux/magic.h */
#define MODE_FILE 0100000 /* S_IFREG of linux/stat.h */

/* The name of a cgroup's file. The kernel gives the name, and nothing can change it. */
struct control_name {
	__u64 words[2]; /* a name that is too long is cut, and equals none of the names below */
};

enum control_kind {
	CONTROL_OTHER,
	CONTROL_ENDS, /* a write also ends or stops the processes of cgroups below */
	CONTROL_PROCESSES, /* the kernel checks it when a process moves between cgroups below */
	CONTROL_PRESSURE, /* a write asks for reports of pressure, and changes nothing */
};

static __always_inline int name_equals(struct control_name *name, __u64 first, __u64 second)
{
	return name->words[0] == first && name->words[1] == second;
}

static __noinline int control_kind(struct kernfs_node *node)
{
	struct control_name n = {};

	bpf_probe_read_kernel_str(&n, sizeof(n), BPF_CORE_READ(node, name));
	if (name_equals(&n, WORD('c', 'g', 'r', 'o', 'u', 'p', '.', 'k'),
			WORD('i', 'l', 'l', 0, 0, 0, 0, 0)) ||
	    name_equals(&n, WORD('c', 'g', 'r', 'o', 'u', 'p', '.', 'f'),
			WORD('r', 'e', 'e', 'z', 'e', 0, 0, 0)) ||
	    name_equals(&n, WORD('m', 'e', 'm', 'o', 'r', 'y', '.', 'm'),
			WORD('a', 'x', 0, 0, 0, 0, 0, 0)))
		return CONTROL_ENDS;
	if (name_equals(&n, WORD('c', 'g', 'r', 'o', 'u', 'p', '.', 'p'),
			WORD('r', 'o', 'c', 's', 0, 0, 0, 0)))
		return CONTROL_PROCESSES;
	if (name_equals(&n, WORD('m', 'e', 'm', 'o', 'r', 'y', '.', 'p'),
			WORD('r', 'e', 's', 's', 'u', 'r', 'e', 0)) ||
	    name_equals(&n, WORD('c', 'p', 'u', '.', 'p', 'r', 'e', 's'),
			WORD('s', 'u', 'r', 'e', 0, 0, 0, 0)) ||
	    name_equals(&n, WORD('i', 'o', '.', 'p', 'r', 'e', 's', 's'),
			WORD('u', 'r', 'e', 0, 0, 0, 0, 0)) ||
	    name_equals(&n, WORD('i', 'r', 'q', '.', 'p', 'r', 'e', 's'),
			WORD('s', 'u', 'r', 'e', 0, 0, 0, 0)))
		return CONTROL_PRESSURE;
	return CONTROL_OTHER;
}

static __always_inline int is_control(struct inode *inode)
{
	return inode->i_sb->s_magic == CGROUP2_MAGIC;
}

/* 0, or -EPERM: rules forbid the current process to write to a file of a cgroup. is_through: the process does not open
 * the file to write. The kernel asks about cgroup.procs in this way when a process moves or begins in another cgroup
 * (cgroup_may_write of kernel/cgroup/cgroup.c): about the file of the nearest cgroup above both, and about the file of the
 * cgroup in which it begins. It asks in the same way before it changes a file's times or length: no program does this
 * to cgroup.procs, so it may count as a move. */
static __noinline int control_judge(struct inode *inode, int is_through)
{
	struct guard_state *state = state_get();
	struct attempt a = { .op = GUARD_KILL, .control = inode };
	struct kernfs_node *node, *folder;
	__u64 cgroup, above;
	int kind;

	if (!state || !state->generation || !inode || (inode->i_mode & MODE_TYPE) != MODE_FILE)
		return 0;
	node = BPF_CORE_READ(inode, i_private);
	folder = node_folder(node);
	cgroup = (__u64)BPF_CORE_READ(folder, priv);
	kind = control_kind(node);
	if (!cgroup || kind == CONTROL_PRESSURE)
		return 0;
	a.generation = state->generation;
	a.rules = groups_at(cgroup, a.generation & 1, 0);
	above = groups_at(cgroup, a.generation & 1, 1);
	if (kind == CONTROL_ENDS)
		a.rules |= above;
	if (!(a.rules | above))
		return 0;
	a.free = rules_own(a.generation);
	if (a.rules && attempt_judge(NULL, &a))
		return -EPERM;
	if (!is_through || kind != CONTROL_PROCESSES)
		return 0;
	a.op = GUARD_MOVE;
	a.rules = above;
	return a.rules ? attempt_judge(NULL, &a) : 0;
}

#endif
