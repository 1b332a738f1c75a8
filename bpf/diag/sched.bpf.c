// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The reasons why a task or a CPU was late.
 *
 *   woken, or taken off the CPU ─► waits ─► on the CPU: the wait ends
 *         │                                   └─► longer than the threshold: an event, with the tasks that
 *         │                                       ran on that CPU meanwhile
 *         └─ noted by the kernel, sched_info.last_queued: sh_queued_*
 *            or by a program at each wake-up, which costs more: sh_switch_*, sh_wakeup_*, sh_new_*
 *   timer of each CPU ─┬─► late: an event, with the code that it interrupted. User space says why it was late
 *                      ├─► length of the run queue
 *                      └─► in kernel code, and other tasks wait: followed until the task leaves the CPU
 *   softirq begins ─► ends: longer than the threshold: an event
 *
 * Invariant: a wait begins once and ends once. A task that is woken while it waits, or while it runs, does
 * not begin another one.
 */
#include "sched.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Only waits of this process are seen; 0: of all. */
volatile const __u32 only_tgid = 0;
/* Only waits of tasks in this cgroup of the second hierarchy are seen; 0: of all. */
volatile const __u64 only_cgroup = 0;
/* The threshold: longer waits, softirqs and stretches of kernel code are events. */
volatile const __u64 threshold_ns = 10000000;
/* A task's waits are watched if these bits of a hash of its id are 0. User space sets more to watch fewer. */
volatile __u32 sample_mask = 0;
/* 1: wake-ups are counted by task. */
volatile const __u32 with_tasks = 0;
/* A timer that comes this long after the last one is an event; 0: only waits are events. */
volatile const __u64 late_ns = 0;

#define TASK_DEAD 0x80 /* linux/sched.h: the task's last switch */
#define E2BIG 7 /* asm-generic/errno-base.h: a hash map is full */
#define CS_USER 3 /* privilege level of user space in the code segment of x86 */

/* bpf_user_pt_regs_t of x86 (asm/ptrace.h): words 16 and 17 are the instruction and the code segment. The
 * tool refuses other processors. */
struct regs {
	__u64 before[16];
	__u64 ip;
	__u64 cs;
};

struct kernfs_node {
	__u64 id;
} KERNEL_STRUCT;

struct cgroup {
	struct kernfs_node *kn;
} KERNEL_STRUCT;

struct css_set {
	struct cgroup *dfl_cgrp;
} KERNEL_STRUCT;

/* The kernel adds up, at each tick and at each change of the queue, the time in which the hypervisor ran
 * something else. Without CONFIG_PARAVIRT it has no such fields. */
struct rq {
	unsigned int nr_running;
	__u64 clock;
	__u64 prev_steal_time;
	__u64 prev_steal_time_rq;
} KERNEL_STRUCT;

struct cfs_rq {
	struct rq *rq;
} KERNEL_STRUCT;

struct sched_entity {
	struct cfs_rq *cfs_rq;
} KERNEL_STRUCT;

/* The kernel's account of a task's waits (CONFIG_SCHED_INFO), of which /proc/PID/schedstat is made. Where the kernel has no
 * such fields, a program that reads them is refused. */
struct sched_info {
	unsigned long pcount;
	unsigned long long run_delay;
	unsigned long long last_queued;
} KERNEL_STRUCT;

struct thread_info {
	__u32 cpu;
} KERNEL_STRUCT;

struct task_struct___sched {
	struct thread_info thread_info;
	int pid;
	int tgid;
	char comm[TASK_COMM_BYTES];
	struct sched_entity se;
	struct css_set *cgroups;
	struct sched_info sched_info;
	unsigned long nvcsw;
} KERNEL_STRUCT;

/* clang writes a type in full only if something uses it. */
struct {
	struct sched_wait wait;
	struct sched_stall stall;
	struct sched_known known;
	enum sched_constant constant;
	enum sched_sensor sensor;
	enum sched_missed missed;
} sched_types;

