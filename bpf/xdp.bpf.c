// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The load balancer at XDP. One copy is loaded per interface (lib/config.h).
 *
 *   frame ─► parse ─► address ─┬─► not ours ──────────────────────────► pass
 *                              ├─► ARP, ND, echo ─────────────────────► answer
 *                              ├─► later fragment ─► note of the first ► send
 *                              ├─► ICMP error ─► flow of the quote ───► send, wrap
 *                              ├─► TCP, UDP ─► flow ─┬─► found ───────► rewrite, send
 *                              │                     └─► none ─► service ─► new flow ─┘
 *                              ├─► to a direct VIP ─► service ─► backend ─► wrap, send
 *                              └─► nobody takes it ──────────────────► reset, unreachable
 *
 * Invariant: a packet that is not ours leaves as it came.
 */
#include "lib/advance.h"
#include "lib/chain.h"
#include "lib/direct_error.h"
#include "lib/encap.h"
#include "lib/filter.h"
#include "lib/fragment.h"
#include "lib/icmp.h"
#include "lib/martian.h"
#include "lib/nat.h"
#include "lib/neighbour.h"
#include "lib/packet.h"
#include "lib/parse.h"
#include "lib/reject.h"
#include "lib/rewrite.h"
#include "lib/service.h"

char _license[] SEC("license") = "Dual BSD/GPL";

static __always_inline void traffic_add(struct traffic *t, const struct flow *f, __u64 bytes)
{
	if (!t)
		return;
	if (f->direction == DIRECTION_CLIENT) {
		t->packets_in++;
		t->bytes_in += bytes;
	} else {
		t->packets_out++;
		t->bytes_out += bytes;
	}
}

static __always_inline void traffic_count(const struct packet *p, const struct flow *f)
{
	__u32 service = f->service_index, backend = f->backend & BACKEND_INDEX_MASK;

	traffic_add(bpf_map_lookup_elem(&sh_svc_traffic, &service), f, p->frame_size);
	traffic_add(bpf_map_lookup_elem(&sh_be_traffic, &backend), f, p->frame_size);
}

/* The last stage of NAT: the packet becomes what its flow says, and leaves. */
static __always_inline enum verdict flow_forward(struct xdp_md *ctx, struct packet *p,
						 int has_transport)
{
	enum reason reason = REASON_UNRESOLVED;
	struct settings *settings = settings_get();
	struct scratch *scratch = scratch_get();
	struct interface *out;
	struct backend *backend;
	struct flow *f;
	__u64 hop;

	if (!scratch || !settings)
		return drop(p, REASON_INTERNAL);
	f = &scratch->flow;
	if (p->ttl <= 1)
		return VERDICT_REFUSE;
	if (f->direction == DIRECTION_CLIENT) {
		backend = backend_find(f->backend);
		if (!backend)
			return drop(p, REASON_BACKEND_GONE);
		hop = hop_to_backend(ctx, backend, settings, &f->source, bpf_jiffies64(), &reason);
	} else if (hop_marked_by(f->hop, f->nonce)) {
		hop = f->hop;
	} else {
		hop = hop_lookup(ctx, &f->source, &f->destination, &reason);
	}
	if (!(hop & HOP_MAC_MASK))
		return drop(p, reason);
	out = hop_interface(hop);
	if (!out)
		return drop(p, REASON_INTERNAL);
	if (packet_size(p) > out->mtu) {
		size_refuse(ctx, p, out->mtu);
		return p->mtu ? VERDICT_REFUSE : drop(p, REASON_TOO_BIG);
	}
	traffic_count(p, f);
	if (packet_rewrite(ctx, p, f, has_transport))
		return drop(p, REASON_INTERNAL);
	return ethernet_send(ctx, p, hop, out);
}

/* The flow's backend, if that and the service are still what they were. */
static __always_inline struct backend *flow_home(const struct flow *f)
{
	__u32 index = f->service_index;
	struct service *service = bpf_map_lookup_elem(&sh_services, &index);

	if (!service || !service->live || service->generation != f->service_generation)
		return 0;
	return backend_find(f->backend);
}

/* Finds the packet's flow. 1: in f, and it goes on. 0: the packet is a first one, or nobody's.
 * -1: it begins another connection on a closed one's tuple, and its source may not. */
