// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The UDP path: alone on an interface, or as the balancer's guest (lb/guest.h), after the balancer has
 * taken the packets for its services.
 *
 *   frame ─► glance ─► plain datagram ─► lease_find ─► a socket
 *              │ │ odd                       │ no
 *              │ └─► odd_count ──────────┐   │
 *              └─────────────────────────┴───┴─► the program after, the stack
 *
 * Invariant: a frame that no socket gets is passed as it came, unless its lease has LEASE_DROP.
 */
#include "../ctx/xdp.h"

#include "../core/parse.h"
#include "lease.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* The interface's own address, as mac_load() has it. Frames to another station pass: an interface in
 * promiscuous mode sees them, and the kernel's socket would not get them either. */
volatile const __u64 interface_mac = 0;

/* Types that user space needs and that no map names. */
const enum lease_limit udp_limit;
const enum lease_pass udp_passed;

/* Whether a frame is for this interface. The lowest bit of the first octet: a group, to which datagrams go as well
 * (RFC 1112, 6.4). */
static __always_inline int station_is_own(const struct ethhdr *eth)
{
	return mac_load(eth->h_dest) == interface_mac || eth->h_dest[0] & 1;
}

static __always_inline enum verdict network_parse(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > data_end)
		return pass(p, REASON_MALFORMED);
	if (!station_is_own(eth))
		return pass(p, REASON_OTHER_MAC);
	switch (frame_protocol(data)) {
	case bpf_htons(ETH_P_IP):
		return ip4_parse(ctx, p, data, data_end);
	case bpf_htons(ETH_P_IPV6):
		return ip6_parse(ctx, p, data, data_end);
	}
	return pass(p, REASON_NOT_IP);
}

/* Counts a frame that is no lease's only because it is a fragment, has options, or contradicts itself. The stack handles
 * it. */
static __always_inline void odd_count(struct frame_ctx *ctx)
{
	struct packet p = { .frame_size = ctx_size_hint(ctx) };
	__u32 plain;

	if (network_parse(ctx, &p) != VERDICT_NEXT) {
		if (p.reason == REASON_MALFORMED)
			lease_pass_count(PASSED_MALFORMED);
		return;
	}
	plain = L3_OFFSET +
		(p.family == FAMILY_IP4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));
	if (p.key.protocol == IPPROTO_FRAGMENT)
		lease_pass_count(PASSED_FRAGMENT);
	else if (p.key.protocol == IPPROTO_UDP)
		lease_pass_count(p.l4_offset == plain ? PASSED_MALFORMED : PASSED_OPTIONS);
}

/* The kinds of frames, as far as leases go. */
enum glance {
	GLANCE_OTHER =
		0, /* certainly for no lease, as most frames are: the program looks no further */
	GLANCE_DATAGRAM, /* a plain datagram, which may be for a lease */
	GLANCE_ODD, /* for no lease either, but perhaps to be counted */
};

/* The rest of a glance at a datagram whose destination may be leased. */
static __always_inline enum glance datagram_check(struct frame_ctx *ctx, struct datagram *d,
						  const void *data, const struct udphdr *udp,
						  __u32 size)
{
	__u32 udp_size = bpf_ntohs(udp->len), offset = (const void *)udp - data;

	if (!station_is_own(data))
		return GLANCE_OTHER;
	d->end = L3_OFFSET + size;
	if (udp_size < sizeof(*udp) || offset + udp_size > d->end)
		return GLANCE_ODD;
	if (d->end > ctx_size_hint(ctx) && d->end > ctx_size(ctx))
		return GLANCE_ODD;
	return GLANCE_DATAGRAM;
}

static __always_inline enum glance glance4(struct frame_ctx *ctx, struct datagram *d, void *data,
					   void *data_end)
{
	struct iphdr *ip = data + L3_OFFSET;
	struct udphdr *udp = (void *)(ip + 1);

	if ((void *)(ip + 1) > data_end || ip->version != 4 || ip->ihl != 5 ||
	    ip->frag_off & bpf_htons(IP4_FRAGMENT_BITS))
		return GLANCE_ODD;
	if (ip->protocol == IPPROTO_TCP)
		return GLANCE_OTHER;
	if (ip->protocol != IPPROTO_UDP || (void *)(udp + 1) > data_end)
		return GLANCE_ODD;
	d->key.address = addr_from_ip4(ip->daddr);
	d->key.port = udp->dest;
	if (!lease_is_possible(&d->key))
		return GLANCE_OTHER;
	return datagram_check(ctx, d, data, udp, bpf_ntohs(ip->tot_len));
}

static __always_inline enum glance glance6(struct frame_ctx *ctx, struct datagram *d, void *data,
					   void *data_end)
{
	struct ipv6hdr *ip = data + L3_OFFSET;
	struct udphdr *udp = (void *)(ip + 1);
	struct addr source;

	if ((void *)(ip + 1) > data_end)
		return GLANCE_ODD;
	if (ip->nexthdr == IPPROTO_TCP)
		return GLANCE_OTHER;
	if (ip->nexthdr != IPPROTO_UDP || (void *)(udp + 1) > data_end)
		return GLANCE_ODD;
	d->key.address = addr_from_ip6(&ip->daddr);
	d->key.port = udp->dest;
	if (!lease_is_possible(&d->key))
		return GLANCE_OTHER;
	source = addr_from_ip6(&ip->saddr);
	/* Packets that ip6_parse refuses: another version, and addresses that could match an IPv4 lease. */
	if (ip->version != 6 || addr_is_mapped(&source) || addr_is_mapped(&d->key.address))
		return GLANCE_ODD;
	return datagram_check(ctx, d, data, udp, sizeof(*ip) + bpf_ntohs(ip->payload_len));
}

/* Reads no more of a frame than it takes to tell its kind. */
static __always_inline enum glance frame_glance(struct frame_ctx *ctx, struct datagram *d)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);

	if (data + sizeof(struct ethhdr) > data_end)
		return GLANCE_ODD;
	switch (frame_protocol(data)) {
	case bpf_htons(ETH_P_IP):
		return glance4(ctx, d, data, data_end);
	case bpf_htons(ETH_P_IPV6):
		return glance6(ctx, d, data, data_end);
	}
	return GLANCE_OTHER;
}

SEC("xdp.frags")
int sh_udp(struct xdp_md *ctx)
{
	struct datagram d = {};

	switch (frame_glance(ctx, &d)) {
	case GLANCE_DATAGRAM:
		switch (lease_find(ctx, &d)) {
		case LEASE_REDIRECT:
			return XDP_REDIRECT;
		case LEASE_DISCARD:
			return XDP_DROP;
		case LEASE_PASS:
			return XDP_PASS;
		case LEASE_NONE:
			break;
		}
		break;
	case GLANCE_ODD:
		odd_count(ctx);
		break;
	case GLANCE_OTHER:
		break;
	}
	bpf_tail_call_static(ctx, &sh_ud_chain, CHAIN_AFTER);
	return XDP_PASS;
}
