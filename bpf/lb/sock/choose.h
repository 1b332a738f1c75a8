/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From the address that a program gave to a backend in its place.
 *
 *   address ─► sh_settings, sh_frontends, sh_ranges ─► service ─► slot ─► backend
 *                    │ none                              │ for packets  │ none
 *                    ▼                                   ▼              ▼
 *              stays as it is                      stays as it is   refused
 *
 * The programs read the balancer's maps, and change only the counter of elements in them that were
 * recycled as they were read.
 */
#ifndef SHUNT_SOCK_CHOOSE_H
#define SHUNT_SOCK_CHOOSE_H

#include "../service.h"
#include "keep.h"
#include "scope.h"
#include "stay.h"

/* A request of a process: its destination, and how it asks. */
struct call {
	struct addr to;
	struct addr at; /* the address to look up: to, or the loopback address for it (scope.h) */
	__be16 port;
	__u8 protocol;
	__u8 connects; /* 1: connect(); 0: a datagram that names its destination */
	__u32 service; /* generation:8 | index:24, as soon as it is found */
};

/* The index of the service at an address, or SERVICE_NONE: the result of service_find() for a packet
 * of this protocol. Nothing is noted in sh_known: that is for programs that nothing preempts. */
static __noinline __u32 service_at(const struct call *call, __u8 protocol)
{
	struct settings *settings = settings_get();
	struct frontend_key exact = { .address = call->at,
				      .port = call->port,
				      .protocol = protocol };
	struct packet p = {};
	struct frontend *found;
	__u64 word;

	if (!settings || !addr_may_be_own(settings, &call->at))
		return SERVICE_NONE;
	found = bpf_map_lookup_elem(&sh_frontends, &exact);
	if (found) {
		word = *(volatile __u64 *)found;
		return word_belongs(word, addr_check(&exact.address) ^ (__u32)exact.protocol << 16 ^
						  bpf_ntohs(exact.port)) ?
			       (__u32)word :
			       SERVICE_NONE;
	}
	p.key.destination = call->at;
	p.key.destination_port = call->port;
	p.key.protocol = protocol;
	return range_find(&p);
}

/* The reason why a service's sockets are left to the programs at interfaces, or OUTCOME_NONE. Backends
 * of direct return have the VIP and may listen on nothing else. Lists, rates, bounds and segment sizes
 * are promises about packets and their sources, and here no source is known yet. */
static __always_inline enum sock_outcome service_leaves(const struct service *service)
{
	if (service->forwarding >= FORWARDING_DSR_L2)
		return OUTCOME_DIRECT;
	if ((*(volatile __u32 *)&service->flags & SERVICE_FILTERS) || service->source_rate ||
	    service->flows_max || service->tcp_mss)
		return OUTCOME_POLICY;
	return OUTCOME_NONE;
}

/* Whether a datagram may go on with a backend that its socket had. None goes on with one that is down,
 * as flow_deserts (balance.h) has it for packets. */
static __always_inline int kept_is_good(const struct sock_choice *kept, __u32 service)
{
	struct backend *backend = backend_find(kept->backend);

	return backend && backend->draining != DRAINING_DOWN && kept->service == service;
}

/* The reference of the backend in a socket's slot. Sockets have no address yet that could be hashed, but
 * each has a cookie. */
static __always_inline __u32 backend_draw(struct bpf_sock_addr *ctx, const struct service *service)
{
	__u64 table = *(volatile __u64 *)&service->table;

	return slot_current(
		slot_get(table, hash_finish(bpf_get_socket_cookie(ctx), service->seed)));
}

/* The reference of a new backend into *reference, 0 where there is none. */
static __noinline enum sock_outcome backend_reference(struct bpf_sock_addr *ctx,
						      const struct call *call,
						      const struct service *service, __u64 now,
						      __u32 *reference)
{
	struct sock_client client = { .service = call->service };

	if (!service->affinity_ticks) {
		*reference = backend_draw(ctx, service);
		return OUTCOME_CHOSEN;
	}
	client.netns = bpf_get_netns_cookie(ctx);
	*reference = stay_follow(&client, service->affinity_seconds, now);
	if (*reference)
		return OUTCOME_AFFINITY;
	*reference = backend_draw(ctx, service);
	if (*reference)
		*reference = stay_note(&client, *reference, now);
	return OUTCOME_CHOSEN;
}

/* Chooses a backend of a service into *choice. */
static __noinline enum sock_outcome backend_new(struct bpf_sock_addr *ctx, const struct call *call,
						__u32 service_index, struct sock_choice *choice)
{
	struct service *service = bpf_map_lookup_elem(&sh_services, &service_index);
	/* Before any map is read: a choice with a later time is not of backends from before it. */
	__u64 made = bpf_ktime_get_ns();
	enum sock_outcome outcome;
	struct backend *backend;
	__u32 reference;

	if (!service)
		return OUTCOME_NO_BACKEND;
	outcome = backend_reference(ctx, call, service, made, &reference);
	if (!reference)
		return OUTCOME_NO_BACKEND;
	backend = backend_find(reference);
	if (!backend)
		return OUTCOME_BACKEND_GONE;
	if (addr_is_mapped(&backend->address) != addr_is_mapped(&call->to))
		return OUTCOME_FAMILY;
	choice->backend = reference;
	choice->address = backend->address;
	choice->port = backend->port ?: call->port;
	choice->vip = call->to;
	choice->vip_port = call->port;
	choice->service = call->service;
	choice->made = made;
	choice->pad = 0;
	return outcome;
}

