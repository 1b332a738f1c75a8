// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * From one pod to another, past the host's stack. sh_pod is at the ingress of the host's end of each pod's
 * veth, sh_pod_in at the ingress of the uplink, the interface towards other machines.
 *
 *   pod a                          host                              pod b
 *   eth0 ══ veth ─► sh_pod ─► (netfilter, routing, tc) ─► veth ══ eth0
 *                     │                                            ▲
 *                     └────────────── redirect_peer ───────────────┘
 *
 *   pod a ══ veth ─► sh_pod ── redirect_neigh ─► uplink ═════ other machine
 *   pod a ══ veth ◄───────────── redirect_peer ── sh_pod_in ◄─ uplink ═══
 *
 * Invariant: a packet that is not taken goes on as it came. Nothing is dropped and nothing is written to
 * a packet. Both directions of a connection take the shortcut, or none: conntrack, which follows sequence
 * numbers, would take the packets of only one direction for invalid. So the decision rests on facts that
 * are the same for both: the states of both pods, their MTUs, and conntrack's entry.
 *
 * Invariant: a checked connection can go back to the stack at any packet. So conntrack is liberal with it
 * before its first packet takes the shortcut, and a killed daemon leaves nothing to do.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../ctx/sk_buff.h"

#include "../core/addr.h"
#include "conntrack.h"
#include "maps.h"

char _license[] SEC("license") = "Dual BSD/GPL";

volatile const __u32 mode = POD_MODE_CHECKED;

/* Types that user space needs and that no map names. */
const enum pod_limit pod_limits;
const enum pod_left pod_lefts;
const enum pod_mode pod_modes;

/* Of sys/socket.h, which needs a C library. */
#define AF_INET 2
#define AF_INET6 10

/* More fragments, or an offset: RFC 791, 3.1. */
#define FRAGMENT_BITS 0x3fff
#define TCP_FLAGS_OFFSET 13
#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04

/* The packet of one run. */
struct passage {
	struct addr source, destination;
	struct bpf_sock_tuple tuple;
	__u32 tuple_size;
	__u32 network_size; /* headers of the network layer and, after it is parsed, of the transport */
	__u32 ifindex; /* of the destination's interface */
	struct addr next_hop; /* set if is_far */
	__u16 mtu;
	__u8 is_far; /* the destination is on another machine */
	__u8 protocol;
	__u8 is_first; /* it may begin a connection */
	enum segment segment;
};

/* Of an address, in 32 bits: both words of struct pod have it. */
static __always_inline __u32 pod_check(const struct addr *a)
{
	__u64 words = a->high ^ a->low;

	return (__u32)words ^ (__u32)(words >> 32);
}

static __always_inline enum pod_left ip4_read(struct passage *p, void *data, void *data_end)
{
	struct iphdr *ip = data + ETH_HLEN;

	if ((void *)(ip + 1) > data_end)
		return POD_MALFORMED;
	p->source = addr_from_ip4(ip->saddr);
	p->destination = addr_from_ip4(ip->daddr);
	p->tuple.ipv4.saddr = ip->saddr;
	p->tuple.ipv4.daddr = ip->daddr;
	p->tuple_size = sizeof(p->tuple.ipv4);
	p->network_size = sizeof(*ip);
	p->protocol = ip->protocol;
	if (ip->ihl != 5)
		return POD_OPTIONS;
	if (ip->frag_off & bpf_htons(FRAGMENT_BITS))
		return POD_FRAGMENT;
	return ip->ttl > 1 ? POD_TAKEN : POD_TTL;
}