static __always_inline int flow_lookup(struct xdp_md *ctx, struct packet *p, struct flow *f,
				       __u32 now)
{
	struct flow *live = flow_find(&p->key, f);
	struct backend *backend;
	enum reason reason;

	if (!live)
		return 0;
	backend = flow_home(f);
	if (backend && backend->draining && is_first(p) && state_is_closed(life_state(f->life))) {
		flow_end(&p->key, live, f); /* a new connection on the tuple of a closed one */
		return 0;
	}
	if (!backend) {
		/* Its backend or service was removed: what comes now is placed anew. */
		flow_end(&p->key, live, f);
		count_reason(REASON_FLOW_MOVED, p->frame_size);
		return 0;
	}
	if (flow_is_settled(p, f, now))
		return 1;
	if (is_first(p) && f->direction == DIRECTION_CLIENT &&
	    state_is_closed(life_state(f->life))) {
		reason = client_admit(p, f->service_index, 1);
		if (reason != REASON_NONE) {
			drop(p, reason);
			return -1;
		}
	}
	return flow_advance(ctx, p, live, f) == ADVANCE_GO;
}

/* Finds or makes the packet's flow. VERDICT_NEXT: it is in scratch->flow. */
static __always_inline enum verdict flow_stage(struct xdp_md *ctx, struct packet *p, int is_vip,
					       __u32 service_index)
{
	struct scratch *scratch = scratch_get();
	enum reason reason;
	int found;

	if (!scratch)
		return drop(p, REASON_INTERNAL);
	found = flow_lookup(ctx, p, &scratch->flow, bpf_jiffies64());
	if (found)
		return found > 0 ? VERDICT_NEXT : VERDICT_DROP;
	if (!is_vip)
		return pass(p, REASON_NOT_OURS);
	if (service_index == SERVICE_NONE) {
		if (is_fragment(p))
			pass_note();
		return pass(p, REASON_NO_SERVICE);
	}
	if (p->tcp_flags & TCP_RST) /* the end of what is not there */
		return pass(p, REASON_NOT_OURS);
	if (source_check_whole(p) != VERDICT_NEXT)
		return VERDICT_DROP;
	if (p->ttl <= 1)
		return VERDICT_REFUSE;
	reason = nat_flow_create(ctx, p, service_index);
	if (reason == REASON_NO_BACKEND)
		return VERDICT_REJECT;
	return reason == REASON_NONE ? VERDICT_NEXT : drop(p, reason);
}

static __always_inline void direct_count(const struct packet *p, __u32 service_index,
					 __u32 backend_index)
{
	struct traffic *of_service = bpf_map_lookup_elem(&sh_svc_traffic, &service_index);
	struct traffic *of_backend = bpf_map_lookup_elem(&sh_be_traffic, &backend_index);
	int first = is_first(p);

	if (!of_service || !of_backend)
		return;
	of_service->packets_in++;
	of_service->bytes_in += p->frame_size;
	of_service->flows_created += first;
	of_backend->packets_in++;
	of_backend->bytes_in += p->frame_size;
	of_backend->flows_created += first;
}

/* The last stage of direct return: the packet goes to the backend as the service says. */
static __always_inline enum verdict direct_forward(struct xdp_md *ctx, struct packet *p,
						   __u32 service_index,
						   const struct service *service, __u32 reference,
						   __u32 hash, int is_whole)
{
	struct backend *backend = backend_find(reference);
	struct settings *settings = settings_get();
	enum reason reason = REASON_UNRESOLVED;
	struct interface *out;
	__u64 hop;

	if (!backend || !settings)
		return drop(p, REASON_BACKEND_GONE);
	hop = hop_to_backend(ctx, backend, settings, &p->key.destination, bpf_jiffies64(), &reason);
	if (!(hop & HOP_MAC_MASK))
		return drop(p, reason);
	out = hop_interface(hop);
	if (!out)
		return drop(p, REASON_INTERNAL);
	if (is_whole && !generic_mode && csum_is_unfinished(ctx, p) && csum_complete(ctx, p))
		return drop(p, REASON_INTERNAL);
	if (service->forwarding != FORWARDING_DSR_L2) {
		reason = packet_wrap(ctx, p, service, backend, out, hash_again(hash));
		if (reason != REASON_NONE)
			return p->mtu ? VERDICT_REFUSE : drop(p, reason);
	} else if (hop_leads_back(ctx, hop)) {
		return drop(p, REASON_LOOP);
	}
	direct_count(p, service_index, reference & BACKEND_INDEX_MASK);
	return ethernet_send(ctx, p, hop, out);
}

/* Direct return: no flow entry, unless the slot is not settled. VERDICT_NEXT: the packet is
 * not for such a service. */
