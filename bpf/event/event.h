/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The stream of events that every product's programs write and internal/event reads.
 *
 *   program ─► event_reserve ─► number of this CPU ─┬─► room: header, payload ─► event_submit ─► reader
 *                                                   └─► no room: the number is used up, nothing else
 *
 * Invariant: a CPU numbers its events 0, 1, 2 … whether or not they find room. So the count of lost
 * events is the CPU's counter minus the events that the reader got from that CPU, exactly, at the end
 * of the stream too. The addition is one atomic instruction, because a program in an interrupt may run
 * between another one's steps on the same CPU; their events may then arrive in the other order.
 */
#ifndef SHUNT_EVENT_H
#define SHUNT_EVENT_H

#include "task.h"

enum event_constant {
	EVENT_VERSION = 1, /* version of struct event_header; a reader refuses other versions */
};

/* Stands before each payload. The host's byte order; 0: the value is not known. */
struct event_header {
	__u64 time_ns; /* CLOCK_BOOTTIME */
	__u64 sequence; /* of this CPU, from 0 */
	__u64 cgroup_id; /* of the current task in the second hierarchy */
	__u64 task_start_ns; /* CLOCK_BOOTTIME: when the process began; unique together with tgid */
	__u32 cpu;
	__u32 tgid;
	__u32 tid;
	__u32 netns; /* inode number of /proc/PID/ns/net */
	__u32 mntns; /* inode number of /proc/PID/ns/mnt */
	__u32 size; /* bytes of the payload, which follows */
	__u16 sensor; /* number of the sensor, which the product gives */
	__u8 version; /* EVENT_VERSION */
	__u8 reserved[5]; /* 0 */
};

/*
 * Events on their way. No key; records of struct event_header and payload. Programs write, one
 * reader reads. Full: the event is lost, and its number says so. Upgrade: never pinned, it goes
 * with its process. The size is set at load.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} sh_events SEC(".maps");

/*
 * How many events this CPU has tried to write. Key: 0; value: a count. Programs write, the reader
 * reads it when it closes. Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sh_event_seq SEC(".maps");

/* Room for a header and a payload of payload_size bytes, which must be a constant; NULL: the event is
 * lost, and counted. The payload is not cleared. The caller submits or discards the room. */
static __always_inline struct event_header *event_reserve(__u64 payload_size, __u16 sensor)
{
	struct event_header *h;
	__u64 *sequence, number;
	__u32 zero = 0;

	sequence = bpf_map_lookup_elem(&sh_event_seq, &zero);
	if (!sequence)
		return NULL;
	number = __sync_fetch_and_add(sequence, 1);
	h = bpf_ringbuf_reserve(&sh_events, sizeof(*h) + payload_size, 0);
	if (!h)
		return NULL;
	__builtin_memset(h, 0, sizeof(*h));
	h->time_ns = bpf_ktime_get_boot_ns();
	h->sequence = number;
	h->cpu = bpf_get_smp_processor_id();
	h->size = payload_size;
	h->sensor = sensor;
	h->version = EVENT_VERSION;
	return h;
}

/* The current task's part of the header. */
static __always_inline void event_task(struct event_header *h)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 id = bpf_get_current_pid_tgid();

	h->tgid = id >> 32;
	h->tid = (__u32)id;
	h->cgroup_id = bpf_get_current_cgroup_id();
	h->task_start_ns = BPF_CORE_READ(task, group_leader, start_boottime);
	h->netns = BPF_CORE_READ(task, nsproxy, net_ns, ns.inum);
	h->mntns = BPF_CORE_READ(task, nsproxy, mnt_ns, ns.inum);
}

static __always_inline void event_submit(struct event_header *h)
{
	bpf_ringbuf_submit(h, 0);
}

#endif
