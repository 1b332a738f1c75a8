/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Direct return: the packet goes to a backend that answers the client itself.
 *
 *   source may ─► slot ─► backend ─► next hop ─┬─► outer headers (encap.h) ─► send
 *                                              └─► this host ─► its stack, or level 2 (tunnelled.h)
 *
 * Invariant: in a settled slot no flow table is touched.
 */
#ifndef SHUNT_DIRECT_H
#define SHUNT_DIRECT_H

#include "encap.h"
#include "filter.h"
#include "hop.h"
#include "martian.h"
#include "mss.h"
#include "place.h"
#include "rewrite.h"
#include "service.h"
#include "traffic.h"
#include "tunnelled.h"

/* The interface that the packet leaves by to a backend, towards *hop; NULL with *reason: none. */
static __always_inline struct interface *direct_route(struct frame_ctx *ctx, const struct packet *p,
						      const struct settings *settings,
						      const struct backend *backend, __u64 *hop,
						      enum reason *reason)
{
	*reason = REASON_UNRESOLVED;
	*hop = hop_to_backend(ctx, backend, settings, &p->key.destination, bpf_jiffies64(), reason);
	if (!(*hop & HOP_MAC_MASK))
		return 0;
	*reason = REASON_INTERNAL;
	return hop_interface(*hop);
}

/* The last stage of direct return. */
static __always_inline enum verdict direct_forward(struct frame_ctx *ctx, struct packet *p,
						   const struct settings *settings,
						   __u32 service_index,
						   const struct service *service, __u32 reference,
						   __u32 hash, int is_whole)
{
	struct backend *backend = backend_find(reference);
	struct interface *out;
	enum verdict verdict;
	enum reason reason;
	__u64 hop;

	if (!backend)
		return drop(p, REASON_BACKEND_GONE);
	if (is_whole && mss_limit(ctx, p, service_index))
		return drop(p, REASON_INTERNAL);
	if (is_whole && !generic_mode && csum_is_unfinished(ctx, p) && csum_complete(ctx, p))
		return drop(p, REASON_INTERNAL);
	out = direct_route(ctx, p, settings, backend, &hop, &reason);
	if (!out)
		return drop(p, reason);
	/* This host's stack has the VIP: the packet needs no tunnel. */
	if (hop_is_host(hop, out)) {
		traffic_count(service_index, reference, p->frame_size, DIRECTION_CLIENT,
			      is_first(p));
		if ((features & FEATURE_TUNNELLED) && (service->flags & SERVICE_TUNNELLED))
			return tunnelled_send(p);
		return host_send(p, own_index(ctx));
	}
	if (service->forwarding == FORWARDING_DSR_L2) {
		/* The packet comes by a second time, at the interface that it leaves by. */
		if (ctx_is_outbound() && hop_is_taken(ctx, hop))
			return pass(p, REASON_NOT_OURS);
		if (hop_leads_back(ctx, hop))
			return drop(p, REASON_LOOP);
	} else {
		verdict = packet_wrap(ctx, p, settings, service->forwarding, &backend->address, out,
				      hash_again(hash));
		if (verdict != VERDICT_NEXT)
			return verdict;
	}
	traffic_count(service_index, reference, p->frame_size, DIRECTION_CLIENT, is_first(p));
	return ethernet_send(ctx, p, hop, out);
}

/* Whether a packet may go to a service with direct return: its source is a possible one, and the
 * service lets it in. */
static __always_inline enum verdict direct_admit(struct packet *p, const struct settings *settings,
						 const struct service *service, __u32 service_index)
{
	if (source_check_direct(p, settings) != VERDICT_NEXT)
		return VERDICT_DROP;
	return admit(p, service, service_index, is_first(p));
}

/* Direct return: no flow entry while the slot is settled. VERDICT_NEXT: the packet is not for
 * a service with direct return. */
static __always_inline enum verdict direct_stage(struct frame_ctx *ctx, struct packet *p,
						 const struct settings *settings,
						 __u32 service_index)
{
	struct service *service = direct_service_find(service_index);
	__u32 reference, hash;

	if (!service)
		return VERDICT_NEXT;
	if (direct_admit(p, settings, service, service_index) != VERDICT_NEXT)
		return VERDICT_DROP;
	if (p->ttl <= 1 && service->forwarding != FORWARDING_DSR_L2)
		return refuse(p, REFUSAL_TTL);
	hash = flow_hash(&p->key, service->seed);
	reference = backend_choose(p, service, service_index, hash);
	if (!reference)
		return VERDICT_REJECT;
	return direct_forward(ctx, p, settings, service_index, service, reference, hash, 1);
}

#endif