/*
 * The state of this CPU. Key: 0; value: struct sched_cpu. Programs write, user space reads. Never full.
 * Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct sched_cpu);
} sh_sched_cpus SEC(".maps");

/*
 * The beginning of each task's wait for a CPU; where the kernel notes that itself, its account of the task when it got a
 * CPU last. Key: the task's id; value: struct sched_known. Programs write and read; an entry stays until its task ends,
 * because writing to it costs less than making and deleting one (docs/design/28-sensors.md). When the map is full, user
 * space deletes entries of tasks that do not wait. Full: the wait is counted as missed. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SCHED_WAITING_MAX);
	__type(key, __u32);
	__type(value, struct sched_known);
} sh_waiting SEC(".maps");

/*
 * Wake-ups by task. Key: the task's id; value: struct sched_task. Programs write, user space reads. Full:
 * the wake-up is counted as missed. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SCHED_TASKS_MAX);
	__type(key, __u32);
	__type(value, struct sched_task);
} sh_sched_tasks SEC(".maps");

/*
 * Counts of waits and wake-ups that were not kept. Key: enum sched_missed; value: a count. Programs write,
 * user space reads. Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SCHED_MISSED_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} sh_sched_missed SEC(".maps");

static __always_inline void sched_miss_many(__u32 what, __u64 many)
{
	__u64 *missed = bpf_map_lookup_elem(&sh_sched_missed, &what);

	if (missed)
		*missed += many;
}

static __always_inline void sched_miss(__u32 what)
{
	sched_miss_many(what, 1);
}

static __always_inline struct sched_cpu *cpu_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sh_sched_cpus, &zero);
}

static __always_inline int is_watched(int typed, struct task_struct___sched *task, __u32 tid)
{
	if ((tid * SCHED_MULTIPLIER >> 16) & sample_mask)
		return 0;
	if (only_tgid && (__u32)FIELD(typed, task, tgid) != only_tgid)
		return 0;
	return !only_cgroup || BPF_CORE_READ(task, cgroups, dfl_cgrp, kn, id) == only_cgroup;
}

/* Adds a task that has no entry; 0: there is no room. */
static __always_inline int known_put(__u32 tid, const struct sched_known *known)
{
	/* An int, because before 6.4 the upper half of the result is not set. */
	int err = bpf_map_update_elem(&sh_waiting, &tid, known, BPF_ANY);

	if (err == -E2BIG)
		sched_miss(SCHED_WAITING_FULL);
	return !err;
}

/* A task that was taken off the CPU waits from now on, even if an earlier wait of it is on record. */
static __always_inline void wait_begin(int typed, struct task_struct___sched *task, __u64 now,
				       int is_wakeup)
{
	struct sched_known begin = { .begin_ns = now, .is_wakeup = is_wakeup }, *known;
	__u32 tid = FIELD(typed, task, pid);

	if (!tid || !is_watched(typed, task, tid))
		return;
	/* Not this CPU: a task may be woken by another one. Without CONFIG_SMP there is one CPU, and no such field. */
	if (bpf_core_field_exists(task->thread_info.cpu))
		begin.cpu = FIELD(typed, task, thread_info.cpu);
	known = bpf_map_lookup_elem(&sh_waiting, &tid);
	if (known) {
		if (!is_wakeup || !known->begin_ns)
			*known = begin;
		return;
	}
	known_put(tid, &begin);
}

/* The task sleeps, and may have been woken while it still ran; or it ends. */
static __always_inline void wait_none(int typed, struct task_struct___sched *task, int is_dead)
{
	__u32 tid = FIELD(typed, task, pid);
	struct sched_known *known;

	if (is_dead) {
		bpf_map_delete_elem(&sh_waiting, &tid);
		return;
	}
	known = bpf_map_lookup_elem(&sh_waiting, &tid);
	if (known)
		known->begin_ns = 0;
}

static __always_inline __u32 bucket_of(__u64 ns)
{
	__u64 us = ns / 1000;
	__u32 n = 0;

#pragma unroll
	for (int shift = 16; shift > 0; shift >>= 1) {
		if (us >> shift) {
			us >>= shift;
			n += shift;
		}
	}
	return n & (SCHED_BUCKETS_COUNT - 1);
}

