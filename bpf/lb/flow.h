/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Flow entries: finding, ageing and ending them.
 *
 * A NAT flow is two entries, twins, each keyed by the packets it rewrites:
 *
 *   client:40000 → vip:80        rewrite to   source:2048 → backend:8080
 *   backend:8080 → source:2048   rewrite to   vip:80 → client:40000
 *
 * so a twin's key is the rewritten tuple, reversed. Nothing holds a pointer to either.
 *
 * No timer runs. An entry is over when its own and its twin's last packet are older than
 * the timeout of its state; the first to meet such an entry (a packet of the flow, a search
 * for a free port, the hand of a ring, sh_sweep) ends it. To end an entry is to set
 * FLOW_DEAD by compare-and-swap: one party wins, and it alone deletes.
 */
#ifndef SHUNT_FLOW_H
#define SHUNT_FLOW_H

#include "lookup.h"
#include "scratch.h"

/* Odd constants (the fractional bits of square roots of primes, as in SHA-512): each
 * word's share of the sum is a bijection, so a single changed word always shows. */
#define MIX_0 0x6a09e667f3bcc909ULL
#define MIX_1 0xbb67ae8584caa73bULL
#define MIX_2 0x3c6ef372fe94f82bULL
#define MIX_3 0xa54ff53a5f1d36f1ULL
#define MIX_4 0x510e527fade682d1ULL
#define MIX_5 0x9b05688c2b3e6c1fULL
#define MIX_6 0x1f83d9abfb41bd6bULL
#define MIX_7 0x5be0cd19137e2179ULL
#define MIX_8 0xcbbb9d5dc1059ed9ULL
#define MIX_9 0x629a292a367cd507ULL
#define MIX_10 0x9159015a3070dd17ULL
#define MIX_11 0x152fecd8f70e5939ULL

static __always_inline __u64 key_mix(const struct flow_key *key)
{
	__u64 last = (__u64)key->protocol << 32 | (__u32)key->source_port << 16 |
		     key->destination_port;

	return key->source.high * MIX_0 + key->source.low * MIX_1 + key->destination.high * MIX_2 +
	       key->destination.low * MIX_3 + last * MIX_4;
}

/* Returns the right seal of a struct flow: a hash of the key and of all fields that are written once. */
static __always_inline __u64 flow_seal(const struct flow_key *key, const struct flow *f)
{
	__u64 ports = (__u64)f->source_port << 48 | (__u64)f->destination_port << 32 | f->nonce;
	__u64 names = (__u64)f->backend << 32 | (__u32)f->service_index << 16 |
		      (__u32)f->service_generation << 8 | f->direction;

	return key_mix(key) + f->source.high * MIX_5 + f->source.low * MIX_6 +
	       f->destination.high * MIX_7 + f->destination.low * MIX_8 + ports * MIX_9 +
	       names * MIX_10;
}

static __always_inline __u64 life_make(__u32 nonce, __u8 state, __u32 seen)
{
	return (__u64)nonce << LIFE_NONCE_SHIFT | (__u64)state << LIFE_STATE_SHIFT | seen;
}

static __always_inline __u8 life_state(__u64 life)
{
	return life >> LIFE_STATE_SHIFT;
}

static __always_inline __u32 life_age(__u64 life, __u32 now)
{
	__s32 age = now - (__u32)life;

	return age < 0 ? 0 : age; /* another CPU's jiffies may be one ahead */
}

static __always_inline int life_belongs(__u64 life, __u32 nonce)
{
	return life >> LIFE_NONCE_SHIFT == (nonce & 0xffffff);
}

/*
 * Finds the entry of a key and copies it. Returns the live entry, for its life and hop
 * words alone, or NULL: no entry, a dead one, or one that was recycled while we read.
 */
static __always_inline struct flow *flow_find(const struct flow_key *key, struct flow *copy)
{
	struct flow *live = bpf_map_lookup_elem(&sh_flows, key);

	if (!live)
		return 0;
	__builtin_memcpy(copy, live, sizeof(*copy));
	/* The compiler must not read the live entry again in place of the copy. */
	asm volatile("" : : "r"(copy) : "memory");
	if (copy->seal != flow_seal(key, copy) || !life_belongs(copy->life, copy->nonce)) {
		count_reason(REASON_FLOW_RECYCLED, 0);
		return 0;
	}
	if (life_state(copy->life) & FLOW_DEAD)
		return 0;
	return live;
}

/* An entry as it was read. */
struct entry {
	struct flow_key key;
	struct flow flow;
};

/* The twin of the entry that is looked at. */
SCRATCH(sh_twin, struct entry);

static __always_inline void twin_key(const struct flow_key *key, const struct flow *f,
				     struct flow_key *twin)
{
	twin->source = f->destination;
	twin->destination = f->source;
	twin->source_port = f->destination_port;
	twin->destination_port = f->source_port;
	twin->protocol = key->protocol;
	__builtin_memset(twin->pad, 0, sizeof(twin->pad));
}