static __always_inline enum pod_left ip6_read(struct passage *p, void *data, void *data_end)
{
	struct ipv6hdr *ip = data + ETH_HLEN;

	if ((void *)(ip + 1) > data_end)
		return POD_MALFORMED;
	p->source = addr_from_ip6(&ip->saddr);
	p->destination = addr_from_ip6(&ip->daddr);
	if (addr_is_mapped(&p->source) || addr_is_mapped(&p->destination))
		return POD_MALFORMED; /* never on the wire (RFC 4291); it could match an IPv4 pod */
	__builtin_memcpy(p->tuple.ipv6.saddr, &ip->saddr, sizeof(ip->saddr));
	__builtin_memcpy(p->tuple.ipv6.daddr, &ip->daddr, sizeof(ip->daddr));
	p->tuple_size = sizeof(p->tuple.ipv6);
	p->network_size = sizeof(*ip);
	p->protocol = ip->nexthdr;
	if (p->protocol == IPPROTO_FRAGMENT)
		return POD_FRAGMENT;
	if (p->protocol == IPPROTO_HOPOPTS || p->protocol == IPPROTO_ROUTING ||
	    p->protocol == IPPROTO_DSTOPTS || p->protocol == IPPROTO_AH)
		return POD_OPTIONS;
	return ip->hop_limit > 1 ? POD_TAKEN : POD_TTL;
}

/* The interface behind which an address is. */
struct location {
	__u32 ifindex;
	__u16 left;
	__u16 mtu;
};

/* Finds a pod of this machine. */
static __always_inline __u32 pod_find(const struct addr *a, struct location *at)
{
	__u32 check = pod_check(a);
	struct pod *pod = bpf_map_lookup_elem(&sh_pd_pods, a);
	__u64 link, state;

	if (!pod)
		return 0;
	link = *(volatile __u64 *)&pod->link;
	state = *(volatile __u64 *)&pod->state;
	at->ifindex = link;
	at->left = state >> 16;
	at->mtu = state;
	return link >> 32 == check && state >> 32 == check;
}

/* Finds the route to a pod of another machine. */
static __always_inline const struct pod_far *far_find(const struct addr *a)
{
	struct pod_far_key key = { .bits = 8 * sizeof(*a) };

	__builtin_memcpy(key.address, a, sizeof(key.address));
	return bpf_map_lookup_elem(&sh_pd_far, &key);
}

/* Where a packet from a pod of this machine goes, and whether it may. */
static __always_inline enum pod_left pods_find(struct passage *p, __u32 ingress_ifindex)
{
	const struct pod_far *far = NULL;
	struct location to = {}, from = {};

	if (!pod_find(&p->destination, &to)) {
		far = far_find(&p->destination);
		if (!far)
			return POD_NOT_LOCAL;
		to.ifindex = far->ifindex;
		to.left = far->left;
		to.mtu = far->mtu;
		p->next_hop = far->next_hop;
		p->is_far = 1;
	}
	p->ifindex = to.ifindex;
	p->mtu = to.mtu;
	if (!pod_find(&p->source, &from) || from.ifindex != ingress_ifindex ||
	    to.ifindex == ingress_ifindex)
		return POD_SOURCE;
	if (to.left)
		return to.left;
	if (from.left)
		return from.left;
	return far || from.mtu == to.mtu ? POD_TAKEN : POD_MTU;
}

/* The same of a packet that comes in from another machine. */
static __always_inline enum pod_left far_pods_find(struct passage *p, __u32 ingress_ifindex)
{
	const struct pod_far *far;
	struct location to = {};

	if (!pod_find(&p->destination, &to))
		return POD_NOT_LOCAL;
	p->ifindex = to.ifindex;
	p->mtu = to.mtu;
	far = far_find(&p->source);
	if (!far || far->ifindex != ingress_ifindex)
		return POD_SOURCE;
	return to.left ? to.left : far->left;
}