static __always_inline void task_woken(int typed, struct task_struct___sched *task, __u32 tid,
				       __u64 waited_ns)
{
	struct sched_task fresh = {}, *t;

	t = bpf_map_lookup_elem(&sh_sched_tasks, &tid);
	if (!t) {
		fresh.tgid = FIELD(typed, task, tgid);
		bpf_map_update_elem(&sh_sched_tasks, &tid, &fresh, BPF_NOEXIST);
		t = bpf_map_lookup_elem(&sh_sched_tasks, &tid);
		if (!t) {
			sched_miss(SCHED_TASKS_FULL);
			return;
		}
	}
	/* A task is on one CPU at a time, so no other CPU writes here. */
	t->wakeups++;
	t->wait_ns += waited_ns;
	if (waited_ns > t->wait_max_ns)
		t->wait_max_ns = waited_ns;
	COMM_READ(typed, &t->comm, task);
}

/* A wait that has ended. */
struct wait_ended {
	__u64 begin_ns;
	__u64 end_ns;
	__u32 is_wakeup;
	__u32 is_moved;
};

/* A busy machine has many events of waits, and large ones. If stalls are events too, waits leave them half the ring. */
static __always_inline int is_room_for_wait(void)
{
	return !late_ns || bpf_ringbuf_query(&sh_events, BPF_RB_AVAIL_DATA) <
				   bpf_ringbuf_query(&sh_events, BPF_RB_RING_SIZE) / 2;
}

static __always_inline void wait_tell(struct sched_cpu *cpu, struct task_struct___sched *task,
				      __u32 tid, const struct wait_ended *wait)
{
	struct event_header *h;
	struct sched_wait *w;

	if (!is_room_for_wait()) {
		sched_miss(SCHED_WAITS_UNTOLD);
		return;
	}
	h = event_reserve(sizeof(struct sched_wait), SCHED_WAITED);
	if (!h)
		return;
	w = (void *)(h + 1);
	w->begin_ns = wait->begin_ns;
	w->end_ns = wait->end_ns;
	w->tid = tid;
	w->tgid = BPF_CORE_READ(task, tgid);
	w->is_moved = wait->is_moved;
	w->is_wakeup = wait->is_wakeup;
	__builtin_memset(w->comm, 0, sizeof(w->comm));
	BPF_CORE_READ_STR_INTO(&w->comm, task, comm);
	bpf_probe_read_kernel(w->runs, sizeof(w->runs), cpu->runs);
	event_submit(h);
}

static __always_inline void wait_add(int typed, struct sched_cpu *cpu,
				     struct task_struct___sched *task, __u32 tid,
				     const struct wait_ended *wait)
{
	__u64 waited_ns = wait->end_ns - wait->begin_ns;

	cpu->waits++;
	cpu->wait_ns += waited_ns;
	cpu->buckets[bucket_of(waited_ns)]++;
	if (with_tasks && wait->is_wakeup)
		task_woken(typed, task, tid, waited_ns);
	if (waited_ns > threshold_ns)
		wait_tell(cpu, task, tid, wait);
}

static __always_inline void wait_end(int typed, struct sched_cpu *cpu,
				     struct task_struct___sched *task, __u64 now)
{
	__u32 tid = FIELD(typed, task, pid);
	struct wait_ended wait = { .end_ns = now };
	struct sched_known *known;

	if (!tid)
		return;
	known = bpf_map_lookup_elem(&sh_waiting, &tid);
	if (!known || !known->begin_ns) {
		if (is_watched(typed, task, tid))
			sched_miss(SCHED_BEGIN_UNSEEN);
		return;
	}
	/* The clocks of two CPUs may differ, by less than matters for a wait. */
	wait.begin_ns = known->begin_ns < now ? known->begin_ns : now;
	wait.is_wakeup = known->is_wakeup;
	wait.is_moved = known->cpu != bpf_get_smp_processor_id();
	known->begin_ns = 0;
	wait_add(typed, cpu, task, tid, &wait);
}

/* If the task that leaves the CPU is not the one that came last, the kernel left out the sensor at a switch between
 * them: then neither the beginning of the leaving task's run nor its wait is known. */
