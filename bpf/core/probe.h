/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The bytes that mark a packet as a probe of `shunt diag ping`. They follow the first eight bytes of
 * the transport header: with ICMP and ICMPv6 these are the header of an echo message (RFC 792; RFC
 * 4443, 4), with UDP they are the whole header (RFC 768).
 */
#ifndef SHUNT_PROBE_H
#define SHUNT_PROBE_H

#include <linux/types.h>
#include <bpf/bpf_endian.h>

enum probe_constant {
	PROBE_MAGIC = 0x73687074, /* "shpt" */
	PROBE_VERSION = 1, /* of struct probe_head; a packet with another version is no probe */
	PROBE_KIND_PROBE = 1, /* a probe or its answer; diag/ping.h has the other kinds */
	PROBE_BEFORE_HEAD = 8, /* bytes of the transport header before struct probe_head */
};

struct probe_head {
	__u32 magic_be; /* PROBE_MAGIC */
	__u8 version; /* PROBE_VERSION */
	__u8 kind; /* PROBE_KIND_PROBE */
	__u8 is_answer; /* UDP: 1: an answer. ICMP: always 0, as the message type says which */
	__u8 reserved; /* 0 */
	__u64 session; /* random, chosen by the client's process; programs only compare it */
	__u64 sequence_be; /* from 1 */
};

static __always_inline int head_is_probe(const struct probe_head *head)
{
	return head->magic_be == bpf_htonl(PROBE_MAGIC) && head->version == PROBE_VERSION &&
	       head->kind == PROBE_KIND_PROBE;
}

#endif
