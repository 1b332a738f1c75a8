/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments of TCP and UDP to us follow the first one of their datagram.
 *
 *   first ─► the ordinary stages ─► sent ─► note in sh_fragments: its flow or backend
 *   later ─► note ─┬─► found ─► as the first: addresses rewritten, or wrapped whole
 *                  └─► none ──► placed by its addresses alone, where the service allows it
 *                               (hash: addresses); else dropped, as fragment_early
 *
 * No fragment is held back: a later fragment that overtakes its first one costs the datagram, and
 * the sender repeats it under another identification. A note is sealed like a flow's entry, because
 * hash elements are recycled without a grace period.
 *
 * A note may be older than its datagram: identifications come round (RFC 4963). The next first
 * fragment replaces it; until then, and for NOTE_SECONDS_MAX at most, a later fragment would
 * go where the datagram before went, and end there in a reassembly that its checksum fails.
 *
 * Checksums: the first fragment's covers the whole datagram, so it is only ever updated. One
 * that the sender had left to hardware cannot occur: the host that fragments completes it first
 * (skb_checksum_help in the kernel's ip_do_fragment and ip6_fragment), for no hardware could.
 */
#ifndef SHUNT_FRAGMENT_H
#define SHUNT_FRAGMENT_H

#include "direct.h"
#include "transport.h"
#include "place.h"
#include "service.h"

/* As long as Linux waits for the rest of a datagram (IP_FRAG_TIME; for IPv6 it waits 60 s, as
 * RFC 8200 says): a later fragment is of no use to an IPv4 backend, and the longer a note is
 * believed, the more identifications have come round. */
#define NOTE_SECONDS_MAX 30

#define IP6_MORE 0x0001

struct fragment_header { /* RFC 8200, 4.5 */
	__u8 next;
	__u8 reserved;
	__be16 offset_and_more;
	__be16 id[2];
};

/* The note of the packet's datagram. */
struct noting {
	struct flow_key key;
	struct note note;
};

SCRATCH(sh_noting, struct noting);

static __always_inline __u64 note_seal(const struct flow_key *key, const struct note *note)
{
	return flow_seal(key, &note->flow) + ((__u64)note->hash << 32 | note->kind) * MIX_11;
}

/* Stores noting->note as the note of the packet's datagram. */
__stage int note_put(void)
{
	struct noting *noting = scratch_of(&sh_noting);
	struct flow_key *key;
	struct note *note;

	if (!noting)
		return 0;
	key = &noting->key;
	note = &noting->note;
	note->flow.life = life_make(note->flow.nonce, 0, bpf_jiffies64());
	note->flow.seal = note_seal(key, note);
	bpf_map_update_elem(&sh_fragments, key, note, BPF_ANY);
	return 0;
}

/* Finds the note of the packet's datagram and copies it to noting->note. 1: it is there. */
static __always_inline int note_find(struct noting *noting)
{
	struct note *live, *copy = &noting->note;

	live = bpf_map_lookup_elem(&sh_fragments, &noting->key);
	if (!live)
		return 0;
	__builtin_memcpy(copy, live, sizeof(*copy));
	/* The compiler must not read the live entry again in place of the copy. */
	asm volatile("" : : "r"(copy) : "memory");
	if (copy->flow.seal != note_seal(&noting->key, copy) ||
	    !life_belongs(copy->flow.life, copy->flow.nonce)) {
		count_reason(REASON_FLOW_RECYCLED, 0);
		return 0;
	}
	return life_age(copy->flow.life, bpf_jiffies64()) <= NOTE_SECONDS_MAX * jiffies_per_second;
}

static __always_inline void note_begin(struct note *note, enum note_kind kind)
{
	__builtin_memset(note, 0, sizeof(*note));
	note->flow.nonce = bpf_get_prandom_u32();
	note->kind = kind;
}

/* Makes the note of a first fragment that NAT sends: f is its flow. */
__stage int nat_note(const struct flow *f)
{
	struct noting *noting = scratch_of(&sh_noting);

	if (!noting || !f)
		return 0;
	noting->note.flow = *f;
	noting->note.hash = 0;
	noting->note.kind = NOTE_NAT;
	return note_put();
}

/* Makes the note of a first fragment to a port that has no service. */
__stage int pass_note(void)
{
	struct noting *noting = scratch_of(&sh_noting);

	if (!noting)
		return 0;
	note_begin(&noting->note, NOTE_PASS);
	return note_put();
}

/* The transport header of a first fragment must be complete: without flags and ports no host
 * on the path can judge it (RFC 1858, 3; RFC 7112, 5). */
static __always_inline enum verdict first_parse(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	void *l4 = data + (p->l4_offset & L4_OFFSET_MAX);
	struct udphdr *udp = l4;
	struct tcphdr *tcp = l4;

	p->has_payload = 1;
	if (p->key.protocol == IPPROTO_UDP) {
		if (p->l4_size < sizeof(*udp))
			return drop(p, REASON_FRAGMENT_TINY);
		if ((void *)(udp + 1) > data_end || bpf_ntohs(udp->len) < sizeof(*udp))
			return drop(p, REASON_MALFORMED_TRANSPORT);
		p->key.source_port = udp->source;
		p->key.destination_port = udp->dest;
		return VERDICT_NEXT;
	}
	if (p->key.protocol != IPPROTO_TCP)
		return pass(p, REASON_FRAGMENT);
	if (p->l4_size < sizeof(*tcp))
		return drop(p, REASON_FRAGMENT_TINY);
	if ((void *)(tcp + 1) > data_end || tcp->doff * 4 < sizeof(*tcp))
		return drop(p, REASON_MALFORMED_TRANSPORT);
	if (tcp->doff * 4 > p->l4_size)
		return drop(p, REASON_FRAGMENT_TINY);
	p->key.source_port = tcp->source;
	p->key.destination_port = tcp->dest;
	p->tcp_flags = ((__u8 *)tcp)[13];
	return VERDICT_NEXT;
}

/* A later fragment that reaches into the TCP header, which the first one has whole, would change
 * it behind our back (RFC 3128). A UDP header ends before any later fragment can begin. */
static __always_inline enum verdict later_parse(struct packet *p, __u8 protocol, __u32 offset)
{
	p->fragment = FRAGMENT_LATER;
	if (protocol == IPPROTO_TCP && offset < sizeof(struct tcphdr))
		return drop(p, REASON_FRAGMENT_TINY);
	return VERDICT_FRAGMENT;
}

static __always_inline enum verdict ip4_fragment_parse(struct frame_ctx *ctx, struct packet *p,
						       struct flow_key *key)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct iphdr *ip = data + L3_OFFSET;
	__u32 offset;

	if ((void *)(ip + 1) > data_end)
		return drop(p, REASON_INTERNAL);
	p->key.protocol = ip->protocol;
	if (ip->protocol != IPPROTO_TCP && ip->protocol != IPPROTO_UDP)
		return pass(p, REASON_FRAGMENT);
	key->source_port = ip->id;
	key->protocol = ip->protocol; /* RFC 791, 3.2: the protocol tells datagrams apart, too */
	offset = (bpf_ntohs(ip->frag_off) & IP4_OFFSET_BITS) * 8;
	if (offset)
		return later_parse(p, ip->protocol, offset);
	p->fragment = FRAGMENT_FIRST;
	return first_parse(ctx, p);
}