static __always_inline void switch_check(int typed, struct sched_cpu *cpu,
					 struct task_struct___sched *prev,
					 struct task_struct___sched *next)
{
	__u32 tid = FIELD(typed, prev, pid);

	if (cpu->is_running_known && cpu->running_tid != tid) {
		cpu->switched_ns = 0;
		if (tid && is_watched(typed, prev, tid))
			sched_miss(SCHED_BEGIN_UNSEEN);
	}
	cpu->running_tid = FIELD(typed, next, pid);
	cpu->is_running_known = 1;
}

/* Keeps the run of the task that leaves this CPU. */
static __always_inline void run_keep(int typed, struct sched_cpu *cpu,
				     struct task_struct___sched *task, __u64 now)
{
	struct sched_run *run = &cpu->runs[cpu->run_count & (SCHED_RUNS_COUNT - 1)];

	run->begin_ns = cpu->switched_ns;
	run->end_ns = now;
	run->tid = FIELD(typed, task, pid);
	COMM_READ(typed, &run->comm, task);
	cpu->run_count++;
	cpu->switched_ns = now;
}

static __always_inline void held_tell(struct sched_cpu *cpu, struct task_struct___sched *task,
				      __u64 now)
{
	struct event_header *h = event_reserve(sizeof(struct sched_stall), SCHED_NOT_YIELDED);
	struct sched_stall *s;

	if (!h)
		return;
	s = (void *)(h + 1);
	__builtin_memset(s, 0, sizeof(*s));
	s->begin_ns = cpu->held_ns;
	s->end_ns = now;
	s->tid = cpu->held_tid;
	s->tgid = BPF_CORE_READ(task, tgid);
	s->stack_bytes = cpu->held_bytes;
	__builtin_memcpy(s->stack, cpu->held_stack, sizeof(s->stack));
	BPF_CORE_READ_STR_INTO(&s->comm, task, comm);
	event_submit(h);
}

static __always_inline void held_end(struct sched_cpu *cpu, struct task_struct___sched *task,
				     __u64 now)
{
	if (cpu->held_bytes && cpu->held_ns && now > cpu->held_ns + threshold_ns)
		held_tell(cpu, task, now);
	cpu->held_ns = 0;
	cpu->held_bytes = 0;
}

static __always_inline int task_switched(int typed, int is_preempted,
					 struct task_struct___sched *prev,
					 struct task_struct___sched *next, __u32 prev_state)
{
	struct sched_cpu *cpu = cpu_get();
	__u64 now = bpf_ktime_get_ns();

	if (!cpu)
		return 0;
	switch_check(typed, cpu, prev, next);
	run_keep(typed, cpu, prev, now);
	held_end(cpu, prev, now);
	if (is_preempted || !prev_state)
		wait_begin(typed, prev, now, 0);
	else
		wait_none(typed, prev, !!(prev_state & TASK_DEAD));
	wait_end(typed, cpu, next, now);
	return 0;
}

#include "sched_account.h"

static __always_inline int task_wakes(int typed, struct task_struct___sched *task)
{
	wait_begin(typed, task, bpf_ktime_get_ns(), 1);
	return 0;
}

static __always_inline int softirq_begins(void)
{
	struct sched_cpu *cpu = cpu_get();

	if (cpu)
		cpu->softirq_ns = bpf_ktime_get_ns();
	return 0;
}

/* Room for a stall of the task that runs. */
static __always_inline struct sched_stall *stall_reserve(__u16 sensor, __u64 begin, __u64 end)
{
	struct event_header *h = event_reserve(sizeof(struct sched_stall), sensor);
	struct sched_stall *s;

	if (!h)
		return NULL;
	event_task(h);
	s = (void *)(h + 1);
	__builtin_memset(s, 0, sizeof(*s));
	s->begin_ns = begin;
	s->end_ns = end;
	s->tid = (__u32)bpf_get_current_pid_tgid();
	s->tgid = bpf_get_current_pid_tgid() >> 32;
	bpf_get_current_comm(s->comm, sizeof(s->comm));
	return s;
}

