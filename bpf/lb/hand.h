/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Hands a tunnel's packets on where this host is a backend as well as a balancer:
 *
 *   frame ─► sh_xdp ─┬─► bare, to a VIP ─► balanced, or to this host's own stack
 *                    ├─► passes, may be a tunnel ─► sh_decap ─► the stack
 *                    └─► for this node of a cluster ─► sh_tunnelled, and so does sh_decap there
 *
 * Invariant: neither sh_decap nor sh_tunnelled calls sh_xdp, so that a packet out of a tunnel is not put into another.
 *
 * And hands passing packets to another product of shunt's on the same interface, which takes some of
 * them (docs/design/39-guest.md):
 *
 *   frame ─► sh_xdp ─► passes ─► the guest ─► the program after ─► the stack
 */
#ifndef SHUNT_HAND_H
#define SHUNT_HAND_H

#include "packet.h"
#include "config.h"
#include "guest.h"
#include "maps.h"

/* Hands a passing packet that may be a tunnel's to sh_decap; returns if there is no sh_decap. All
 * other packets that pass are spared the call. A fragment goes there to be counted. For the place of
 * the call, see chain.h. */
static __always_inline void tunnel_hand_on(struct frame_ctx *ctx, const struct packet *p)
{
	__u8 protocol = p->key.protocol;

	if (protocol == IPPROTO_IPIP || protocol == IPPROTO_IPV6 || protocol == IPPROTO_UDP ||
	    protocol == IPPROTO_FRAGMENT)
		bpf_tail_call(ctx, &sh_decap_progs, interface_index);
}

/* Hands a packet for level 2 to sh_tunnelled; returns if there is none. The Ethernet source, which has no
 * meaning until the frame leaves, tells that program what it cannot see: see arrival_stage. */
static __always_inline void tunnelled_hand_on(struct frame_ctx *ctx, const struct packet *p)
{
	struct ethhdr *eth = ctx_data(ctx);

	if ((void *)(eth + 1) > ctx_data_end(ctx))
		return;
	mac_store(eth->h_source, p->csum_finished ? MAC_CSUM_FINISHED : 0);
	bpf_tail_call(ctx, &sh_tunnel_progs, interface_index);
}

#endif
