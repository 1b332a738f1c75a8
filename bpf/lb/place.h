/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The choice of the backend for a packet of a tracked service: one with direct return, or the first
 * packet of a NAT flow whose client keeps its backend. docs/design/13-just-enough-tracking.md
 * has the rules and why they hold.
 *
 *   slot ─► settled ────────────────────────────────────► current
 *        └► else: entry of the flow, or of its client ─┬► found ─► its backend
 *                                                      └► none ──► current or previous,
 *                                                                  remembered in transition
 */
#ifndef SHUNT_PLACE_H
#define SHUNT_PLACE_H

#include "remember.h"
#include "slot.h"

/* The packet whose backend is looked for. */
struct placing {
	struct flow_key key; /* the packet's */
	struct flow_key client_key; /* of the client's entry in sh_remembered */
	struct remembered remembered;
	__u64 slot;
	__u32 previous; /* in a transition, the backend of flows without an entry; 0: none */
	__u32 hash;
	__u32 service; /* generation:8 | index:24 */
	__u32 affinity_ticks;
	__u16 now;     /* ticks */
	__u8 tracking; /* enum tracking */
	__u8 first;    /* the packet is a TCP SYN */
	__u8 drains;   /* previous gets no new flows */
	__u8 pad[3];
	__u32 client_backend; /* the client's, if it drains and the flow gets its own entry; or 0 */
	__u32 drawn; /* the backend for a client without an entry, by the flow's slot; or 0 */
};

SCRATCH(sh_placing, struct placing);

/* Whether this is no packet, but the quote of one in an ICMP error: no TCP or UDP header is
 * empty. It is placed as a packet of the flow, and leaves no trace. */
static __always_inline int is_quoted(const struct packet *p)
{
	return !p->l4_size;
}

/* The key of the packet's entry in sh_remembered, or of its client's. */
static __always_inline struct flow_key *placing_key(struct placing *placing, int of_client)
{
	return of_client ? &placing->client_key : &placing->key;
}

/* The backend of an entry, if both live; an entry that is over or has no backend is deleted. */
__stage __u32 remembered_follow(const struct packet *p, int of_client)
{
	struct settings *settings = settings_get();
	struct placing *placing = scratch_of(&sh_placing);
	struct remembered *live, *copy;
	const struct flow_key *key;
	struct backend *backend;

	if (!p || !settings || !placing)
		return 0;
	key = placing_key(placing, of_client);
	copy = &placing->remembered;
	live = remembered_find(key, copy);
	if (!live)
		return 0;
	backend = backend_find(remembered_backend(copy));
	/* A SYN after a FIN or a reset is no retransmission: the tuple has a new connection. Nor is
	 * one whose entry has another slot, from before affinity or hash changed: a scan would not
	 * see the connection in its own. At a backend that is down, only established ones go on. */
	if (!backend || copy->service != placing->service ||
	    (backend->draining == DRAINING_DOWN &&
	     (placing->first || p->key.protocol != IPPROTO_TCP) &&
	     !(remembered_flags(copy->word) & REMEMBERED_CLIENT)) ||
	    (placing->first &&
	     ((remembered_flags(copy->word) & (REMEMBERED_FIN | REMEMBERED_RESET)) ||
	      copy->hash != placing->hash)) ||
	    remembered_is_over(copy, settings, placing->affinity_ticks, key->protocol,
			       placing->now)) {
		remembered_end(key, live, copy);
		return 0;
	}
	/* The client's next flow is placed anew, and remembered as one of its own. */
	if ((remembered_flags(copy->word) & REMEMBERED_CLIENT) && backend->draining &&
	    (placing->first || p->key.protocol != IPPROTO_TCP)) {
		placing->client_backend = remembered_backend(copy);
		return 0;
	}
	if (!is_quoted(p))
		remembered_touch(live, copy, p, placing->now);
	return remembered_backend(copy);
}

