/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types of denied connections that cross to Go.
 */
#ifndef SHUNT_CONNECT_H
#define SHUNT_CONNECT_H

#include "guard.h"

enum connect_constant {
	CONNECT_TARGETS_MAX = 1 << 10, /* addresses of all rules together */
	CONNECT_PROGRAMS_MAX = GUARD_RULES_MAX, /* one program for each rule */
	CONNECT_TASKS_MAX =
		1 << 16, /* processes started by the program of a rule that is also for children */
	CONNECT_FILTER_BITS =
		1 << 12, /* bits of sh_c_filter; at most 64 are set: few other programs match */
	CONNECT_SENSOR = 3, /* event_header.sensor of struct connect_event */
};

/* Operations that a rule can deny. */
enum connect_op {
	CONNECT_CONNECT = 0, /* connect, or send a datagram to an address */
	CONNECT_BIND = 1,
	CONNECT_LISTEN = 2,
	CONNECT_ACCEPT = 3,
	CONNECT_RAW = 4, /* make a socket that sends packets as they are */
	CONNECT_OP_COUNT = 5,
};

/* Kinds of addresses of an attempt. */
enum connect_address_kind {
	CONNECT_GIVEN = 0, /* one address, in the field address */
	CONNECT_SELF = 1, /* the unspecified address as a destination: this host's loopback */
	CONNECT_ANY = 2, /* the unspecified address as the socket's own: all of the host's */
	CONNECT_UNKNOWN = 3, /* no hook sees the address: it may be any address that a rule names */
};

/* Addresses and ports of rules. IPv4 is mapped (::ffff:0:0/96). */
struct connect_target {
	__u8 address[16]; /* wire order; bits beyond the mask are 0 */
	__u8 mask[16];
	__u64 rules; /* rules that forbid operations at these addresses */
	__u64 spares; /* rules with an exception for these addresses */
	__u16 port_first; /* host order */
	__u16 port_last;
	__u32 version; /* 4 or 6, of IP; 0: addresses of both */
};

/* The rules that forbid an operation, as masks. */
struct connect_masks {
	__u64 denied;
	__u64 audited;
};

/* The rules in force. All 0: none. */
struct connect_policy {
	struct connect_masks ops[CONNECT_OP_COUNT];
	__u64 everywhere; /* rules that name no address */
	__u64 spares; /* rules with exceptions */
	__u64 children; /* rules that are also for the processes that their program starts */
	__u64 loaded_ns; /* CLOCK_BOOTTIME */
	__u32 target_count;
	__u32 reserved;
};

/* Counts since the first policy of this boot. */
struct connect_count {
	__u64 denied;
	__u64 audited;
	__u64 untracked; /* processes that sh_c_tasks had no room for */
	__u64 changed; /* processes that sh_walk has put under more rules */
};

/* Payload of an event. */
struct connect_event {
	struct guard_file program; /* the executable; 0: a thread of the kernel */
	__u64 rules; /* rules that forbid the operation */
	__u32 op; /* enum connect_op */
	__u32 is_denied; /* 0: audited */
	__u32 address_kind; /* enum connect_address_kind */
	__u16 protocol; /* as in socket(2); 0: not known */
	__u16 port; /* host order; 0: none */
	__u8 address[16]; /* wire order; IPv4 is mapped */
	__u32 program_size; /* bytes used of program_names */
	char comm[TASK_COMM_BYTES];
	char program_names
		[GUARD_PATH_BYTES +
		 GUARD_NAME_BYTES]; /* each name with its zero, the last one of the path first */
	__u32 reserved;
};

/* Argument of sh_file, and its answer. */
struct connect_file {
	__u64 fd; /* a descriptor of the calling process */
	struct guard_file file; /* all 0: it has none */
};

/* Argument of sh_ask, and its answer: the rules that would forbid an operation to another process. */
struct connect_question {
	struct guard_process process;
	struct guard_file program;
	__u64 denied; /* rules that deny the operation */
	__u64 audited;
	__u32 op;
	__u32 address_kind;
	__u16 port;
	__u16 reserved[3];
	__u8 address[16];
};

#endif
