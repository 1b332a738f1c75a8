/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The program that a process runs: its file, and the file's path. Fields are found by name in the kernel's BTF
 * (CO-RE), and read without locks.
 */
#ifndef SHUNT_PROGRAM_H
#define SHUNT_PROGRAM_H

#include "inode.h"

#define PATH_DEPTH_MAX 32 /* names and mounts of a path, at most */

struct vfsmount {
	struct dentry *mnt_root;
} KERNEL_STRUCT;

struct mount {
	struct mount *mnt_parent;
	struct dentry *mnt_mountpoint;
	struct vfsmount mnt;
} KERNEL_STRUCT;

struct path {
	struct vfsmount *mnt;
	struct dentry *dentry;
} KERNEL_STRUCT;

struct file {
	unsigned int f_mode;
	struct inode *f_inode;
	struct path f_path;
	void *private_data;
} KERNEL_STRUCT;

struct mm_struct {
	struct file *exe_file;
	unsigned long arg_start;
	unsigned long arg_end;
} KERNEL_STRUCT;

/* The position of path_walk. */
struct path_steps {
	char *names;
	struct dentry *dentry;
	struct mount *mount;
	__u32 used; /* bytes of names so far */
};

/* One folder up; 1: there is none. */
static long path_step(__u32 number, struct path_steps *s)
{
	struct dentry *dentry = s->dentry, *parent = BPF_CORE_READ(dentry, d_parent);
	struct mount *mount = s->mount;
	__u32 size;

	if (s->used >= GUARD_PATH_BYTES)
		return 1;
	if (dentry == BPF_CORE_READ(mount, mnt.mnt_root)) {
		struct mount *outer = BPF_CORE_READ(mount, mnt_parent);

		if (!outer || outer == mount)
			return 1;
		s->dentry = BPF_CORE_READ(mount, mnt_mountpoint);
		s->mount = outer;
		return 0;
	}
	size = name_add(s->names, s->used, BPF_CORE_READ(dentry, d_name.name));
	if (!size)
		return 1;
	s->used += size;
	if (!parent || parent == dentry) /* there is no folder: a memfd */
		return 1;
	s->dentry = parent;
	return 0;
}

/* From a file to the root of its mount namespace, through mounts: without locks, so a rename at the same
 * moment may mix two names. Returns the bytes that are used. With bpf_loop the verifier goes through one step, and
 * not through every step, which takes seconds for all programs. */
static __noinline int path_walk(char *names, struct file *file)
{
	struct path_steps s = { .names = names };
	struct vfsmount *inner = BPF_CORE_READ(file, f_path.mnt);

	if (!names)
		return 0;
	s.dentry = BPF_CORE_READ(file, f_path.dentry);
	s.mount = (void *)inner - bpf_core_field_offset(struct mount, mnt);
	bpf_loop(PATH_DEPTH_MAX, path_step, &s, 0);
	return s.used;
}

#endif
