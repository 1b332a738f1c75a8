/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Loads through pointers whose type the verifier does not know.
 *
 * A call of bpf_probe_read_kernel() takes some 25 ns where returns are guarded, a load hardly any. From 6.2 on (kernel commit
 * fd264ca02094) a program can say which type is at an address: a load of an address that cannot be read
 * gives 0 then, as the call does. Programs at tp_btf may do that, programs at raw_tp may not.
 */
#ifndef SHUNT_CAST_H
#define SHUNT_CAST_H

#include "../event/task.h"

extern void *bpf_rdonly_cast(const void *pointer, __u32 type) __ksym __attribute__((weak));

/* Whether CASTED works: a constant for the verifier, which removes the other branch. typed: as in FIELD. */
#define CAN_CAST(typed) ((typed) && bpf_rdonly_cast)
#define CASTED(pointer, type) \
	((struct type *)bpf_rdonly_cast(pointer, bpf_core_type_id_kernel(struct type)))

/* A struct of the kernel that begins with a number as large as a pointer. */
struct rb_node {
	unsigned long __rb_parent_color;
} KERNEL_STRUCT;

/* The number at an address, as large as a pointer. The kernel marks some pointers by single bits, and the verifier lets
 * no program look at single bits of a field that is a pointer. */
static __always_inline unsigned long word_read(int typed, const void *at)
{
	unsigned long word = 0;

	if (CAN_CAST(typed))
		return CASTED(at, rb_node)->__rb_parent_color;
	bpf_probe_read_kernel(&word, sizeof(word), at);
	return word;
}

#endif
