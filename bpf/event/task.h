/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The fields that programs read of a task. The loader finds them by name in the kernel's BTF
 * (CO-RE), so the other fields of the kernel's structs do not matter.
 */
#ifndef SHUNT_TASK_H
#define SHUNT_TASK_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#define NULL ((void *)0)
#define KERNEL_STRUCT __attribute__((preserve_access_index))

#define TASK_COMM_BYTES 16 /* TASK_COMM_LEN of linux/sched.h */
/* Reads a field of a struct of the kernel. typed is a constant: 1 if the verifier knows the pointer's type, as in
 * programs at tp_btf, and a load is enough; 0: it takes a helper. */
#define FIELD(typed, pointer, field) ((typed) ? (pointer)->field : BPF_CORE_READ(pointer, field))

/* Copies the name of a task, all of its bytes. */
#define COMM_READ(typed, to, task)                                       \
	do {                                                             \
		if (typed) {                                             \
			const __u64 *words = (const void *)(task)->comm; \
			((__u64 *)(to))[0] = words[0];                   \
			((__u64 *)(to))[1] = words[1];                   \
		} else {                                                 \
			BPF_CORE_READ_INTO(to, task, comm);              \
		}                                                        \
	} while (0)

#define TASK_KERNEL 0x00200000 /* PF_KTHREAD of linux/sched.h */

struct ns_common {
	unsigned int inum;
} KERNEL_STRUCT;

struct net {
	struct ns_common ns;
} KERNEL_STRUCT;

struct mnt_namespace {
	struct ns_common ns;
} KERNEL_STRUCT;

struct nsproxy {
	struct mnt_namespace *mnt_ns;
	struct net *net_ns;
} KERNEL_STRUCT;

struct task_struct {
	unsigned int flags;
	struct task_struct *group_leader;
	__u64 start_boottime;
	char comm[TASK_COMM_BYTES];
	struct nsproxy *nsproxy;
} KERNEL_STRUCT;

/* The context of an iterator of tasks (kernel/bpf/task_iter.c). */
struct bpf_iter__task {
	struct task_struct *task; /* NULL at the end */
} KERNEL_STRUCT;

#endif