/* The headers after the fragment header, of a packet that has its beginning. */
static __always_inline enum verdict ip6_rest_parse(struct frame_ctx *ctx, struct packet *p,
						   int whole)
{
	enum verdict verdict = VERDICT_NEXT;

	if (p->key.protocol != IPPROTO_TCP && p->key.protocol != IPPROTO_UDP)
		verdict = ip6_extensions_walk(ctx, p);
	if (verdict != VERDICT_NEXT) /* RFC 7112, 5: the first fragment must hold all headers */
		return whole ? verdict : drop(p, REASON_FRAGMENT_TINY);
	if (p->key.protocol == IPPROTO_ROUTING)
		return pass(p, REASON_SOURCE_ROUTED);
	if (p->key.protocol == IPPROTO_RAW)
		return drop(p, REASON_EXTENSION_LIMIT);
	if (!whole)
		return first_parse(ctx, p);
	/* RFC 6980: neighbour discovery is not taken from behind a fragment header. */
	if (p->key.protocol != IPPROTO_TCP && p->key.protocol != IPPROTO_UDP)
		return pass(p, REASON_FRAGMENT);
	return transport_parse(ctx, p);
}

static __always_inline enum verdict ip6_fragment_parse(struct frame_ctx *ctx, struct packet *p,
						       struct flow_key *key)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct fragment_header *header = data + (p->l4_offset & L4_OFFSET_MAX);
	__u32 field;

	if ((void *)(header + 1) > data_end || p->l4_size < sizeof(*header))
		return pass(p, REASON_MALFORMED);
	/* RFC 8200, 4.5: fragments of one packet may differ in their next header. */
	key->protocol = IPPROTO_FRAGMENT;
	key->source_port = header->id[0];
	key->destination_port = header->id[1];
	p->key.protocol = header->next;
	p->l4_offset += sizeof(*header);
	p->l4_size -= sizeof(*header);
	field = bpf_ntohs(header->offset_and_more);
	if (field & IP6_OFFSET_BITS) {
		/* Behind an extension header there may be TCP or UDP: only the first shows it. */
		if (header->next != IPPROTO_TCP && header->next != IPPROTO_UDP &&
		    !ip6_is_extension(header->next))
			return pass(p, REASON_FRAGMENT);
		return later_parse(p, header->next, field & IP6_OFFSET_BITS);
	}
	if (!(field & IP6_MORE)) /* RFC 6946: an atomic fragment, which is a whole packet */
		return ip6_rest_parse(ctx, p, 1);
	p->fragment = FRAGMENT_FIRST;
	return ip6_rest_parse(ctx, p, 0);
}

