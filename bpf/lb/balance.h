/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The load balancer's stages and their order, the same at each hook: the program of a hook runs
 * frame_stage and carries out its verdict.
 *
 *   frame ─► parse ─► address ─┬─► not ours ──────────────────────────► pass
 *                              ├─► ARP, ND, echo ─────────────────────► answer
 *                              ├─► later fragment ─► note of the first ► send
 *                              ├─► ICMP error ─► flow of the quote ───► send, wrap
 *                              ├─► TCP, UDP ─► flow ─┬─► found ───────► rewrite, send
 *                              │                     └─► none ─► service ─► new flow ─┘
 *                              ├─► to a direct VIP ─► service ─► backend ─┬► wrap, send
 *                              │                                          └► this node: level 2, NAT
 *                              └─► no backend takes it ──────────────► reset, unreachable
 *
 * Invariant: a packet that is not ours leaves as it came.
 */
#ifndef SHUNT_BALANCE_H
#define SHUNT_BALANCE_H

#include "advance.h"
#include "carry.h"
#include "direct.h"
#include "direct_error.h"
#include "filter.h"
#include "fragment.h"
#include "icmp.h"
#include "martian.h"
#include "mss.h"
#include "nat.h"
#include "neighbour.h"
#include "lookup.h"
#include "transport.h"
#include "reject.h"
#include "rewrite.h"
#include "service.h"
#include "traffic.h"

/*
 * The last stage where no hop is known. Of a client whose packets come from other nodes no frame has told the
 * way, and nobody may have asked for its neighbour entry yet. At tc the kernel can be told to do so.
 */
static __always_inline enum verdict flow_resolve(struct frame_ctx *ctx, struct packet *p,
						 const struct flow *f, enum reason reason,
						 __u64 hop)
{
	if (!ctx_is_tc() || !(features & FEATURE_TUNNELLED) || f->direction != DIRECTION_BACKEND ||
	    p->fragment)
		return drop(p, reason);
	traffic_count(f->service_index, f->backend, p->frame_size, f->direction, 0);
	if (mss_limit(ctx, p, f->service_index) || packet_rewrite(ctx, p, f, 1))
		return drop(p, REASON_INTERNAL);
	p->egress = hop_index(hop);
	return VERDICT_ROUTE;
}

/* The last stage of NAT: the packet gets its flow's addresses and ports, and leaves. */
static __always_inline enum verdict flow_forward(struct frame_ctx *ctx, struct packet *p,
						 const struct settings *settings, struct flow *f,
						 const struct backend *backend, int has_transport)
{
	enum reason reason = REASON_UNRESOLVED;
	struct interface *out;
	enum verdict verdict;
	__u64 hop;

	if (p->ttl <= 1)
		return refuse(p, REFUSAL_TTL);
	if (f->direction == DIRECTION_CLIENT) {
		hop = hop_to_backend(ctx, backend, settings, &f->source, bpf_jiffies64(), &reason);
	} else if (hop_marked_by(f->hop, f->nonce)) {
		hop = f->hop;
	} else {
		hop = hop_lookup(ctx, &f->source, &f->destination, &reason);
	}
	if (!(hop & HOP_MAC_MASK))
		return flow_resolve(ctx, p, f, reason, hop);
	out = hop_interface(hop);
	if (!out)
		return drop(p, REASON_INTERNAL);
	if (packet_size(p) - wire_surplus(ctx, p) > out->mtu)
		return size_refuse(ctx, p, out->mtu);
	traffic_count(f->service_index, f->backend, p->frame_size, f->direction, 0);
	if (has_transport && p->fragment)
		nat_note(f);
	if (has_transport && mss_limit(ctx, p, f->service_index))
		return drop(p, REASON_INTERNAL);
	if (packet_rewrite(ctx, p, f, has_transport))
		return drop(p, REASON_INTERNAL);
	verdict = hop_send(ctx, p, hop, out);
	if (verdict == VERDICT_HOST && f->direction == DIRECTION_CLIENT)
		p->egress = own_index(ctx); /* where the client's packets are expected */
	return verdict;
}

/* The flow's backend, if neither it nor the service was removed since the flow began. */
static __always_inline struct backend *flow_home(const struct flow *f)
{
	__u32 index = f->service_index;
	struct service *service = bpf_map_lookup_elem(&sh_services, &index);

	if (!service || !service->live || service->generation != f->service_generation)
		return 0;
	return backend_find(f->backend);
}

/* Whether a client's flow leaves a backend that is down: an established connection stays,
 * because a backend that fails its checks may yet serve it. */
