/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether rules forbid an operation to the current process, and the event of it.
 */
#ifndef SHUNT_GUARD_JUDGE_H
#define SHUNT_GUARD_JUDGE_H

#include "kernfs.h"
#include "../event/ring.h"

#define EPERM 1

/*
 * The rules that forbid each operation. Key: the side of the generation × GUARD_OP_COUNT + enum guard_op; value:
 * struct guard_masks. User space writes, programs read. Never full. Upgrade: pinned, and taken over.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * GUARD_OP_COUNT);
	__type(key, __u32);
	__type(value, struct guard_masks);
} sh_g_ops SEC(".maps");

/*
 * Events of audited operations: as sh_events, which has the denied ones, so that audited ones never take
 * their room. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} sh_g_audits SEC(".maps");

/* Numbers of sh_g_audits: as sh_event_seq. Upgrade: never pinned. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sh_g_audits_seq SEC(".maps");

/* The position of names_walk. */
struct names_steps {
	char *names;
	struct dentry *dentry;
	__u32 used; /* bytes of names so far */
};

/* One folder up; 1: there is none. */
static long names_step(__u32 number, struct names_steps *s)
{
	struct dentry *dentry = s->dentry, *parent = BPF_CORE_READ(dentry, d_parent);
	__u32 size;

	if (!parent || parent == dentry)
		return 1;
	size = name_add(s->names, s->used, BPF_CORE_READ(dentry, d_name.name));
	if (!size)
		return 1;
	s->used += size;
	s->dentry = parent;
	return 0;
}

/* From the file to the root of its file system, without locks: a rename at the same moment may mix two
 * names. Returns the bytes that are used. bpf_loop as in path_walk. */
static __noinline int names_walk(char *names, struct dentry *dentry)
{
	struct names_steps s = { .names = names, .dentry = dentry };

	if (!names)
		return 0;
	bpf_loop(GUARD_DEPTH_MAX, names_step, &s, 0);
	return s.used;
}

/* An operation that a process is about to perform. */
struct attempt {
	__u64 rules; /* rules that the object is under */
	__u64 generation;
	__u64 free; /* rules that do not forbid it to the current process, trusted or not */
	struct inode *control; /* the object, if it is a cgroup's file; otherwise NULL */
	enum guard_op op;
	__u32 target; /* of GUARD_TRACE, GUARD_TRACE_ANY and GUARD_KILL: process ID; 0: the object is a file */
	__u32 is_denied;
	__u32 is_nobodys; /* 1: the operation is not the current process's own */
};

/* Writes the event of an operation; dentry is the object's name, or NULL. */
static __noinline int attempt_tell(struct dentry *dentry, struct attempt *a)
{
	struct task_struct___guard *task = (void *)bpf_get_current_task();
	void *ring = &sh_events, *numbers = &sh_event_seq;
	struct event_header *h;
	struct guard_event *e;
	struct inode *control;
	struct file *program;
	__u64 number;

	if (!a->is_denied) {
		ring = &sh_g_audits;
		numbers = &sh_g_audits_seq;
	}
	h = event_room(ring, numbers, sizeof(struct guard_event), &number);
	if (!h)
		return 0;
	event_head(h, number, sizeof(struct guard_event), GUARD_SENSOR);
	event_task(h);
	e = (void *)(h + 1);
	__builtin_memset(e, 0, __builtin_offsetof(struct guard_event, names));
	e->rules = a->rules;
	e->generation = a->generation;
	e->op = a->op;
	e->is_denied = a->is_denied;
	e->target = a->target;
	bpf_get_current_comm(e->comm, sizeof(e->comm));
	if (dentry) {
		e->file = file_of(BPF_CORE_READ(dentry, d_inode));
		e->file.device = BPF_CORE_READ(dentry, d_sb, s_dev); /* a new name has no inode */
		e->names_size = names_walk(e->names, dentry);
	}
	control = a->control;
	if (control) {
		e->file = file_of(control);
		e->names_size = nodes_walk(e->names, BPF_CORE_READ(control, i_private));
	}
	program = BPF_CORE_READ(task, mm, exe_file);
	if (program) {
		e->program = file_of(BPF_CORE_READ(program, f_inode));
		e->program_size =
			names_walk(e->program_names, BPF_CORE_READ(program, f_path.dentry));
	}
	event_submit(h);
	return 0;
}

