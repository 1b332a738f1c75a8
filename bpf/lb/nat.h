/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * New NAT flows: choosing a source port and making the two entries.
 *
 *   1. claim: insert the DIRECTION_BACKEND entry with NOEXIST. The CPU that inserts it owns
 *      (source address, source port) towards (backend address, backend port).
 *   2. insert the DIRECTION_CLIENT entry with NOEXIST. If another CPU was first with the
 *      same packet, the claim is released and its flow is used.
 *   3. note the flow among the handshakes, which bounds their number.
 *
 * A claim lives as long as its entry: a closed connection's port rests until the entry is
 * over.
 */
#ifndef SHUNT_NAT_H
#define SHUNT_NAT_H

#include "carry.h"
#include "filter.h"
#include "hop.h"
#include "place.h"
#include "track.h"
#include "traffic.h"

/* At 90 % occupancy a search of n random ports fails with 0.9^n: 64 is 0.1 %. */
#define CLAIM_TRIES 64

/* For a second after a search towards a backend has met no free port, the next ones stop at
 * a closed port after this many tries. Where backends close first, each port rests for a
 * minute and a busy pool has no free port: every new connection would pay for 64 tries. */
#define CLAIM_TRIES_SHORT 8

/* <errno.h> is the C library's. */
#define EEXIST_ 17
#define EBUSY_ 16 /* Linux 6.1: the code that this packet interrupted holds the bucket's lock */

#define CLAIM_SHORT_HINTS 16

/* The port and the entry for a new flow. */
struct claim {
	struct flow_key key; /* of the DIRECTION_BACKEND entry; destination_port varies */
	struct flow entry;   /* the value to insert there */
	struct flow_key probed_key;
	struct flow probed;
	__u64 now;
	__u32 start;
	__u32 closed_age; /* age of the flow of closed_port; 0: there is no such flow */
	__u16 port_first;
	__u16 port_count;
	__be16 own_port;    /* tried first, for NAT that keeps the client's port */
	__be16 closed_port; /* the port whose flow has been closed longest, so far */
	/* Hints, kept from run to run: jiffies until when searches give up early, by backend; two
	 * backends may share a hint. */
	__u32 short_until[CLAIM_SHORT_HINTS];
};

SCRATCH(sh_claim, struct claim);

/* The packet's own. */
SCRATCH(sh_entry, struct entry);

/* Inserts the claim under its present port. 1: it is ours, 0: it is taken, -1: no room. */
static __always_inline int claim_insert(struct claim *c)
{
	int err; /* Linux before 6.4 (d7ba4cc900bf) returns an int, and its sign is lost in a long */

	if ((features & FEATURE_CARRY) && carry_is_due(&c->key, 0))
		return 0;
	c->entry.seal = flow_seal(&c->key, &c->entry);
	err = bpf_map_update_elem(&sh_flows, &c->key, &c->entry, BPF_NOEXIST);
	if (!err)
		return 1;
	return err == -EEXIST_ || err == -EBUSY_ ? 0 : -1;
}

/* Whether a flow may lose its port when the pool is short: a closed one, or a handshake that
 * has not been finished within a second, which its ring may end at any time anyway. */
static __always_inline int flow_can_yield(const struct flow_key *key, __u8 state, __u32 age)
{
	return state_is_closed(state) || (key->protocol == IPPROTO_TCP && !(state & FLOW_SLOTTED) &&
					  age > jiffies_per_second);
}

/* Ends the flow that holds the claim's present port, if it is over or may_end says so. */
__stage int claim_reclaim(int may_end)
{
	struct settings *settings = settings_get();
	struct claim *c = scratch_of(&sh_claim);
	struct flow *live;

	if (!c || !settings)
		return 0;
	c->probed_key = c->key;
	live = flow_find(&c->probed_key, &c->probed);
	if (!live)
		return 0;
	if (!flow_is_over(&c->probed_key, &c->probed, settings, c->now)) {
		__u32 age = life_age(c->probed.life, c->now) + 1;

		if (!flow_can_yield(&c->probed_key, life_state(c->probed.life), age))
			return 0;
		if (!may_end) {
			if (age > c->closed_age) {
				c->closed_age = age;
				c->closed_port = c->key.destination_port;
			}
			return 0;
		}
	}
	return flow_end(&c->probed_key, live, &c->probed);
}

struct claim_result {
	int found; /* 1: claimed, -1: the table is full */
	__u32 tries_short;
};

