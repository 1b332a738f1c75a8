/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A flow's life, moved on by its packets: by each packet that may change the flow's state, and
 * at most once a second by the packets of a flow in full swing.
 *
 *            client's SYN          backend answers        client goes on
 *   (none) ───────────────► 0 ───────────────► REPLIED ───────────────► ESTABLISHED
 *
 * A FIN from each side, or a reset, closes; the entry then rests for a short timeout and a
 * later packet brings it back: a reset may be forged (RFC 5961), and a side that sends
 * data after its FIN has not closed.
 */
#ifndef SHUNT_ADVANCE_H
#define SHUNT_ADVANCE_H

#include "hop.h"
#include "track.h"
#include "traffic.h"

enum advance {
	ADVANCE_GO = 0,    /* the packet belongs to the flow */
	ADVANCE_OVER =
		1, /* it was over and has been ended: the packet begins a flow, or has none */
};

/* The state after a packet from the client. */
static __always_inline __u8 state_after_client(__u8 state, const struct packet *p)
{
	if (p->key.protocol == IPPROTO_TCP) {
		if (is_first(p))
			/* A new connection on a closed one's tuple: see reopens. */
			return state_is_closed(state) ? state & FLOW_SLOTTED : state;
		if (p->tcp_flags & TCP_RST)
			return state | FLOW_RESET;
		state &= ~FLOW_RESET;
		if (p->tcp_flags & TCP_FIN)
			state |= FLOW_FIN_CLIENT;
		else if (p->has_payload)
			state &= ~FLOW_FIN_CLIENT;
	}
	return state & FLOW_REPLIED ? state | FLOW_ESTABLISHED : state;
}

/* The state after a packet from the backend. */
static __always_inline __u8 state_after_backend(__u8 state, const struct packet *p)
{
	if (p->key.protocol != IPPROTO_TCP)
		return state | FLOW_REPLIED;
	if (p->tcp_flags & TCP_RST)
		return state | FLOW_RESET;
	state = (state | FLOW_REPLIED) & ~FLOW_RESET;
	if (p->tcp_flags & TCP_FIN) {
		if (!(state & FLOW_FIN_CLIENT))
			state |= FLOW_BACKEND_FIRST;
		return state | FLOW_FIN_BACKEND;
	}
	if (p->has_payload)
		state &= ~(FLOW_FIN_BACKEND | FLOW_BACKEND_FIRST);
	return state;
}

static __always_inline __u8 state_after(__u8 state, const struct packet *p, const struct flow *f)
{
	return f->direction == DIRECTION_CLIENT ? state_after_client(state, p) :
						  state_after_backend(state, p);
}

/* Carries a change over to the twin, and a client's new next hop with it. Returns 0, or -1
 * when a client's entry has lost its twin: the CPU that ended the twin lost the race for this
 * entry to a packet, and the port may be another flow's by now. */
static __noinline int twin_follow(struct frame_ctx *ctx, const struct packet *p,
				  const struct flow *f, __u8 set, __u8 clear)
{
	struct entry *twin = scratch_of(&sh_twin);
	struct flow *live;
	__u64 hop, old_hop;

	if (!twin)
		return 0;
	live = twin_find(twin, &p->key, f);
	if (!live)
		return f->direction == DIRECTION_CLIENT ? -1 : 0;
	if (set | clear)
		life_set(live, f->nonce, set, clear, twin->flow.life);
	/* Look up the route at most once a second, not for every change of state. */
	if (f->direction != DIRECTION_CLIENT ||
	    life_age(f->life, bpf_jiffies64()) < jiffies_per_second)
		return 0;
	old_hop = twin->flow.hop;
	hop = hop_mark(hop_to_client(ctx, &p->key), f->nonce);
	if (hop != old_hop) /* compare-and-swap, because the element may be another flow's by now */
		__sync_val_compare_and_swap(&live->hop, old_hop, hop);
	return 0;
}

/*
 * Whether a packet answers a connection that the client has begun past us, to the backend's own address
 * and from the closed flow's port: a SYN to the VIP would have opened the flow again. Only NAT that
 * keeps the client's address meets that. With NAT from an address of ours, the packet repeats an
 * earlier answer, after a reset that may be forged.
 */
static __always_inline int answers_past_us(const struct packet *p, const struct flow *f)
{
	return f->direction == DIRECTION_BACKEND && p->key.protocol == IPPROTO_TCP &&
	       (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == (TCP_SYN | TCP_ACK) &&
	       state_is_closed(life_state(f->life)) &&
	       p->key.destination.high == f->destination.high &&
	       p->key.destination.low == f->destination.low;
}

/*
 * Moves the flow on by this packet. live is the entry f was copied from.
 */
static __noinline enum advance flow_advance(struct frame_ctx *ctx, struct packet *p,
					    struct flow *live, struct flow *f)
{
	struct settings *settings = settings_get();
	__u8 old = life_state(f->life), state;
	__u32 now = bpf_jiffies64();

	if (!settings || !live)
		return ADVANCE_GO;
	if (flow_is_over(&p->key, f, settings, now) || answers_past_us(p, f)) {
		flow_end(&p->key, live, f);
		return ADVANCE_OVER;
	}
	state = state_after(old, p, f);
	if (f->direction == DIRECTION_CLIENT && (state & FLOW_ESTABLISHED) &&
	    !(state & FLOW_SLOTTED)) {
		if (tracked_take(&p->key, f->nonce, now))
			state &= ~FLOW_ESTABLISHED; /* the flow's next packet tries again */
		else
			state |= FLOW_SLOTTED;
	}
	if (life_set(live, f->nonce, state & ~old, old & ~state, now))
		return ADVANCE_OVER;
	if (state == old && f->direction == DIRECTION_BACKEND)
		return ADVANCE_GO; /* nothing to update in the twin */
	if (!twin_follow(ctx, p, f, state & ~old, old & ~state)) {
		if (begins_again(p, f))
			traffic_flow_count(f->service_index, f->backend);
		return ADVANCE_GO;
	}
	f->life = life_make(f->nonce, state, now);
	if (entry_end(&p->key, live, f))
		service_flow_end(f);
	return ADVANCE_OVER;
}

/* Whether this packet can pass without flow_advance: it changes nothing, and the flow was
 * seen within the last second. */
static __always_inline int flow_is_settled(const struct packet *p, const struct flow *f, __u32 now)
{
	__u8 state = life_state(f->life);

	return state_after(state, p, f) == state && life_age(f->life, now) < jiffies_per_second &&
	       !(p->tcp_flags & TCP_SYN);
}

#endif
