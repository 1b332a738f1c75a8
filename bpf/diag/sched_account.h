/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Waits for a CPU by the kernel's own account of a task (CONFIG_SCHED_INFO; kernel/sched/stats.h), of which /proc/PID/schedstat is made. Part of
 * sched.bpf.c, which has the maps and handles a wait that has ended.
 *
 *   queued on a CPU ─► moves to another CPU ─► on the CPU
 *   last_queued        run_delay grows,        run_delay grows, pcount is one more:
 *                      last_queued is new      right after the tracepoint
 *
 * So no program runs at a wake-up, and a wait is found by one look-up when it ends: it is the growth of run_delay since the
 * task got a CPU last. nvcsw tells whether the task has slept in between, and pcount how often it got a CPU without being seen.
 */
#ifndef SHUNT_SCHED_ACCOUNT_H
#define SHUNT_SCHED_ACCOUNT_H

#include "sched.h"

/* The scheduler's clock of this CPU, which the kernel has read at the beginning of the switch, and by which it notes when it
 * queues a task. The task is on this CPU. */
static __always_inline __u64 clock_read(int typed, struct task_struct___sched *task)
{
	if (typed)
		return task->se.cfs_rq->rq->clock;
	return BPF_CORE_READ(task, se.cfs_rq, rq, clock);
}

static __always_inline struct sched_known account_read(int typed, struct task_struct___sched *task)
{
	struct sched_known account = {
		.delay_ns = FIELD(typed, task, sched_info.run_delay),
		.count = FIELD(typed, task, sched_info.pcount),
		.sleeps = FIELD(typed, task, nvcsw),
	};

	return account;
}

/* The task that leaves the CPU is not the one that was seen to come, or it was there before the first switch: from now on its account is
 * known. If it was known before, the kernel's count shows at the task's next wait how often the task got a CPU unseen. */
static __always_inline void account_begin(int typed, struct task_struct___sched *task, __u32 tid,
					  int is_asleep, int is_unseen)
{
	struct sched_known account;

	if (!tid || !is_watched(typed, task, tid))
		return;
	if (is_unseen && bpf_map_lookup_elem(&sh_waiting, &tid))
		return;
	account = account_read(typed, task);
	account.sleeps -= is_asleep; /* the kernel counts the present sleep already */
	if (known_put(tid, &account) && is_unseen)
		sched_miss(SCHED_BEGIN_UNSEEN);
}

/* A task that was there before the sensors, and gets a CPU later: its account until now, so that the time before a move to another CPU
 * is in its first wait, too. Whether it sleeps is not looked at: the first wait is taken for one after a wake-up. */
static __always_inline void account_find(struct task_struct___sched *task)
{
	struct sched_known account = account_read(1, task);
	__u32 tid = task->pid;

	if (!tid || !is_watched(1, task, tid))
		return;
	account.sleeps--;
	bpf_map_update_elem(&sh_waiting, &tid, &account, BPF_NOEXIST);
}

/* The task ends. */
static __always_inline void account_end(int typed, struct task_struct___sched *task)
{
	__u32 tid = FIELD(typed, task, pid);
	struct sched_known *known = bpf_map_lookup_elem(&sh_waiting, &tid);
	__u64 count;

	if (!known)
		return;
	count = FIELD(typed, task, sched_info.pcount);
	if (count > known->count)
		sched_miss_many(SCHED_BEGIN_UNSEEN, count - known->count);
	bpf_map_delete_elem(&sh_waiting, &tid);
}

/* The wait began earlier, on another CPU. */
static __always_inline void wait_move(struct wait_ended *wait, __s64 earlier_ns)
{
	wait->begin_ns -= earlier_ns;
	wait->is_moved = 1;
}

/*
 * The task gets a CPU. The kernel will add the time since it queued the task on this CPU to the account, by the same clock,
 * right after this tracepoint. If a task that waits moves to another CPU, its wait until then is in the account already.
 */
