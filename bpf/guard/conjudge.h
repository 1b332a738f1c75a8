/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Decides whether rules forbid a connection to a process, and makes the event of it.
 *
 *   executable's inode ─► sh_c_programs ─┐
 *                                        ├─► rules ─► sh_c_policy: forbidden? ─► sh_c_targets: there? ─► event, -EPERM
 *   processes above ─► sh_c_tasks ───────┘
 *
 * Invariant: the maps are of one policy. The next policy has maps and programs of its own. They are attached before it
 * comes into force, and the old policy's are removed after that.
 */
#ifndef SHUNT_CONJUDGE_H
#define SHUNT_CONJUDGE_H

#include "connect.h"
#include "program.h"
#include "socket.h"
#include "../event/ring.h"

#define TICK_NS 10000000 /* a second by USER_HZ of asm-generic/param.h */

/* The rules are for the processes of this cgroup and of the cgroups below it; 0: for all. Set at load. */
volatile const __u64 only_cgroup;
volatile const __u32 only_level; /* depth of that cgroup; the root has 0 */

/*
 * The rules in force. Key: 0; value: struct connect_policy. User space writes, in one step to bring it into force and
 * in one to end it; programs read. Never full. Upgrade: pinned, and replaced with its programs.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct connect_policy);
} sh_c_policy SEC(".maps");

/*
 * Rules by the program that they name. Key: struct guard_file; value: a mask. User space writes before the programs
 * are attached, programs read. Never full. Upgrade: pinned, and replaced with its programs.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, CONNECT_PROGRAMS_MAX);
	__type(key, struct guard_file);
	__type(value, __u64);
} sh_c_programs SEC(".maps");

/*
 * A filter of inode numbers, so that most programs need no look-up in sh_c_programs: a program whose bit is 0 is under
 * no rule. Key: a number's bit / 64; value: bits. User space writes before the programs are attached, programs read.
 * Never full. Upgrade: never pinned, and replaced with its programs.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CONNECT_FILTER_BITS / 64);
	__type(key, __u32);
	__type(value, __u64);
} sh_c_filter SEC(".maps");

/*
 * Addresses of rules. Key: a number below connect_policy.target_count; value: struct connect_target. User space writes
 * before the policy is in force, programs read. Full: a load is refused. Upgrade: pinned, and replaced with its
 * programs.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CONNECT_TARGETS_MAX);
	__type(key, __u32);
	__type(value, struct connect_target);
} sh_c_targets SEC(".maps");

/*
 * Rules by the processes that their program has started. Key: struct guard_process; value: a mask. Programs write at
 * exec and fork, read, and remove ended processes; user space writes before the policy is in force. Full: the
 * process is under no rule but its own program's, and is counted in sh_c_counts. Upgrade: pinned; user space hands it
 * on to the next policy.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, CONNECT_TASKS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct guard_process);
	__type(value, __u64);
} sh_c_tasks SEC(".maps");

/*
 * Counts of attempts, and of processes in sh_c_tasks. Key: 0; value: struct connect_count of a CPU. Programs write,
 * user space reads. Never full. Upgrade: pinned, and handed on to the next policy.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct connect_count);
} sh_c_counts SEC(".maps");

/*
 * The rules, for people. Key: a rule's number; value: struct guard_rule. User space writes and reads. Never full.
 * Upgrade: pinned, and replaced with its programs.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, GUARD_RULES_MAX);
	__type(key, __u32);
	__type(value, struct guard_rule);
} sh_c_rules SEC(".maps");

/*
 * Events of audited connections: as sh_events, which has the denied ones, so that audited ones never take their room.
 * Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} sh_c_audits SEC(".maps");

/* Numbers of sh_c_audits: as sh_event_seq. Upgrade: never pinned. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sh_c_audits_seq SEC(".maps");

/* The fields that task.h does not have. */
struct task_struct___connect {
	int tgid;
	struct task_struct *real_parent;
	struct mm_struct *mm;
} KERNEL_STRUCT;

static __always_inline struct connect_policy *policy_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sh_c_policy, &zero);
}

static __always_inline struct connect_count *count_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sh_c_counts, &zero);
}

