/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types of `shunt diag ping` that cross to Go. Its packets begin with struct probe_head.
 */
#ifndef SHUNT_PING_H
#define SHUNT_PING_H

#include "../core/probe.h"
#include "../event/task.h"

enum ping_constant {
	/* Kinds of struct probe_head, beside PROBE_KIND_PROBE. The server's process sends them. */
	PING_KIND_REPORT = 2, /* records of the server: as many probes as sequence says */
	PING_KIND_TRAIL = 3, /* the places on its host that one probe passed */
	PING_KIND_STAMPS = 4, /* some stamps of a balancer on its host (core/stamp.h) */
	PING_CODE_MAX = 1, /* codes of echo messages that are looked at: 0 and 1 */
	PING_ROWS = 65536, /* probes that a server remembers; a power of two */
	PING_ROWS_MIN =
		4096, /* probes that a client remembers at least: all under way; a power of two */
	PING_ROWS_MAX = 262144, /* probes that a client remembers at most */
	PING_TRAILS = 4096, /* probes whose places a host remembers; a power of two */
	PING_PLACES = 32, /* places of one probe; a power of two */
};

/* Where a host stamps a probe. A client's probe leaves and its answer arrives; a server's probe
 * arrives and its answer leaves. */
enum ping_point {
	PING_POINT_QUEUE = 0, /* the queueing discipline takes the packet that leaves */
	PING_POINT_DRIVER = 1, /* the driver is given the packet */
	PING_POINT_RECEIVE = 2, /* the driver hands the packet that arrives over */
	PING_POINT_SOFTIRQ = 3, /* the network stack begins with the packet */
	PING_POINT_SOCKET = 4, /* the packet reaches the socket of shunt */
	PING_POINT_COUNT = 5,
};

/* A host's record of a probe; all 0: nothing is known. */
struct ping_row {
	__u64 session; /* as in struct probe_head */
	__u64 sequence; /* in the host's byte order */
	__u64 at_ns[PING_POINT_COUNT]; /* CLOCK_MONOTONIC; 0: not seen there */
	__u64 dropped_ns; /* CLOCK_MONOTONIC: when the kernel first dropped it; 0: it did not */
	__u32 drop_reason; /* enum skb_drop_reason of this kernel */
	__u32 reserved; /* 0 */
};

/* A place that a probe or its answer passed, in any network namespace of the host. */
struct ping_place {
	__u64 at_ns; /* CLOCK_MONOTONIC */
	__u32 netns; /* inode number of the network namespace */
	__u32 ifindex; /* of the device there */
	__u32 drop_reason; /* enum skb_drop_reason of this kernel, at PING_POINT_COUNT */
	__u8 point; /* enum ping_point; PING_POINT_COUNT: the kernel dropped it */
	__u8 is_request; /* 0: the answer */
	__u16 reserved; /* 0 */
};

/* The places of a probe in their order. */
struct ping_trail {
	__u64 session; /* as in struct probe_head */
	__u64 sequence; /* in the host's byte order */
	__u64 count; /* places passed; only the first PING_PLACES of them are kept */
	struct ping_place places[PING_PLACES];
};

/* The thread that receives. */
struct ping_thread {
	__u64 woken_ns; /* CLOCK_MONOTONIC: when it was last put on a run queue */
	__u32 tid; /* in the first pid namespace */
	__u32 reserved; /* 0 */
};

#endif
