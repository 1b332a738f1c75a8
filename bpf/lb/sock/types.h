/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types that the socket programs and user space share. Go is generated from it (internal/lb/sock).
 */
#ifndef SHUNT_SOCK_TYPES_H
#define SHUNT_SOCK_TYPES_H

#include "../types.h"

/*
 * The outcome of a call. Numbers are given once and never reused; the word in output is the name
 * after OUTCOME_, in lower case. docs/design/34-services-at-the-socket.md has a line for each.
 */
enum sock_outcome {
	OUTCOME_NONE = 0,

	/* translated: the socket talks to a backend */
	OUTCOME_CHOSEN = 1, /* a backend was chosen */
	OUTCOME_KEPT = 2, /* the socket went on with the backend that it had */
	OUTCOME_CHOSEN_ANEW = 3, /* the backend that it had is gone, and another one was chosen */
	OUTCOME_AFFINITY = 4, /* the network namespace went on with the backend that it had */

	/* refused: the program gets ECONNREFUSED, and EADDRINUSE for a port */
	OUTCOME_NO_BACKEND = 16, /* the service has no backend that takes new flows */
	OUTCOME_BACKEND_GONE = 17, /* the slot named a backend that has just been removed */

	OUTCOME_PORT_TAKEN = 18, /* bind() to a port that the host has a service at */

	/* left: the address stays as it is, and the packets are for the programs at interfaces */
	OUTCOME_DIRECT = 32, /* the service's backends answer clients themselves, as the VIP */
	OUTCOME_POLICY =
		33, /* the service has lists or limits, which only packets can be checked against */
	OUTCOME_FAMILY = 34, /* the backend's address is of another family than the VIP */

	/* note: counted beside the outcome */
	OUTCOME_NAMED_VIP = 48, /* a program that asked for its peer was told the VIP */
	OUTCOME_FORGOTTEN = 49, /* the socket got another destination, and its VIP was forgotten */
	OUTCOME_NOT_KEPT =
		50, /* no memory to keep the choice: the program will see the backend as its peer */

	/* closed, by user space, which counts it */
	OUTCOME_CLOSED_GONE = 56, /* END_GONE */
	OUTCOME_CLOSED_DOWN = 57, /* END_DOWN */
	OUTCOME_CLOSED_LEFT = 58, /* END_LEFT */

	OUTCOME_COUNT = 64,
};

enum sock_limit {
	CHOICES_MAX = 4, /* choices of one socket: the connection's, then unconnected datagrams' */
	CLIENTS_MAX = 16384, /* network namespaces times the services with affinity that they use */
	PAIRS_MAX = 4096, /* pairs whose sockets one walk closes */
};

/*
 * One VIP that a socket has used, and its backend. Threads may write to one at
 * the same time, so a reader copies it and takes a wrong seal for an empty one.
 */
struct sock_choice {
	__u64 seal; /* covers all other fields (keep.h) */
	struct addr vip;
	struct addr address; /* of the backend */
	__u64 made; /* when it was chosen, CLOCK_MONOTONIC in ns */
	__be16 vip_port;
	__be16 port; /* of the backend */
	__u32 backend; /* reference: generation:8 | index:20; 0: there is no choice */
	__u32 service; /* generation:8 | index:24 */
	__u32 pad;
};

/* A client of a service with affinity: sockets have no address yet, so it is a network namespace. */
struct sock_client {
	__u64 netns; /* cookie */
	__u32 service; /* generation:8 | index:24 */
	__u32 pad;
};

/* The backend that a client stays with. Elements are recycled as they are read, so the first word is read whole. */
struct sock_stay {
	__u32 backend; /* reference */
	__u32 check; /* of the key */
	__u64 used; /* when a socket of the client last got it, CLOCK_MONOTONIC in ns */
};

/* Of one socket. */
struct sock_choices {
	struct sock_choice of[CHOICES_MAX]; /* the first one is of connect() */
	__u32 hand; /* index of the other choice that was written last */
	__u32 pad;
};

/* A backend that sockets of a service have, or had. */
struct sock_pair {
	__u32 service; /* generation:8 | index:24 */
	__u32 backend; /* generation:8 | index:20 */
};

/* Why a socket is closed. */
enum sock_end {
	END_NOT = 0,
	END_GONE = 1, /* its backend was removed */
	END_DOWN = 2, /* its backend is down, and nothing is established */
	END_LEFT = 3, /* its backend has left the service, and is still in another one */
};

/* A socket whose backend is gone, as the iterators write it. */
struct sock_gone {
	__u64 cookie;
	struct addr source;
	struct addr destination;
	__be16 source_port;
	__be16 destination_port;
	__u32 ifindex; /* interface that the socket is bound to, or 0 */
	__u8 family; /* AF_INET or AF_INET6 */
	__u8 protocol;
	__u8 closed; /* 1: the program has closed it; 0: user space has to */
	__u8 end; /* enum sock_end */
	__u8 pad[4];
};

#endif