/* Finds the backend of flows without an entry, if it lives, and whether it drains. */
static __always_inline void previous_find(struct placing *placing, __u64 table_before)
{
	__u64 slot = placing->slot;
	__u32 previous = slot & BACKEND_REF_MASK, flags = slot_flags(slot);
	struct backend *backend;

	placing->previous = 0;
	placing->drains = 0;
	if (slot_state(slot) != SLOT_TRANSITION)
		return;
	if (flags & SLOT_PREVIOUS_BEFORE) {
		slot = slot_get(table_before, placing->hash);
		previous = slot_state(slot) == SLOT_TRANSITION ? slot & BACKEND_REF_MASK :
								 slot_current(slot);
	}
	backend = backend_find(previous);
	if (!backend)
		return;
	placing->previous = previous;
	/* Many backends may be meant by the table before, so its slots do not say. */
	placing->drains = flags & SLOT_PREVIOUS_BEFORE ? backend->draining :
							 flags & SLOT_PREVIOUS_DRAINS;
}

/* Whether another entry may be made in this tick. First packets get only half of the budget, so
 * that a flood of them leaves the other half to flows in their middle. */
static __always_inline int budget_take(int first, __u16 now)
{
	__u32 index = HAND_BUDGET;
	__u64 *hand = bpf_map_lookup_elem(&sh_hands, &index), old;
	struct settings *settings = settings_get();
	__u32 budget;

	if (!hand || !settings)
		return 0;
	budget = settings->remember_budget;
	old = *(volatile __u64 *)hand;
	if (old >> 32 != now) {
		__sync_val_compare_and_swap(hand, old, (__u64)now << 32);
		old = *(volatile __u64 *)hand;
	}
	/* Read first, so that a flood beyond the budget does not write. */
	if ((__u32)old >= (first ? budget / 2 : budget))
		return 0;
	__sync_fetch_and_add(hand, 1);
	return 1;
}

/*
 * Makes an entry from placing->remembered, whose word, hash and service are set. Returns the
 * backend that the flow is remembered with, which is another one if another CPU was
 * first with this flow; 0 when it could not be remembered, which is counted.
 */
static __always_inline __u32 remember(const struct flow_key *key, int first)
{
	struct placing *placing = scratch_of(&sh_placing);
	struct remembered *r;
	__u16 now = ticks_now();
	__u64 nonce;

	if (!placing)
		return 0;
	r = &placing->remembered;
	if (budget_take(first, now)) {
		nonce = bpf_get_prandom_u32() & ((1 << REMEMBERED_NONCE_BITS) - 1);
		r->word = remembered_word(r->word | nonce << REMEMBERED_NONCE_SHIFT,
					  remembered_flags(r->word), now);
		r->seal = remembered_seal(key, r);
		if (!bpf_map_update_elem(&sh_remembered, key, r, BPF_NOEXIST))
			return remembered_backend(r);
		if (remembered_find(key, r))
			return remembered_backend(r);
	}
	count_reason(REASON_NOT_REMEMBERED, 0);
	return 0;
}

/* Places a flow without an entry, and remembers it, or its client, if that is needed. */
__stage __u32 unremembered_place(const struct packet *p, int is_client)
{
	struct placing *placing = scratch_of(&sh_placing);
	__u32 current, previous, choice, remembered, drawn;
	__u8 flags = 0;
	int in_middle;

	if (!p || !placing)
		return 0;
	in_middle = p->key.protocol == IPPROTO_TCP && !placing->first;
	current = slot_current(placing->slot);
	previous = placing->previous;
	choice = previous ? previous : current;
	if ((placing->first && !is_client) || (!in_middle && placing->drains) ||
	    placing->client_backend)
		choice = current;
	drawn = is_client ? placing->drawn : 0;
	if (drawn)
		choice = drawn;
	if (!choice || is_quoted(p) || (p->tcp_flags & TCP_RST) ||
	    (slot_state(placing->slot) != SLOT_TRANSITION && placing->tracking != TRACKING_ALWAYS &&
	     !placing->client_backend))
		return choice;
	if (is_client)
		flags = REMEMBERED_CLIENT;
	else if (placing->first)
		flags = REMEMBERED_SYN;
	else
		flags = remembered_after(0, p); /* the packet may be the flow's FIN */
	placing->remembered.word = choice | (__u64)flags << REMEMBERED_FLAGS_SHIFT;
	placing->remembered.hash = placing->hash;
	placing->remembered.service = placing->service;
	remembered = remember(placing_key(placing, is_client), !in_middle);
	if (remembered)
		return remembered;
	/* Its next packets will have no entry either, and will go to the client's backend, or else
	 * to the previous backend. */
	if (placing->client_backend)
		return placing->client_backend;
	if (drawn)
		return current;
	return previous && placing->first ? previous : choice;
}

