// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The times at which a probe of `shunt diag ping` passes the stages of this host's network stack.
 *
 *   client   user ─► QUEUE ─► DRIVER ─► … server … ─► RECEIVE ─► SOFTIRQ ─► SOCKET ─► woken ─► user
 *   server   RECEIVE ─► SOFTIRQ ─┬─► ICMP: the kernel answers ─────────► QUEUE ─► DRIVER
 *                                └─► SOCKET ─► woken ─► user, who reports and, with UDP, answers ─► QUEUE ─► DRIVER
 *
 * A program looks for the tool's own bytes (struct probe_head) in a packet before anything else, and a packet without
 * them leaves no trace. Stamps go into the probe's row, which user space has mapped: there is no stream that
 * could lose them. User space makes the client's rows before it sends; the first stamp makes a server's.
 *
 * Invariant: a stamp is written only into a row with the probe's session and number.
 */
#include "ping_probe.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* 1: this host is the server. */
volatile const __u32 is_server = 0;
/* Elements of sh_ping_rows, less one. */
volatile const __u32 row_mask = PING_ROWS - 1;
#define WHOLE_MESSAGE \
	0xffff /* bytes that a socket filter keeps: no IP packet is longer, except a jumbogram */
#define HASH_FACTOR 0x9e3779b97f4a7c15ULL /* 2^64 divided by the golden ratio */

/* The fields of struct task_struct that event/task.h leaves out. */
struct task_struct___pid {
	int pid;
} KERNEL_STRUCT;

/* clang keeps types in the BTF only if something uses them. */
struct {
	enum ping_constant constant;
	enum probe_constant probe;
	enum ping_point point;
	struct probe_head head;
} ping_types;

/*
 * Probes by session and number. Key: position_of(); value: struct ping_row. Programs stamp, user
 * space makes rows, reads and has it mapped. Full: a newer probe takes the place, and user space sees that the
 * row is another's. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, PING_ROWS);
	__type(key, __u32);
	__type(value, struct ping_row);
} sh_ping_rows SEC(".maps");

/*
 * Places that probes pass. Key: position_of(); value: struct ping_trail. Programs write, user space
 * reads and has it mapped. Full: a newer probe takes the place. User space makes it with one element if places are
 * not asked for. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, PING_TRAILS);
	__type(key, __u32);
	__type(value, struct ping_trail);
} sh_ping_trails SEC(".maps");

/*
 * The thread that receives. Key: 0; value: struct ping_thread. Programs write, user space reads and has it mapped.
 * Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ping_thread);
} sh_ping_thread SEC(".maps");

/* Where a probe is in a map of mask + 1 elements, a power of two. */
static __always_inline __u32 position_of(const struct message *m, __u32 mask)
{
	return ((m->session * HASH_FACTOR >> 32) + m->sequence) & mask;
}

/* The probe's row; NULL: there is none. */
static __always_inline struct ping_row *row_get(const struct message *m, int may_begin)
{
	__u32 position = position_of(m, row_mask);
	struct ping_row *row = bpf_map_lookup_elem(&sh_ping_rows, &position);

	if (!row)
		return NULL;
	if (row->session == m->session && row->sequence == m->sequence)
		return row;
	if (!may_begin)
		return NULL;
	__builtin_memset(row, 0, sizeof(*row));
	row->sequence = m->sequence;
	row->session = m->session;
	return row;
}

/* Adds a place to the probe's trail, unless a newer probe has that trail already. */
static __always_inline void place_note(struct sk_buff *skb, const struct message *m, __u8 point,
				       __u32 drop_reason)
{
	__u32 position = position_of(m, PING_TRAILS - 1);
	struct ping_trail *trail;
	struct ping_place *place;
	__u64 n;

	if (!all_netns)
		return;
	trail = bpf_map_lookup_elem(&sh_ping_trails, &position);
	if (!trail || (trail->session == m->session && trail->sequence > m->sequence))
		return;
	if (trail->session != m->session || trail->sequence != m->sequence) {
		trail->count = 0;
		trail->sequence = m->sequence;
		trail->session = m->session;
	}
	n = __sync_fetch_and_add(&trail->count, 1);
	if (n >= PING_PLACES)
		return;
	place = &trail->places[n & (PING_PLACES - 1)];
	place->at_ns = bpf_ktime_get_ns();
	place->netns = m->netns;
	place->ifindex = BPF_CORE_READ(skb, dev, ifindex);
	place->drop_reason = drop_reason;
	place->point = point;
	place->is_request = m->is_request;
}

