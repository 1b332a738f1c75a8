/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The identity and the path of an inode's file, from the kernel's structs, by name (CO-RE).
 */
#ifndef SHUNT_FILE_H
#define SHUNT_FILE_H

#include "io.h"

#define MODE_TYPE 0170000 /* S_IFMT of linux/stat.h */
#define MODE_BLOCK 0060000 /* S_IFBLK */

struct hlist_node {
	struct hlist_node *next;
} KERNEL_STRUCT;

struct hlist_head {
	struct hlist_node *first;
} KERNEL_STRUCT;

struct super_block {
	__u32 s_dev;
} KERNEL_STRUCT;

struct inode {
	__u16 i_mode;
	unsigned long i_ino;
	unsigned int i_nlink;
	__u32 i_generation;
	__u32 i_rdev;
	struct super_block *i_sb;
	struct hlist_head i_dentry;
} KERNEL_STRUCT;

struct qstr {
	const unsigned char *name;
} KERNEL_STRUCT;

struct dentry {
	struct dentry *d_parent;
	struct qstr d_name;
	union {
		struct hlist_node d_alias;
	} d_u;
} KERNEL_STRUCT;

struct io_told {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u64 links;
};

/* A name is told again after this time, because files are renamed. */
#define TELL_AGAIN_NS (5ULL * 1000 * 1000 * 1000)

/*
 * Files whose names have been told. Key: the file; value: when, and how many names it had then.
 * Programs write and read. Full: the least used one goes, and is told again. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, IO_FILES_MAX);
	__type(key, struct io_file);
	__type(value, struct io_told);
} sh_io_files SEC(".maps");

static __always_inline struct io_file file_of(int typed, struct inode *inode)
{
	struct io_file file = {};
	struct super_block *sb;

	if ((FIELD(typed, inode, i_mode) & MODE_TYPE) == MODE_BLOCK) {
		file.device = FIELD(typed, inode, i_rdev);
		return file;
	}
	sb = FIELD(typed, inode, i_sb);
	file.inode = FIELD(typed, inode, i_ino);
	file.device = FIELD(typed, sb, s_dev);
	file.generation = FIELD(typed, inode, i_generation);
	return file;
}

/* From the file to the root, without locks: a rename at the same moment may mix two names. */
static __always_inline void path_walk(struct io_path *path, struct inode *inode)
{
	struct hlist_node *alias = BPF_CORE_READ(inode, i_dentry.first);
	struct dentry *dentry, *parent;
	__u32 used = 0;

	path->is_cut = 1;
	if (!alias) {
		path->names_size = 0;
		return;
	}
	dentry = (void *)alias - bpf_core_field_offset(struct dentry, d_u.d_alias);
	for (int i = 0; i < IO_PATH_DEPTH && used < IO_PATH_BYTES; i++) {
		const unsigned char *name = BPF_CORE_READ(dentry, d_name.name);
		long size;

		parent = BPF_CORE_READ(dentry, d_parent);
		if (!parent || parent == dentry) {
			path->is_cut = 0;
			break;
		}
		size = bpf_probe_read_kernel_str(&path->names[used & (IO_PATH_BYTES - 1)],
						 IO_NAME_BYTES, name);
		if (size <= 0 || size > IO_NAME_BYTES)
			break;
		used += size;
		dentry = parent;
	}
	path->names_size = used;
}

/* Tells the file's path, unless that has been done lately. 0: there was no room for the event. */
static __always_inline int file_tell(const struct io_file *file, struct inode *inode)
{
	struct io_told now = { bpf_ktime_get_ns(), BPF_CORE_READ(inode, i_nlink) };
	struct io_told *told;
	struct event_header *h;
	struct io_path *path;

	if (!file->inode)
		return 1;
	told = bpf_map_lookup_elem(&sh_io_files, file);
	if (told && told->links == now.links && now.time_ns - told->time_ns < TELL_AGAIN_NS)
		return 1;
	bpf_map_update_elem(&sh_io_files, file, &now, BPF_ANY);
	h = event_reserve(sizeof(*path), IO_SENSOR_PATH);
	if (!h) {
		bpf_map_delete_elem(&sh_io_files, file); /* so that the next IO tries again */
		return 0;
	}
	event_task(h);
	path = (void *)(h + 1);
	path->file = *file;
	path->links = now.links;
	path_walk(path, inode);
	event_submit(h);
	return 1;
}

#endif