static __always_inline int flow_deserts(const struct packet *p, const struct flow *f, __u8 draining)
{
	if (draining != DRAINING_DOWN || f->direction != DIRECTION_CLIENT)
		return 0;
	return p->key.protocol != IPPROTO_TCP ||
	       (is_first(p) && !(life_state(f->life) & FLOW_REPLIED));
}

/* The result of the look-up of a packet's flow. */
enum lookup {
	LOOKUP_BEFORE = -2, /* the flow is still the ABI's before */
	LOOKUP_REFUSED =
		-1, /* the packet begins another connection on a closed one's tuple, and its source may not */
	LOOKUP_NONE = 0, /* no flow goes on: the packet is a first one, or no flow's */
	LOOKUP_FOUND = 1,
};

/* A connection that begins on a closed one's tuple. LOOKUP_FOUND: it takes the closed one's flow over.
 * LOOKUP_NONE: it is placed anew, and the flow's twin rests, because the backend may remember a
 * connection of the port. */
static __noinline enum lookup closed_begins(struct packet *p, struct flow *live,
					    const struct flow *f)
{
	enum reason reason;

	if (!live)
		return LOOKUP_NONE;
	if (!reopens(p, f)) {
		if (entry_end(&p->key, live, f))
			service_flow_end(f);
		return LOOKUP_NONE;
	}
	reason = client_admit(p, f->service_index, 1);
	if (reason == REASON_NONE)
		return LOOKUP_FOUND;
	drop(p, reason);
	return LOOKUP_REFUSED;
}

/* Finds the packet's flow, into f, and its backend, into *home. */
static __always_inline enum lookup flow_lookup(struct frame_ctx *ctx, struct packet *p,
					       struct flow *f, struct backend **home, __u32 now)
{
	struct flow *live = flow_find(&p->key, f);
	struct backend *backend;
	enum lookup found;

	if ((features & FEATURE_CARRY) && carry_is_due(&p->key, live ? f : 0))
		return LOOKUP_BEFORE;
	if (!live)
		return LOOKUP_NONE;
	backend = *home = flow_home(f);
	if (!backend || flow_deserts(p, f, backend->draining)) {
		/* Its backend or service was removed or is down: this packet is placed anew. */
		flow_end(&p->key, live, f);
		count_reason(REASON_FLOW_MOVED, p->frame_size);
		return LOOKUP_NONE;
	}
	if (flow_is_settled(p, f, now))
		return LOOKUP_FOUND;
	if (begins_again(p, f)) {
		found = closed_begins(p, live, f);
		if (found <= LOOKUP_NONE)
			return found;
	}
	if (flow_advance(ctx, p, live, f) != ADVANCE_GO)
		return LOOKUP_NONE;
	if ((features & FEATURE_REMEMBER) && f->direction == DIRECTION_CLIENT)
		client_touch(p, f);
	return LOOKUP_FOUND;
}

/* Finds or makes the packet's flow. VERDICT_NEXT: it is in f, and its backend in *home. */
static __always_inline enum verdict flow_stage(struct frame_ctx *ctx, struct packet *p,
					       struct flow *f, struct backend **home, int is_vip,
					       __u32 service_index)
{
	enum lookup found;
	enum reason reason;

	found = flow_lookup(ctx, p, f, home, bpf_jiffies64());
	if (found == LOOKUP_BEFORE) {
		p->reason = REASON_CARRYING;
		return VERDICT_CARRY;
	}
	if (found != LOOKUP_NONE)
		return found == LOOKUP_FOUND ? VERDICT_NEXT : VERDICT_DROP;
	if (!is_vip)
		return pass(p, REASON_NOT_OURS);
	if (service_index == SERVICE_NONE) {
		if (p->fragment)
			pass_note();
		return pass(p, REASON_NO_SERVICE);
	}
	if (p->tcp_flags & TCP_RST) /* the end of what is not there */
		return pass(p, REASON_NOT_OURS);
	if (source_check_whole(p) != VERDICT_NEXT)
		return VERDICT_DROP;
	if (p->ttl <= 1)
		return refuse(p, REFUSAL_TTL);
	reason = nat_flow_create(ctx, p, service_index);
	if (reason == REASON_NO_BACKEND)
		return VERDICT_REJECT;
	if (reason == REASON_BEGUN_BEFORE) {
		if (p->fragment)
			pass_note();
		return pass(p, reason);
	}
	if (reason != REASON_NONE)
		return drop(p, reason);
	*home = backend_find(f->backend);
	return *home ? VERDICT_NEXT : drop(p, REASON_BACKEND_GONE);
}