static __always_inline enum verdict direct_stage(struct xdp_md *ctx, struct packet *p,
						 __u32 service_index)
{
	__u32 reference, hash;
	enum reason reason;
	struct service *service = bpf_map_lookup_elem(&sh_services, &service_index);

	if (!service || !service->live || service->forwarding < FORWARDING_DSR_L2)
		return VERDICT_NEXT;
	if (source_check(p) != VERDICT_NEXT)
		return VERDICT_DROP;
	reason = service_admits(service) ? client_admit(p, service_index, is_first(p)) :
					   REASON_NONE;
	if (reason != REASON_NONE)
		return drop(p, reason);
	if (p->ttl <= 1 && service->forwarding != FORWARDING_DSR_L2)
		return VERDICT_REFUSE;
	hash = flow_hash(&p->key, service->seed);
	reference = backend_choose(p, service, service_index, hash);
	if (!reference)
		return VERDICT_REJECT;
	return direct_forward(ctx, p, service_index, service, reference, hash, 1);
}

/* Begins the note of a first fragment. VERDICT_FRAGMENT: it is for a service with direct return,
 * and has a backend; VERDICT_NEXT: it is not for such a service. */
static __always_inline enum verdict fragment_choose(struct packet *p, __u32 flags, __u32 epoch,
						    struct flow *note)
{
	struct service *service;
	enum reason reason;
	__u32 index;

	if (!(flags & ADDRESS_DIRECT))
		return VERDICT_NEXT;
	index = service_find(p, flags, epoch);
	service = bpf_map_lookup_elem(&sh_services, &index);
	if (!service || !service->live || service->forwarding < FORWARDING_DSR_L2)
		return VERDICT_NEXT;
	if (source_check(p) != VERDICT_NEXT)
		return VERDICT_DROP;
	reason = service_admits(service) ? client_admit(p, index, is_first(p)) : REASON_NONE;
	if (reason != REASON_NONE)
		return drop(p, reason);
	note_begin(note, NOTE_DIRECT);
	note->service_index = index;
	note->service_generation = service->generation;
	/* The same for those that have no ports, and come here before the first. */
	note->source.low = service->flags & SERVICE_HASHES_ADDRESSES ?
				   addresses_hash(&p->key, service->seed) :
				   flow_hash(&p->key, service->seed);
	note->backend = backend_choose(p, service, index, note->source.low);
	return note->backend ? VERDICT_FRAGMENT : VERDICT_REJECT;
}

/*
 * Places a later fragment that has no note, where its addresses alone decide: that is where its
 * first one goes, whichever balancer that reaches, unless flows of the slot may be elsewhere.
 */
static __always_inline enum verdict fragment_place(struct packet *p, __u32 flags, __u32 epoch,
						   struct flow *note)
{
	struct service *service;
	__u32 index, hash;
	enum reason reason;
	__u64 slot;

	if (p->key.protocol != IPPROTO_TCP && p->key.protocol != IPPROTO_UDP)
		return drop(p, REASON_FRAGMENT_EARLY);
	p->key.protocol |= FRONTEND_FRAGMENTS;
	index = service_find(p, flags, epoch);
	p->key.protocol &= ~FRONTEND_FRAGMENTS;
	service = bpf_map_lookup_elem(&sh_services, &index);
	if (!service || !service->live || service->forwarding < FORWARDING_DSR_L2 ||
	    !(service->flags & SERVICE_HASHES_ADDRESSES) || service->affinity_ticks ||
	    service->tracking == TRACKING_ALWAYS)
		return drop(p, REASON_FRAGMENT_EARLY);
	reason = service_admits(service) ? client_admit(p, index, 0) : REASON_NONE;
	if (reason != REASON_NONE)
		return drop(p, reason);
	hash = addresses_hash(&p->key, service->seed);
	slot = slot_get(*(volatile __u64 *)&service->table, hash);
	if (slot_state(slot) != SLOT_SETTLED && service->tracking != TRACKING_NONE)
		return drop(p, REASON_FRAGMENT_EARLY);
	note_begin(note, NOTE_DIRECT);
	note->service_index = index;
	note->service_generation = service->generation;
	note->source.low = hash;
	note->backend = slot_current(slot);
	if (!note->backend)
		return drop(p, REASON_NO_BACKEND);
	p->reason = REASON_FRAGMENT_FOLLOWED;
	return VERDICT_FRAGMENT;
}