static __always_inline int softirq_ends(void *ctx, __u32 vector)
{
	struct sched_cpu *cpu = cpu_get();
	struct sched_stall *s;
	__u64 begin, now;
	long bytes;

	if (!cpu)
		return 0;
	begin = cpu->softirq_ns;
	cpu->softirq_ns = 0;
	/* A softirq into which the timer did not come was shorter than its period, so the clock need not be read. Interrupts are on
	 * here, so a timer that was held back has come. */
	if (cpu->sampled_ns < begin)
		return 0;
	now = bpf_ktime_get_ns();
	if (!begin || now < begin + threshold_ns)
		return 0;
	s = stall_reserve(SCHED_SOFTIRQ_LONG, begin, now);
	if (!s)
		return 0;
	s->vector = vector;
	bytes = bpf_get_stack(ctx, s->stack, sizeof(s->stack), 0);
	s->stack_bytes = bytes > 0 ? bytes : 0;
	event_submit((struct event_header *)s - 1);
	return 0;
}

static __always_inline __u64 steal_read(struct rq *rq)
{
	__u64 tick = 0, queue = 0;

	if (bpf_core_field_exists(rq->prev_steal_time))
		tick = BPF_CORE_READ(rq, prev_steal_time);
	if (bpf_core_field_exists(rq->prev_steal_time_rq))
		queue = BPF_CORE_READ(rq, prev_steal_time_rq);
	return tick > queue ? tick : queue;
}

/* Keeps the code that the late timer has interrupted. The hypervisor's time is counted by the next tick. */
static __always_inline void late_keep(void *ctx, const struct regs *regs, struct sched_cpu *cpu,
				      __u64 last, __u64 now)
{
	struct sched_stall *s = &cpu->late;
	long bytes;

	s->begin_ns = last;
	s->end_ns = now;
	s->ip = regs->ip;
	s->tid = (__u32)bpf_get_current_pid_tgid();
	s->tgid = bpf_get_current_pid_tgid() >> 32;
	s->stack_bytes = 0;
	s->is_user = (regs->cs & CS_USER) == CS_USER;
	s->steal_ns = cpu->steal_ns;
	bpf_get_current_comm(s->comm, sizeof(s->comm));
	if (!s->is_user) {
		bpf_probe_read_kernel(s->code, sizeof(s->code), (void *)(s->ip - sizeof(s->code)));
		bytes = bpf_get_stack(ctx, s->stack, sizeof(s->stack), 0);
		s->stack_bytes = bytes > 0 ? bytes : 0;
	}
	cpu->is_late = 1;
}

static __always_inline void late_tell(struct sched_cpu *cpu, __u64 steal_ns)
{
	struct event_header *h = event_reserve(sizeof(struct sched_stall), SCHED_TIMER_LATE);
	struct sched_stall *s = &cpu->late;

	cpu->is_late = 0;
	if (!h)
		return;
	s->is_steal_known = steal_ns != 0;
	s->steal_ns = steal_ns - s->steal_ns;
	bpf_probe_read_kernel(h + 1, sizeof(*s), s);
	event_submit(h);
}

/* Follows kernel code of one task as long as another task waits for this CPU. */
static __always_inline void held_follow(void *ctx, const struct regs *regs, struct sched_cpu *cpu,
					__u64 length, __u64 now)
{
	__u32 tid = (__u32)bpf_get_current_pid_tgid();
	long bytes;

	if (!tid || length < 2 || (regs->cs & CS_USER) == CS_USER ||
	    (cpu->held_ns && cpu->held_tid != tid)) {
		cpu->held_ns = 0;
		cpu->held_bytes = 0;
		return;
	}
	if (!cpu->held_ns) {
		cpu->held_ns = now;
		cpu->held_tid = tid;
		return;
	}
	if (cpu->held_bytes || now - cpu->held_ns < threshold_ns / 2)
		return;
	bytes = bpf_get_stack(ctx, cpu->held_stack, sizeof(cpu->held_stack), 0);
	cpu->held_bytes = bytes > 0 ? bytes : 0;
}

/* The earliest moment from which the timer that comes now can have been held back: when it came last, or the last
 * switch, if that is later, because a switch ends with interrupts on. So the time of an idle CPU, on which timers
 * come late, does not count. 0: not known. */
