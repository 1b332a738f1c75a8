/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Next hops: one word that names a MAC address and an interface index (types.h, HOP_*).
 *
 * Towards a backend the daemon keeps the word fresh in sh_backends; when the daemon is
 * silent, the routing table is asked for each packet. Towards a client the word lies in
 * the flow: at first the hop that the client's packet came from, then the routing table's
 * if it has one, looked up again at most once a second.
 */
#ifndef SHUNT_HOP_H
#define SHUNT_HOP_H

#include "lookup.h"
#include "own.h"

#define AF_INET_ 2
#define AF_INET6_ 10

/*
 * bpf_fib_lookup answers only from an interface whose forwarding is on. Asked from the
 * loopback it decides as for a packet that the host sends, and forwarding on lo lets no
 * further packets through; the daemon switches it on.
 */
#define LOOPBACK_IFINDEX 1

static __always_inline __u64 hop_make(const __u8 *mac, __u32 index)
{
	__u64 hop = 0;

	__builtin_memcpy(&hop, mac, ETH_ALEN);
	return hop | (__u64)(index & HOP_INTERFACE_MASK) << HOP_INTERFACE_SHIFT;
}

static __always_inline __u32 hop_index(__u64 hop)
{
	return hop >> HOP_INTERFACE_SHIFT & HOP_INTERFACE_MASK;
}

/* The interface that a hop leads out of. */
static __always_inline struct interface *hop_interface(__u64 hop)
{
	__u32 index = hop_index(hop);

	return bpf_map_lookup_elem(&sh_interfaces, &index);
}

/* Whether a hop out of this interface leads to this host itself: to a client on it, or to a
 * backend. */
static __always_inline int hop_is_host(__u64 hop, const struct interface *out)
{
	return (features & FEATURE_HOST) && (hop & HOP_MAC_MASK) == mac_load(out->mac);
}

/* The word as a flow holds it, marked with six bits of the flow's nonce. */
static __always_inline __u64 hop_mark(__u64 hop, __u32 nonce)
{
	return (hop << 6 >> 6) | (__u64)nonce << HOP_CHECK_SHIFT;
}

static __always_inline int hop_marked_by(__u64 hop, __u32 nonce)
{
	return hop >> HOP_CHECK_SHIFT == (nonce & 0x3f);
}

#define HOP_NONE (1ULL << 63) /* result of hop_ask(): no hop; the lowest bits have the reason */

/* Asks the routing table for the route from source to destination. Returns the hop, or HOP_NONE with
 * the reason: a value, because a pointer to the reason would keep it in memory for every packet. */
__stage __u64 hop_ask(struct frame_ctx *ctx, const struct addr *source,
		      const struct addr *destination)
{
	struct bpf_fib_lookup fib = { .ifindex = LOOPBACK_IFINDEX };
	__u32 ifindex, *index;

	if (!source || !destination)
		return HOP_NONE | REASON_INTERNAL;
	if (addr_is_mapped(destination)) {
		fib.family = AF_INET_;
		fib.ipv4_src = addr_to_ip4(source);
		fib.ipv4_dst = addr_to_ip4(destination);
	} else {
		fib.family = AF_INET6_;
		__builtin_memcpy(fib.ipv6_src, source, sizeof(*source));
		__builtin_memcpy(fib.ipv6_dst, destination, sizeof(*destination));
	}
	if (ctx_route(ctx, &fib) != BPF_FIB_LKUP_RET_SUCCESS)
		return HOP_NONE | REASON_UNRESOLVED;
	ifindex = fib.ifindex;
	index = bpf_map_lookup_elem(&sh_ifindexes, &ifindex);
	if (!index)
		return HOP_NONE | REASON_EGRESS_UNLISTED;
	return hop_make(fib.dmac, *index);
}

/*
 * Asks the routing table for the route from source to destination. Returns the hop, or 0
 * with *reason set. Costs 60 to 100 ns, so no settled path calls it.
 */
static __always_inline __u64 hop_lookup(struct frame_ctx *ctx, const struct addr *source,
					const struct addr *destination, enum reason *reason)
{
	__u64 hop = hop_ask(ctx, source, destination);

	if (!(hop & HOP_NONE))
		return hop;
	*reason = (__u32)hop;
	return 0;
}

/* The hop that this packet came from. */
static __always_inline __u64 hop_back(struct frame_ctx *ctx)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > data_end)
		return 0;
	return hop_make(eth->h_source, own_index(ctx));
}

/* The hop to a client: the routing table's, or else the hop that this packet came from. */
static __apart __u64 hop_to_client(struct frame_ctx *ctx, const struct flow_key *key)
{
	enum reason reason;
	__u64 hop = hop_lookup(ctx, &key->destination, &key->source, &reason);

	return hop ? hop : hop_back(ctx);
}

static __always_inline int daemon_is_silent(const struct settings *settings, __u64 now)
{
	return (__s64)(now - settings->heartbeat) >
	       (__s64)HEARTBEAT_SECONDS_MAX * jiffies_per_second;
}

/*
 * The hop to a backend. 0 with *reason set when there is none.
 */
static __always_inline __u64 hop_to_backend(struct frame_ctx *ctx, const struct backend *backend,
					    const struct settings *settings,
					    const struct addr *source, __u64 now,
					    enum reason *reason)
{
	__u64 hop = backend->hop, found;

	if (hop && !daemon_is_silent(settings, now))
		return hop;
	found = hop_lookup(ctx, source, &backend->address, reason);
	if (found) {
		count_reason(REASON_FIB_FALLBACK, 0);
		return found;
	}
	/* The last known hop is better than none: the kernel may not have asked for it yet. */
	return hop;
}

#endif
