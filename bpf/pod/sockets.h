/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Socket pairs: types and maps of sockets.bpf.c.
 *
 * A connection's key is its two initial sequence numbers, as this end has them; the other end has them the other way
 * round. Both are random (RFC 6528), so an end that has them belongs to the same connection, in any network
 * namespace and behind any address translation.
 */
#ifndef SHUNT_POD_SOCKETS_H
#define SHUNT_POD_SOCKETS_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "../core/types.h"

enum so_limit {
	SO_SOCKETS_MAX = 65536,
	SO_PORT_WORDS = 1024, /* of 64 ports each */
	SO_LOOK_MAX = 32, /* sockets in one run of sh_so_look */
};

/* The fate of a message of a paired socket (the first ones), or of a connection. Go has the names from here. */
enum so_left {
	SO_TAKEN, /* it was put into the queue of the other end */
	SO_ORDER, /* the other end has not read all that went by TCP */
	SO_FULL, /* limit bytes already wait at the other end */
	SO_GONE, /* the other end is not in the map any more: it is closing */
	SO_PASSING, /* shunt takes its pairs apart */
	SO_UNPAIRED, /* the other end is not in the map yet */
	SO_JOINED, /* connections: both ends are in the map */
	SO_FOREIGN, /* one end is on another machine, in no listed cgroup, or older than shunt */
	SO_MPTCP, /* a subflow of MPTCP */
	SO_NO_ROOM, /* the map, or the memory for a socket's own data, is full */
	SO_LEFT_COUNT,
};

/* The keys of an end: next sequence numbers when the connection was established, host byte order. */
struct so_key {
	__u32 sent;
	__u32 received;
};

/* A socket's own storage. */
struct so_own {
	struct so_key key; /* set by user space in its own test, and by sh_so_ops */
	struct so_key peer; /* the key of the other end */
	__u64 other; /* address of the other end's socket in the kernel; 0: not known yet */
	__u64 since; /* bytes redirected since the other end's queue was last seen empty */
};

/* Word 0 of sh_so_control. */
struct so_control {
	__u32 passing; /* 1: nothing is redirected or paired any more. Set by user space. */
	__u32 limit; /* bytes that may wait at one end. Set by user space before programs are attached. */
};

/* The record of sh_so_look of a socket in the map. */
struct so_seen {
	struct so_key key; /* set by user space */
	__u64 at; /* address of the socket in the kernel, for sh_so_ends; 0: it is not in the map any more */
	__u32 queued; /* bytes redirected to it and not read, or 1 if the kernel does not count them */
	__u32 unread; /* bytes that came by TCP and are not read */
};

/* Key of an end -> its socket. Put in by sh_so_ops, or by user space for its test; taken out by the kernel when the
 * socket closes, by sh_so_ops if no other end comes, and by user space when it takes pairs apart, once the socket's queue
 * is empty: the queue's messages go with the element. Pinned, since its programs go on without the process. Full:
 * connections go on by TCP, counted. An upgrade makes a new one, and takes the pairs of the old one apart. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__type(key, struct so_key);
	__type(value, __u64);
	__uint(max_entries, SO_SOCKETS_MAX);
} sh_so_socks SEC(".maps");

/* Key of an end -> the address of its socket in the kernel, to be read and never followed without the kernel's checks.
 * Written by sh_so_ops, and by user space for its test; read by the programs. Full: the least recently used entry goes;
 * it matters only while a connection begins, which then goes by TCP. Made anew with the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct so_key);
	__type(value, __u64);
	__uint(max_entries, SO_SOCKETS_MAX);
} sh_so_ends SEC(".maps");

/* Socket -> its keys. Written by sh_so_ops; goes with the socket. Full: there is no limit but the socket's own memory
 * (net.core.optmem_max), beyond which the connection goes on by TCP, counted. Made anew with the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__type(key, int);
	__type(value, struct so_own);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_so_own SEC(".maps");

/* 0 -> struct so_control. Written by user space, read by the programs. Pinned beside sh_so_socks. Cannot be full. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct so_control);
	__uint(max_entries, 1);
} sh_so_control SEC(".maps");

/* Port / 64 -> a bit for each port that may be paired. Written by user space before programs are attached, read by
 * sh_so_ops. Cannot be full. Made anew with the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, SO_PORT_WORDS);
} sh_so_ports SEC(".maps");

/* enum so_left -> how many messages or connections, and bytes of messages, per CPU. Written by the programs, read by
 * user space. Cannot be full. Made anew with the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct count);
	__uint(max_entries, SO_LEFT_COUNT);
} sh_so_counts SEC(".maps");

#endif
