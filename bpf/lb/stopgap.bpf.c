// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Keeps packets that are shunt's from the host's stack while an interface has no XDP program:
 * native and generic mode exclude each other there (dev_xdp_attach in net/core/dev.c), so the
 * one goes before the other comes.
 *
 *   frame ─► XDP: none for the moment ─► tc ingress: sh_stopgap ─┬─► shunt's ──► dropped
 *                                                              └─► else ─────► the host's stack
 *
 * To the host these packets belong to no socket, so it would reset each of their connections.
 * Senders repeat dropped packets.
 *
 * Invariant: a packet of the host's own passes. A packet that may be the host's, such as a fragment
 * without ports to an address that the host has, passes too.
 */
#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#include "packet.h"
#include "../ctx/sk_buff.h"
#include "service.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* CLOCK_MONOTONIC in ns. A program that clsact holds may outlive a daemon that is killed
 * meanwhile; from this time on it passes everything. */
volatile const __u64 stopgap_end_ns = 0;

#define IP4_LATER_FRAGMENT 0x1fff

static __always_inline int ports_load(struct __sk_buff *skb, struct packet *p, __u32 offset)
{
	__be16 ports[2];

	if (p->key.protocol != IPPROTO_TCP && p->key.protocol != IPPROTO_UDP)
		return 0;
	if (bpf_skb_load_bytes(skb, offset, ports, sizeof(ports)))
		return -1;
	p->key.source_port = ports[0];
	p->key.destination_port = ports[1];
	return 0;
}

static __always_inline int ip4_load(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, L3_OFFSET, &ip, sizeof(ip)))
		return -1;
	p->key.source = addr_from_ip4(ip.saddr);
	p->key.destination = addr_from_ip4(ip.daddr);
	if (ip.frag_off & bpf_htons(IP4_LATER_FRAGMENT))
		return 0; /* useless to the host without the first fragment, which has the ports */
	p->key.protocol = ip.protocol;
	return ports_load(skb, p, L3_OFFSET + ip.ihl * 4);
}

/* Extension headers are not followed: TCP has none in practice, and to a VIP they do not matter. */
static __always_inline int ip6_load(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, L3_OFFSET, &ip, sizeof(ip)))
		return -1;
	p->key.source = addr_from_ip6(&ip.saddr);
	p->key.destination = addr_from_ip6(&ip.daddr);
	p->key.protocol = ip.nexthdr;
	return ports_load(skb, p, L3_OFFSET + sizeof(ip));
}

/* Whether the program at XDP would take the packet. */
static __always_inline int is_ours(const struct packet *p, const struct settings *settings)
{
	__u32 flags = address_flags(&p->key.destination);

	if ((flags & ADDRESS_VIP) && !(flags & ADDRESS_HOST_OWN))
		return 1;
	if (!p->key.source_port && !p->key.destination_port)
		return 0;
	if ((flags & ADDRESS_VIP) &&
	    service_find(p, flags, *(volatile __u32 *)&settings->epoch) != SERVICE_NONE)
		return 1;
	/* An entry that is recycled as it is found can at worst cost a packet. */
	return !!bpf_map_lookup_elem(&sh_flows, &p->key);
}

SEC("tc")
int sh_stopgap(struct __sk_buff *skb)
{
	struct settings *settings = settings_get();
	struct packet p = { .frame_size = skb->len };
	int unread;

	/* A frame with a tag is the VLAN's own interface's. */
	if (!settings || bpf_ktime_get_ns() > stopgap_end_ns || skb->pkt_type != PACKET_HOST ||
	    skb->vlan_present)
		return TC_ACT_UNSPEC;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		unread = ip4_load(skb, &p);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		unread = ip6_load(skb, &p);
	else
		return TC_ACT_UNSPEC;
	if (unread || !is_ours(&p, settings))
		return TC_ACT_UNSPEC;
	count_reason(REASON_MODE_CHANGE, p.frame_size);
	return TC_ACT_SHOT;
}