static __always_inline void account_wait(int typed, struct sched_cpu *cpu,
					 struct task_struct___sched *task, __u64 now)
{
	struct wait_ended wait = { .end_ns = now, .is_wakeup = 1 };
	__u32 tid = FIELD(typed, task, pid);
	struct sched_known account, *known;
	__u64 queued_ns, count;
	__s64 earlier_ns;

	if (!tid || !is_watched(typed, task, tid))
		return;
	queued_ns = FIELD(typed, task, sched_info.last_queued);
	/* It was taken off its CPU on the way to sleep, which the kernel does not take for a wait. */
	if (!queued_ns) {
		sched_miss(SCHED_BEGIN_UNSEEN);
		return;
	}
	wait.begin_ns = queued_ns < now ? queued_ns : now;
	known = bpf_map_lookup_elem(&sh_waiting, &tid);
	account = account_read(typed, task);
	count = account.count++;
	earlier_ns = account.delay_ns;
	account.delay_ns += now - queued_ns;
	if (!known) {
		if (!known_put(tid, &account))
			return;
		/* All waiting of a new task is this wait. */
		if (!count && earlier_ns > 0) {
			wait_move(&wait, earlier_ns);
		} else if (queued_ns < cpu->first_ns) {
			sched_miss(SCHED_BEGIN_UNSEEN);
			return;
		}
	} else {
		wait.is_wakeup = known->sleeps != account.sleeps;
		earlier_ns -= known->delay_ns;
		if (count > known->count) {
			sched_miss_many(SCHED_BEGIN_UNSEEN, count - known->count);
		} else if (count == known->count && earlier_ns > 0) {
			wait_move(&wait, earlier_ns);
		}
		*known = account;
	}
	wait_add(typed, cpu, task, tid, &wait);
}

/* Compares the clocks. Between the two readings the hypervisor may take the CPU, which only adds to the difference: so a larger one is taken
 * over no faster than clocks drift, by about a thousandth of the time. */
static __always_inline void clocks_compare(struct sched_cpu *cpu, __u64 now)
{
	__s64 more = bpf_ktime_get_ns() - now - cpu->ahead_ns;
	__s64 more_max = (now - cpu->compared_ns) >> 10;

	if (cpu->compared && more > more_max)
		more = more_max;
	cpu->ahead_ns += more;
	cpu->compared_ns = now;
	cpu->compared = cpu->samples + 1;
}

/* Checks which task leaves, and compares the clocks once after each tick of the timer, because to read the other clock takes
 * longer than most of the rest. */
static __always_inline void leaving_check(int typed, struct sched_cpu *cpu,
					  struct task_struct___sched *prev, int is_asleep,
					  __u64 now)
{
	__u32 tid = FIELD(typed, prev, pid);

	if (cpu->compared != cpu->samples + 1)
		clocks_compare(cpu, now);
	if (cpu->is_running_known && cpu->running_tid == tid)
		return;
	if (!cpu->is_running_known)
		cpu->first_ns = now;
	cpu->switched_ns = 0;
	account_begin(typed, prev, tid, is_asleep, cpu->is_running_known);
}

/* task_switched, where the kernel notes when a task is queued. */
static __always_inline int queue_switched(int typed, int is_preempted,
					  struct task_struct___sched *prev,
					  struct task_struct___sched *next, __u32 prev_state)
{
	int is_asleep = !is_preempted && prev_state;
	__u64 now = clock_read(typed, next);
	struct sched_cpu *cpu = cpu_get();

	if (!cpu)
		return 0;
	leaving_check(typed, cpu, prev, is_asleep, now);
	cpu->running_tid = FIELD(typed, next, pid);
	cpu->is_running_known = 1;
	run_keep(typed, cpu, prev, now);
	held_end(cpu, prev, now + cpu->ahead_ns);
	if (is_asleep && (prev_state & TASK_DEAD))
		account_end(typed, prev);
	account_wait(typed, cpu, next, now);
	return 0;
}

#endif
