// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Programs for tests, and for nothing else: they keep a CPU busy for a known time, with interrupts off or
 * in a softirq, once each time that the test asks for it.
 */
#include "../event/task.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* A turn of bpf_loop() takes some 20 ns; this many take more than the time of any request. */
#define TURNS_MAX (1 << 23)
#define STACK_BYTES \
	(16 << 10) /* a task's stack in the kernel: THREAD_SIZE of x86 (asm/page_64_types.h) */

/* The request of a test, and its result. */
struct hold {
	__u64 begin_ns; /* CLOCK_MONOTONIC; 0: not yet */
	__u64 end_ns;
	__u64 for_ns; /* 0: there is no request */
	__u32 tid; /* the thread that makes the request */
	__u32 is_softirq; /* 1: in the next softirq while the thread runs */
};

/*
 * The request. Key: 0; value: struct hold. The test and the programs write, the test reads. Never full.
 * Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct hold);
} sh_holds SEC(".maps");

struct task_struct___hold {
	void *stack;
} KERNEL_STRUCT;

static long hold_turn(__u32 i, __u64 *until)
{
	return bpf_ktime_get_ns() >= *until;
}

static __always_inline int hold(__u32 is_softirq)
{
	__u32 zero = 0;
	struct hold *h = bpf_map_lookup_elem(&sh_holds, &zero);
	__u64 until;

	if (!h || !h->for_ns || h->begin_ns || h->is_softirq != is_softirq ||
	    h->tid != (__u32)bpf_get_current_pid_tgid())
		return 0;
	h->begin_ns = bpf_ktime_get_ns();
	until = h->begin_ns + h->for_ns;
	bpf_loop(TURNS_MAX, hold_turn, &until, 0);
	h->end_ns = bpf_ktime_get_ns();
	return 0;
}

/* The kernel starts a timer with interrupts off: hrtimer_start_range_ns() holds the lock of the CPU's timers. The timer
 * of a task that goes to sleep is on its stack; others are started by interrupts that come meanwhile. */
SEC("raw_tp/hrtimer_start")
int sh_hold_irq(__u64 *ctx)
{
	struct task_struct___hold *task = (void *)bpf_get_current_task();
	__u64 stack = (__u64)BPF_CORE_READ(task, stack);

	if (ctx[0] < stack || ctx[0] - stack >= STACK_BYTES)
		return 0;
	return hold(0);
}

SEC("raw_tp/softirq_entry")
int sh_hold_soft(void *ctx)
{
	return hold(1);
}
