/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The bound of the flow table, without a daemon and without a timer.
 *
 * Every new flow takes the next element of sh_handshakes. The flow that had that element before
 * ends, if its handshake is still unfinished. A flow whose handshake completes asks for an element
 * of sh_tracked: a clock hand (Corbató, 1968) moves on until it meets an element whose flow has
 * ended. Elements hold keys, so an element outlives its flow harmlessly; the nonce tells.
 */
#ifndef SHUNT_TRACK_H
#define SHUNT_TRACK_H

#include "flow.h"

#define CLOCK_TRIES 8

static __always_inline __u32 hand_move(__u32 ring, __u32 count)
{
	__u64 *hand = bpf_map_lookup_elem(&sh_hands, &ring);

	if (!hand || !count)
		return 0;
	return __sync_fetch_and_add(hand, 1) % count;
}

/* The entry that an element of a ring names. */
SCRATCH(sh_ring_entry, struct entry);

/* The flow that an element names, if it lives: its entry, with a copy in entry. */
static __always_inline struct flow *tracked_find(struct entry *entry, const struct tracked *element)
{
	struct flow *live;

	entry->key = element->key;
	if (!entry->key.protocol)
		return 0;
	live = flow_find(&entry->key, &entry->flow);
	return live && entry->flow.nonce == element->nonce ? live : 0;
}

/* Ends the flow that tracked_find has found. */
static __always_inline int tracked_end(struct entry *entry, struct flow *live)
{
	return flow_end(&entry->key, live, &entry->flow);
}

/* Notes a new flow among the handshakes; the oldest unfinished one makes room. */
static __noinline void handshake_note(const struct flow_key *key, __u32 nonce)
{
	__u32 index = hand_move(RING_HANDSHAKE, handshake_count);
	struct tracked *element = bpf_map_lookup_elem(&sh_handshakes, &index);
	struct entry *entry = scratch_of(&sh_ring_entry);
	struct flow *live;

	if (!element || !entry)
		return;
	live = tracked_find(entry, element);
	if (live && !(life_state(entry->flow.life) & FLOW_SLOTTED) && tracked_end(entry, live))
		count_reason(REASON_HANDSHAKE_EVICTED, 0);
	element->key = *key;
	element->nonce = nonce;
}

enum taking {
	TAKING_FAILED = -1,
	TAKING_TAKEN = 0,
	TAKING_MET_ALIVE = 1, /* the element keeps its flow */
};

/* Moves the hand of the established flows on by one, and takes the element that it meets if it can. */
__stage int tracked_try(const struct flow_key *key, __u32 nonce, __u32 now)
{
	__u32 index = hand_move(RING_ESTABLISHED, tracked_count);
	struct tracked *element = bpf_map_lookup_elem(&sh_tracked, &index);
	struct entry *entry = scratch_of(&sh_ring_entry);
	struct settings *settings = settings_get();
	struct flow *live;

	if (!key || !element || !entry || !settings)
		return TAKING_FAILED;
	live = tracked_find(entry, element);
	if (live &&
	    (!flow_is_over(&entry->key, &entry->flow, settings, now) || !tracked_end(entry, live)))
		return TAKING_MET_ALIVE;
	element->key = *key;
	element->nonce = nonce;
	return TAKING_TAKEN;
}

/* Takes an element of the established flows. Returns 0, or -1 if the flows of all elements that it met live. */
__stage int tracked_take(const struct flow_key *key, __u32 nonce, __u32 now)
{
	int taking;

	for (int i = 0; i < CLOCK_TRIES; i++) {
		taking = tracked_try(key, nonce, now);
		if (taking != TAKING_MET_ALIVE)
			return taking;
	}
	count_reason(REASON_FLOWS_FULL, 0);
	return TAKING_FAILED;
}

#endif