static __always_inline __u64 late_since(const struct sched_cpu *cpu, __u64 last)
{
	__u64 switched_ns = cpu->switched_ns ? cpu->switched_ns + cpu->ahead_ns : 0;

	if (cpu->is_running_known && cpu->running_tid != (__u32)bpf_get_current_pid_tgid()) {
		if (cpu->running_tid)
			return last; /* another task ran; only idle time must not count */
		sched_miss(SCHED_BEGIN_UNSEEN);
		return 0;
	}
	return switched_ns > last ? switched_ns : last;
}

SEC("perf_event")
int sh_sched_timer(struct regs *regs)
{
	struct task_struct___sched *task = (void *)bpf_get_current_task();
	struct sched_cpu *cpu = cpu_get();
	__u64 now = bpf_ktime_get_ns();
	__u64 last, length, steal_ns, begin_ns;
	struct rq *rq;

	if (!cpu)
		return 0;
	last = cpu->sampled_ns;
	cpu->sampled_ns = now;
	cpu->samples++;
	rq = BPF_CORE_READ(task, se.cfs_rq, rq);
	length = BPF_CORE_READ(rq, nr_running);
	cpu->length_sum += length;
	if (length > cpu->length_max)
		cpu->length_max = length;
	if (!late_ns)
		return 0;
	held_follow(regs, regs, cpu, length, now);
	steal_ns = steal_read(rq);
	if (cpu->is_late)
		late_tell(cpu, steal_ns);
	begin_ns = last ? late_since(cpu, last) : 0;
	if (begin_ns && now > begin_ns + late_ns)
		late_keep(regs, regs, cpu, begin_ns, now);
	cpu->steal_ns = steal_ns;
	return 0;
}

SEC("tp_btf/sched_switch")
int sh_queued_btf(__u64 *ctx)
{
	return queue_switched(1, ctx[0], (void *)ctx[1], (void *)ctx[2], ctx[3]);
}

SEC("raw_tp/sched_switch")
int sh_queued_raw(__u64 *ctx)
{
	return queue_switched(0, ctx[0], (void *)ctx[1], (void *)ctx[2], ctx[3]);
}

/* Tasks that exist already. */
SEC("iter/task")
int sh_tasks(struct bpf_iter__task *ctx)
{
	struct task_struct___sched *task = (void *)ctx->task;

	if (task)
		account_find(task);
	return 0;
}

SEC("tp_btf/sched_switch")
int sh_switch_btf(__u64 *ctx)
{
	return task_switched(1, ctx[0], (void *)ctx[1], (void *)ctx[2], ctx[3]);
}

SEC("raw_tp/sched_switch")
int sh_switch_raw(__u64 *ctx)
{
	return task_switched(0, ctx[0], (void *)ctx[1], (void *)ctx[2], ctx[3]);
}

SEC("tp_btf/sched_wakeup")
int sh_wakeup_btf(__u64 *ctx)
{
	return task_wakes(1, (void *)ctx[0]);
}

SEC("raw_tp/sched_wakeup")
int sh_wakeup_raw(__u64 *ctx)
{
	return task_wakes(0, (void *)ctx[0]);
}

SEC("tp_btf/sched_wakeup_new")
int sh_new_btf(__u64 *ctx)
{
	return task_wakes(1, (void *)ctx[0]);
}

SEC("raw_tp/sched_wakeup_new")
int sh_new_raw(__u64 *ctx)
{
	return task_wakes(0, (void *)ctx[0]);
}

SEC("tp_btf/softirq_entry")
int sh_soft_in_btf(void *ctx)
{
	return softirq_begins();
}

SEC("raw_tp/softirq_entry")
int sh_soft_in_raw(void *ctx)
{
	return softirq_begins();
}

SEC("tp_btf/softirq_exit")
int sh_soft_out_btf(__u64 *ctx)
{
	return softirq_ends(ctx, ctx[0]);
}

SEC("raw_tp/softirq_exit")
int sh_soft_out_raw(__u64 *ctx)
{
	return softirq_ends(ctx, ctx[0]);
}