/* Reads the ports, and the kind of a TCP segment, which conntrack's entry depends on. */
static __always_inline enum pod_left transport_read(struct __sk_buff *skb, struct passage *p)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	__u32 is_ip4 = p->tuple_size == sizeof(p->tuple.ipv4);
	void *l4 = data + ETH_HLEN + (is_ip4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));
	struct tcphdr *tcp = l4;
	struct udphdr *udp = l4; /* UDP's ports are at the same offsets as TCP's */
	__u8 flags;

	if (p->protocol != IPPROTO_TCP && p->protocol != IPPROTO_UDP)
		return POD_PROTOCOL;
	if ((void *)(udp + 1) > data_end)
		return POD_MALFORMED;
	if (is_ip4) {
		p->tuple.ipv4.sport = udp->source;
		p->tuple.ipv4.dport = udp->dest;
	} else {
		p->tuple.ipv6.sport = udp->source;
		p->tuple.ipv6.dport = udp->dest;
	}
	if (p->protocol == IPPROTO_UDP) {
		p->is_first = 1;
		p->network_size += sizeof(*udp);
		return POD_TAKEN;
	}
	if ((void *)(tcp + 1) > data_end)
		return POD_MALFORMED;
	p->network_size += tcp->doff * 4;
	flags = ((__u8 *)tcp)[TCP_FLAGS_OFFSET];
	p->is_first = !!(flags & TCP_SYN);
	if (p->is_first)
		return mode == POD_MODE_BYPASS ? POD_TAKEN : POD_HANDSHAKE;
	if (flags & TCP_RST)
		p->segment = SEGMENT_RST;
	else if (flags & TCP_FIN)
		p->segment = SEGMENT_FIN;
	else if (skb->len > ETH_HLEN + p->network_size)
		p->segment = SEGMENT_DATA;
	return POD_TAKEN;
}

/* Whether user space has judged the pods recently. A daemon that is stuck or gone cannot see new rules. */
static __always_inline __u32 pods_watched(void)
{
	__u32 zero = 0;
	__u64 *until_ns = bpf_map_lookup_elem(&sh_pd_watched, &zero);

	return until_ns && bpf_ktime_get_coarse_ns() < *(volatile __u64 *)until_ns;
}

/* The connection of a packet, as the packet has it. */
static __always_inline void flow_read(const struct passage *p, struct pod_flow *flow)
{
	flow->source = p->source;
	flow->destination = p->destination;
	flow->protocol = p->protocol;
	if (p->tuple_size == sizeof(p->tuple.ipv4)) {
		flow->source_port = p->tuple.ipv4.sport;
		flow->destination_port = p->tuple.ipv4.dport;
	} else {
		flow->source_port = p->tuple.ipv6.sport;
		flow->destination_port = p->tuple.ipv6.dport;
	}
}

/* The same connection, with the end that has the smaller address first, so that both directions are one flow. */
static __always_inline struct pod_flow flow_ordered(const struct pod_flow *flow)
{
	const struct addr *a = &flow->source, *b = &flow->destination;

	if (a->high < b->high || (a->high == b->high && a->low <= b->low))
		return *flow;
	return (struct pod_flow){
		.source = *b,
		.destination = *a,
		.source_port = flow->destination_port,
		.destination_port = flow->source_port,
		.protocol = flow->protocol,
	};
}

/* Has user space tell conntrack to be liberal with a connection, unless it ends. The end that closes last has
 * no packet here: conntrack's state has changed with the first FIN. The function is not static, so that the
 * verifier goes through it once; Linux 6.1 takes no argument of such a function as a map's key. */
__noinline int preparation_ask(const struct pod_flow *flow, __u32 is_over)
{
	struct pod_flow ordered;
	__u8 nothing = 0;

	if (!flow)
		return 0;
	ordered = flow_ordered(flow);
	if (is_over)
		return bpf_map_delete_elem(&sh_pd_asking, &ordered);
	return bpf_map_update_elem(&sh_pd_asking, &ordered, &nothing, BPF_NOEXIST);
}

static __always_inline __u32 entry_is_liberal(const struct nf_conn *entry)
{
	return entry->proto.tcp.seen[0].flags & entry->proto.tcp.seen[1].flags & CT_TCP_BE_LIBERAL;
}

/* Whether conntrack is to be told of a connection. With bypass that is a precaution: an established
 * connection goes on if its packets have to go through the stack again. */
static __always_inline __u32 entry_is_unprepared(const struct passage *p,
						 const struct nf_conn *entry, enum pod_left left)
{
	if (left != POD_TAKEN || mode != POD_MODE_BYPASS)
		return left == POD_UNPREPARED;
	return p->protocol == IPPROTO_TCP && p->segment == SEGMENT_DATA &&
	       entry->proto.tcp.state == CT_TCP_ESTABLISHED && !entry_is_liberal(entry);
}

