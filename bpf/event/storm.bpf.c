// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Programs for tests and for the example of package sensor, and for nothing else: one that writes
 * as many events as its argument says, and one that counts, with several ways to attach it.
 */
#include "event.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Only this process is counted. */
volatile const __u32 only_tgid = 0;

/*
 * How often the process changed the name of a thread. Key: 0; value: a count. Programs write, the
 * test reads. Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sh_renames SEC(".maps");

static long storm_write(__u32 i, void *unused)
{
	struct event_header *h = event_reserve(sizeof(__u64), 7);

	if (!h)
		return 0;
	event_task(h);
	*(__u64 *)(h + 1) = i;
	event_submit(h);
	return 0;
}

/* Writes as many events as its first argument says, each with its number as the payload. It is run by
 * BPF_PROG_RUN and never attached. */
SEC("raw_tp")
int sh_storm(struct bpf_raw_tracepoint_args *ctx)
{
	bpf_loop(ctx->args[0], storm_write, NULL, 0);
	return 0;
}

static __always_inline int rename_count(void)
{
	__u32 zero = 0;
	__u64 *count = bpf_map_lookup_elem(&sh_renames, &zero);

	if (count && bpf_get_current_pid_tgid() >> 32 == only_tgid)
		__sync_fetch_and_add(count, 1);
	return 0;
}

SEC("fentry/__set_task_comm")
int sh_rename_fn(void *ctx)
{
	return rename_count();
}

SEC("tp_btf/task_rename")
int sh_rename_btf(void *ctx)
{
	return rename_count();
}

SEC("raw_tp/task_rename")
int sh_rename_raw(void *ctx)
{
	return rename_count();
}

SEC("tracepoint/task/task_rename")
int sh_rename_tp(void *ctx)
{
	return rename_count();
}

SEC("kprobe/__set_task_comm")
int sh_rename_kp(void *ctx)
{
	return rename_count();
}

struct task_struct___storm {
	int tgid;
} KERNEL_STRUCT;

/* Counts the threads of the process, as renames. */
SEC("iter/task")
int sh_threads(struct bpf_iter__task *ctx)
{
	struct task_struct___storm *task = (void *)ctx->task;
	__u32 zero = 0;
	__u64 *count = bpf_map_lookup_elem(&sh_renames, &zero);

	if (task && count && (__u32)task->tgid == only_tgid)
		__sync_fetch_and_add(count, 1);
	return 0;
}
