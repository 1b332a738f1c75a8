// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The UDP path: alone on an interface, or as the balancer's guest (lb/guest.h), which then has dealt with
 * what is for its services.
 *
 *   frame ─► for this interface? ─► IPv4, IPv6 ─► lease_find ─► a socket
 *                  │ no                 │ other        │ no
 *                  └────────────────────┴──────────────┴─────► the program after, the stack
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

/* Types that user space must know, and no map leads to. */
const enum lease_limit udp_limit;
const enum lease_pass udp_passed;

static __always_inline enum verdict network_parse(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > data_end)
		return pass(p, REASON_MALFORMED);
	/* The lowest bit of the first octet: a group, to which datagrams go as well (RFC 1112, 6.4). */
	if (mac_load(eth->h_dest) != interface_mac && !(eth->h_dest[0] & 1))
		return pass(p, REASON_OTHER_MAC);
	switch (frame_protocol(data)) {
	case bpf_htons(ETH_P_IP):
		return ip4_parse(ctx, p, data, data_end);
	case bpf_htons(ETH_P_IPV6):
		return ip6_parse(ctx, p, data, data_end);
	}
	return pass(p, REASON_NOT_IP);
}

/* Whether a frame is surely no lease's, from a glance at it: most that come here are so, and are spared the
 * rest. What is odd in any way is not so sure. */
static __always_inline int frame_is_no_lease(struct frame_ctx *ctx)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ipv6hdr *ip6 = data + L3_OFFSET;
	struct iphdr *ip = data + L3_OFFSET;
	struct lease_key key = {};
	struct udphdr *udp;
	__u8 protocol;

	if ((void *)(ip + 1) > data_end)
		return 0;
	if (frame_protocol(data) == bpf_htons(ETH_P_IP)) {
		if (ip->version != 4 || ip->ihl != 5 || ip->frag_off & bpf_htons(IP4_FRAGMENT_BITS))
			return 0;
		protocol = ip->protocol;
		key.address = addr_from_ip4(ip->daddr);
		udp = (void *)(ip + 1);
	} else {
		if (frame_protocol(data) != bpf_htons(ETH_P_IPV6))
			return 1;
		if ((void *)(ip6 + 1) > data_end)
			return 0;
		protocol = ip6->nexthdr;
		key.address = addr_from_ip6(&ip6->daddr);
		udp = (void *)(ip6 + 1);
	}
	if (protocol == IPPROTO_TCP)
		return 1;
	if (protocol != IPPROTO_UDP || (void *)(udp + 1) > data_end)
		return 0;
	key.port = udp->dest;
	return !lease_is_possible(&key);
}

SEC("xdp.frags")
int sh_udp(struct xdp_md *ctx)
{
	struct packet p = { .frame_size = ctx_size_hint(ctx) };

	if (frame_is_no_lease(ctx)) {
		bpf_tail_call_static(ctx, &sh_ud_chain, CHAIN_AFTER);
		return XDP_PASS;
	}
	if (network_parse(ctx, &p) == VERDICT_NEXT) {
		switch (lease_find(ctx, &p)) {
		case LEASE_REDIRECT:
			return XDP_REDIRECT;
		case LEASE_DISCARD:
			return XDP_DROP;
		case LEASE_PASS:
			return XDP_PASS;
		case LEASE_NONE:
			break;
		}
	} else if (p.reason == REASON_MALFORMED) {
		lease_pass_count(PASSED_MALFORMED);
	}
	bpf_tail_call_static(ctx, &sh_ud_chain, CHAIN_AFTER);
	return XDP_PASS;
}