/* Whether a socket's call goes to a backend. */
static __always_inline int outcome_translates(enum sock_outcome outcome)
{
	return outcome == OUTCOME_CHOSEN || outcome == OUTCOME_CHOSEN_ANEW ||
	       outcome == OUTCOME_KEPT || outcome == OUTCOME_AFFINITY;
}

/* The service that sockets of this host have where other clients have *index, which it changes. It is
 * the others' while there is no own: the daemon makes the flag and the frontend one after the other. */
static __noinline struct service *service_inside(const struct call *call, __u32 *index,
						 struct service *everybodys)
{
	__u32 inside = service_at(call, call->protocol | FRONTEND_INSIDE);

	if (inside == SERVICE_NONE)
		return everybodys;
	*index = inside;
	return bpf_map_lookup_elem(&sh_services, index);
}

/* Finds the service that a call is for. OUTCOME_CHOSEN: there is one, and it is for sockets. */
static __noinline enum sock_outcome service_open(struct bpf_sock_addr *ctx, struct call *call,
						 __u32 *index)
{
	struct service *service;
	enum sock_outcome leaves;

	if (!address_scope(ctx, &call->to, &call->at))
		return OUTCOME_NONE;
	*index = service_at(call, call->protocol);
	if (*index == SERVICE_NONE)
		return OUTCOME_NONE;
	service = bpf_map_lookup_elem(&sh_services, index);
	if (service && (*(volatile __u32 *)&service->flags & SERVICE_INSIDE))
		service = service_inside(call, index, service);
	if (!service || !service->live)
		return OUTCOME_NONE;
	call->service = *index | (__u32)service->generation << 24;
	leaves = service_leaves(service);
	return leaves ?: OUTCOME_CHOSEN;
}

/* Finds the backend of a call, into *choice, and keeps it. */
static __noinline enum sock_outcome call_decide(struct bpf_sock_addr *ctx, struct call *call,
						struct sock_choice *choice)
{
	enum sock_outcome outcome;
	int had_one = 0;
	__u32 index;

	outcome = service_open(ctx, call, &index);
	if (outcome != OUTCOME_CHOSEN)
		return outcome;
	if (!call->connects && choice_find(ctx, &call->to, call->port, choice)) {
		if (kept_is_good(choice, call->service))
			return OUTCOME_KEPT;
		had_one = 1;
	}
	outcome = backend_new(ctx, call, index, choice);
	if (!outcome_translates(outcome))
		return outcome;
	if (choice_keep(ctx, choice, call->connects))
		outcome_count(OUTCOME_NOT_KEPT);
	return had_one ? OUTCOME_CHOSEN_ANEW : outcome;
}

/* Translates a call: changes call->to and call->port, or refuses. Returns 0, or the error that the
 * program gets, which is negative. */
static __noinline int call_translate(struct bpf_sock_addr *ctx, struct call *call)
{
	struct sock_choice choice = {};
	enum sock_outcome outcome;

	if (call->protocol != IPPROTO_TCP && call->protocol != IPPROTO_UDP)
		return 0;
	outcome = call_decide(ctx, call, &choice);
	if (outcome != OUTCOME_NONE)
		outcome_count(outcome);
	if (outcome_translates(outcome)) {
		call->to = choice.address;
		call->port = choice.port;
		return 0;
	}
	if (outcome == OUTCOME_NO_BACKEND || outcome == OUTCOME_BACKEND_GONE)
		return -ECONNREFUSED; /* a UDP socket stays connected to its earlier peer */
	choices_forget(ctx, &call->to, call->port, call->connects);
	return 0;
}

/* The service that has a port of one address, or SERVICE_NONE. */
static __noinline __u32 service_at_address(const struct call *call, const struct addr *at)
{
	struct call there = { .at = *at, .port = call->port, .protocol = call->protocol };
	__u32 index = service_at(&there, there.protocol);
	struct service *service;

	if (index == SERVICE_NONE)
		return SERVICE_NONE;
	service = bpf_map_lookup_elem(&sh_services, &index);
	return service && service->live ? index : SERVICE_NONE;
}

/*
 * Whether a port is a service's that the host has at its loopback addresses, so that no client would
 * reach a program that listens there, at call->to. A service at other addresses only takes no port of
 * the host: its backend may listen there.
 */
static __noinline int port_is_taken(const struct call *call)
{
	struct addr any6 = {}, loopback = addr_loopback(&call->to);
	__u32 index = service_at_address(call, &loopback);

	if (addr_equal(&call->to, &any6)) { /* :: listens for IPv4, too */
		loopback = addr_from_ip4(LOOPBACK4);
		return index != SERVICE_NONE || service_at_address(call, &loopback) != SERVICE_NONE;
	}
	if (index == SERVICE_NONE)
		return 0;
	return addr_is_loopback(&call->to) ||
	       (addr_is_mapped(&call->to) && !addr_to_ip4(&call->to)) ||
	       service_at_address(call, &call->to) == index;
}

/* bind() of the host's own sockets. Returns 0, or the error that the program gets, which is negative. */
static __noinline int bind_judge(struct bpf_sock_addr *ctx, const struct call *call)
{
	if (!call->port || (call->protocol != IPPROTO_TCP && call->protocol != IPPROTO_UDP))
		return 0; /* port 0: the kernel chooses one (ip_local_port_range) */
	if (!socket_is_host(ctx) || !port_is_taken(call))
		return 0;
	outcome_count(OUTCOME_PORT_TAKEN);
	return -EADDRINUSE;
}

#endif