static long claim_try(__u32 i, void *context)
{
	struct claim_result *result = context;
	struct claim *c = scratch_of(&sh_claim);

	if (!c || !c->port_count || (i >= result->tries_short && c->closed_age))
		return 1;
	if (i == 0 && c->own_port)
		c->key.destination_port = c->own_port;
	else /* an odd stride visits every port of a power of two, and enough of any other */
		c->key.destination_port = bpf_htons(
			c->port_first + (c->start + i * ((c->start >> 16) | 1)) % c->port_count);
	result->found = claim_insert(c);
	if (result->found)
		return 1;
	if (claim_reclaim(0)) {
		result->found = claim_insert(c);
		if (result->found)
			return 1;
	}
	return 0;
}

/* Finds and claims a port. 0, or the reason why not. */
static __noinline enum reason port_claim(void)
{
	struct claim_result result = { .tries_short = CLAIM_TRIES };
	struct claim *c = scratch_of(&sh_claim);
	__u32 *short_until;

	if (!c)
		return REASON_INTERNAL;
	short_until = &c->short_until[c->entry.backend % CLAIM_SHORT_HINTS];
	if (*short_until - (__u32)c->now - 1 < jiffies_per_second)
		result.tries_short = CLAIM_TRIES_SHORT;
	bpf_loop(CLAIM_TRIES, claim_try, &result, 0);
	if (!result.found && result.tries_short == CLAIM_TRIES)
		*short_until = c->now + jiffies_per_second;
	if (!result.found && c->closed_age) {
		c->key.destination_port = c->closed_port;
		if (claim_reclaim(1))
			result.found = claim_insert(c);
		if (result.found > 0)
			count_reason(REASON_PORT_TAKEN, 0);
	}
	if (result.found > 0)
		return REASON_NONE;
	return result.found < 0 ? REASON_TABLE_FULL : REASON_PORTS_EXHAUSTED;
}

static __always_inline int backend_is_host(const struct backend *backend)
{
	__u64 hop = backend->hop;
	struct interface *out;

	if (!(features & FEATURE_HOST) || !hop)
		return 0;
	out = hop_interface(hop);
	return out && hop_is_host(hop, out);
}

#define HOST_TRIES 16 /* if every second backend is this host, 1 in 65,536 flows finds no other */

/* For a client on this host, which a backend on it would answer past us: a backend elsewhere, if
 * there is one. */
static __noinline __u32 backend_not_host(const struct service *service, __u32 reference, __u32 hash)
{
	struct backend *backend;

	for (int i = 0; i < HOST_TRIES; i++) {
		backend = backend_find(reference);
		if (!backend || !backend_is_host(backend))
			break;
		hash = hash_again(hash);
		reference = slot_current(slot_get(*(volatile __u64 *)&service->table, hash));
	}
	return reference;
}

/* The backend of a flow that begins with this packet: its reference, or 0 when there is none. */
static __always_inline __u32 nat_choose(const struct packet *p, const struct service *service,
					__u32 service_index, __u32 hash)
{
	__u32 reference = backend_choose(p, service, service_index, hash);

	return ctx_is_outbound() ? backend_not_host(service, reference, hash) : reference;
}

/*
 * Whether a connection that begins on a closed one's tuple goes to the closed one's backend. Then
 * it keeps the source port as well, and the backend judges it as if it saw the client itself.
 */
__stage int reopens(const struct packet *p, const struct flow *f)
{
	struct service *service;
	__u32 index;

	if (!p || !f)
		return 0;
	index = f->service_index;
	service = bpf_map_lookup_elem(&sh_services, &index);
	return service &&
	       nat_choose(p, service, index, flow_hash(&p->key, service->seed)) == f->backend;
}

/* Chooses the source address and fills in the claim. 0, or the reason why not. */
static __noinline enum reason claim_prepare(const struct packet *p, const struct backend *backend,
					    const struct service *service, __u32 hash)
{
	struct settings *settings = settings_get();
	struct claim *c = scratch_of(&sh_claim);
	__u64 sources = *(volatile __u64 *)&backend->sources;
	int is_destination = service->forwarding == FORWARDING_NAT_DESTINATION;
	struct addr *source;
	__u32 index;

	if (!c || !settings)
		return REASON_INTERNAL;
	c->start = bpf_get_prandom_u32();
	c->closed_age = 0;
	c->own_port = 0;
	c->port_first = settings->port_first;
	c->port_count = settings->port_count;
	c->key.source = backend->address;
	c->key.source_port = backend->port ? backend->port : p->key.destination_port;
	c->key.protocol = p->key.protocol;
	if (backend_is_host(backend)) {
		/* Its answers to the client come by where they leave the host. Answers to a client on
		 * this host would not. */
		if (ctx_is_outbound() || (!ctx_sees_host() && !(features & FEATURE_TC_INTERFACES)))
			return REASON_HOST_BACKEND;
		is_destination = 1;
	}
	if (is_destination) {
		/* The client's own port, unless another of its flows to this backend has it. */
		c->key.destination = p->key.source;
		c->own_port = p->key.source_port;
		return REASON_NONE;
	}
	if (!(__u32)sources)
		return REASON_NO_SOURCE;
	index = (sources >> 32) + (((__u64)hash_again(hash) * (__u32)sources) >> 32);
	source = bpf_map_lookup_elem(&sh_sources, &index);
	if (!source)
		return REASON_NO_SOURCE;
	c->key.destination = *source;
	return REASON_NONE;
}

