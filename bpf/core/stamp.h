/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A stamp: the note that one of shunt's programs makes of a probe it has handled. Stamps overwrite each
 * other round and round in a ring, and a counter beside the ring counts all of them: so a reader needs no
 * wake-up, and knows exactly how many stamps it has missed. User space makes the ring and reads it
 * (internal/kernel/stamps.go).
 *
 * A reader accepts a stamp if its number is the expected one before and after it has read the rest. A
 * program sets the number to 0 before it changes the rest, and to the stamp's number after that; both are
 * atomic exchanges, which order the reads and writes around them.
 */
#ifndef SHUNT_STAMP_H
#define SHUNT_STAMP_H

#include "types.h"

enum stamp_constant {
	STAMP_COUNT = 65536, /* in the ring, a power of two: 1.3 s of 50,000 probes a second */
	STAMP_LAYOUT = 1, /* version of struct stamp; part of the pin path */
};

struct stamp {
	__u64 number; /* from 1, in the order in which the runs began; 0: it is being written */
	__u64 session; /* as in struct probe_head */
	__u64 sequence; /* as in struct probe_head, but in the host's byte order */
	__u64 begin_ns; /* CLOCK_MONOTONIC: when the program got the packet */
	__u64 end_ns; /* CLOCK_MONOTONIC: when the program had its verdict */
	struct addr source; /* of the packet as it came in */
	__u32 ifindex; /* of the interface that it came in by */
	__u8 verdict; /* enum verdict */
	__u8 reason; /* enum reason */
	__u8 is_answer; /* 0: the probe; 1: its answer */
	__u8 is_tc; /* 0: the program is at XDP; 1: at tc */
};

#endif
