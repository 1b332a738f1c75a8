/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The UDP path's maps: the leases of addresses and ports, their sockets, and the fates of datagrams.
 */
#ifndef SHUNT_UDP_MAPS_H
#define SHUNT_UDP_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

/* Address and port -> the lease. Written by user space: an entry comes after all else of its lease,
 * and goes before it. Read by the program. Full: user space refuses the lease. These maps are pinned while
 * there is a lease, and the next process takes them over; one whose layout differs (internal/udp/hook/kept.go)
 * makes them anew. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct lease_key);
	__type(value, struct lease);
	__uint(max_entries, LEASE_FRONTENDS_MAX);
} sh_ud_leases SEC(".maps");

/* The bucket of an address and port (lease_hash()) -> an entry of sh_ud_leases: the first one of this bucket. Found without the
 * kernel's hash, which is a third of the work on a datagram. Others of the bucket are in sh_ud_leases alone. Written by user
 * space, with the entry there; read by the program. An element that is being written is a miss. Cannot be full. Pinned as sh_ud_leases is. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct lease_direct);
	__uint(max_entries, LEASE_BUCKETS);
} sh_ud_direct SEC(".maps");

/* The bucket of an address and port -> a bit for each hash in it: some lease may have the address and port; without the bit, none
 * has. It spares other datagrams all look-ups but this one. Written by user space: a bit comes before the entry in sh_ud_leases,
 * and goes after the last one with its hash. Read by the program. Cannot be full. Pinned as sh_ud_leases is. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, LEASE_BUCKETS);
} sh_ud_hints SEC(".maps");

/* lease * LEASE_QUEUES_MAX + queue -> an AF_XDP socket that is bound to that queue. Written by user
 * space; the kernel takes an entry out when its socket's last holder closes it, so that a program that
 * is killed leaves none. Read by the redirect. Cannot be full. Pinned as sh_ud_leases is. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
	__uint(max_entries, LEASE_SLOTS);
} sh_ud_sockets SEC(".maps");

/* The same key -> the fates of its datagrams, per CPU. Written by the program, and by user space at the
 * start of a lease, to zero. Read by user space. Cannot be full. Pinned as sh_ud_leases is. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct lease_count);
	__uint(max_entries, LEASE_SLOTS);
} sh_ud_counts SEC(".maps");

/* enum lease_pass -> how many passed, per CPU. Written by the program, read by user space. Cannot be
 * full. Pinned as sh_ud_leases is. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, PASSED_COUNT);
} sh_ud_passed SEC(".maps");

/* CHAIN_AFTER -> the program that runs after the balancer's on the interface. Where the stage is a guest,
 * this map stands for the balancer's (lb/chain.h); else it is empty. Written by `shunt chain`; read by
 * the tail call. Cannot be full. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, CHAIN_COUNT);
} sh_ud_chain SEC(".maps");

#endif
