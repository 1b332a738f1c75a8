/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Packets of chosen ports go through a chosen interface, and their answers past the stack to the pod.
 *
 *   pod ══ veth ─► steer_out ── redirect_neigh ─► interface ═════ next hop
 *   pod ══ veth ◄─ redirect_peer ── steer_in ◄─── interface ═════
 *
 * A connection's first packet (SYN, or the first datagram) pins it to the hop that its steer has then. A connection
 * that conntrack knows has begun in the stack and stays there. A hop that is no longer good is removed, and its
 * connections go on through the stack; they do not come back to it. So a connection is moved once at most, and only
 * when its hop would lose its packets.
 *
 * Conntrack sees neither direction, so the answers must not go through the stack alone.
 */
#ifndef SHUNT_POD_STEER_H
#define SHUNT_POD_STEER_H

/* Whether the file has steers. */
volatile const __u8 steers = 0;

/* This bit in a key of sh_pd_counts: the key is a steer's. Indexes of interfaces are positive as signed numbers. */
#define COUNTS_OF_STEER (1U << 31)

/* A connection of UDP that is silent for this long has ended: its port may be another's by now. */
#define UDP_IDLE_NS (60 * 1000000000ULL)
/* The resolution of a pin's time, so that not every packet writes it. */
#define SEEN_NS 1000000000ULL

/* A steer's work on a packet. */
struct steering {
	struct passage p;
	struct pod_hop hop;
	__u32 number; /* number of the steer; 0: no steer is for the packet */
	__u32 is_answer;
	__u32 size; /* as size_of() */
};

static __always_inline const struct pod_steer *steer_find(const struct pod_flow *flow)
{
	struct pod_steer_key key = { .bits = 32 + 8 * sizeof(flow->destination) };

	key.protocol = flow->protocol;
	key.port = flow->destination_port;
	__builtin_memcpy(key.address, &flow->destination, sizeof(key.address));
	return bpf_map_lookup_elem(&sh_pd_steers, &key);
}

static __always_inline void flow_reverse(struct pod_flow *flow)
{
	struct addr source = flow->source;
	__be16 port = flow->source_port;

	flow->source = flow->destination;
	flow->source_port = flow->destination_port;
	flow->destination = source;
	flow->destination_port = port;
}

/* Whether the connection of a pin is over, or about to begin again, so that a packet begins another. */
static __always_inline __u32 pin_is_over(const struct passage *p, const struct pod_pin *pin,
					 __u64 now_ns)
{
	if (p->protocol == IPPROTO_UDP)
		return now_ns > pin->seen_ns + UDP_IDLE_NS;
	return p->is_first;
}

/* Whether conntrack knows the connection, or one whose answers look like this one's. */
static __always_inline __u32 conntrack_knows(struct __sk_buff *skb, struct passage *p)
{
	struct nf_conn *entry = entry_find(skb, p, &p->tuple);

	if (!entry)
		return answer_is_translated(skb, p);
	bpf_ct_release(entry);
	return 1;
}

/* Finds the hop of a connection that has one. */
static __always_inline enum pod_left pin_follow(struct steering *s, struct pod_pin *pin,
						__u64 now_ns)
{
	__u32 number = pin->hop;
	const struct pod_hop *hop = bpf_map_lookup_elem(&sh_pd_hops, &number);

	if (!hop)
		return POD_PINNED;
	s->hop = *hop;
	s->number = hop->number;
	if (now_ns > pin->seen_ns + SEEN_NS)
		pin->seen_ns = now_ns;
	return POD_TAKEN;
}