/* NAT. */
static __always_inline enum verdict nat_stage(struct frame_ctx *ctx, struct packet *p,
					      const struct settings *settings, int is_vip,
					      __u32 service_index)
{
	struct entry *entry = scratch_of(&sh_entry);
	struct backend *home = 0;
	enum verdict verdict;

	if (!entry)
		return drop(p, REASON_INTERNAL);
	verdict = flow_stage(ctx, p, &entry->flow, &home, is_vip, service_index);
	if (verdict != VERDICT_NEXT)
		return verdict;
	return flow_forward(ctx, p, settings, &entry->flow, home, 1);
}

/* The last stage of a later fragment of NAT. */
__stage enum verdict fragment_nat_forward(struct frame_ctx *ctx, struct packet *p)
{
	struct settings *settings = settings_get();
	struct noting *noting = scratch_of(&sh_noting);
	struct backend *home;

	if (!p || !settings || !noting)
		return VERDICT_DROP;
	home = backend_find(noting->note.flow.backend);
	if (!home)
		return drop(p, REASON_BACKEND_GONE);
	return flow_forward(ctx, p, settings, &noting->note.flow, home, 0);
}

static __always_inline enum verdict fragment_forward(struct frame_ctx *ctx, struct packet *p)
{
	struct noting *noting = scratch_of(&sh_noting);
	enum verdict verdict;

	if (!noting)
		return drop(p, REASON_INTERNAL);
	if (!flow_home(&noting->note.flow))
		return drop(p, REASON_BACKEND_GONE);
	if (noting->note.kind == NOTE_DIRECT)
		verdict = fragment_direct_forward(ctx, p);
	else
		verdict = fragment_nat_forward(ctx, p);
	/* RFC 1812, 4.3.2.7: no error is sent for a later fragment. RFC 4443 has no such rule. */
	if (verdict == VERDICT_REFUSE && p->family == FAMILY_IP4 && p->fragment == FRAGMENT_LATER)
		return drop(p, p->refusal == REFUSAL_SIZE ? REASON_TOO_BIG : REASON_ICMP_LIMITED);
	return verdict;
}

__stage enum verdict icmp_stage(struct frame_ctx *ctx, struct packet *p, __u32 flags)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	enum verdict verdict;
	__u8 *icmp, request;
	__u32 reference;

	if (!p)
		return VERDICT_DROP;
	icmp = data + (p->l4_offset & L4_OFFSET_MAX);
	request = p->family == FAMILY_IP4 ? ICMP_ECHO : ICMPV6_ECHO_REQUEST;
	if ((void *)(icmp + 8) > data_end || p->l4_size < 8)
		return flags ? drop(p, REASON_MALFORMED_TRANSPORT) : pass(p, REASON_NOT_OURS);
	if (p->family == FAMILY_IP6 && icmp[0] == ND_SOLICITATION)
		return nd_answer(ctx, p);
	if ((flags & ADDRESS_VIP) && source_check(p) != VERDICT_NEXT)
		return VERDICT_DROP;
	if (icmp[0] == request) {
		if ((flags & ADDRESS_VIP) && !(flags & ADDRESS_HOST_OWN))
			return echo_answer(ctx, p);
		return pass(p, flags ? REASON_ICMP : REASON_NOT_OURS);
	}
	verdict = icmp_error_translate(ctx, p);
	if (verdict == VERDICT_NEXT && (flags & ADDRESS_DIRECT)) {
		reference = error_owner(ctx, p);
		if (reference)
			return error_to_backend(ctx, p, reference);
	}
	if (verdict == VERDICT_NEXT)
		verdict = pass(p, REASON_ICMP);
	if (verdict == VERDICT_PASS && !flags) /* seen for the sake of nat-destination only */
		p->reason = REASON_NOT_OURS;
	return verdict;
}

/* Whether backends' answers to any address pass this program. */
static __always_inline int answers_pass(const struct settings *settings)
{
	return settings->nat_destination &
	       (ctx_is_outbound() ? TO_CLIENTS_ROUTED | TO_CLIENTS_HOST : TO_CLIENTS_ROUTED);
}