/* The entry of the client's direction. */
static __always_inline void client_entry(const struct claim *c, const struct packet *p,
					 struct flow *f)
{
	*f = c->entry;
	f->hop = 0;
	f->direction = DIRECTION_CLIENT;
	f->source = c->key.destination;
	f->source_port = c->key.destination_port;
	f->destination = c->key.source;
	f->destination_port = c->key.source_port;
	f->seal = flow_seal(&p->key, f);
}

/* Whether a packet without a flow is in the middle of a connection: the host's connection tracking may
 * have its backend, from before the service was shunt's. */
static __always_inline int begun_before(const struct packet *p)
{
	return p->key.protocol == IPPROTO_TCP && !is_first(p);
}

/*
 * Makes the flow of a client's first packet and leaves its entry in sh_entry.
 * REASON_NONE, why the packet has to be dropped, or REASON_BEGUN_BEFORE: it passes.
 */
__stage enum reason nat_flow_create(struct frame_ctx *ctx, struct packet *p, __u32 service_index)
{
	struct service *service = bpf_map_lookup_elem(&sh_services, &service_index);
	struct entry *entry = scratch_of(&sh_entry);
	struct claim *c = scratch_of(&sh_claim);
	struct flow_key *key;
	struct backend *backend;
	enum reason reason;
	struct flow *f;
	__u32 hash, reference;
	int err; /* Linux before 6.4 (d7ba4cc900bf) returns an int, and its sign is lost in a long */

	if (!p || !service || !entry || !c)
		return REASON_INTERNAL;
	f = &entry->flow;
	key = &entry->key;
	*key = p->key;
	if ((*(volatile __u32 *)&service->flags & SERVICE_PASSES_BEGUN) && begun_before(p))
		return REASON_BEGUN_BEFORE;
	if (admit(p, service, service_index, 1) != VERDICT_NEXT)
		return p->reason;
	if (service->flows_max && service_is_full(service, service_index))
		return REASON_SERVICE_FULL;
	hash = flow_hash(&p->key, service->seed);
	reference = nat_choose(p, service, service_index, hash);
	if (!reference)
		return REASON_NO_BACKEND;
	backend = backend_find(reference);
	if (!backend)
		return REASON_BACKEND_GONE;
	reason = claim_prepare(p, backend, service, hash);
	if (reason != REASON_NONE)
		return reason;

	c->now = bpf_jiffies64();
	c->entry.nonce = bpf_get_prandom_u32() & ~NONCE_COUNTED;
	if (service->flows_max)
		c->entry.nonce |= NONCE_COUNTED;
	c->entry.life = life_make(c->entry.nonce, 0, c->now);
	c->entry.hop = hop_mark(hop_to_client(ctx, &p->key), c->entry.nonce);
	c->entry.source = p->key.destination;
	c->entry.source_port = p->key.destination_port;
	c->entry.destination = p->key.source;
	c->entry.destination_port = p->key.source_port;
	c->entry.backend = reference;
	c->entry.service_index = service_index;
	c->entry.service_generation = service->generation;
	c->entry.direction = DIRECTION_BACKEND;
	reason = port_claim();
	if (reason != REASON_NONE)
		return reason;

	client_entry(c, p, f);
	err = bpf_map_update_elem(&sh_flows, key, f, BPF_NOEXIST);
	if (err) {
		/* Another CPU was first with this flow, or the table is full: our claim goes. */
		bpf_map_delete_elem(&sh_flows, &c->key);
		if (flow_find(key, f))
			return REASON_NONE;
		return err == -EEXIST_ || err == -EBUSY_ ? REASON_CLAIM_RACE : REASON_TABLE_FULL;
	}
	service_flow_begin(f);
	handshake_note(key, f->nonce);
	traffic_flow_count(f->service_index, f->backend);
	return REASON_NONE;
}

#endif
