/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Stamps of probes (core/probe.h, core/stamp.h), for the copies of the programs at XDP and at tc that the
 * daemon loads while the file has `stamp_probes: true`.
 *
 *   frame ─► stamp_begin ─► stages ─► stamp_end ─► passes, goes back, goes on, is dropped
 *
 * The head is read before the stages: they may change the frame, and nothing is left of a dropped one.
 * Frames with options or extension headers of IP get no stamp, and neither do fragments: the tool sends
 * none. Nor do frames with a VLAN's tag, which come in at the VLAN's own interface once more.
 *
 * Invariant: a stamp changes neither the frame nor the verdict.
 */
#ifndef SHUNT_STAMPING_H
#define SHUNT_STAMPING_H

#include "../core/probe.h"
#include "../core/stamp.h"
#include "icmp.h"
#include "scratch.h"

#define IP4_PLAIN 0x45 /* RFC 791, 3.1: version 4, and a header of five words */

/*
 * The ring. Key: number - 1, modulo STAMP_COUNT; value: struct stamp. Written by the programs, read by
 * `shunt diag ping -s`, which has it mapped. Full: the oldest is overwritten, and the reader counts it.
 * Made and pinned by user space beside the instance's other pins, for all its interfaces, while stamps
 * are asked for; the size here is a placeholder. An upgrade leaves it alone: its layout has a number of
 * its own.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct stamp);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} sh_stamps SEC(".maps");

/* One element: the number of all stamps ever begun. Written and read as above; never full. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} sh_stamp_count SEC(".maps");

/* The number of this run's stamp; 0: its packet is no probe. The main function's stack has no room for
 * it. It is never another run's: stamp_end clears it. */
SCRATCH(sh_stamping, __u64);

/* The facts about a probe that are read before it is changed. */
struct probe {
	struct addr source;
	const struct probe_head *head;
	__u8 is_answer;
};

/* Whether the transport header at l4 is in front of a probe's head. Finds the head, and whether the
 * probe is an answer. */
static __always_inline int head_find(struct probe *probe, const void *l4, const void *data_end,
				     int is_udp, __u8 request, __u8 reply)
{
	const __u8 *type = l4;

	probe->head = l4 + PROBE_BEFORE_HEAD;
	if ((void *)(probe->head + 1) > data_end || !head_is_probe(probe->head))
		return 0;
	probe->is_answer = is_udp ? probe->head->is_answer & 1 : *type == reply;
	return is_udp || *type == request || *type == reply;
}

static __always_inline int ip4_find(struct probe *probe, const struct iphdr *ip,
				    const void *data_end)
{
	int is_udp = ip->protocol == IPPROTO_UDP;

	if (!is_udp && ip->protocol != IPPROTO_ICMP)
		return 0;
	if (*(const __u8 *)ip != IP4_PLAIN || ip->frag_off & bpf_htons(IP4_FRAGMENT_BITS) ||
	    !head_find(probe, ip + 1, data_end, is_udp, ICMP_ECHO, ICMP_ECHO_REPLY))
		return 0;
	probe->source = addr_from_ip4(ip->saddr);
	return 1;
}

static __always_inline int ip6_find(struct probe *probe, const struct ipv6hdr *ip,
				    const void *data_end)
{
	int is_udp;

	if ((const void *)(ip + 1) > data_end)
		return 0;
	is_udp = ip->nexthdr == IPPROTO_UDP;
	if ((!is_udp && ip->nexthdr != IPPROTO_ICMPV6) ||
	    !head_find(probe, ip + 1, data_end, is_udp, ICMPV6_ECHO_REQUEST, ICMPV6_ECHO_REPLY))
		return 0;
	probe->source = addr_from_ip6(&ip->saddr);
	return 1;
}

static __always_inline int probe_find(struct frame_ctx *ctx, struct probe *probe)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx), *ip = data + L3_OFFSET;

	if (ctx_has_tag(ctx) || ip + sizeof(struct iphdr) > data_end)
		return 0;
	switch (frame_protocol(data)) {
	case bpf_htons(ETH_P_IP):
		return ip4_find(probe, ip, data_end);
	case bpf_htons(ETH_P_IPV6):
		return ip6_find(probe, ip, data_end);
	}
	return 0;
}

/* The ring's element for a stamp; NULL for the verifier alone. */
static __always_inline struct stamp *stamp_at(__u64 number)
{
	__u32 position = (number - 1) & (STAMP_COUNT - 1);

	return bpf_map_lookup_elem(&sh_stamps, &position);
}

/* Begins a stamp if the frame is a probe. Not in the main function, whose stack is used up. */
__stage int stamp_begin(struct frame_ctx *ctx)
{
	__u64 begin, number, *running, *count;
	struct probe probe = {};
	struct stamp *stamp;

	if (!probe_find(ctx, &probe))
		return 0;
	begin = bpf_ktime_get_ns();
	running = scratch_of(&sh_stamping);
	count = scratch_of(&sh_stamp_count);
	if (!running || !count)
		return 0;
	number = __sync_fetch_and_add(count, 1) + 1;
	stamp = stamp_at(number);
	if (!stamp)
		return 0;
	__sync_lock_test_and_set(&stamp->number, 0);
	stamp->session = probe.head->session;
	stamp->sequence = bpf_be64_to_cpu(probe.head->sequence_be);
	stamp->source = probe.source;
	stamp->begin_ns = begin;
	stamp->ifindex = ctx->ingress_ifindex;
	stamp->is_answer = probe.is_answer;
	stamp->is_tc = ctx_is_tc();
	*running = number;
	return 1;
}

/* Ends the stamp that this run has begun, if it has. */
__stage int stamp_end(__u32 verdict, __u32 reason)
{
	__u64 *running = scratch_of(&sh_stamping), number;
	struct stamp *stamp;

	if (!running || !*running)
		return 0;
	number = *running;
	*running = 0;
	stamp = stamp_at(number);
	if (!stamp)
		return 0;
	stamp->verdict = verdict;
	stamp->reason = reason;
	stamp->end_ns = bpf_ktime_get_ns();
	__sync_lock_test_and_set(&stamp->number, number);
	return 1;
}

#endif
