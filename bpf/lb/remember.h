/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Remembered flows: the entries of sh_remembered, found, kept and made. place.h decides which
 * flows are remembered, and when.
 *
 * An entry's words are sealed like a flow's (flow.h): a reader copies it, recomputes the seal
 * over its key and the copy, and takes any difference for a miss. The fields that change, flags
 * and the time of the last packet, lie in one word with a nonce and the backend, and change
 * by compare-and-swap only. An entry whose time is over is deleted by the party that sets
 * REMEMBERED_DEAD first: a packet that meets it, or sh_recall.
 */
#ifndef SHUNT_REMEMBER_H
#define SHUNT_REMEMBER_H

#include "flow.h"

#define REMEMBERED_NONCE_BITS 12
#define REMEMBERED_CHANGING (0xffffffULL << REMEMBERED_SEEN_SHIFT) /* flags and seen */
#define REMEMBERED_AGE_MAX 0xf000 /* of 16 bits; with any timeout, an older entry is over */

static __always_inline __u64 remembered_seal(const struct flow_key *key, const struct remembered *r)
{
	return key_mix(key) + (r->word & ~REMEMBERED_CHANGING) * MIX_5 +
	       ((__u64)r->hash << 32 | r->service) * MIX_6;
}

static __always_inline __u16 ticks_now(void)
{
	return bpf_jiffies64() >> tick_shift;
}

static __always_inline __u8 remembered_flags(__u64 word)
{
	return word >> REMEMBERED_FLAGS_SHIFT;
}

static __always_inline __u32 remembered_age(__u64 word, __u16 now)
{
	__s16 age = now - (__u16)(word >> REMEMBERED_SEEN_SHIFT);

	/* One tick ahead is another CPU's clock; more than half the range is old age. */
	return age == -1 ? 0 : (__u16)age;
}

static __always_inline __u64 remembered_word(__u64 old, __u8 flags, __u16 now)
{
	return (old & ~REMEMBERED_CHANGING) | (__u64)flags << REMEMBERED_FLAGS_SHIFT |
	       (__u64)now << REMEMBERED_SEEN_SHIFT;
}

static __always_inline __u32 remembered_backend(const struct remembered *r)
{
	return r->word & BACKEND_REF_MASK;
}

/* A service as keys and entries name it: the next service at its index inherits nothing. */
static __always_inline __u32 service_name(__u32 generation, __u32 index)
{
	return generation << 24 | index;
}

/* The key of a client's entry. service is a service_name. */
static __always_inline void client_key(struct flow_key *key, const struct addr *client,
				       __u32 service)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->source = *client;
	key->destination.low = service;
}

/* How long an entry may be idle, in ticks. */
static __always_inline __u32 remembered_timeout(const struct settings *s, __u32 affinity_ticks,
						__u8 protocol, __u8 flags)
{
	__u32 timeout;

	if (flags & REMEMBERED_CLIENT)
		return affinity_ticks;
	if (protocol == IPPROTO_UDP)
		timeout = s->timeouts[TIMEOUT_UDP];
	else if (flags & REMEMBERED_RESET)
		timeout = s->timeouts[TIMEOUT_TCP_RESET];
	else if (flags & REMEMBERED_SYN)
		timeout = s->timeouts[TIMEOUT_TCP_HANDSHAKE];
	else if (flags & REMEMBERED_FIN)
		timeout = s->timeouts[TIMEOUT_TCP_HALF_CLOSED];
	else
		timeout = s->timeouts[TIMEOUT_TCP_ESTABLISHED];
	return (timeout >> tick_shift) + 1;
}

static __always_inline int remembered_is_over(const struct remembered *r,
					      const struct settings *settings, __u32 affinity_ticks,
					      __u8 protocol, __u16 now)
{
	__u32 age = remembered_age(r->word, now);

	return age > REMEMBERED_AGE_MAX ||
	       age > remembered_timeout(settings, affinity_ticks, protocol,
					remembered_flags(r->word));
}

/* Finds and copies a living entry. Returns it for its word alone, or NULL. */
static __always_inline struct remembered *remembered_find(const struct flow_key *key,
							  struct remembered *copy)
{
	struct remembered *live = bpf_map_lookup_elem(&sh_remembered, key);

	if (!live)
		return 0;
	__builtin_memcpy(copy, live, sizeof(*copy));
	/* The compiler must not read the live entry again in place of the copy. */
	asm volatile("" : : "r"(copy) : "memory");
	if (copy->seal != remembered_seal(key, copy)) {
		count_reason(REASON_FLOW_RECYCLED, 0);
		return 0;
	}
	return remembered_flags(copy->word) & REMEMBERED_DEAD ? 0 : live;
}

/* Deletes an entry, unless it has changed since it was copied. 1: this call did it. */
static __always_inline int remembered_end(const struct flow_key *key, struct remembered *live,
					  const struct remembered *copy)
{
	__u64 old = copy->word;
	__u64 dead = old | (__u64)REMEMBERED_DEAD << REMEMBERED_FLAGS_SHIFT;

	if (__sync_val_compare_and_swap(&live->word, old, dead) != old)
		return 0;
	if (bpf_map_delete_elem(&sh_remembered, key)) {
		live->word = old; /* as in entry_end (flow.h) */
		return 0;
	}
	return 1;
}

/* The flags after a packet of the flow. */
static __always_inline __u8 remembered_after(__u8 flags, const struct packet *p)
{
	if (p->key.protocol != IPPROTO_TCP || (flags & REMEMBERED_CLIENT))
		return flags;
	if (p->tcp_flags & TCP_RST)
		return flags | REMEMBERED_RESET;
	if (is_first(p))
		return flags;
	flags &= ~(REMEMBERED_SYN | REMEMBERED_RESET);
	if (p->tcp_flags & TCP_FIN)
		return flags | REMEMBERED_FIN;
	return p->has_payload ? flags & ~REMEMBERED_FIN : flags;
}

/* Notes a packet of the flow, at most once a tick unless it changes the flags. If another CPU
 * wins the race, it has noted another packet at the same time. */
static __always_inline void remembered_touch(struct remembered *live, const struct remembered *copy,
					     const struct packet *p, __u16 now)
{
	__u64 next =
		remembered_word(copy->word, remembered_after(remembered_flags(copy->word), p), now);

	if (next != copy->word)
		__sync_val_compare_and_swap(&live->word, copy->word, next);
}

#endif
