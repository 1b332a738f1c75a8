/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the UDP path's stage and user space share. Go is generated from it (internal/udp/hook).
 */
#ifndef SHUNT_UDP_TYPES_H
#define SHUNT_UDP_TYPES_H

#include "../core/types.h"

enum lease_limit {
	LEASES_MAX = 64, /* of one interface */
	LEASE_QUEUES_MAX = 64, /* receive queues that can have a socket */
	LEASE_SLOTS = 4096, /* a lease and a queue: lease * LEASE_QUEUES_MAX + queue */
	LEASE_FRONTENDS_MAX = 1024, /* addresses and ports of all leases */
};

/* Where a datagram goes to. */
struct lease_key {
	struct addr address;
	__be16 port;
	__u8 pad[6];
};

/* Which lease has it. Elements are recycled without a grace period, so that a reader takes the
 * whole word at once, and a wrong check for a miss (see struct frontend). */
struct lease {
	__u32 index; /* below LEASES_MAX */
	__u32 check; /* of the key: lease_check() */
};

/* Of one lease and queue, per CPU. matched = passed_no_socket + what the socket was given. */
struct lease_count {
	__u64 matched; /* datagrams to the lease's address and port */
	__u64 passed_no_socket; /* of them, passed to the stack because the queue has no socket */
};

/* Datagrams that pass to the stack before a lease is looked for, or though there is one. */
enum lease_pass {
	PASSED_FRAGMENT = 0, /* of any protocol: only the first fragment has ports */
	PASSED_OPTIONS = 1, /* UDP behind IPv4 options or IPv6 extension headers */
	PASSED_MALFORMED = 2, /* headers that end too soon or contradict each other */
	PASSED_LARGE = 3, /* to a lease, and not in one piece in memory */
	PASSED_QUEUE = 4, /* to a lease, on a queue beyond LEASE_QUEUES_MAX */
	PASSED_COUNT = 5,
};

#endif