/* Judges a packet of a connection that conntrack knows, by conntrack's entry. */
static __always_inline enum pod_left entry_judge(const struct passage *p,
						 const struct nf_conn *entry)
{
	if (entry->status & CT_TRANSLATED)
		return POD_NAT;
	if (mode == POD_MODE_BYPASS)
		return POD_TAKEN;
	if (!(entry->status & CT_SEEN_REPLY))
		return POD_UNANSWERED;
	if (p->protocol != IPPROTO_TCP)
		return POD_TAKEN;
	if (entry->proto.tcp.state != CT_TCP_ESTABLISHED)
		return POD_HANDSHAKE;
	return entry_is_liberal(entry) ? POD_TAKEN : POD_UNPREPARED;
}

static __always_inline struct nf_conn *entry_find(struct __sk_buff *skb, const struct passage *p,
						  struct bpf_sock_tuple *tuple)
{
	struct bpf_ct_opts opts = { .netns_id = -1, .l4proto = p->protocol };

	if (p->tuple_size == sizeof(tuple->ipv4))
		return bpf_skb_ct_lookup(skb, tuple, sizeof(tuple->ipv4), &opts, sizeof(opts));
	return bpf_skb_ct_lookup(skb, tuple, sizeof(tuple->ipv6), &opts, sizeof(opts));
}

/*
 * Whether the answers to a packet that conntrack does not know would be translated: its source has sent
 * to a service from the same port, and got the same pod, not long ago. The host's stack gives the
 * packet another port then.
 */
static __always_inline int answer_is_translated(struct __sk_buff *skb, const struct passage *p)
{
	struct bpf_sock_tuple back = {};
	struct nf_conn *entry;
	int translated;

	if (p->tuple_size == sizeof(back.ipv4)) {
		back.ipv4.saddr = p->tuple.ipv4.daddr;
		back.ipv4.daddr = p->tuple.ipv4.saddr;
		back.ipv4.sport = p->tuple.ipv4.dport;
		back.ipv4.dport = p->tuple.ipv4.sport;
	} else {
		__builtin_memcpy(back.ipv6.saddr, p->tuple.ipv6.daddr, sizeof(back.ipv6.saddr));
		__builtin_memcpy(back.ipv6.daddr, p->tuple.ipv6.saddr, sizeof(back.ipv6.daddr));
		back.ipv6.sport = p->tuple.ipv6.dport;
		back.ipv6.dport = p->tuple.ipv6.sport;
	}
	entry = entry_find(skb, p, &back);
	if (!entry)
		return 0;
	translated = !!(entry->status & CT_TRANSLATED);
	bpf_ct_release(entry);
	return translated;
}

static __always_inline enum pod_left conntrack_ask(struct __sk_buff *skb, struct passage *p)
{
	struct nf_conn *entry = entry_find(skb, p, &p->tuple);
	__u32 time_ms, unprepared;
	struct pod_flow flow;
	enum pod_left left;

	if (!entry && mode != POD_MODE_BYPASS)
		return POD_UNKNOWN;
	if (!entry)
		return p->is_first && answer_is_translated(skb, p) ? POD_NAT : POD_TAKEN;
	left = entry_judge(p, entry);
	if (left == POD_TAKEN) {
		time_ms = entry_time(entry, p->protocol, p->segment);
		if (time_ms)
			bpf_ct_change_timeout(entry, time_ms);
	}
	unprepared = entry_is_unprepared(p, entry, left);
	bpf_ct_release(entry);
	if (unprepared) {
		flow_read(p, &flow);
		preparation_ask(&flow, p->segment == SEGMENT_FIN || p->segment == SEGMENT_RST);
	}
	return left;
}

/* The length of a packet, or of the longest that it will be cut into. */
static __always_inline __u32 size_of(const struct __sk_buff *skb, const struct passage *p)
{
	return skb->gso_size ? p->network_size + skb->gso_size : skb->len - ETH_HLEN;
}