static __always_inline __u32 flow_timeout(const struct settings *s, __u8 protocol, __u8 state)
{
	const __u8 fins = FLOW_FIN_CLIENT | FLOW_FIN_BACKEND;

	if (protocol == IPPROTO_UDP)
		return s->timeouts[TIMEOUT_UDP];
	if (state & FLOW_RESET)
		return s->timeouts[TIMEOUT_TCP_RESET];
	/* before the FINs: a client that never finished a handshake cannot close, only hold a port */
	if (!(state & FLOW_ESTABLISHED))
		return s->timeouts[TIMEOUT_TCP_HANDSHAKE];
	if ((state & fins) == fins)
		return state & FLOW_BACKEND_FIRST ? s->timeouts[TIMEOUT_TCP_REST_BACKEND_FIRST] :
						    s->timeouts[TIMEOUT_TCP_REST];
	if (state & fins)
		return s->timeouts[TIMEOUT_TCP_HALF_CLOSED];
	return s->timeouts[TIMEOUT_TCP_ESTABLISHED];
}

/* Whether the packet asks for a TCP connection. */
static __always_inline int is_first(const struct packet *p)
{
	return p->key.protocol == IPPROTO_TCP && (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

static __always_inline int state_is_closed(__u8 state)
{
	const __u8 fins = FLOW_FIN_CLIENT | FLOW_FIN_BACKEND;

	return (state & FLOW_RESET) || (state & fins) == fins;
}

/* Whether a client's packet begins another connection on a closed one's tuple. */
static __always_inline int begins_again(const struct packet *p, const struct flow *f)
{
	return f->direction == DIRECTION_CLIENT && is_first(p) &&
	       state_is_closed(life_state(f->life));
}

/* The count of a service's flows, if the index is still the generation's. */
static __always_inline struct service_flows *service_flows_find(__u32 index, __u32 generation)
{
	struct service_flows *flows = bpf_map_lookup_elem(&sh_svc_flows, &index);

	return flows && flows->generation == generation ? flows : 0;
}

/* Ends one entry: at most one caller succeeds (returns 1), and it has deleted it. */
static __always_inline int entry_end(const struct flow_key *key, struct flow *live,
				     const struct flow *copy)
{
	__u64 old = copy->life;

	/* A life that has changed since the copy is a flow that has come back, or another's. */
	if (__sync_val_compare_and_swap(&live->life, old,
					old | (__u64)FLOW_DEAD << LIFE_STATE_SHIFT) != old)
		return 0;
	if (bpf_map_delete_elem(&sh_flows, key)) {
		/* Linux 6.1 answers EBUSY if the code that this packet interrupted holds the
		 * bucket's lock. The entry is still ours alone: bring it back, for a later try. */
		live->life = old;
		return 0;
	}
	return 1;
}

/* The twin of an entry, copied to twin, if it is still this flow's. */
static __always_inline struct flow *twin_find(struct entry *twin, const struct flow_key *key,
					      const struct flow *copy)
{
	struct flow *live;

	twin_key(key, copy, &twin->key);
	live = flow_find(&twin->key, &twin->flow);
	return live && twin->flow.nonce == copy->nonce ? live : 0;
}

/* Ends the twin of an entry. */
__stage int twin_end(const struct flow_key *key, const struct flow *copy)
{
	struct entry *twin = scratch_of(&sh_twin);
	struct flow *live;

	if (!key || !copy || !twin)
		return 0;
	live = twin_find(twin, key, copy);
	return live ? entry_end(&twin->key, live, &twin->flow) : 0;
}

/*
 * Takes a flow off its service's count. The caller has ended the client's entry, and is done with it
 * and the twin: a call from further down would make the deepest chain of stacks longer.
 */
static __noinline int service_flow_end(const struct flow *copy)
{
	struct service_flows *flows;

	if (!(copy->nonce & NONCE_COUNTED))
		return 0;
	flows = service_flows_find(copy->service_index, copy->service_generation);
	if (flows)
		__sync_fetch_and_add(&flows->count, -1);
	return 0;
}

/* Ends both entries of a flow, the found one first. Returns the number of ended entries: 0 if
 * the flow has come back, or another CPU is ending it. */
static __always_inline int flow_end(const struct flow_key *key, struct flow *live,
				    const struct flow *copy)
{
	int twin;

	if (!entry_end(key, live, copy))
		return 0;
	twin = twin_end(key, copy);
	if (copy->direction == DIRECTION_CLIENT || twin)
		service_flow_end(copy);
	return 1 + twin;
}

/* Whether both halves of a flow have been idle for longer than its state allows. */
__stage int flow_is_over(const struct flow_key *key, const struct flow *copy,
			 const struct settings *settings, __u32 now)
{
	struct entry *twin = scratch_of(&sh_twin);
	__u32 timeout;

	if (!key || !copy || !settings || !twin)
		return 0;
	timeout = flow_timeout(settings, key->protocol, life_state(copy->life));
	if (life_age(copy->life, now) <= timeout)
		return 0;
	if (!twin_find(twin, key, copy))
		return 1;
	return life_age(twin->flow.life, now) > timeout;
}

#define CAS_TRIES 4

/*
 * Sets an entry's state and time of last packet. Returns 0, or -1 when the entry is no
 * longer this flow's. In the rare case that CPUs contend CAS_TRIES times, the change is
 * left to the flow's next packet.
 */
static __always_inline int life_set(struct flow *live, __u32 nonce, __u8 set, __u8 clear, __u32 now)
{
	__u64 old = *(volatile __u64 *)&live->life;

	for (int i = 0; i < CAS_TRIES; i++) {
		__u64 next, found;

		if (!life_belongs(old, nonce) || (life_state(old) & FLOW_DEAD))
			return -1;
		next = life_make(nonce, (life_state(old) & ~clear) | set, now);
		if (next == old)
			return 0;
		found = __sync_val_compare_and_swap(&live->life, old, next);
		if (found == old)
			return 0;
		old = found;
	}
	return 0;
}

#endif