/* 0, or -EPERM: the rules forbid the operation to the current process. */
static __noinline int attempt_judge(struct dentry *dentry, struct attempt *a)
{
	struct task_struct *task = bpf_get_current_task_btf();
	__u32 key = (a->generation & 1) * GUARD_OP_COUNT + a->op;
	struct guard_masks *masks = bpf_map_lookup_elem(&sh_g_ops, &key);
	struct guard_count *count = count_get();
	__u64 denied, rules;

	if (!masks || !count)
		return 0;
	rules = a->rules & ~a->free & (masks->denied | masks->audited);
	if (rules && !a->is_nobodys) {
		__u64 trusts = rules & trust_of(task->group_leader, a->generation);

		if (trusts)
			rules &= ~trust_here(trusts, a->generation & 1);
	}
	if (rules & masks->only)
		rules &= ~masks->only | guards_of(task->group_leader, a->generation);
	if (!rules)
		return 0;
	denied = rules & masks->denied;
	a->is_denied = denied != 0;
	a->rules = denied ? denied : rules;
	if (denied)
		count->denied++;
	else
		count->audited++;
	attempt_tell(dentry, a);
	return denied ? -EPERM : 0;
}

/* Whether any rule forbids an operation: if none does, no label is looked for. */
static __always_inline int is_forbidden(__u32 op)
{
	struct guard_state *state = state_get();
	struct guard_masks *masks;
	__u32 key;

	if (!state || !state->generation)
		return 0;
	key = (state->generation & 1) * GUARD_OP_COUNT + op;
	masks = bpf_map_lookup_elem(&sh_g_ops, &key);
	return masks && (masks->denied | masks->audited);
}

/* The same as attempt_judge for an operation on no file of a rule; dentry names its object, or is NULL. */
static __noinline int machine_judge(struct dentry *dentry, __u32 op, __u32 target)
{
	struct guard_state *state = state_get();
	struct attempt a = { .op = op, .rules = ~0ULL, .target = target };

	if (!state || !state->generation)
		return 0;
	a.generation = state->generation;
	return attempt_judge(dentry, &a);
}

/* The rules that protect the current process: processes of one rule may act on each other. */
static __noinline __u64 rules_own(__u64 generation)
{
	struct task_struct *task = bpf_get_current_task_btf();

	return guards_of(task->group_leader, generation) |
	       groups_of(task->group_leader, generation);
}

/* The same for an operation on another process. */
static __noinline int process_judge(struct task_struct *target, __u32 op, int is_nobodys)
{
	struct task_struct *task = bpf_get_current_task_btf(), *leader = target->group_leader;
	struct guard_state *state = state_get();
	struct attempt a = { .op = op, .is_nobodys = is_nobodys };

	if (!state || !state->generation || !leader)
		return 0;
	if (!is_nobodys && task->group_leader == leader)
		return 0;
	a.generation = state->generation;
	a.rules = guards_of(leader, a.generation) | groups_of(leader, a.generation);
	if (op == GUARD_TRACE)
		a.rules |= trust_of(leader, a.generation);
	if (!a.rules)
		return 0;
	if (!is_nobodys)
		a.free = rules_own(a.generation);
	a.target = BPF_CORE_READ((struct task_struct___guard *)leader, tgid);
	return attempt_judge(NULL, &a);
}

static __always_inline int is_moved(void)
{
	__u64 *moved = moved_get();

	return moved && *moved;
}

/* The same for an operation on an inode, whose name is the dentry's; is_place: the operation also
 * changes the file that a path through a folder leads to. */
static __noinline int inode_judge(struct inode *inode, struct dentry *dentry, __u32 op,
				  int is_place)
{
	struct guard_state *state = state_get();
	struct attempt a = { .op = op };
	struct guard_side *side;
	__u64 trusts = 0;

	if (!state || !state->generation || !inode)
		return 0;
	a.generation = state->generation;
	side = side_if(side_find(inode, a.generation), a.generation);
	if (side) {
		a.rules = side->rules;
		if (is_place)
			a.rules |= side->above;
		trusts = side->trusts;
	}
	if (!a.rules && is_moved())
		a.rules = rules_above(dentry, a.generation);
	if (a.rules && attempt_judge(dentry, &a))
		return -EPERM;
	if (!trusts || op != GUARD_WRITE)
		return 0;
	a.rules = trusts;
	a.op = GUARD_PROGRAM;
	return attempt_judge(dentry, &a);
}

#endif
