/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The pod shortcuts' maps: the addresses of this machine's pods, and the fates of packets.
 */
#ifndef SHUNT_POD_MAPS_H
#define SHUNT_POD_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

/* Address -> the pod that has it. Written by user space, each time that the pod's state changes. Read by
 * the program. Full: user space refuses the pod, whose packets go through the stack. Made anew with the
 * program; no upgrade yet meets an old one. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct addr);
	__type(value, struct pod);
	__uint(max_entries, PODS_MAX);
} sh_pd_pods SEC(".maps");

/* Network -> the route to its pods, which are on another machine. Written by user space, each time that the route's
 * state changes. Read by the programs. Full: user space refuses the network, whose packets go through the stack.
 * Made anew with the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct pod_far_key);
	__type(value, struct pod_far);
	__uint(max_entries, FAR_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_pd_far SEC(".maps");

/* Index of an interface, or COUNTS_OF_STEER with the number of a steer -> the fates of the packets that came in by
 * it, or that the steer is for, per CPU. Elements are made by user space before the program can count in them, read
 * by user space, and removed after the program is off or the steer gone. Full: user space does not attach, or steer.
 * Made anew with the program. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__type(key, __u32);
	__type(value, struct pod_counts);
	__uint(max_entries, PODS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_pd_counts SEC(".maps");

/* 0 -> the time until which user space's judgement of the pods holds, ns of CLOCK_MONOTONIC. User space writes it
 * after each judgement; the program reads it. Cannot be full. Made anew with the program. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 1);
} sh_pd_watched SEC(".maps");

/* A connection that could take the shortcut once conntrack is liberal with it -> nothing. Added by the
 * program, which removes connections that end; removed by user space, which tells conntrack. Full: the
 * connection goes through the stack and asks again with its next packet. Made anew with the program. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct pod_flow);
	__type(value, __u8);
	__uint(max_entries, ASKING_MAX);
} sh_pd_asking SEC(".maps");

/* Protocol with port, and network -> where packets for it go. Written by user space, each time that the state of
 * the steer changes. Read by the programs. Full: user space refuses the steer, whose packets then go unsteered. Made
 * anew with the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct pod_steer_key);
	__type(value, struct pod_steer);
	__uint(max_entries, STEERS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_pd_steers SEC(".maps");

/* Number of a hop -> the hop. Added by user space before the first steer has it, removed when it is no longer good.
 * Read by the programs. Full: user space refuses the steer. Made anew with the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32);
	__type(value, struct pod_hop);
	__uint(max_entries, HOPS_MAX);
} sh_pd_hops SEC(".maps");

/* A connection, as its first packet has it -> its hop. Written and read by the programs. Full: the connection that
 * was silent longest, about, is forgotten and goes on through the stack. Made anew with the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct pod_flow);
	__type(value, struct pod_pin);
	__uint(max_entries, PINS_MAX);
} sh_pd_pins SEC(".maps");

#endif
