/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types of more than one product. A product's own are in its folder's types.h.
 *
 * Byte order: __beN is wire order, everything else is the host's. Addresses are 16
 * bytes, IPv4 as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2).
 */
#ifndef SHUNT_TYPES_H
#define SHUNT_TYPES_H

#include <linux/types.h>

/* An IP address in wire order, in two words because programs compare and copy words. */
struct addr {
	__be64 high;
	__be64 low;
};

/* The tuple of a packet, which tells flows from each other. */
struct flow_key {
	struct addr source;
	struct addr destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 pad[3];
};

/* A count of packets, and of their bytes. */
struct count {
	__u64 packets;
	__u64 bytes;
};

/* Positions in the chain of programs at XDP (lb/chain.h). Other projects build programs with these
 * numbers: they never change. */
enum chain_position {
	CHAIN_BEFORE = 0, /* the program attached to the interface; noted here for user space */
	CHAIN_NEXT = 1, /* sh_xdp, which the program before it calls */
	CHAIN_AFTER = 2, /* gets the frames that sh_xdp passes to the stack */
	CHAIN_COUNT = 3,
};

#endif