/* Pins a connection that begins to the hop that its steer has. */
static __always_inline enum pod_left pin_begin(struct __sk_buff *skb, struct steering *s,
					       const struct pod_steer *steer,
					       const struct pod_flow *flow, __u16 mtu, __u64 now_ns)
{
	struct pod_pin pin = { .seen_ns = now_ns, .hop = steer->hop };
	const struct pod_hop *hop;

	if (steer->left)
		return steer->left;
	if (!s->p.is_first)
		return POD_PINNED;
	hop = bpf_map_lookup_elem(&sh_pd_hops, &pin.hop);
	if (!hop)
		return POD_UNJUDGED;
	s->hop = *hop;
	if (hop->mtu < mtu)
		return POD_MTU;
	if (conntrack_knows(skb, &s->p) || bpf_map_update_elem(&sh_pd_pins, flow, &pin, BPF_ANY))
		return POD_PINNED;
	return POD_TAKEN;
}

/* Judges a packet from a pod. */
static __always_inline enum pod_left steer_out(struct __sk_buff *skb, struct steering *s,
					       struct pod_flow *flow)
{
	const struct pod_steer *steer = steer_find(flow);
	struct pod_pin *pin = bpf_map_lookup_elem(&sh_pd_pins, flow);
	__u64 now_ns = bpf_ktime_get_coarse_ns();
	struct location from = {};

	if (steer)
		s->number = steer->number;
	else if (!pin)
		return POD_NOT_LOCAL;
	if (!pods_watched())
		return POD_UNWATCHED;
	if (!pod_find(&s->p.source, &from) || from.ifindex != skb->ifindex)
		return POD_SOURCE;
	if (from.left)
		return from.left;
	if (pin && !pin_is_over(&s->p, pin, now_ns))
		return pin_follow(s, pin, now_ns);
	return steer ? pin_begin(skb, s, steer, flow, from.mtu, now_ns) : POD_NOT_LOCAL;
}

/* Judges a packet that could be the answer to one that was steered. */
static __always_inline enum pod_left steer_in(struct __sk_buff *skb, struct steering *s,
					      struct pod_flow *flow)
{
	struct location to = {};
	struct pod_pin *pin;
	enum pod_left left;

	flow_reverse(flow);
	pin = bpf_map_lookup_elem(&sh_pd_pins, flow);
	if (!pin)
		return POD_NOT_LOCAL;
	left = pin_follow(s, pin, bpf_ktime_get_coarse_ns());
	if (left != POD_TAKEN)
		return left;
	if (s->hop.ifindex != skb->ifindex || !pod_find(&s->p.destination, &to))
		return POD_SOURCE;
	if (!pods_watched())
		return POD_UNWATCHED;
	s->p.ifindex = to.ifindex;
	s->is_answer = 1;
	if (to.left)
		return to.left;
	return s->size > to.mtu ? POD_OVERSIZE : POD_TAKEN;
}

/* Steers a packet, or its answer. TC_ACT_UNSPEC: it goes on as if there were no steer. */
static __always_inline int packet_steer(struct __sk_buff *skb, __u32 from_pod)
{
	struct steering s = {};
	struct pod_flow flow;
	enum pod_left left;

	if (!steers || network_read(skb, &s.p) != POD_TAKEN)
		return TC_ACT_UNSPEC;
	left = transport_read(skb, &s.p);
	if (left != POD_TAKEN && left != POD_HANDSHAKE)
		return TC_ACT_UNSPEC;
	flow_read(&s.p, &flow);
	/* Read early, because compilers merge a later read with another one, which verifiers refuse. */
	s.size = size_of(skb, &s.p);
	left = from_pod ? steer_out(skb, &s, &flow) : POD_NOT_LOCAL;
	if (!s.number)
		left = steer_in(skb, &s, &flow);
	if (!s.number)
		return TC_ACT_UNSPEC;
	pod_count(COUNTS_OF_STEER | s.number, left, skb->len);
	if (left != POD_TAKEN)
		return TC_ACT_UNSPEC;
	pod_count(skb->ifindex, left, skb->len);
	if (s.is_answer)
		return bpf_redirect_peer(s.p.ifindex, 0);
	s.p.ifindex = s.hop.ifindex;
	s.p.next_hop = s.hop.next_hop;
	return far_send(&s.p);
}

#endif