/* The backend of a packet whose slot is not settled, or whose service always remembers. */
__stage __u32 backend_place(const struct packet *p, const struct service *service,
			    __u32 service_index, __u64 slot, __u32 hash)
{
	struct placing *placing = scratch_of(&sh_placing);
	__u32 found;
	__u8 first;

	if (!p || !service || !placing)
		return 0;
	first = is_first(p);
	placing->key = p->key;
	placing->slot = slot;
	placing->hash = hash;
	placing->service = service_name(service->generation, service_index);
	placing->affinity_ticks = service->affinity_ticks;
	placing->now = ticks_now();
	placing->tracking = service->tracking;
	placing->first = first;
	placing->client_backend = 0;
	placing->drawn = 0;
	previous_find(placing, *(volatile __u64 *)&service->table_before);
	found = remembered_follow(p, 0);
	if (found)
		return found;
	if (!service->affinity_ticks)
		return unremembered_place(p, 0);
	if (service->flags & SERVICE_DRAWS)
		placing->drawn = slot_current(slot_get(*(volatile __u64 *)&service->table,
						       flow_hash(&p->key, service->seed)));
	client_key(&placing->client_key, &p->key.source, placing->service);
	found = remembered_follow(p, 1);
	if (found)
		return found;
	/* Where the client's backend drains, its new flows go elsewhere, each on its own. */
	return unremembered_place(
		p, !placing->client_backend &&
			   !(placing->drains && (first || p->key.protocol != IPPROTO_TCP)));
}

/* Notes a packet of a flow with the flow's client, if that has the same backend.
 * NAT places a client's flows when they begin, but its affinity counts from its last packet, too.
 * Asked as seldom as flow_advance. */
__stage int client_touch(const struct packet *p, const struct flow *f)
{
	struct settings *settings = settings_get();
	struct placing *placing = scratch_of(&sh_placing);
	struct service *service;
	struct remembered *live, *copy;
	__u16 now = ticks_now();
	__u32 index, name;

	if (!p || !f || !placing || !settings)
		return 0;
	index = f->service_index;
	service = bpf_map_lookup_elem(&sh_services, &index);
	if (!service || !service->affinity_ticks)
		return 0;
	name = service_name(f->service_generation, index);
	client_key(&placing->client_key, &p->key.source, name);
	copy = &placing->remembered;
	live = remembered_find(&placing->client_key, copy);
	if (live && copy->service == name && remembered_backend(copy) == f->backend &&
	    !remembered_is_over(copy, settings, service->affinity_ticks, p->key.protocol, now))
		remembered_touch(live, copy, p, now);
	return 0;
}

/* The backend of a packet: its reference, or 0 when there is none. */
static __always_inline __u32 backend_choose(const struct packet *p, const struct service *service,
					    __u32 service_index, __u32 hash)
{
	__u64 slot;

	if ((features & FEATURE_REMEMBER) && service->affinity_ticks)
		hash = client_hash(&p->key, service->seed);
	else if ((features & FEATURE_ADDRESSES) && (service->flags & SERVICE_HASHES_ADDRESSES))
		hash = addresses_hash(&p->key, service->seed);
	slot = slot_get(*(volatile __u64 *)&service->table, hash);
	if (!(features & FEATURE_REMEMBER))
		return slot_current(slot);
	if (slot_state(slot) == SLOT_SETTLED && service->tracking != TRACKING_ALWAYS)
		return slot_current(slot);
	/* Until its slots are written anew, a service that was tracked has old states in them. */
	if (service->tracking == TRACKING_NONE ||
	    (service->forwarding < FORWARDING_DSR_L2 && !service->affinity_ticks))
		return slot_current(slot);
	return backend_place(p, service, service_index, slot, hash);
}

#endif