/*
 * Prepares a fragment for the ordinary stages. VERDICT_NEXT: the packet has its ports, and is
 * either a first fragment or a whole packet; VERDICT_FRAGMENT: a later fragment. The
 * key of its note is in noting->key.
 */
__stage enum verdict fragment_parse(struct frame_ctx *ctx, struct packet *p)
{
	struct noting *noting = scratch_of(&sh_noting);
	struct flow_key *key;

	if (!p)
		return VERDICT_DROP;
	if (!noting)
		return drop(p, REASON_INTERNAL);
	key = &noting->key;
	__builtin_memset(key, 0, sizeof(*key));
	key->source = p->key.source;
	key->destination = p->key.destination;
	if (p->family == FAMILY_IP4)
		return ip4_fragment_parse(ctx, p, key);
	return ip6_fragment_parse(ctx, p, key);
}

/* Begins the note of a first fragment. VERDICT_FRAGMENT: it is for a service with direct return,
 * and has a backend; VERDICT_NEXT: it is not for such a service. */
static __always_inline enum verdict fragment_choose(struct packet *p,
						    const struct settings *settings, __u32 flags,
						    __u32 epoch, struct note *note)
{
	struct service *service;
	__u32 index;

	if (!(flags & ADDRESS_DIRECT))
		return VERDICT_NEXT;
	index = service_find(p, flags, epoch);
	service = direct_service_find(index);
	if (!service)
		return VERDICT_NEXT;
	if (direct_admit(p, settings, service, index) != VERDICT_NEXT)
		return VERDICT_DROP;
	note_begin(note, NOTE_DIRECT);
	note->flow.service_index = index;
	note->flow.service_generation = service->generation;
	/* The same hash as for later fragments, which have no ports and may come before the first. */
	note->hash = service->flags & SERVICE_HASHES_ADDRESSES ?
			     addresses_hash(&p->key, service->seed) :
			     flow_hash(&p->key, service->seed);
	note->flow.backend = backend_choose(p, service, index, note->hash);
	return note->flow.backend ? VERDICT_FRAGMENT : VERDICT_REJECT;
}

/*
 * Places a later fragment without a note, if its addresses alone decide: the first fragment goes
 * to the same backend, through any balancer, unless flows of the slot may be elsewhere.
 */
