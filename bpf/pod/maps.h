/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The pod shortcuts' maps: which addresses are pods of this machine, and what became of packets.
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

/* enum pod_left -> how many packets and bytes, per CPU. Written by the program, read by user space. Cannot
 * be full. Made anew with the program. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct count);
	__uint(max_entries, POD_LEFT_COUNT);
} sh_pd_counts SEC(".maps");

#endif
