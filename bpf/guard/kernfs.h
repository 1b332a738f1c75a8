/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Nodes of kernfs, the file system of cgroups: from a node to its folder, and the names on the way to the root. The
 * inode of a cgroup's file leads to the file's node, and the priv of the node's folder is the cgroup. Mounts, names and
 * namespaces have no part in this.
 */
#ifndef SHUNT_GUARD_KERNFS_H
#define SHUNT_GUARD_KERNFS_H

#include "group.h"

struct kernfs_node___before {
	struct kernfs_node___before *parent;
} KERNEL_STRUCT;

/* Since Linux 6.15 ("kernfs: Use RCU to access kernfs_node::parent."). */
struct kernfs_node___since {
	struct kernfs_node *__parent;
} KERNEL_STRUCT;

/* The folder of a node; NULL: the node is the root of its hierarchy. */
static __always_inline struct kernfs_node *node_folder(struct kernfs_node *node)
{
	struct kernfs_node___before *before = (void *)node;

	if (bpf_core_field_exists(before->parent))
		return (void *)BPF_CORE_READ(before, parent);
	return BPF_CORE_READ((struct kernfs_node___since *)node, __parent);
}

/* The position of nodes_walk. */
struct nodes_steps {
	char *names;
	struct kernfs_node *node;
	__u32 used; /* bytes of names so far */
};

/* One folder up; 1: there is none. */
static long nodes_step(__u32 number, struct nodes_steps *s)
{
	struct kernfs_node *node = s->node, *folder = node_folder(node);
	__u32 size;

	if (!folder)
		return 1;
	size = name_add(s->names, s->used, BPF_CORE_READ(node, name));
	if (!size)
		return 1;
	s->used += size;
	s->node = folder;
	return 0;
}

/* The names from a file to the root of its hierarchy, as names_walk writes those of other files: a hook without a dentry
 * has only the inode. Returns the bytes that are used. bpf_loop as in path_walk. */
static __noinline int nodes_walk(char *names, struct kernfs_node *node)
{
	struct nodes_steps s = { .names = names, .node = node };

	if (!names || !node)
		return 0;
	bpf_loop(GUARD_DEPTH_MAX, nodes_step, &s, 0);
	return s.used;
}

#endif