/* Whether a packet is longer than the route allows. The interface's MTU counts, too: it can have changed since
 * user space looked, and redirect_neigh does not check it. */
static __always_inline __u32 is_oversize(struct __sk_buff *skb, const struct passage *p)
{
	__u32 mtu = 0;

	return size_of(skb, p) > p->mtu ||
	       (p->is_far && bpf_check_mtu(skb, p->ifindex, &mtu, 0, BPF_MTU_CHK_SEGS));
}

/* Reads the addresses, and refuses headers of the network layer that are not plain. */
static __always_inline enum pod_left network_read(struct __sk_buff *skb, struct passage *p)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;

	if (skb->pkt_type != PACKET_HOST || skb->vlan_present)
		return POD_NOT_IP;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return ip4_read(p, data, data_end);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return ip6_read(p, data, data_end);
	return POD_NOT_IP;
}

static __always_inline enum pod_left packet_judge(struct __sk_buff *skb, struct passage *p,
						  __u32 from_far)
{
	enum pod_left left, plain = network_read(skb, p);

	if (plain == POD_MALFORMED || plain == POD_NOT_IP)
		return plain;
	/* First, so that a packet for no known pod has no other reason. */
	left = from_far ? far_pods_find(p, skb->ifindex) : pods_find(p, skb->ifindex);
	if (left != POD_TAKEN)
		return left;
	if (!pods_watched())
		return POD_UNWATCHED;
	if (plain != POD_TAKEN)
		return plain;
	left = transport_read(skb, p);
	if (left != POD_TAKEN)
		return left;
	if (is_oversize(skb, p))
		return POD_OVERSIZE;
	return conntrack_ask(skb, p);
}

/* Counts a packet that came in by an interface. */
static __always_inline void pod_count(__u32 ifindex, enum pod_left left, __u64 bytes)
{
	struct pod_counts *counts = bpf_map_lookup_elem(&sh_pd_counts, &ifindex);

	if (!counts || (__u32)left >= POD_LEFT_COUNT)
		return;
	counts->of[left].packets++;
	counts->of[left].bytes += bytes;
}

/* Sends a packet to the machine of its pod. The next hop is from the route that user space has seen. */
static __always_inline int far_send(const struct passage *p)
{
	struct bpf_redir_neigh hop = {};

	if (p->tuple_size == sizeof(p->tuple.ipv4)) {
		hop.nh_family = AF_INET;
		hop.ipv4_nh = addr_to_ip4(&p->next_hop);
	} else {
		hop.nh_family = AF_INET6;
		__builtin_memcpy(hop.ipv6_nh, &p->next_hop, sizeof(hop.ipv6_nh));
	}
	return bpf_redirect_neigh(p->ifindex, &hop, sizeof(hop), 0);
}

#include "steer.h"

SEC("tc")
int sh_pod(struct __sk_buff *skb)
{
	int action = packet_steer(skb, 1);
	struct passage p = {};
	enum pod_left left;

	if (action != TC_ACT_UNSPEC)
		return action;
	left = packet_judge(skb, &p, 0);
	pod_count(skb->ifindex, left, skb->len);
	if (left != POD_TAKEN)
		return TC_ACT_UNSPEC;
	return p.is_far ? far_send(&p) : bpf_redirect_peer(p.ifindex, 0);
}

SEC("tc")
int sh_pod_in(struct __sk_buff *skb)
{
	int action = packet_steer(skb, 0);
	struct passage p = {};
	enum pod_left left;

	if (action != TC_ACT_UNSPEC)
		return action;
	left = packet_judge(skb, &p, 1);
	/* Packets that come in for no pod here are the host's own traffic, and do not count. */
	if (left != POD_NOT_LOCAL && left != POD_NOT_IP)
		pod_count(skb->ifindex, left, skb->len);
	return left == POD_TAKEN ? bpf_redirect_peer(p.ifindex, 0) : TC_ACT_UNSPEC;
}