/* The process of a thread. */
static __always_inline struct guard_process process_of(struct task_struct *task)
{
	struct task_struct *leader = BPF_CORE_READ(task, group_leader);
	struct guard_process process = {};

	process.id = BPF_CORE_READ((struct task_struct___connect *)leader, tgid);
	process.start = BPF_CORE_READ(leader, start_boottime) / TICK_NS;
	return process;
}

static __always_inline __u64 rules_of_file(struct inode *inode)
{
	__u64 number, *bits, *rules;
	struct guard_file file;
	__u32 word;

	if (!inode)
		return 0;
	number = BPF_CORE_READ(inode, i_ino) % CONNECT_FILTER_BITS;
	word = number / 64;
	bits = bpf_map_lookup_elem(&sh_c_filter, &word);
	if (!bits || !(*bits >> number % 64 & 1))
		return 0;
	file = file_of(inode);
	rules = bpf_map_lookup_elem(&sh_c_programs, &file);
	return rules ? *rules : 0;
}

static __always_inline __u64 rules_of_process(struct guard_process *process)
{
	__u64 *rules = bpf_map_lookup_elem(&sh_c_tasks, process);

	return rules ? *rules : 0;
}

static __always_inline struct inode *executable(struct task_struct *task)
{
	return BPF_CORE_READ((struct task_struct___connect *)task, mm, exe_file, f_inode);
}

/* An operation, and the rules that it is under so far. */
struct connect_attempt {
	__u64 rules;
	__u8 address[16] __attribute__((aligned(8))); /* wire order; IPv4 is mapped */
	enum connect_op op;
	enum connect_address_kind address_kind;
	__u16 port; /* host order */
	__u16 protocol;
	__u32 is_denied;
};

/* The state of a search through the targets. */
struct connect_search {
	struct connect_attempt attempt;
	__u64 found;
	/* By exceptions, if the unspecified address is IPv4's loopback, or IPv6's. Other attempts have the same in both. */
	__u64 spared4;
	__u64 spared6;
};

/* The addresses that the unspecified one stands for as a destination. */
#define LOOPBACK_HIGH 0ULL
#define LOOPBACK_LOW bpf_cpu_to_be64(1)
#define MAPPED_LOOPBACK_LOW bpf_cpu_to_be64(0xffff7f000001ULL)
#define MAPPED_MASK bpf_cpu_to_be64(0xffffffff00000000ULL)
#define MAPPED bpf_cpu_to_be64(0xffff00000000ULL)

static __always_inline int is_in(const struct connect_target *target, __u64 high, __u64 low)
{
	const __u64 *want = (const void *)target->address, *mask = (const void *)target->mask;
	__u32 version = !high && (low & MAPPED_MASK) == MAPPED ? 4 : 6;

	if (target->version && target->version != version)
		return 0;
	return (high & mask[0]) == want[0] && (low & mask[1]) == want[1];
}

/* Whether a target has the address of an attempt, or one that it can stand for. */
static __always_inline int is_there(const struct connect_target *target,
				    const struct connect_attempt *a)
{
	const __u64 *address = (const void *)a->address;

	switch (a->address_kind) {
	case CONNECT_GIVEN:
		return is_in(target, address[0], address[1]);
	case CONNECT_SELF: /* the address of the socket decides between ::1 and 127.0.0.1 */
		return is_in(target, LOOPBACK_HIGH, LOOPBACK_LOW) ||
		       is_in(target, LOOPBACK_HIGH, MAPPED_LOOPBACK_LOW);
	default:
		return 1;
	}
}

static __always_inline int has_port(const struct connect_target *target,
				    const struct connect_attempt *a)
{
	return a->port >= target->port_first && a->port <= target->port_last;
}

/* Whether a target has every address that an attempt can stand for: only then does an exception apply. self is the lower
 * half of the loopback address that the unspecified one stands for. */
static __always_inline int is_all_there(const struct connect_target *target,
					const struct connect_attempt *a, __u64 self)
{
	const __u64 *mask = (const void *)target->mask;

	switch (a->address_kind) {
	case CONNECT_GIVEN:
		return is_there(target, a);
	case CONNECT_SELF:
		return is_in(target, LOOPBACK_HIGH, self);
	case CONNECT_ANY:
		return !target->version && !mask[0] && !mask[1];
	default:
		return 0;
	}
}