/* The note of a later fragment. VERDICT_FRAGMENT: it is there. */
static __always_inline enum verdict fragment_recall(struct packet *p, __u32 flags, __u32 epoch,
						    struct scratch *scratch)
{
	if (!note_find(scratch)) {
		if (!flags)
			return pass(p, REASON_NOT_OURS);
		if (flags & ADDRESS_HOST_OWN)
			return pass(p, REASON_FRAGMENT);
		return fragment_place(p, flags, epoch, &scratch->flow);
	}
	if (scratch->flow.direction == NOTE_PASS)
		return pass(p, REASON_NO_SERVICE);
	p->reason = REASON_FRAGMENT_FOLLOWED;
	return VERDICT_FRAGMENT;
}

/* Finds what is to become of a fragment, or of what has an IPv6 fragment header.
 * VERDICT_NEXT: it goes the ordinary way; VERDICT_FRAGMENT: the way of scratch->flow. */
__stage enum verdict fragment_stage(struct xdp_md *ctx, struct packet *p, __u32 flags, __u32 epoch)
{
	struct scratch *scratch = scratch_get();
	enum verdict verdict;

	if (!p || !scratch)
		return VERDICT_DROP;
	verdict = fragment_parse(ctx, p);
	if (verdict == VERDICT_FRAGMENT)
		return fragment_recall(p, flags, epoch, scratch);
	if (verdict != VERDICT_NEXT)
		return flags ? verdict : pass(p, REASON_NOT_OURS);
	if (!is_fragment(p))
		return VERDICT_NEXT;
	verdict = fragment_choose(p, flags, epoch, &scratch->flow);
	return verdict == VERDICT_REJECT ? reject_answer(ctx, p, scratch->flow.service_index) :
					   verdict;
}

/* The last stage of a fragment to a backend that answers the client itself. */
__stage enum verdict fragment_direct_forward(struct xdp_md *ctx, struct packet *p)
{
	struct scratch *scratch = scratch_get();
	struct service *service;
	enum verdict verdict;
	__u32 index;

	if (!p || !scratch)
		return VERDICT_DROP;
	index = scratch->flow.service_index;
	service = bpf_map_lookup_elem(&sh_services, &index);
	if (!service || service->forwarding < FORWARDING_DSR_L2)
		return drop(p, REASON_BACKEND_GONE);
	if (p->ttl <= 1 && service->forwarding != FORWARDING_DSR_L2)
		return VERDICT_REFUSE;
	verdict = direct_forward(ctx, p, index, service, scratch->flow.backend,
				 scratch->flow.source.low, 0);
	if (p->reason == REASON_FRAGMENT_FIRST && verdict != VERDICT_REFUSE) {
		note_put(scratch);
		p->reason = REASON_NONE; /* nothing is left for nat_note to do */
	}
	return verdict;
}

/* The last stage of a later fragment of NAT. */
__stage enum verdict fragment_nat_forward(struct xdp_md *ctx, struct packet *p)
{
	return p ? flow_forward(ctx, p, 0) : VERDICT_DROP;
}

static __always_inline enum verdict fragment_forward(struct xdp_md *ctx, struct packet *p)
{
	struct scratch *scratch = scratch_get();
	enum verdict verdict;

	if (!scratch)
		return drop(p, REASON_INTERNAL);
	if (!flow_home(&scratch->flow))
		return drop(p, REASON_BACKEND_GONE);
	if (scratch->flow.direction == NOTE_DIRECT)
		verdict = fragment_direct_forward(ctx, p);
	else
		verdict = fragment_nat_forward(ctx, p);
	/* RFC 1812, 4.3.2.7: no error is sent for a later fragment. RFC 4443 knows no such rule. */
	if (verdict == VERDICT_REFUSE && p->family == FAMILY_IP4 &&
	    p->reason == REASON_FRAGMENT_FOLLOWED)
		return drop(p, p->mtu ? REASON_TOO_BIG : REASON_ICMP_LIMITED);
	return verdict;
}

__stage enum verdict icmp_stage(struct xdp_md *ctx, struct packet *p, __u32 flags)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
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

