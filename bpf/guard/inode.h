/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * An inode, which identifies a file, and the names that lead to it. Fields are found by name in the kernel's BTF
 * (CO-RE), and read without locks.
 */
#ifndef SHUNT_INODE_H
#define SHUNT_INODE_H

#include "guard.h"

struct super_block {
	__u32 s_dev;
	unsigned long s_magic;
} KERNEL_STRUCT;

struct inode {
	__u16 i_mode;
	unsigned long i_ino;
	unsigned int i_nlink;
	__u32 i_generation;
	struct super_block *i_sb;
	void *i_private;
} KERNEL_STRUCT;

struct qstr {
	const unsigned char *name;
} KERNEL_STRUCT;

struct dentry {
	struct dentry *d_parent;
	struct qstr d_name;
	struct inode *d_inode;
	struct super_block *d_sb;
} KERNEL_STRUCT;

static __always_inline struct guard_file file_of(struct inode *inode)
{
	struct guard_file file = {};

	file.inode = BPF_CORE_READ(inode, i_ino);
	file.device = BPF_CORE_READ(inode, i_sb, s_dev);
	file.generation = BPF_CORE_READ(inode, i_generation);
	return file;
}

/* Writes a name behind the used bytes, with its zero. Returns its bytes; 0: there was no room, or no name. */
static __always_inline __u32 name_add(char *names, __u32 used, const void *name)
{
	long size;

	if (used >= GUARD_PATH_BYTES)
		return 0;
	/* Linux 6.1 loses the bound of used, and clang 19 leaves the mask out because it knows the bound. */
	asm volatile("" : "+r"(used));
	size = bpf_probe_read_kernel_str(&names[used & (GUARD_PATH_BYTES - 1)], GUARD_NAME_BYTES,
					 name);
	return size <= 0 || size > GUARD_NAME_BYTES ? 0 : size;
}

#endif
