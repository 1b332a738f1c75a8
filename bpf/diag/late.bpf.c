// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Programs for tests, and for nothing else: each keeps the probes of one namespace and direction at its tracepoint for
 * a known time. Programs at a tracepoint run in the order of their attachment, so one that is attached after the
 * tool's program adds to the stage that begins with the tool's stamp, and one before it to the stage that ends with it.
 */
#include "ping_probe.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* The time; the number of the first probe that is kept; and whether requests are kept, or answers. */
volatile const __u64 late_ns = 0;
volatile const __u64 late_from = 0;
volatile const __u32 late_requests = 0;

/* A turn of bpf_loop() takes some 20 ns; this many take more than the time of any request. */
#define TURNS_MAX (1 << 23)
#define LATE_COUNT 64 /* probes of a test; a power of two */

/*
 * How long a probe was kept, in ns. Key: the low bits of its number; 0: not at all. The programs write, the test reads.
 * Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LATE_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} sh_late SEC(".maps");

static long late_turn(__u32 i, __u64 *until)
{
	return bpf_ktime_get_ns() >= *until;
}

static __always_inline int late(struct sk_buff *skb, void *ip)
{
	struct message m;
	__u64 begin, until, *kept;
	__u32 position;

	if (probe_read(&m, skb, ip, 0) || m.is_request != late_requests || m.sequence < late_from)
		return 0;
	position = m.sequence & (LATE_COUNT - 1);
	kept = bpf_map_lookup_elem(&sh_late, &position);
	if (!kept || *kept)
		return 0;
	begin = bpf_ktime_get_ns();
	until = begin + late_ns;
	bpf_loop(TURNS_MAX, late_turn, &until, 0);
	*kept = bpf_ktime_get_ns() - begin;
	return 0;
}

SEC("raw_tp/net_dev_queue")
int sh_late_queue(__u64 *ctx)
{
	struct sk_buff *skb = (void *)ctx[0];

	return late(skb, ip_of_leaving(skb, 0));
}

SEC("raw_tp/net_dev_start_xmit")
int sh_late_driver(__u64 *ctx)
{
	struct sk_buff *skb = (void *)ctx[0];

	return late(skb, ip_of_leaving(skb, 0));
}

SEC("raw_tp/netif_rx")
int sh_late_receive(__u64 *ctx)
{
	struct sk_buff *skb = (void *)ctx[0];

	return late(skb, ip_of_arriving(skb, 0));
}

SEC("raw_tp/netif_receive_skb")
int sh_late_stack(__u64 *ctx)
{
	struct sk_buff *skb = (void *)ctx[0];

	return late(skb, ip_of_arriving(skb, 0));
}