/* The last device counts for the driver, the first for the queue: a VLAN or a bond is both passed before the wire. */
static __always_inline int packet_leaves(struct sk_buff *skb, enum ping_point point, int is_typed)
{
	struct message m;
	struct ping_row *row;

	if (probe_read(&m, skb, ip_of_leaving(skb, is_typed), is_typed))
		return 0;
	place_note(skb, &m, point, 0);
	if (m.netns != only_netns || m.is_request == is_server)
		return 0;
	row = row_get(&m, 0);
	if (row && (point == PING_POINT_DRIVER || !row->at_ns[point]))
		row->at_ns[point] = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int packet_arrives(struct sk_buff *skb, enum ping_point point, int is_typed)
{
	struct message m;
	struct ping_row *row;

	if (probe_read(&m, skb, ip_of_arriving(skb, is_typed), is_typed))
		return 0;
	place_note(skb, &m, point, 0);
	if (m.netns != only_netns || m.is_request != is_server)
		return 0;
	row = row_get(&m, is_server);
	if (row && !row->at_ns[point])
		row->at_ns[point] = bpf_ktime_get_ns();
	return 0;
}

/* The first drop counts: at the end of its path the kernel also drops a delivered packet. */
static __always_inline int packet_dropped(struct sk_buff *skb, __u32 reason, int is_typed)
{
	struct message m;
	struct ping_row *row;

	if (probe_read(&m, skb, ip_of_leaving(skb, is_typed), is_typed))
		return 0;
	place_note(skb, &m, PING_POINT_COUNT, reason);
	if (m.netns != only_netns)
		return 0;
	row = row_get(&m, 0);
	if (row && !row->dropped_ns) {
		row->drop_reason = reason;
		row->dropped_ns = bpf_ktime_get_ns();
	}
	return 0;
}

static __always_inline int task_woken(struct task_struct___pid *task)
{
	__u32 zero = 0;
	struct ping_thread *t = bpf_map_lookup_elem(&sh_ping_thread, &zero);

	if (t && t->tid && t->tid == (__u32)BPF_CORE_READ(task, pid))
		t->woken_ns = bpf_ktime_get_ns();
	return 0;
}

/* On the sockets of shunt: takes the tool's messages only, and stamps probes. */
SEC("socket")
int sh_ping_filter(void *skb)
{
	__u8 first[10], protocol;
	struct ping_row *row;
	struct message m;
	struct echo e;
	__u32 header;

	if (bpf_skb_load_bytes_relative(skb, 0, first, sizeof(first), BPF_HDR_START_NET))
		return 0;
	header = header_bytes(first, &protocol);
	if (!header || bpf_skb_load_bytes_relative(skb, header, &e, sizeof(e), BPF_HDR_START_NET) ||
	    echo_read(&m, &e, protocol) || m.is_request != is_server)
		return 0;
	if (m.kind == PROBE_KIND_PROBE) {
		row = row_get(&m, is_server);
		if (row && !row->at_ns[PING_POINT_SOCKET])
			row->at_ns[PING_POINT_SOCKET] = bpf_ktime_get_ns();
	}
	return WHOLE_MESSAGE;
}

/* Run once by the thread that receives, and never attached: notes its id in the first pid namespace. */
SEC("raw_tp")
int sh_ping_me(void *ctx)
{
	__u32 zero = 0;
	struct ping_thread *t = bpf_map_lookup_elem(&sh_ping_thread, &zero);

	if (t)
		t->tid = (__u32)bpf_get_current_pid_tgid();
	return 0;
}

SEC("tp_btf/net_dev_queue")
int sh_queue_btf(__u64 *ctx)
{
	return packet_leaves((void *)ctx[0], PING_POINT_QUEUE, 1);
}

SEC("raw_tp/net_dev_queue")
int sh_queue_raw(__u64 *ctx)
{
	return packet_leaves((void *)ctx[0], PING_POINT_QUEUE, 0);
}

SEC("tp_btf/net_dev_start_xmit")
int sh_driver_btf(__u64 *ctx)
{
	return packet_leaves((void *)ctx[0], PING_POINT_DRIVER, 1);
}

SEC("raw_tp/net_dev_start_xmit")
int sh_driver_raw(__u64 *ctx)
{
	return packet_leaves((void *)ctx[0], PING_POINT_DRIVER, 0);
}

SEC("tp_btf/netif_rx")
int sh_backlog_btf(__u64 *ctx)
{
	return packet_arrives((void *)ctx[0], PING_POINT_RECEIVE, 1);
}

SEC("raw_tp/netif_rx")
int sh_backlog_raw(__u64 *ctx)
{
	return packet_arrives((void *)ctx[0], PING_POINT_RECEIVE, 0);
}

SEC("tp_btf/napi_gro_receive_entry")
int sh_napi_btf(__u64 *ctx)
{
	return packet_arrives((void *)ctx[0], PING_POINT_RECEIVE, 1);
}

SEC("raw_tp/napi_gro_receive_entry")
int sh_napi_raw(__u64 *ctx)
{
	return packet_arrives((void *)ctx[0], PING_POINT_RECEIVE, 0);
}

SEC("tp_btf/netif_receive_skb")
int sh_stack_btf(__u64 *ctx)
{
	return packet_arrives((void *)ctx[0], PING_POINT_SOFTIRQ, 1);
}

SEC("raw_tp/netif_receive_skb")
int sh_stack_raw(__u64 *ctx)
{
	return packet_arrives((void *)ctx[0], PING_POINT_SOFTIRQ, 0);
}

SEC("tp_btf/kfree_skb")
int sh_drop_btf(__u64 *ctx)
{
	return packet_dropped((void *)ctx[0], ctx[2], 1);
}

SEC("raw_tp/kfree_skb")
int sh_drop_raw(__u64 *ctx)
{
	return packet_dropped((void *)ctx[0], ctx[2], 0);
}

SEC("tp_btf/sched_wakeup")
int sh_wake_btf(__u64 *ctx)
{
	return task_woken((void *)ctx[0]);
}

SEC("raw_tp/sched_wakeup")
int sh_wake_raw(__u64 *ctx)
{
	return task_woken((void *)ctx[0]);
}