/* Decides whether the packet is ours, by its destination. */
static __always_inline enum verdict address_stage(struct frame_ctx *ctx, struct packet *p)
{
	enum verdict verdict = transport_parse(ctx, p);
	__u32 flags, epoch, service_index = SERVICE_NONE;
	struct settings *settings = settings_get();
	const struct flow_key *key = &p->key;
	struct known *known = known_at(&key->destination, key->destination_port, key->protocol);

	if (!settings || !known)
		return pass(p, REASON_NOT_OURS);
	epoch = *(volatile __u32 *)&settings->epoch;
	if (verdict == VERDICT_NEXT &&
	    known_is(known, &key->destination, key->destination_port, key->protocol, epoch)) {
		flags = known->flags;
		service_index = known->service_index;
	} else {
		flags = destination_flags(p, settings, epoch);
		/* Answers to clients of nat-destination go to the client's own address. */
		if (!flags && !answers_pass(settings))
			return pass(p, REASON_NOT_OURS);
		if (verdict != VERDICT_NEXT) {
			if (verdict == VERDICT_FRAGMENT)
				verdict = fragment_stage(ctx, p, flags, epoch);
			else if (!flags)
				return pass(p, REASON_NOT_OURS);
			if (verdict == VERDICT_FRAGMENT)
				verdict = fragment_forward(ctx, p);
			if (ctx_is_tc() && is_tunnelled(p, verdict)) {
				verdict = tunnelled_go_on(p, &service_index);
				goto translate;
			}
			if (verdict == VERDICT_REJECT)
				verdict = reject_answer(ctx, p, fragment_service());
			if (verdict != VERDICT_NEXT)
				return verdict == VERDICT_REFUSE ? error_answer(ctx, p) : verdict;
		}
		if (p->key.protocol == IPPROTO_ICMP || p->key.protocol == IPPROTO_ICMPV6)
			return icmp_stage(ctx, p, flags);
		if (flags & ADDRESS_VIP)
			service_index = service_find(p, flags, epoch);
	}
	if ((features & FEATURE_DIRECT) && (flags & ADDRESS_DIRECT) &&
	    service_index != SERVICE_NONE) {
		if (ctx_is_tc() && (features & FEATURE_TUNNELLED))
			service_index = inside_find(p, service_index);
		verdict = direct_stage(ctx, p, settings, service_index);
	}
	if (ctx_is_tc() && is_tunnelled(p, verdict))
		verdict = tunnelled_go_on(p, &service_index);
translate:
	if (verdict == VERDICT_NEXT)
		verdict = nat_stage(ctx, p, settings, flags & ADDRESS_VIP, service_index);
	if (verdict == VERDICT_REJECT)
		verdict = reject_answer(ctx, p, service_index);
	return verdict == VERDICT_REFUSE ? error_answer(ctx, p) : verdict;
}

static __always_inline int mac_is_ours(const struct frame_ctx *ctx, const struct ethhdr *eth)
{
	__u32 index = own_index(ctx);
	struct interface *in = bpf_map_lookup_elem(&sh_interfaces, &index);

	return in && mac_load(eth->h_dest) == mac_load(in->mac);
}

/* Group addresses: only a neighbour solicitation may concern us. */
static __always_inline enum verdict multicast_stage(struct frame_ctx *ctx, struct packet *p)
{
	if (p->family != FAMILY_IP6 || p->key.protocol != IPPROTO_ICMPV6)
		return pass(p, REASON_MULTICAST);
	return nd_answer(ctx, p);
}

static __always_inline enum verdict frame_stage(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data;
	enum verdict verdict;
	int group = 0;

	if ((void *)(eth + 1) > data_end)
		return pass(p, REASON_MALFORMED);
	if (ctx_has_tag(ctx))
		return VERDICT_TAGGED;
	if (ctx_is_outbound() || !mac_is_ours(ctx, eth)) {
		group = eth->h_dest[0] & 1;
		if (!group && !ctx_is_outbound())
			return is_tag(frame_protocol(data)) ? VERDICT_TAGGED :
							      pass(p, REASON_OTHER_MAC);
	}
	switch (frame_protocol(data)) {
	case bpf_htons(ETH_P_IP):
		if (group)
			return pass(p, REASON_MULTICAST);
		verdict = ip4_parse(ctx, p, data, data_end);
		break;
	case bpf_htons(ETH_P_IPV6):
		verdict = ip6_parse(ctx, p, data, data_end);
		break;
	case bpf_htons(ETH_P_ARP):
		return arp_answer(ctx, p);
	case bpf_htons(ETH_P_8021Q):
	case bpf_htons(ETH_P_8021AD):
		return VERDICT_TAGGED;
	default:
		return pass(p, REASON_NOT_IP);
	}
	if (verdict != VERDICT_NEXT)
		return verdict;
	return group ? multicast_stage(ctx, p) : address_stage(ctx, p);
}

#endif
