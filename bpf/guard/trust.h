/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The rules that trust a process, and the rules that protect it: both follow the chain of processes.
 *
 *   executable's label ─► exec ─► sh_g_tasks ─► fork ─► sh_g_tasks of the child
 *                          ▲
 *   starter's trust ─► sh_g_execs, if a rule trusts children
 *
 * Invariant: trust belongs to a process, and only that in sh_g_given0 and 1 comes from user space. A process that
 * executes a file loses it, so no program inherits trust that user space gave to another one.
 */
#ifndef SHUNT_GUARD_TRUST_H
#define SHUNT_GUARD_TRUST_H

#include "label.h"

#define STRINGS_MAX (1 << 17) /* arguments and variables that are read; with more, no trust */
#define STRING_BYTES 128 /* bytes of strings that are read at once */
#define TICK_NS 10000000 /* a second by USER_HZ of asm-generic/param.h */

struct vfsmount {
	struct dentry *mnt_root;
} KERNEL_STRUCT;

struct path {
	struct vfsmount *mnt;
	struct dentry *dentry;
} KERNEL_STRUCT;

struct file {
	unsigned int f_mode;
	unsigned int f_flags;
	struct inode *f_inode;
	struct path f_path;
} KERNEL_STRUCT;

struct linux_binprm {
	unsigned long p;
	struct file *file;
	int argc;
	const char *filename;
	const char *interp;
	unsigned long exec;
} KERNEL_STRUCT;

struct mm_struct {
	struct file *exe_file;
} KERNEL_STRUCT;

struct fdtable {
	struct file **fd;
} KERNEL_STRUCT;

struct files_struct {
	struct fdtable *fdt;
} KERNEL_STRUCT;

/* The fields that task.h does not have. */
struct task_struct___guard {
	int tgid;
	unsigned int ptrace;
	struct mm_struct *mm;
	struct files_struct *files;
} KERNEL_STRUCT;

static __always_inline struct guard_process process_of(struct task_struct *leader)
{
	struct guard_process process = {};

	process.id = BPF_CORE_READ((struct task_struct___guard *)leader, tgid);
	process.start = BPF_CORE_READ(leader, start_boottime) / TICK_NS;
	return process;
}

/* Sets the trust of a process. */
static __always_inline void trust_put(struct guard_process *process, struct guard_trust *trust)
{
	struct guard_count *count;

	if (!bpf_map_update_elem(&sh_g_tasks, process, trust, BPF_ANY))
		return;
	count = count_get();
	if (count)
		count->untrusted++;
}

static __always_inline void trust_add(struct guard_trust *sum, int side, struct guard_given *given)
{
	if (!given || given->generation < sum->generations[side])
		return;
	if (given->generation > sum->generations[side]) {
		sum->trusts[side] = 0;
		sum->guards[side] = 0;
	}
	sum->generations[side] = given->generation;
	sum->trusts[side] |= given->trusts;
	sum->guards[side] |= given->guards;
}

/* Adds up all trust of a process; leader is its first thread. */
static __always_inline void trust_sum(struct guard_trust *sum, struct task_struct *leader)
{
	struct guard_process process = process_of(leader);
	struct guard_trust *own = bpf_map_lookup_elem(&sh_g_tasks, &process);

	if (own)
		*sum = *own;
	trust_add(sum, 0, bpf_map_lookup_elem(&sh_g_given0, &process));
	trust_add(sum, 1, bpf_map_lookup_elem(&sh_g_given1, &process));
}

/* Takes over the trust of a newer generation that the process was given since it began to execute a file. */
static __noinline int trust_renew(struct guard_trust *going, struct task_struct *task)
{
	struct guard_trust sum = {};

	if (!going)
		return 0;
	trust_sum(&sum, task);
	for (int i = 0; i < 2; i++) {
		if (sum.generations[i] <= going->generations[i])
			continue;
		going->generations[i] = sum.generations[i];
		going->trusts[i] = sum.trusts[i];
	}
	return 0;
}

/* The rules by which a process is trusted. */
static __always_inline __u64 trust_of(struct task_struct *leader, __u64 generation)
{
	struct guard_trust sum = {};

	trust_sum(&sum, leader);
	return sum.generations[generation & 1] == generation ? sum.trusts[generation & 1] : 0;
}

/* The rules by which a process is protected. */
static __always_inline __u64 guards_of(struct task_struct *leader, __u64 generation)
{
	struct guard_trust sum = {};

	trust_sum(&sum, leader);
	return sum.generations[generation & 1] == generation ? sum.guards[generation & 1] : 0;
}

/* The rules of a side that trust the tracer: a traced process is trusted by no others. */
static __always_inline __u64 trust_left(struct guard_trust *tracer, int side, __u64 generation)
{
	return tracer->generations[side] == generation ? tracer->trusts[side] : 0;
}

