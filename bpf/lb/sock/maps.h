/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The socket programs' own maps. All are pinned beside the links, and outlive the daemon.
 */
#ifndef SHUNT_SOCK_MAPS_H
#define SHUNT_SOCK_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

/* Socket -> the backends that were chosen for it. Written by the socket programs, read by them and by
 * the iterators that close sockets. It goes with the socket. Full: there is no limit but the
 * socket's memory (net.core.optmem_max), beyond which a choice is not kept, which is counted. An
 * upgrade to another layout makes a new one: sockets of before see their backend as peer. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__type(key, int);
	__type(value, struct sock_choices);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_sk_choices SEC(".maps");

/* enum sock_outcome -> how often, per CPU. Written by the socket programs, and of closed sockets by user
 * space, which sums it.
 * Cannot be full. An upgrade takes it over, or makes a new one where its size differs. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, OUTCOME_COUNT);
} sh_sk_outcomes SEC(".maps");

/* Network namespace and service of affinity -> the backend that the namespace's sockets are given. Written
 * by the socket programs; user space removes entries of backends that have left their service. Full:
 * the one that was not used for the longest time goes, and its client is placed anew. An upgrade takes
 * the map over, or makes a new one if the layout differs. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct sock_client);
	__type(value, struct sock_stay);
	__uint(max_entries, CLIENTS_MAX);
} sh_sk_clients SEC(".maps");

/* Calls of sockets can be preempted by another one on the same CPU, so the sum is atomic. */
static __always_inline void outcome_count(__u32 outcome)
{
	__u64 *count = bpf_map_lookup_elem(&sh_sk_outcomes, &outcome);

	if (count)
		__sync_fetch_and_add(count, 1);
}

#endif