/* Decides whether the packet is ours, by where it goes. */
static __always_inline enum verdict address_stage(struct xdp_md *ctx, struct packet *p)
{
	enum verdict verdict = transport_parse(ctx, p);
	__u32 flags, epoch, service_index = SERVICE_NONE;
	struct settings *settings = settings_get();
	struct known *known = known_place(p);

	if (!settings || !known)
		return pass(p, REASON_NOT_OURS);
	epoch = *(volatile __u32 *)&settings->epoch;
	if (verdict == VERDICT_NEXT && known_is(known, p, epoch)) {
		flags = known->flags;
		service_index = known->service_index;
	} else {
		flags = address_flags(&p->key.destination);
		/* Answers to clients of nat-destination go to the client's own address. */
		if (!flags && !settings->nat_destination)
			return pass(p, REASON_NOT_OURS);
		if (verdict != VERDICT_NEXT) {
			if (verdict == VERDICT_FRAGMENT)
				verdict = fragment_stage(ctx, p, flags, epoch);
			else if (!flags)
				return pass(p, REASON_NOT_OURS);
			if (verdict == VERDICT_FRAGMENT)
				verdict = fragment_forward(ctx, p);
			if (verdict != VERDICT_NEXT)
				return verdict == VERDICT_REFUSE ? error_answer(ctx, p) : verdict;
		}
		if (p->key.protocol == IPPROTO_ICMP || p->key.protocol == IPPROTO_ICMPV6)
			return icmp_stage(ctx, p, flags);
		if (flags & ADDRESS_VIP)
			service_index = service_find(p, flags, epoch);
	}
	if ((features & FEATURE_DIRECT) && (flags & ADDRESS_DIRECT) &&
	    service_index != SERVICE_NONE)
		verdict = direct_stage(ctx, p, service_index);
	if (verdict == VERDICT_NEXT)
		verdict = flow_stage(ctx, p, flags & ADDRESS_VIP, service_index);
	if (verdict == VERDICT_NEXT)
		verdict = flow_forward(ctx, p, 1);
	if (verdict == VERDICT_REJECT)
		verdict = reject_answer(ctx, p, service_index);
	return verdict == VERDICT_REFUSE ? error_answer(ctx, p) : verdict;
}

static __always_inline int mac_is_ours(const struct ethhdr *eth)
{
	__u32 slot = interface_slot;
	struct interface *in = bpf_map_lookup_elem(&sh_interfaces, &slot);
	const __u16 *a = (const __u16 *)eth->h_dest, *b;

	if (!in)
		return 0;
	b = (const __u16 *)in->mac;
	return !((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]));
}

/* Group addresses: only a neighbour solicitation may concern us. */
static __always_inline enum verdict multicast_stage(struct xdp_md *ctx, struct packet *p)
{
	if (p->family != FAMILY_IP6 || p->key.protocol != IPPROTO_ICMPV6)
		return pass(p, REASON_MULTICAST);
	return nd_answer(ctx, p);
}

static __always_inline enum verdict frame_stage(struct xdp_md *ctx, struct packet *p)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	int group, ours;
	enum verdict verdict;

	if ((void *)(eth + 1) > data_end)
		return pass(p, REASON_MALFORMED);
	group = eth->h_dest[0] & 1;
	ours = mac_is_ours(eth);
	if (!group && !ours)
		return pass(p, REASON_OTHER_MAC);
	switch (eth->h_proto) {
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
		return pass(p, REASON_VLAN);
	default:
		return pass(p, REASON_NOT_IP);
	}
	if (verdict != VERDICT_NEXT)
		return verdict;
	return group ? multicast_stage(ctx, p) : address_stage(ctx, p);
}

/* Out of an interface of ours. One that has gone has left the device map, too. */
static __always_inline int frame_redirect(const struct packet *p, __u32 slot)
{
	int action = bpf_redirect_map(&sh_tx_ports, slot, XDP_DROP);

	if (action == XDP_DROP)
		count_reason(REASON_EGRESS_UNLISTED, p->frame_size);
	return action;
}

SEC("xdp.frags")
int sh_xdp(struct xdp_md *ctx)
{
	struct packet p = { .frame_size = ctx->data_end - ctx->data };
	enum verdict verdict = frame_stage(ctx, &p);

	if (p.reason) {
		if (p.reason == REASON_FRAGMENT_FIRST) /* and has been sent, or it had another */
			nat_note();
		else
			count_reason(p.reason, p.frame_size);
	}
	switch (verdict) {
	case VERDICT_PASS:
		chain_after(ctx);
		return XDP_PASS;
	case VERDICT_SEND_BACK:
		if (redirect_back)
			return frame_redirect(&p, interface_slot);
		return XDP_TX;
	case VERDICT_SEND_ON:
		return frame_redirect(&p, p.egress);
	default:
		return XDP_DROP;
	}
}