/* 1: no more targets need a look. */
static long target_look(__u32 number, struct connect_search *s)
{
	struct connect_target *target = bpf_map_lookup_elem(&sh_c_targets, &number);
	const struct connect_attempt *a = &s->attempt;

	if (!target)
		return 1;
	if (target->rules & a->rules && is_there(target, a) &&
	    (a->address_kind == CONNECT_UNKNOWN || has_port(target, a)))
		s->found |= target->rules & a->rules;
	if (!(target->spares & a->rules) || !has_port(target, a))
		return 0;
	if (is_all_there(target, a, MAPPED_LOOPBACK_LOW))
		s->spared4 |= target->spares & a->rules;
	if (is_all_there(target, a, LOOPBACK_LOW))
		s->spared6 |= target->spares & a->rules;
	return 0;
}

/* Reduces a->rules to the rules that forbid the attempt, and returns whether one of them denies. */
static __noinline int attempt_weigh(struct connect_attempt *a)
{
	struct connect_policy *policy = policy_get();
	struct connect_search search = {};
	struct connect_masks *masks;
	__u32 op;

	if (!a || !policy)
		return 0;
	op = a->op;
	if (op >= CONNECT_OP_COUNT)
		return 0;
	masks = &policy->ops[op];
	a->rules &= masks->denied | masks->audited;
	if (!a->rules)
		return 0;
	search.found = a->rules & policy->everywhere;
	search.attempt = *a;
	if (a->rules & (~policy->everywhere | policy->spares))
		bpf_loop(policy->target_count, target_look, &search, 0);
	a->rules = search.found & ~(search.spared4 & search.spared6);
	a->is_denied = (a->rules & masks->denied) != 0;
	if (a->is_denied)
		a->rules &= masks->denied;
	return 0;
}

static __noinline int attempt_tell(struct connect_attempt *a)
{
	struct task_struct___connect *task = (void *)bpf_get_current_task();
	void *ring = &sh_events, *numbers = &sh_event_seq;
	struct event_header *h;
	struct connect_event *e;
	struct file *program;
	__u64 number;

	if (!a)
		return 0;
	if (!a->is_denied) {
		ring = &sh_c_audits;
		numbers = &sh_c_audits_seq;
	}
	h = event_room(ring, numbers, sizeof(struct connect_event), &number);
	if (!h)
		return 0;
	event_head(h, number, sizeof(struct connect_event), CONNECT_SENSOR);
	event_task(h);
	e = (void *)(h + 1);
	__builtin_memset(e, 0, __builtin_offsetof(struct connect_event, program_names));
	e->rules = a->rules;
	e->op = a->op;
	e->is_denied = a->is_denied;
	e->address_kind = a->address_kind;
	e->protocol = a->protocol;
	e->port = a->port;
	__builtin_memcpy(e->address, a->address, sizeof(e->address));
	bpf_get_current_comm(e->comm, sizeof(e->comm));
	program = BPF_CORE_READ(task, mm, exe_file);
	if (program) {
		e->program = file_of(BPF_CORE_READ(program, f_inode));
		e->program_size = path_walk(e->program_names, program);
	}
	event_submit(h);
	return 0;
}

/* 0, or 1: the rules deny it to the current process. */
static __noinline int attempt_judge(struct connect_attempt *a)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct connect_policy *policy = policy_get();
	struct connect_count *count;

	if (!a || !policy)
		return 0;
	if (only_cgroup && bpf_get_current_ancestor_cgroup_id(only_level) != only_cgroup)
		return 0;
	a->rules = rules_of_file(executable(task));
	if (policy->children) {
		struct guard_process process = process_of(task);

		a->rules |= rules_of_process(&process);
	}
	if (!a->rules)
		return 0;
	attempt_weigh(a);
	count = count_get();
	if (!a->rules || !count)
		return 0;
	if (a->is_denied)
		count->denied++;
	else
		count->audited++;
	attempt_tell(a);
	return a->is_denied;
}

#endif
