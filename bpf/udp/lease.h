/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The UDP path as a stage: a datagram to a leased address and port goes into the AF_XDP socket of its
 * lease and queue.
 *
 *   plain datagram ─► leased? ─► socket on this queue? ─► redirect
 *                        │ no         │ no
 *                        ▼            ▼
 *          the stages that follow   pass: the kernel's socket on the same port, if there
 *                                   is one, has it; with LEASE_DROP: drop
 *
 * Invariant: the stage writes nothing to a frame, and drops none without LEASE_DROP, so that a frame that it
 * does not take goes on as it came. A time in front of it (LEASE_STAMPED) is taken away again.
 */
#ifndef SHUNT_UDP_LEASE_H
#define SHUNT_UDP_LEASE_H

#include "../core/packet.h"
#include "maps.h"

/* A datagram with nothing odd about it: its headers are whole, their lengths agree, and it has neither options nor
 * fragments. */
struct datagram {
	struct lease_key key; /* its destination */
	__u32 end; /* of the IP packet, in bytes from the start of the frame */
};

enum lease_verdict {
	LEASE_NONE = 0, /* not for a lease: go on */
	LEASE_PASS, /* for a lease that cannot take it: the stack gets it, and no other stage */
	LEASE_REDIRECT, /* for the socket of a lease: XDP_REDIRECT */
	LEASE_DISCARD, /* for a lease without a socket, and with LEASE_DROP: XDP_DROP */
};

static __always_inline void lease_pass_count(__u32 why)
{
	__u64 *count = bpf_map_lookup_elem(&sh_ud_passed, &why);

	if (count)
		++*count;
}

/* The check of a key, in 32 bits: struct lease has it too. */
static __always_inline __u32 lease_check(const struct lease_key *key)
{
	__u64 words = key->address.high ^ key->address.low;

	return (__u32)words ^ (__u32)(words >> 32) ^ key->port;
}

/* The hash of a key by its check: the bucket in sh_ud_hints and sh_ud_direct, times LEASE_HINTS, and a bit in it. It is Fibonacci
 * hashing (Knuth, vol. 3, 6.4). */
static __always_inline __u32 lease_hash(__u32 check)
{
	return check * 0x9e3779b1U / (0x100000000ULL / (LEASE_BUCKETS * LEASE_HINTS));
}

/* Whether a lease may have the key; 0: none has. */
static __always_inline int lease_is_possible(const struct lease_key *key)
{
	__u32 hash = lease_hash(lease_check(key)), bucket = hash / LEASE_HINTS;
	__u64 *hints = bpf_map_lookup_elem(&sh_ud_hints, &bucket);

	return hints && *hints >> (hash % LEASE_HINTS) & 1;
}

/* Puts the time in front of the frame. Returns 0, or -1 where it cannot stand there. */
static __always_inline int stamp_put(struct frame_ctx *ctx)
{
	__u64 *stamp;

	if (bpf_xdp_adjust_meta(ctx, -(int)sizeof(*stamp)))
		return -1;
	stamp = (void *)(long)ctx->data_meta;
	if ((void *)(stamp + 1) > (void *)(long)ctx->data)
		return -1;
	*stamp = bpf_ktime_get_ns();
	return 0;
}

/* Gives the frame to the socket of the lease and the queue that it came in by. lease is its number, with
 * LEASE_STAMPED and LEASE_DROP or without. */
static __always_inline enum lease_verdict lease_redirect(struct frame_ctx *ctx,
							 const struct datagram *d, __u32 lease)
{
	__u32 index = lease % LEASES_MAX;
	struct lease_count *count;
	__u32 queue = ctx->rx_queue_index;
	__u32 slot = index * LEASE_QUEUES_MAX + queue;

	/* A socket without XDP_USE_SG takes frames in one piece only. */
	if (d->end > ctx_size_hint(ctx)) {
		lease_pass_count(PASSED_LARGE);
		return LEASE_PASS;
	}
	if (queue >= LEASE_QUEUES_MAX) {
		lease_pass_count(PASSED_QUEUE);
		return LEASE_PASS;
	}
	count = bpf_map_lookup_elem(&sh_ud_counts, &slot);
	if (!count)
		return LEASE_PASS;
	if (lease & LEASE_STAMPED && stamp_put(ctx)) {
		lease_pass_count(PASSED_UNSTAMPED);
		return LEASE_PASS;
	}
	count->matched++;
	if (bpf_redirect_map(&sh_ud_sockets, slot, XDP_PASS) == XDP_REDIRECT)
		return LEASE_REDIRECT;
	if (lease & LEASE_DROP) {
		count->dropped_no_socket++;
		return LEASE_DISCARD;
	}
	count->passed_no_socket++;
	if (lease & LEASE_STAMPED)
		bpf_xdp_adjust_meta(ctx, sizeof(__u64));
	return LEASE_PASS;
}

/* The lease of a key, or NULL. */
static __always_inline struct lease *lease_of(struct lease_key *key, __u32 check)
{
	__u32 bucket = lease_hash(check) / LEASE_HINTS;
	struct lease_direct *direct = bpf_map_lookup_elem(&sh_ud_direct, &bucket);

	if (direct && direct->key.port == key->port &&
	    direct->key.address.low == key->address.low &&
	    direct->key.address.high == key->address.high)
		return &direct->lease;
	return bpf_map_lookup_elem(&sh_ud_leases, key);
}

/* The stage. */
static __always_inline enum lease_verdict lease_find(struct frame_ctx *ctx, struct datagram *d)
{
	__u32 check = lease_check(&d->key);
	struct lease *lease = lease_of(&d->key, check);
	__u64 word;

	if (!lease)
		return LEASE_NONE;
	word = *(volatile __u64 *)lease; /* index and check at once */
	if (word >> 32 != check || ((__u32)word & ~(LEASE_STAMPED | LEASE_DROP)) >= LEASES_MAX)
		return LEASE_NONE;
	return lease_redirect(ctx, d, word);
}

#endif
