/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reads a process for detection: its descriptors, its parents, and by program.h its executable. Fields are found by
 * name in the kernel's BTF (CO-RE), and read without locks.
 */
#ifndef SHUNT_LOOK_H
#define SHUNT_LOOK_H

#include "detect.h"
#include "program.h"
#include "socket.h"

#define MODE_TYPE 0170000 /* S_IFMT of linux/stat.h; below, the types */
#define MODE_SOCKET 0140000
#define MODE_FILE 0100000
#define MODE_BLOCK 0060000
#define MODE_DEVICE 0020000
#define MODE_PIPE 0010000
#define FAMILY_UNIX 1 /* AF_UNIX of linux/socket.h */

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} KERNEL_STRUCT;

struct files_struct {
	struct fdtable *fdt;
} KERNEL_STRUCT;

struct kuid {
	unsigned int val;
};

struct cred {
	struct kuid uid;
	struct kuid euid;
} KERNEL_STRUCT;

struct linux_binprm {
	const char *filename;
} KERNEL_STRUCT;

/* The fields that task.h does not have. */
struct task_struct___look {
	int tgid;
	struct task_struct *real_parent;
	struct mm_struct *mm;
	struct files_struct *files;
	struct cred *cred;
} KERNEL_STRUCT;

/*
 * Sockets that this host has connected. Key: the address of struct sock; value: 1. Programs write at the
 * first step of connect, read, and take it away when the socket closes. Full: the oldest goes, and its socket
 * counts as accepted. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, DETECT_OPENED_MAX);
	__type(key, __u64);
	__type(value, __u32);
} sh_d_opened SEC(".maps");

static __always_inline struct file *file_at(struct task_struct___look *task, __u32 fd)
{
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files, *file = NULL;

	if (!table || fd >= BPF_CORE_READ(table, max_fds))
		return NULL;
	files = BPF_CORE_READ(table, fd);
	bpf_probe_read_kernel(&file, sizeof(file), files + fd);
	return file;
}

/* The peer of a socket of IPv4 or IPv6. */
static __always_inline void socket_look(struct detect_fd *fd, struct sock *sk)
{
	__u16 family = BPF_CORE_READ(sk, __sk_common.skc_family);
	__u64 key = (__u64)sk;

	if (family == FAMILY_UNIX)
		fd->kind = DETECT_UNIX;
	else if (family == FAMILY_INET || family == FAMILY_INET6)
		fd->kind = DETECT_INET;
	else
		fd->kind = DETECT_SOCKET;
	if (fd->kind != DETECT_INET)
		return;
	fd->is_tcp = BPF_CORE_READ(sk, sk_protocol) == PROTOCOL_TCP;
	fd->local_port = BPF_CORE_READ(sk, __sk_common.skc_num);
	fd->remote_port = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	if (!fd->remote_port)
		return;
	if (family == FAMILY_INET) {
		__be32 address = BPF_CORE_READ(sk, __sk_common.skc_daddr);

		fd->remote[10] = 0xff;
		fd->remote[11] = 0xff;
		__builtin_memcpy(fd->remote + 12, &address, sizeof(address));
	} else {
		bpf_core_read(fd->remote, sizeof(fd->remote), &sk->__sk_common.skc_v6_daddr);
	}
	/* UDP has no handshake that tells who began: the host that connects a socket sends first. */
	if (!fd->is_tcp || bpf_map_lookup_elem(&sh_d_opened, &key))
		fd->direction = DETECT_OUT;
	else
		fd->direction = DETECT_IN;
}

static __noinline int fd_look(struct detect_fd *fd, struct file *file)
{
	struct inode *inode = BPF_CORE_READ(file, f_inode);
	__u16 type = BPF_CORE_READ(inode, i_mode) & MODE_TYPE;
	struct socket *socket;
	struct sock *sk;

	if (!fd || !file)
		return 0;
	fd->inode = BPF_CORE_READ(inode, i_ino);
	if (type == MODE_SOCKET) {
		fd->kind = DETECT_SOCKET;
		socket = BPF_CORE_READ(file, private_data);
		sk = BPF_CORE_READ(socket, sk);
		if (sk)
			socket_look(fd, sk);
	} else if (type == MODE_PIPE) {
		fd->kind = DETECT_PIPE;
	} else if (type == MODE_DEVICE) {
		fd->kind = DETECT_DEVICE;
	} else {
		fd->kind = type == MODE_FILE ? DETECT_FILE : DETECT_OTHER;
	}
	return 0;
}

/* The processes above the current one, the nearest first. */
static __noinline int parents_look(struct detect_event *e)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	if (!e)
		return 0;
	for (int i = 0; i < DETECT_PARENTS; i++) {
		struct detect_parent *to = &e->parents[i];
		struct task_struct *leader = BPF_CORE_READ(task, group_leader);
		struct file *program;

		task = BPF_CORE_READ((struct task_struct___look *)leader, real_parent,
				     group_leader);
		to->tgid = BPF_CORE_READ((struct task_struct___look *)task, tgid);
		if (!task || !to->tgid)
			break;
		to->start_ns = BPF_CORE_READ(task, start_boottime);
		bpf_core_read_str(to->comm, sizeof(to->comm), &task->comm);
		program = BPF_CORE_READ((struct task_struct___look *)task, mm, exe_file);
		if (program)
			to->program = file_of(BPF_CORE_READ(program, f_inode));
	}
	return 0;
}

/* How many of the parent's first descriptors lead to sockets that this host has connected. */
static __noinline int parent_outs(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct task_struct___look *parent;
	int outs = 0;

	task = BPF_CORE_READ(task, group_leader);
	parent = (void *)BPF_CORE_READ((struct task_struct___look *)task, real_parent);
	for (int i = 0; i < DETECT_PARENT_FDS; i++) {
		struct file *file = file_at(parent, i);
		struct detect_fd fd = {};

		if (!file)
			continue;
		fd_look(&fd, file);
		outs += fd.kind == DETECT_INET && fd.direction == DETECT_OUT;
	}
	return outs;
}

#endif