/* A traced process is trusted by no more rules than its tracer. */
static __noinline int trust_lose(struct task_struct *leader, struct task_struct *tracer)
{
	struct guard_process process = process_of(leader);
	struct guard_trust sum = {}, *own = bpf_map_lookup_elem(&sh_g_tasks, &process);
	struct guard_given *given;

	trust_sum(&sum, tracer);
	for (int i = 0; i < 2 && own; i++)
		own->trusts[i] &= trust_left(&sum, i, own->generations[i]);
	given = bpf_map_lookup_elem(&sh_g_given0, &process);
	if (given)
		given->trusts &= trust_left(&sum, 0, given->generation);
	given = bpf_map_lookup_elem(&sh_g_given1, &process);
	if (given)
		given->trusts &= trust_left(&sum, 1, given->generation);
	return 0;
}

/* The first eight bytes of a variable, as the machine reads them. */
#define WORD(a, b, c, d, e, f, g, h)                                                             \
	((__u64)(a) | (__u64)(b) << 8 | (__u64)(c) << 16 | (__u64)(d) << 24 | (__u64)(e) << 32 | \
	 (__u64)(f) << 40 | (__u64)(g) << 48 | (__u64)(h) << 56)

/* Whether a variable makes the loader (ld.so(8), iconv(3)) or an interpreter run code of the starter's choice. */
static __always_inline int variable_loads(__u64 word)
{
	if ((word & 0xffffff) == WORD('L', 'D', '_', 0, 0, 0, 0, 0))
		return 1;
	return word == WORD('G', 'C', 'O', 'N', 'V', '_', 'P', 'A') ||
	       word == WORD('B', 'A', 'S', 'H', '_', 'E', 'N', 'V') ||
	       word == WORD('P', 'Y', 'T', 'H', 'O', 'N', 'P', 'A') ||
	       word == WORD('P', 'Y', 'T', 'H', 'O', 'N', 'H', 'O') ||
	       word == WORD('P', 'E', 'R', 'L', '5', 'L', 'I', 'B') ||
	       word == WORD('P', 'E', 'R', 'L', '5', 'O', 'P', 'T') ||
	       word == WORD('R', 'U', 'B', 'Y', 'L', 'I', 'B', '=') ||
	       word == WORD('R', 'U', 'B', 'Y', 'O', 'P', 'T', '=') ||
	       word == WORD('N', 'O', 'D', 'E', '_', 'O', 'P', 'T') ||
	       word == WORD('J', 'A', 'V', 'A', '_', 'T', 'O', 'O');
}

/* The strings of a new program: arguments, then variables, each with its zero. */
struct strings {
	unsigned long at;
	unsigned long end;
	int arguments; /* how many arguments are still to come */
	int is_inside; /* 1: at is inside a string whose beginning was read already */
	int is_trusted;
};

/* 1: no more strings need a look. */
static long string_read(__u32 number, struct strings *s)
{
	char text[STRING_BYTES] __attribute__((aligned(8)));
	long size;

	if (s->at >= s->end) {
		s->is_trusted = 1;
		return 1;
	}
	/* A page that was swapped out comes back for a copy like this one, and not for a string's. */
	if (bpf_copy_from_user(text, 1, (void *)s->at) ||
	    bpf_copy_from_user(
		    text, 1,
		    (void *)(s->at + STRING_BYTES < s->end ? s->at + STRING_BYTES : s->end)))
		return 1;
	size = bpf_probe_read_user_str(text, sizeof(text), (void *)s->at);
	if (size <= 0)
		return 1;
	if (!s->is_inside && s->arguments <= 0 && variable_loads(*(__u64 *)text))
		return 1;
	s->is_inside = size == sizeof(text);
	s->at += s->is_inside ? size - 1 : size;
	if (!s->is_inside)
		s->arguments--;
	return 0;
}

/* Whether nothing in the environment of a new program loads code into it. */
static __always_inline int environment_is_plain(struct linux_binprm *bprm)
{
	struct strings s = { .at = bprm->p, .end = bprm->exec, .arguments = bprm->argc };

	bpf_loop(STRINGS_MAX, string_read, &s, 0);
	return s.is_trusted;
}

/* Sets the trust of a process after it has executed a file; i is the side, a constant, and is_script: "#!" led to the
 * file. */
static __always_inline void trust_go_on(struct guard_trust *next, const struct guard_trust *going,
					const struct guard_side *side, const int i, int is_script)
{
	__u32 key = i;
	__u64 *children = bpf_map_lookup_elem(&sh_g_children, &key);

	next->generations[i] = going->generations[i];
	next->trusts[i] = children ? going->trusts[i] & *children : 0;
	if (side->generation < next->generations[i])
		return;
	if (side->generation > next->generations[i])
		next->trusts[i] = 0;
	else if (!is_script)
		next->trusts[i] &= ~side->interprets;
	next->generations[i] = side->generation;
	next->trusts[i] |= side->trusts;
	next->guards[i] = side->guards;
}

#endif
