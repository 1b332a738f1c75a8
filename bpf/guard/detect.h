/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types of detection that cross to Go: one shape for all events.
 */
#ifndef SHUNT_DETECT_H
#define SHUNT_DETECT_H

#include "guard.h"

enum detect_constant {
	DETECT_SENSOR = 2, /* event_header.sensor of struct detect_event */
	DETECT_FDS = 4, /* descriptors in an event: 0 to 3 */
	DETECT_PARENTS = 8, /* ancestors of the process in an event */
	DETECT_PARENT_FDS = 16, /* descriptors of the parent that are looked at */
	DETECT_ARGS_BYTES = 512, /* bytes of arguments; the rest is cut */
	DETECT_OPENED_MAX = 1 << 16, /* sockets that this host has connected */
	DETECT_CALLS_MAX = 1 << 12, /* threads in setuid(2) or a similar call */
	DETECT_TYPES_MAX = 16, /* greater than each enum detect_type */
	DETECT_NAMES_MAX = 1 << 12, /* names of files and folders whose opens become events */
	DETECT_NAME_LEVELS = 3, /* levels of names that are looked up */
	DETECT_MOUNTS_MAX = 4, /* mounts over each other at one mount point */
	DETECT_NAME_BYTES = 56, /* bytes of such a name, with its zero */
};

enum detect_type {
	DETECT_EXEC = 1,
	DETECT_CONNECT = 2,
	DETECT_ACCEPT = 3,
	DETECT_DUP = 4,
	DETECT_OPEN = 5,
	DETECT_SETUID = 6,
	DETECT_MODULE = 7,
	DETECT_BPF = 8,
	DETECT_PTRACE = 9,
	DETECT_MOUNT = 10,
	DETECT_MEMFD = 11,
};

enum detect_kind {
	DETECT_CLOSED = 0,
	DETECT_FILE = 1,
	DETECT_DEVICE = 2, /* a character device: a terminal, /dev/null */
	DETECT_PIPE = 3,
	DETECT_INET = 4, /* a socket of IPv4 or IPv6 */
	DETECT_UNIX = 5, /* a socket of AF_UNIX */
	DETECT_SOCKET = 6, /* a socket of another family */
	DETECT_OTHER = 7,
};

enum detect_direction {
	DETECT_UNKNOWN = 0, /* the socket has no peer */
	DETECT_OUT = 1, /* this host has connected it */
	DETECT_IN = 2, /* it was accepted, or is older than the sensor */
};

/* Events of a type that are left out while detection may use less CPU than they take. */
struct detect_shed {
	__u64 seen; /* events of the type, counted while some are left out */
	__u64 left_out; /* of these, the events that were left out */
};

/* Kinds of opens that become events only if sh_d_names has the file. */
enum detect_filter {
	DETECT_FILTER_READS = 1, /* opens for reading */
	DETECT_FILTER_WRITES = 2, /* opens for writing */
};

/* The last part of a file's path, or one of the two before that: its folders. */
struct detect_name {
	char name[DETECT_NAME_BYTES]; /* and zeros */
	__u32 is_write;
	__u32 level; /* 0: the file's own name; 1: its folder's; 2: the name of the folder above */
};

/* The file, pipe or socket of a descriptor. */
struct detect_fd {
	__u64 inode; /* equal in two descriptors of the same file, pipe or socket */
	__u32 kind; /* enum detect_kind */
	__u32 direction; /* enum detect_direction, of DETECT_INET */
	__u16 remote_port; /* host order */
	__u16 local_port; /* host order */
	__u8 is_tcp;
	__u8 reserved[3];
	__u8 remote[16]; /* IPv4 is mapped; 0: not connected */
};

/* A process above. */
struct detect_parent {
	struct guard_file program;
	__u64 start_ns; /* CLOCK_BOOTTIME */
	__u32 tgid;
	__u32 reserved;
	char comm[TASK_COMM_BYTES];
};

struct detect_cred {
	__u32 uid;
	__u32 euid;
};

/* Payload of an event. A field that is not of the event's type is 0. */
struct detect_event {
	struct guard_file program; /* the executable */
	struct guard_file file; /* of DETECT_OPEN and DETECT_MEMFD */
	struct detect_fd fds[DETECT_FDS]; /* 0 is stdin */
	struct detect_fd socket; /* of DETECT_CONNECT and DETECT_ACCEPT */
	struct detect_parent parents[DETECT_PARENTS]; /* the nearest first; tgid 0: no more */
	struct detect_cred cred; /* of the process, now */
	struct detect_cred before; /* of DETECT_SETUID */
	__u32 type; /* enum detect_type */
	__u32 program_links; /* names that the executable has; 0: deleted, or a memfd */
	__u32 fd; /* of DETECT_DUP: the new descriptor */
	__u32 is_write; /* of DETECT_OPEN */
	__u32 mode; /* of DETECT_OPEN: the file's, with its type */
	__u32 number; /* of DETECT_BPF: the command; of DETECT_PTRACE: the request, or a system call's number */
	__u32 target; /* of DETECT_PTRACE: process ID, as the caller gives it */
	__u32 parent_outs; /* of DETECT_EXEC: the parent's descriptors to connected sockets */
	__u32 program_size; /* bytes used of program_names */
	__u32 object_size; /* bytes used of object */
	__u32 args_size;
	char comm[TASK_COMM_BYTES];
	char args[DETECT_ARGS_BYTES]; /* of the process, each with its zero */
	/* Each name with its zero, the last one of the path first. */
	char program_names[GUARD_PATH_BYTES + GUARD_NAME_BYTES];
	/* Of DETECT_OPEN and DETECT_MEMFD: names as above. Of others, one text: DETECT_EXEC: the executed
	 * path, as it was written, also a script's; DETECT_MOUNT: the target; DETECT_MODULE: the module. */
	char object[GUARD_PATH_BYTES + GUARD_NAME_BYTES];
};

/* The users of a process before setuid(2) or a call like it. */
struct detect_call {
	struct detect_cred before;
};

#endif