static __always_inline enum verdict fragment_place(struct packet *p,
						   const struct settings *settings, __u32 flags,
						   __u32 epoch, struct note *note)
{
	struct service *service;
	__u32 index, hash;
	__u64 slot;

	if (p->key.protocol != IPPROTO_TCP && p->key.protocol != IPPROTO_UDP)
		return drop(p, REASON_FRAGMENT_EARLY);
	p->key.protocol |= FRONTEND_FRAGMENTS;
	index = service_find(p, flags, epoch);
	p->key.protocol &= ~FRONTEND_FRAGMENTS;
	service = direct_service_find(index);
	if (!service || !(service->flags & SERVICE_HASHES_ADDRESSES) || service->affinity_ticks ||
	    service->tracking == TRACKING_ALWAYS)
		return drop(p, REASON_FRAGMENT_EARLY);
	if (direct_admit(p, settings, service, index) != VERDICT_NEXT)
		return VERDICT_DROP;
	hash = addresses_hash(&p->key, service->seed);
	slot = slot_get(*(volatile __u64 *)&service->table, hash);
	if (slot_state(slot) != SLOT_SETTLED && service->tracking != TRACKING_NONE)
		return drop(p, REASON_FRAGMENT_EARLY);
	note_begin(note, NOTE_DIRECT);
	note->flow.service_index = index;
	note->flow.service_generation = service->generation;
	note->hash = hash;
	note->flow.backend = slot_current(slot);
	if (!note->flow.backend)
		return drop(p, REASON_NO_BACKEND);
	p->reason = REASON_FRAGMENT_FOLLOWED;
	return VERDICT_FRAGMENT;
}

/* The note of a later fragment. VERDICT_FRAGMENT: it is there. */
static __always_inline enum verdict fragment_recall(struct packet *p,
						    const struct settings *settings, __u32 flags,
						    __u32 epoch, struct noting *noting)
{
	if (!note_find(noting)) {
		if (!flags)
			return pass(p, REASON_NOT_OURS);
		if (flags & ADDRESS_HOST_OWN)
			return pass(p, REASON_FRAGMENT);
		return fragment_place(p, settings, flags, epoch, &noting->note);
	}
	if (noting->note.kind == NOTE_PASS)
		return pass(p, REASON_NO_SERVICE);
	p->reason = REASON_FRAGMENT_FOLLOWED;
	return VERDICT_FRAGMENT;
}

/* Decides on a fragment, or on a packet with an IPv6 fragment header. VERDICT_NEXT: the ordinary
 * stages follow; VERDICT_FRAGMENT: the packet is sent as noting->note says; VERDICT_REJECT: no backend
 * of fragment_service takes it, and the caller answers it, because the stack is too short here. */
__stage enum verdict fragment_stage(struct frame_ctx *ctx, struct packet *p, __u32 flags,
				    __u32 epoch)
{
	struct settings *settings = settings_get();
	struct noting *noting = scratch_of(&sh_noting);
	enum verdict verdict;

	if (!p || !noting || !settings)
		return VERDICT_DROP;
	verdict = fragment_parse(ctx, p);
	if (verdict == VERDICT_FRAGMENT)
		return fragment_recall(p, settings, flags, epoch, noting);
	if (verdict != VERDICT_NEXT)
		return flags ? verdict : pass(p, REASON_NOT_OURS);
	if (!p->fragment)
		return VERDICT_NEXT;
	return fragment_choose(p, settings, flags, epoch, &noting->note);
}

/* The service that fragment_stage has found no backend of. */
static __always_inline __u32 fragment_service(void)
{
	struct noting *noting = scratch_of(&sh_noting);

	return noting ? noting->note.flow.service_index : SERVICE_NONE;
}

/* The last stage of a fragment to a backend that answers the client itself. */
__stage enum verdict fragment_direct_forward(struct frame_ctx *ctx, struct packet *p)
{
	struct settings *settings = settings_get();
	struct noting *noting = scratch_of(&sh_noting);
	struct service *service;
	enum verdict verdict;
	__u32 index;

	if (!p || !noting || !settings)
		return VERDICT_DROP;
	index = noting->note.flow.service_index;
	service = direct_service_find(index);
	if (!service)
		return drop(p, REASON_BACKEND_GONE);
	if (p->ttl <= 1 && service->forwarding != FORWARDING_DSR_L2)
		return refuse(p, REFUSAL_TTL);
	verdict = direct_forward(ctx, p, settings, index, service, noting->note.flow.backend,
				 noting->note.hash, 0);
	if (p->fragment == FRAGMENT_FIRST && verdict_sends(verdict))
		note_put();
	return verdict;
}

#endif
