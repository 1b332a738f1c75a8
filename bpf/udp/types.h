/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types that the UDP path's stage and user space share. Go is generated from it (internal/udp/hook).
 */
#ifndef SHUNT_UDP_TYPES_H
#define SHUNT_UDP_TYPES_H

#include "../core/types.h"

enum lease_limit {
	LEASES_MAX = 64, /* of one interface */
	LEASE_QUEUES_MAX = 64, /* receive queues that can have a socket */
	LEASE_SLOTS = 4096, /* pairs of a lease and a queue: lease * LEASE_QUEUES_MAX + queue */
	LEASE_FRONTENDS_MAX = 1024, /* addresses and ports of all leases */
	LEASE_BUCKETS = 1024, /* hash buckets for them, each with LEASE_HINTS bits */
	LEASE_HINTS = 64,
	/* In struct lease's index: a datagram that no socket takes is dropped, and does not pass to the stack. */
	LEASE_DROP = 1 << 16,
	/* And: bpf_ktime_get_ns() (CLOCK_MONOTONIC) stands in front of each frame, as 8 bytes of metadata, which the
	 * kernel copies with it (xsk_copy_xdp, net/xdp/xsk.c). It is the highest bit, so that one comparison finds
	 * it: the program tests this bit for each datagram of a lease, the other only for those without a socket. */
	LEASE_STAMPED = 1 << 17,
};

/* The destination of a datagram. */
struct lease_key {
	struct addr address;
	__be16 port;
	__u8 pad[6];
};

/* The lease of a key. Elements are recycled without a grace period, so a reader reads the
 * whole word at once, and takes a wrong check for a miss. */
struct lease {
	__u32 index; /* < LEASES_MAX; plus LEASE_STAMPED (its holder wants times), LEASE_DROP */
	__u32 check; /* of the key: lease_check() */
};

/* One address and port in the bucket of its hash. In an empty bucket the port is 0, or the index is beyond all leases. */
struct lease_direct {
	struct lease_key key;
	struct lease lease;
};

/* Counts of one lease and queue, per CPU. matched = passed_no_socket + dropped_no_socket + datagrams to the socket. */
struct lease_count {
	__u64 matched; /* datagrams to the lease's address and port */
	__u64 passed_no_socket; /* of these, passed to the stack, because the queue has no socket */
	__u64 dropped_no_socket; /* of these, dropped for the same reason, with LEASE_DROP */
};

/* Datagrams that pass to the stack before a lease is looked for, or though there is one. Plain datagrams to
 * an address and port that no lease has, and TCP, are not looked at so far. */
enum lease_pass {
	PASSED_FRAGMENT = 0, /* a fragment of any protocol: only the first fragment has ports */
	PASSED_OPTIONS = 1, /* UDP behind IPv4 options or IPv6 extension headers */
	PASSED_MALFORMED = 2, /* headers that are truncated or contradict each other */
	PASSED_LARGE = 3, /* to a lease, but not in one piece in memory */
	PASSED_QUEUE = 4, /* to a lease, on a queue beyond LEASE_QUEUES_MAX */
	PASSED_UNSTAMPED = 5, /* to a lease with times, but the driver has no room for a time */
	PASSED_COUNT = 6,
};

#endif
