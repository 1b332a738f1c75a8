/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Points inside a layer of `shunt diag vdisk` that the user asks for: the beginning of a function of qemu or of the kernel.
 * vdisk.bpf.c includes this file. One program is at all points of a kind, and the attachment's cookie is the point's number.
 *
 * Invariant: a point of the kernel belongs to the task that is on its own stack, never to an interrupt.
 */
#ifndef SHUNT_VDISK_POINT_H
#define SHUNT_VDISK_POINT_H

#define STACK_BYTES 16384 /* THREAD_SIZE of asm/page_64_types.h for x86-64 */

struct task_struct___stack {
	void *stack;
} KERNEL_STRUCT;

SEC("uprobe/point")
int sh_vd_point(__u64 *ctx)
{
	struct vdisk_event *e = vdisk_reserve(VDISK_POINT, 0);

	if (!e)
		return 0;
	e->id = bpf_get_attach_cookie(ctx);
	e->stack = ctx[REG_RSP];
	vdisk_submit(e);
	return 0;
}

/* An interrupt is on a stack of its own. In a guest only tasks in a system call on files have events. */
SEC("kprobe/point")
int sh_vd_kpoint(__u64 *ctx)
{
	struct task_struct___stack *task = (void *)bpf_get_current_task();
	__u64 stack = (__u64)BPF_CORE_READ(task, stack), began_ns = 0;
	__u32 tid = bpf_get_current_pid_tgid();
	struct vdisk_event *e;

	if (!is_ours() || ctx[REG_RSP] - stack >= STACK_BYTES)
		return 0;
	if (!only_tgid) {
		struct vdisk_call *call = bpf_map_lookup_elem(&sh_vd_calls, &tid);

		if (!call)
			return 0;
		began_ns = call->began_ns;
	}
	e = vdisk_reserve(VDISK_POINT, 0);
	if (!e)
		return 0;
	e->id = bpf_get_attach_cookie(ctx);
	e->other = began_ns;
	vdisk_submit(e);
	return 0;
}

#endif
