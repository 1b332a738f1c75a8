/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types of `shunt diag runq` and `shunt diag irqoff` that cross to Go. Times are CLOCK_MONOTONIC, ns, except times of waits,
 * runs and switches where the kernel notes when a task is queued: these are by its scheduler's clock of that CPU.
 */
#ifndef SHUNT_SCHED_H
#define SHUNT_SCHED_H

#include "../event/event.h"

enum sched_constant {
	SCHED_RUNS_COUNT = 64, /* latest runs kept of a CPU, to name the tasks; a power of two */
	SCHED_STACK_DEPTH = 32, /* frames */
	SCHED_CODE_BYTES =
		16, /* bytes before the interrupted instruction; one of x86 has at most 15 */
	SCHED_BUCKETS_COUNT =
		32, /* of waits: bucket n has [2^n, 2^(n+1)) µs, bucket 0 shorter ones, too */
	SCHED_WAITING_MAX = 65536, /* tasks that have waited and are remembered */
	SCHED_TASKS_MAX = 16384, /* tasks that have been woken */
	SCHED_MULTIPLIER = 0x9e3779b1, /* 2^32 divided by the golden ratio: spreads tasks' ids */
};

/* event_header.sensor. */
enum sched_sensor {
	SCHED_WAITED = 1, /* struct sched_wait */
	SCHED_TIMER_LATE = 2, /* struct sched_stall */
	SCHED_SOFTIRQ_LONG = 3, /* struct sched_stall */
	SCHED_NOT_YIELDED = 4, /* struct sched_stall */
};

/* Kinds of waits and wake-ups that are counted and not kept. */
enum sched_missed {
	SCHED_WAITING_FULL = 0, /* waits whose beginning was not kept, because the map was full */
	SCHED_TASKS_FULL = 1, /* wake-ups that were not counted by task, because the map was full */
	SCHED_BEGIN_UNSEEN = 2, /* switches to a task whose wait was not seen to begin */
	SCHED_WAITS_UNTOLD = 3, /* waits that were not reported, to leave room for stalls */
	SCHED_MISSED_COUNT = 4,
};

/* A task on a CPU, from one switch to the next. */
struct sched_run {
	__u64 begin_ns; /* 0: not known */
	__u64 end_ns;
	char comm[TASK_COMM_BYTES];
	__u32 tid; /* 0: idle */
	__u32 reserved; /* 0 */
};

/* A wait of more than the threshold. */
struct sched_wait {
	__u64 begin_ns;
	__u64 end_ns;
	__u32 tid;
	__u32 tgid;
	__u32 is_moved; /* 1: the wait began on another CPU than the event's, where it ended */
	__u32 is_wakeup; /* 1: the task was woken; 0: it was taken off the CPU */
	char comm[TASK_COMM_BYTES];
	struct sched_run runs[SCHED_RUNS_COUNT]; /* of the CPU where it ended, in no order */
};

/* A CPU that was kept from other work for more than the threshold. */
struct sched_stall {
	__u64 begin_ns; /* of a late timer: when it last fired, or a later switch */
	__u64 end_ns;
	__u64 ip; /* the instruction that the timer interrupted */
	__u64 stack[SCHED_STACK_DEPTH]; /* of the kernel, the innermost frame first */
	__u32 stack_bytes;
	__u32 tid; /* of the task that ran; 0: idle */
	__u32 tgid;
	__u32 vector; /* of a softirq: its number in linux/interrupt.h */
	__u32 is_user; /* 1: the timer interrupted user space */
	__u32 is_steal_known; /* 1: the kernel counts steal_ns */
	__u64 steal_ns; /* of a late timer: the part in which the hypervisor ran something else */
	char comm[TASK_COMM_BYTES];
	__u8 code[SCHED_CODE_BYTES]; /* just before ip */
};

/* One CPU since the start. */
struct sched_cpu {
	__u64 sampled_ns; /* when the timer last fired; 0: not yet */
	__u64 samples;
	__u64 length_sum; /* runnable tasks, the running one included, at each sample */
	__u64 length_max;
	__u64 softirq_ns; /* when the running softirq began; 0: none runs */
	__u64 waits;
	__u64 wait_ns;
	__u64 buckets[SCHED_BUCKETS_COUNT];
	__u64 switched_ns; /* when the running task came, by the switches' clock; 0: not known */
	__u64 ahead_ns; /* CLOCK_MONOTONIC minus the switches' clock */
	__u64 compared_ns; /* when the two were last compared, by the switches' clock */
	__u64 compared; /* samples + 1 at that comparison; 0: there was none yet */
	__u64 first_ns; /* time of the first switch that was seen */
	__u64 run_count;
	__u32 running_tid; /* the task that the last switch seen put on the CPU */
	__u32 is_running_known; /* 0: no switch was seen yet */
	struct sched_run runs[SCHED_RUNS_COUNT];
	__u64 steal_ns; /* total steal time of the hypervisor, when the timer last fired */
	struct sched_stall late; /* reported at the next tick, when its steal_ns is known */
	__u32 is_late; /* 1: late is still to be reported */
	__u32 reserved; /* 0 */
	/* A stretch of kernel code in one task while others wait for the CPU. */
	__u64 held_ns; /* when the stretch began; 0: there is none */
	__u64 held_stack[SCHED_STACK_DEPTH];
	__u32 held_bytes; /* 0: the stack was not taken, because it is not long enough yet */
	__u32 held_tid;
};

/* The wake-ups of one task. */
struct sched_task {
	__u64 wakeups;
	__u64 wait_ns;
	__u64 wait_max_ns;
	char comm[TASK_COMM_BYTES];
	__u32 tgid;
	__u32 reserved; /* 0 */
};

/* The record of a task, in one of two forms. */
struct sched_known {
	/* Where the kernel does not note when a task is queued: its wait. */
	__u64 begin_ns; /* 0: the task does not wait */
	__u32 cpu;
	__u32 is_wakeup;
	/* Where it does: the kernel's account of the task when it got a CPU last. */
	__u64 delay_ns; /* the task's waits until then, added up */
	__u64 count; /* how often the task had got a CPU */
	__u64 sleeps; /* how often the task had given up its CPU by itself */
};

#endif
