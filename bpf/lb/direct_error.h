/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP errors about packets that backends of direct return have sent.
 *
 *   outer  router → VIP                     goes on to the flow's backend, as the service says
 *   quote  VIP:port → client:port           the backend's own packet
 *
 * The quote reversed is the tuple of the client's packets, so hash, slot and remembered flows name
 * its backend, as they do for those packets. If all of a fleet's balancers have the same table,
 * each of them sends the error to the right backend, whichever balancer the network has chosen.
 *
 * Invariant: an error changes no entry of a flow. Anybody can forge one.
 */
#ifndef SHUNT_DIRECT_ERROR_H
#define SHUNT_DIRECT_ERROR_H

#include "direct.h"
#include "icmp.h"
#include "place.h"
#include "service.h"

/* The packet of a client whose flow an ICMP error is about. */
struct accused {
	struct packet packet;
	__u32 service_index;
};

SCRATCH(sh_accused, struct accused);

/* The service of the client's packets; SERVICE_NONE also if the service uses NAT. */
static __always_inline __u32 quoted_service(const struct packet *quoted)
{
	struct settings *settings = settings_get();
	__u32 epoch, index;

	if (!settings)
		return SERVICE_NONE;
	epoch = *(volatile __u32 *)&settings->epoch; /* before the look-ups: see struct known */
	index = service_find(quoted, address_flags(&quoted->key.destination), epoch);
	return direct_service_find(index) ? index : SERVICE_NONE;
}

/* The backend that has sent the packet which an ICMP error to a VIP quotes; 0: it is no error, or
 * about no service with direct return. The tuple and the service are left in sh_accused. */
__stage __u32 error_owner(struct frame_ctx *ctx, struct packet *p)
{
	struct accused *accused = scratch_of(&sh_accused);
	struct packet *quoted;
	struct service *service;
	struct quote q = {};
	__u32 index;
	__u8 type;

	if (!p || !accused)
		return 0;
	if (ctx_load(ctx, p->l4_offset, &type, sizeof(type)) || !icmp_is_error(p->family, type))
		return 0;
	quoted = &accused->packet;
	__builtin_memset(quoted, 0, sizeof(*quoted)); /* look-ups compare the key's padding, too */
	q.key = &quoted->key;
	if (quote_parse(ctx, p, &q) != VERDICT_NEXT)
		return 0;
	index = quoted_service(quoted);
	service = bpf_map_lookup_elem(&sh_services, &index);
	if (!service)
		return 0;
	accused->service_index = index;
	return backend_choose(quoted, service, index, flow_hash(&quoted->key, service->seed));
}

/* Sends an ICMP error on to the backend that error_owner has found. */
__stage enum verdict error_to_backend(struct frame_ctx *ctx, struct packet *p, __u32 reference)
{
	struct backend *backend = backend_find(reference);
	struct settings *settings = settings_get();
	struct accused *accused = scratch_of(&sh_accused);
	__u32 index, entropy;
	struct service *service;
	struct interface *out;
	enum verdict verdict;
	enum reason reason;
	__u64 hop;

	if (!p)
		return VERDICT_DROP;
	if (!backend || !settings || !accused)
		return drop(p, REASON_BACKEND_GONE);
	index = accused->service_index;
	service = bpf_map_lookup_elem(&sh_services, &index);
	if (!service)
		return drop(p, REASON_INTERNAL);
	/* RFC 1122, 3.2.2 and RFC 4443, 2.4 e: no error is answered with another. */
	if (service->forwarding != FORWARDING_DSR_L2 && p->ttl <= 1)
		return pass(p, REASON_ICMP);
	entropy = hash_again(flow_hash(&accused->packet.key, service->seed));
	out = direct_route(ctx, p, settings, backend, &hop, &reason);
	if (!out)
		return drop(p, reason);
	if (hop_is_host(hop, out))
		return host_send(p, own_index(ctx));
	if (service->forwarding != FORWARDING_DSR_L2) {
		verdict = packet_wrap(ctx, p, settings, service->forwarding, &backend->address, out,
				      entropy);
		if (verdict != VERDICT_NEXT)
			return verdict == VERDICT_REFUSE ? drop(p, REASON_TOO_BIG) : verdict;
	}
	count_reason(REASON_ICMP_TO_BACKEND, p->frame_size);
	return ethernet_send(ctx, p, hop, out);
}

#endif
