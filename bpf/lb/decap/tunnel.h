/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps of sh_decap, its load-time constant, and the packet that it looks at. The program
 * runs at a backend, with or without a balancer. Behind a balancer's program it shares two maps
 * with it: sh_chain, and sh_reasons in the place of sh_dc_reasons.
 *
 *   Ethernet │ outer IP │ (destination options) │ (UDP │ GUE) │ inner IP │ …
 *            ▲                                                ▲
 *            14                                               tunnel.offset
 */
#ifndef SHUNT_DECAP_H
#define SHUNT_DECAP_H

#include "../count.h"
#include "../packet.h"

/* UDP port of GUE, wire order. 0: GUE is not taken off. */
volatile const __be16 gue_port = 0;

/* A balancer's program on the same interface calls this one, which therefore calls the program that
 * is chained after that. */
volatile const __u8 behind_balancer = 0;

/* Where this machine is a node of a cluster, the index of the interface, for the balancer's programs get
 * what is decapsulated. INTERFACE_ANY: the host's stack does. */
volatile const __u32 tunnelled_index = INTERFACE_ANY;

/* lb/maps.h has it. Alone, sh_decap has an empty one of its own, which it never reads. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, INTERFACE_MAX);
} sh_tunnel_progs SEC(".maps");

#define DECAP_ADDRESSES_MAX 1024 /* our choice: far more than a host has */

/* VIPs, whose packets are decapsulated; the value means nothing. Written by user space
 * before the program is attached, and for a node of a cluster, which has more of them, whenever they change.
 * Read by the program. Full: user space refuses to start. Made anew by every start, so no upgrade meets an old
 * one. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct addr);
	__type(value, __u32);
	__uint(max_entries, DECAP_ADDRESSES_MAX);
} sh_dc_vips SEC(".maps");

/* Addresses of the interface; the value means nothing. Written by user space whenever they
 * change, read by the program. Full: user space reports it, and tunnels to addresses without
 * an entry pass. Made anew by every start. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct addr);
	__type(value, __u32);
	__uint(max_entries, DECAP_ADDRESSES_MAX);
} sh_dc_locals SEC(".maps");

struct sender_key {
	__u32 prefix_length; /* bits that count; for IPv4 the prefix's own, and 96 */
	__be32 address[4];
};

/* Prefixes of permitted outer sources; the value means nothing. Written by user space as
 * sh_dc_vips, read by the program. Full: user space refuses to start.
 * Made anew by every start. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct sender_key);
	__type(value, __u32);
	__uint(max_entries, DECAP_ADDRESSES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_dc_senders SEC(".maps");

/* enum reason -> how often, per CPU. Written by the program, summed by user space. Cannot
 * be full. Made anew by every start, so it counts from there; behind a balancer's program it is
 * that one's sh_reasons. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct count);
	__uint(max_entries, REASON_COUNT);
} sh_dc_reasons SEC(".maps");

struct tunnel {
	/* The packet as it came: its addresses, fragment, frame_size and reason; key.protocol is that of the
	 * header at offset. Nothing from behind the outer header is in it. */
	struct packet outer;
	__u32 offset; /* of the next header, from the start of the frame */
	__u32 end; /* end of the payload by the outer headers, from the start of the frame */
	__u8 ecn; /* of the outer header, RFC 3168 */
	__u8 is_gue;
};

/* The largest offset of an inner header is 14 + 60 (IPv4 with options) + 8 + 4 + 124 (GUE) =
 * 210 bytes, so that the mask changes nothing; it is the verifier's bound. */
#define OFFSET_MASK 0xff

static __always_inline void decap_count(__u32 reason, __u64 bytes)
{
	count_in(&sh_dc_reasons, reason, bytes);
}

#endif
