/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP and ICMPv6: echo is answered, errors are translated by the NAT, and errors of our own
 * are sent where a packet's TTL or hop limit ends here, where it is too long for the next hop, and
 * where no backend takes it.
 *
 * An error quotes a packet that we sent, as we sent it, so the flow's entry is the one
 * whose packets travel the other way, and the error goes where these packets go:
 *
 *   outer  router → quoted source               becomes   f.source → f.destination
 *   quote  quoted source → quoted destination   becomes   f.destination → f.source
 *
 * Headers are reached through ctx_load, because an offset behind two headers of
 * variable size is more than the verifier can follow through a pointer.
 */
#ifndef SHUNT_ICMP_H
#define SHUNT_ICMP_H

#include "csum_whole.h"
#include "flow.h"
#include "hop.h"
#include "transport.h"
#include "rewrite.h"
#include "slot.h"

#define ICMP_ECHO_REPLY 0
#define ICMP_UNREACHABLE 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER 12
#define ICMP_PORT_UNREACHABLE 3 /* codes of ICMP_UNREACHABLE */
#define ICMP_FRAGMENTATION_NEEDED 4

#define ANSWER_TTL 64
#define QUOTED_TRANSPORT_SIZE_MIN 8 /* RFC 792: least bytes of the transport header in a quote */

struct icmp_header {
	__u8 type;
	__u8 code;
	__sum16 checksum;
	__be32 rest; /* differs by type */
};

static __always_inline void macs_swap(struct ethhdr *eth)
{
	__u8 mac[ETH_ALEN];

	__builtin_memcpy(mac, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, eth->h_source, ETH_ALEN);
	__builtin_memcpy(eth->h_source, mac, ETH_ALEN);
}

/* RFC 1122, 3.2.2 and RFC 4443, 2.4 e: some sources must not be answered. */
static __always_inline int source_is_answerable(const struct addr *a)
{
	__u8 first;

	if (!addr_is_mapped(a))
		return (__u8)a->high != 0xff && (a->high || a->low);
	first = addr_to_ip4(a); /* wire order: the lowest byte is the first octet */
	return first != 0 && first != 127 && first < 224;
}

/* --- echo ----------------------------------------------------------------------- */

/* Turns an echo request into its answer. */
static __noinline enum verdict echo_answer(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	__u8 request = p->family == FAMILY_IP4 ? ICMP_ECHO : ICMPV6_ECHO_REQUEST;
	__u8 reply = p->family == FAMILY_IP4 ? ICMP_ECHO_REPLY : ICMPV6_ECHO_REPLY;
	struct icmp_header *icmp = data + (p->l4_offset & L4_OFFSET_MAX);
	struct ipv6hdr *ip6 = data + L3_OFFSET;
	struct iphdr *ip = data + L3_OFFSET;

	if (p->l4_size < sizeof(*icmp) || (void *)(icmp + 1) > data_end)
		return drop(p, REASON_MALFORMED_TRANSPORT);
	if (icmp->type != request || icmp->code != 0 || !source_is_answerable(&p->key.source))
		return pass(p, REASON_ICMP);
	/* The type is the first octet of its word. Swapped addresses leave a sum as it is. */
	icmp->checksum = csum_update(icmp->checksum, reply, request);
	icmp->type = reply;
	if (p->family == FAMILY_IP4) {
		if ((void *)(ip + 1) > data_end)
			return drop(p, REASON_INTERNAL);
		/* 0 and 0xffff are both zero in one's complement (RFC 1624, 3). If only zeros
		 * follow, as type and code are, 0xffff alone is right; for any other answer
		 * both are. */
		if (!icmp->checksum)
			icmp->checksum = 0xffff;
		ip->check = csum_update(ip->check, ANSWER_TTL, ip->ttl);
		ip->ttl = ANSWER_TTL;
		ip->saddr = addr_to_ip4(&p->key.destination);
		ip->daddr = addr_to_ip4(&p->key.source);
	} else {
		if ((void *)(ip6 + 1) > data_end)
			return drop(p, REASON_INTERNAL);
		ip6->hop_limit = ANSWER_TTL;
		__builtin_memcpy(&ip6->saddr, &p->key.destination, sizeof(ip6->saddr));
		__builtin_memcpy(&ip6->daddr, &p->key.source, sizeof(ip6->daddr));
	}
	macs_swap(data);
	return answer(p, REASON_ECHO_ANSWERED);
}

/* --- errors --------------------------------------------------------------------- */

/* The flow whose packet an error quotes. */
SCRATCH(sh_quoted, struct entry);

/* The packet that an error quotes. Offsets are from the start of the frame. */
struct quote {
	struct flow_key *key; /* the key of packets in the other direction */
	struct flow *flow; /* a copy */
	__u64 plus; /* sum of the new words under the error's checksum */
	__u64 minus; /* sum of the words that they replace */
	__u32 ip_offset;
	__u32 l4_offset;
	__u32 l4_size; /* how much of the transport header and payload is quoted */
	__u32 pad;
};

/* The quoted network header. VERDICT_NEXT with key, l4_offset and key.protocol set. */
static __noinline enum verdict quote_ip4_parse(struct frame_ctx *ctx, struct packet *p,
					       struct quote *q)
{
	struct iphdr ip;

	if (ctx_load(ctx, q->ip_offset, &ip, sizeof(ip)))
		return pass(p, REASON_ICMP);
	if (ip.version != 4 || ip.ihl < 5 || (ip.frag_off & bpf_htons(0x1fff)))
		return pass(p, REASON_ICMP); /* a later fragment has no ports */
	q->key->source = addr_from_ip4(ip.daddr);
	q->key->destination = addr_from_ip4(ip.saddr);
	q->key->protocol = ip.protocol;
	q->l4_offset = q->ip_offset + ip.ihl * 4;
	return VERDICT_NEXT;
}

static __noinline enum verdict quote_ip6_parse(struct frame_ctx *ctx, struct packet *p,
					       struct quote *q)
{
	__u32 offset = q->ip_offset + sizeof(struct ipv6hdr);
	struct ipv6hdr ip;
	__u8 protocol;

	if (ctx_load(ctx, q->ip_offset, &ip, sizeof(ip)) || ip.version != 6)
		return pass(p, REASON_ICMP);
	q->key->source = addr_from_ip6(&ip.daddr);
	q->key->destination = addr_from_ip6(&ip.saddr);
	protocol = ip.nexthdr;
	for (int i = 0; i < EXTENSION_HEADERS_MAX; i++) {
		__u8 header[4];

		if (protocol != IPPROTO_HOPOPTS && protocol != IPPROTO_ROUTING &&
		    protocol != IPPROTO_DSTOPTS && protocol != IPPROTO_AH &&
		    protocol != IPPROTO_FRAGMENT)
			break;
		if (ctx_load(ctx, offset, header, sizeof(header)))
			return pass(p, REASON_ICMP);
		if (protocol == IPPROTO_FRAGMENT) { /* RFC 8200, 4.5: the offset's 13 bits */
			if (header[2] || header[3] & 0xf8)
				return pass(p, REASON_ICMP); /* a later fragment has no ports */
			header[1] = 0; /* reserved; 8 octets */
		}
		/* RFC 4302, 2.2: AH counts words less two, all others count 8 octets less one */
		offset += protocol == IPPROTO_AH ? (header[1] + 2) * 4 : (header[1] + 1) * 8;
		protocol = header[0];
	}
	q->key->protocol = protocol;
	q->l4_offset = offset;
	return VERDICT_NEXT;
}

static __noinline enum verdict quote_parse(struct frame_ctx *ctx, struct packet *p, struct quote *q)
{
	__u32 end = (__u32)p->l4_offset + p->l4_size;
	__be16 ports[2];
	enum verdict verdict;

	q->ip_offset = p->l4_offset + sizeof(struct icmp_header);
	verdict = p->family == FAMILY_IP4 ? quote_ip4_parse(ctx, p, q) : quote_ip6_parse(ctx, p, q);
	if (verdict != VERDICT_NEXT)
		return verdict;
	if (q->key->protocol != IPPROTO_TCP && q->key->protocol != IPPROTO_UDP)
		return pass(p, REASON_ICMP);
	if (q->l4_offset + QUOTED_TRANSPORT_SIZE_MIN > end ||
	    ctx_load(ctx, q->l4_offset, ports, sizeof(ports)))
		return pass(p, REASON_ICMP);
	q->l4_size = end - q->l4_offset;
	q->key->source_port = ports[1];
	q->key->destination_port = ports[0];
	/* RFC 5508, 4.2: an error about a packet goes to the sender of that packet. */
	if (!addr_equal(&q->key->destination, &p->key.destination))
		return pass(p, REASON_ICMP);
	return VERDICT_NEXT;
}

/* The hop that the flow's packets go to; 0 with *reason set. */
static __noinline __u64 error_hop(struct frame_ctx *ctx, const struct flow *f, enum reason *reason)
{
	struct settings *settings = settings_get();
	struct backend *backend;

	if (f->direction == DIRECTION_BACKEND) {
		if (hop_marked_by(f->hop, f->nonce))
			return f->hop;
		return hop_lookup(ctx, &f->source, &f->destination, reason);
	}
	*reason = REASON_BACKEND_GONE;
	backend = backend_find(f->backend);
	if (!backend || !settings)
		return 0;
	*reason = REASON_UNRESOLVED;
	return hop_to_backend(ctx, backend, settings, &f->source, bpf_jiffies64(), reason);
}

/* Replaces a 16-bit checksum in the frame, noting the change. Returns 0, or -1. */
static __always_inline int quoted_csum_update(struct frame_ctx *ctx, struct quote *q, __u32 offset,
					      int is_udp, __u64 gained, __u64 lost)
{
	__sum16 old, new;

	if (ctx_load(ctx, offset, &old, sizeof(old)))
		return -1;
	if (is_udp && old == 0)
		return 0; /* RFC 768: there is no checksum */
	new = csum_update(old, gained, lost);
	if (is_udp && new == 0)
		new = 0xffff;
	q->plus += new;
	q->minus += old;
	return ctx_store(ctx, offset, &new, sizeof(new)) ? -1 : 0;
}

/* The quoted addresses. Every change of a word that the error's own checksum covers goes
 * into plus and minus, so that a checksum that was wrong stays wrong. Returns 0, or -1. */
static __noinline int quote_addresses_rewrite(struct frame_ctx *ctx, struct quote *q)
{
	const struct flow *f = q->flow;
	__u64 gained = addr_sum(&f->source) + addr_sum(&f->destination);
	__u64 lost = addr_sum(&q->key->source) + addr_sum(&q->key->destination);
	__be32 pair[2] = { addr_to_ip4(&f->destination), addr_to_ip4(&f->source) };
	__u32 at = q->ip_offset;

	q->plus += gained;
	q->minus += lost;
	if (!addr_is_mapped(&f->source))
		return ctx_store(ctx, at + offsetof(struct ipv6hdr, saddr), (void *)&f->destination,
				 sizeof(f->destination)) ||
		       ctx_store(ctx, at + offsetof(struct ipv6hdr, daddr), (void *)&f->source,
				 sizeof(f->source));
	return ctx_store(ctx, at + offsetof(struct iphdr, saddr), pair, sizeof(pair)) ||
	       quoted_csum_update(ctx, q, at + offsetof(struct iphdr, check), 0, gained, lost);
}

/* The quoted ports and, where it is quoted, the checksum. Returns 0, or -1. */
static __noinline int quote_transport_rewrite(struct frame_ctx *ctx, struct quote *q)
{
	int is_udp = q->key->protocol == IPPROTO_UDP;
	__u32 check = is_udp ? offsetof(struct udphdr, check) : offsetof(struct tcphdr, check);
	const struct flow *f = q->flow;
	__be16 ports[2] = { f->destination_port, f->source_port };
	__u64 gained = (__u64)ports[0] + ports[1];
	__u64 lost = (__u64)q->key->source_port + q->key->destination_port;

	q->plus += gained;
	q->minus += lost;
	if (ctx_store(ctx, q->l4_offset, ports, sizeof(ports)))
		return -1;
	if (q->l4_size < check + sizeof(__sum16))
		return 0;
	gained += addr_sum(&f->source) + addr_sum(&f->destination);
	lost += addr_sum(&q->key->source) + addr_sum(&q->key->destination);
	return quoted_csum_update(ctx, q, q->l4_offset + check, is_udp, gained, lost);
}

/* Rewrites the error's own headers and checksum. Returns 0, or -1. */
static __noinline int error_rewrite(struct frame_ctx *ctx, const struct packet *p,
				    const struct quote *q)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct icmp_header *icmp = data + (p->l4_offset & L4_OFFSET_MAX);
	__u64 plus = q->plus, minus = q->minus;
	const struct flow *f = q->flow;

	if ((void *)(icmp + 1) > data_end)
		return -1;
	if (p->family == FAMILY_IP6) { /* the checksum includes the pseudo-header */
		plus += addr_sum(&f->source) + addr_sum(&f->destination);
		minus += addr_sum(&p->key.source) + addr_sum(&p->key.destination);
	}
	icmp->checksum = csum_update(icmp->checksum, plus, minus);
	return p->family == FAMILY_IP4 ? ip4_rewrite(data, data_end, f) :
					 ip6_rewrite(data, data_end, f);
}

/* RFC 792 and RFC 4443: the types that quote a packet */
static __always_inline int icmp_is_error(__u8 family, __u8 type)
{
	if (family == FAMILY_IP4)
		return type == ICMP_UNREACHABLE || type == ICMP_TIME_EXCEEDED ||
		       type == ICMP_PARAMETER;
	return type >= ICMPV6_DEST_UNREACH && type <= ICMPV6_PARAMPROB;
}

/*
 * Carries an ICMP error through the NAT. VERDICT_NEXT: it is not an error, or the quoted
 * packet belongs to no flow of ours.
 */
__stage enum verdict icmp_error_translate(struct frame_ctx *ctx, struct packet *p)
{
	enum reason reason = REASON_UNRESOLVED;
	struct entry *entry = scratch_of(&sh_quoted);
	struct quote q = {};
	struct interface *out;
	enum verdict verdict;
	__u64 hop;
	__u8 type;

	if (!p)
		return VERDICT_DROP;
	if (p->l4_size < sizeof(struct icmp_header) ||
	    ctx_load(ctx, p->l4_offset, &type, sizeof(type)))
		return drop(p, REASON_MALFORMED_TRANSPORT);
	if (!icmp_is_error(p->family, type))
		return VERDICT_NEXT;
	if (!entry)
		return drop(p, REASON_INTERNAL);
	q.key = &entry->key;
	q.flow = &entry->flow;
	__builtin_memset(q.key, 0, sizeof(*q.key)); /* look-ups compare the key's padding, too */
	verdict = quote_parse(ctx, p, &q);
	if (verdict != VERDICT_NEXT)
		return verdict;
	if (!flow_find(q.key, q.flow))
		return VERDICT_NEXT;
	if (p->ttl <= 1)
		return pass(p, REASON_ICMP); /* errors are not answered with errors */
	hop = error_hop(ctx, q.flow, &reason);
	if (!(hop & HOP_MAC_MASK))
		return drop(p, reason);
	if (quote_addresses_rewrite(ctx, &q) || quote_transport_rewrite(ctx, &q))
		return drop(p, REASON_INTERNAL);
	/* If NAT keeps the client's address, the router that sent the error keeps its own. */
	if (q.flow->direction == DIRECTION_CLIENT && addr_equal(&q.flow->source, &q.key->source))
		q.flow->source = p->key.source;
	if (error_rewrite(ctx, p, &q))
		return drop(p, REASON_INTERNAL);
	count_reason(REASON_ICMP_TRANSLATED, p->frame_size);
	out = hop_interface(hop);
	return out ? hop_send(ctx, p, hop, out) : drop(p, REASON_INTERNAL);
}

/* --- errors of our own ---------------------------------------------------------- */

/* RFC 1812, 4.3.2.8 and RFC 4443, 2.4 f ask for a limit and leave the figure open. */
#define ICMP_RATE 100 /* errors per second and CPU, and also the largest burst */

#define QUOTE_IP4_MAX 548 /* RFC 1812, 4.3.2.3: the error is at most 576 bytes */
#define QUOTE_IP6_MAX 1232 /* RFC 4443, 2.4 c: the error is at most 1280 bytes */
#define TOS_ERROR 0xc0 /* RFC 1812, 4.3.2.5: precedence 6 */

enum token {
	TOKEN_ERROR = 0, /* an ICMP error */
	TOKEN_RESET = 1, /* lb/reject.h */
	TOKEN_COUNT = 2,
};

struct icmp_tokens {
	__u64 refilled; /* jiffies */
	__u64 level; /* tokens times jiffies_per_second */
};

/* enum token -> the tokens left for packets of our own, per CPU. Written and read by the programs
 * alone. Never full. An upgrade may begin with a new one: every CPU gets full buckets. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct icmp_tokens);
	__uint(max_entries, TOKEN_COUNT);
} sh_icmp_tokens SEC(".maps");

/* Takes a token, of which there are rate a second. 1: the packet may be sent. */
static __always_inline int token_take(__u32 kind, __u32 rate)
{
	__u64 now = bpf_jiffies64(), full = (__u64)rate * jiffies_per_second, passed;
	struct icmp_tokens *tokens = bpf_map_lookup_elem(&sh_icmp_tokens, &kind);

	if (!tokens)
		return 0;
	passed = now - tokens->refilled;
	if (passed >= jiffies_per_second) /* a bucket is full after a second */
		tokens->level = full;
	else
		tokens->level += passed * rate;
	if (tokens->level > full)
		tokens->level = full;
	tokens->refilled = now;
	if (tokens->level < jiffies_per_second)
		return 0;
	tokens->level -= jiffies_per_second;
	return 1;
}

/* The source address of errors: the interface's, or else the packet's destination. */
static __always_inline struct addr error_source(const struct frame_ctx *ctx, const struct packet *p)
{
	__u32 index = own_index(ctx);
	struct interface *in = bpf_map_lookup_elem(&sh_interfaces, &index);
	const struct addr *a;

	if (!in)
		return p->key.destination;
	a = p->family == FAMILY_IP4 ? &in->address4 : &in->address6;
	return a->high || a->low ? *a : p->key.destination;
}

/* Cuts the frame to the quoted bytes and makes room for two new headers. Returns 0, or -1. */
static __always_inline int quote_make(struct frame_ctx *ctx, const struct packet *p,
				      __u32 headers_size, __u32 quote_size)
{
	__s32 surplus = p->frame_size - L3_OFFSET - quote_size;

	if (surplus > 0 && ctx_tail_cut(ctx, surplus))
		return -1;
	return ctx_head_grow(ctx, headers_size) ? -1 : 0;
}

/*
 * Whether the sk_buff says that the transport checksum is still open: it is then filled in when the
 * frame leaves, at the place that the transport header has by then. Merged segments from a card say
 * so, too (tcp_gro_complete).
 */
static __noinline int csum_is_open(struct frame_ctx *ctx, const struct packet *p)
{
	__u64 sum = 0, pseudo;
	__u16 check;

	if (!generic_mode || p->fragment ||
	    ctx_load(ctx, transport_csum_offset(p), &check, sizeof(check)))
		return 0;
	pseudo = pseudo_sum(&p->key.source, &p->key.destination, p->l4_size, p->key.protocol);
	if (check != csum_fold(pseudo))
		return 0;
	if (ctx_segment_size(ctx))
		return 1;
	return !csum_whole(ctx, p->l4_offset, p->l4_size, &sum) &&
	       csum_fold(sum + pseudo) != 0xffff;
}

/* The sum of an error's message of this size, as it will be on the wire. An open checksum is the
 * folded pseudo-header's sum, and the bytes it covers then sum up to its complement. */
static __noinline int message_sum(struct frame_ctx *ctx, const struct packet *p, __u32 size,
				  int is_open, __u64 *sum)
{
	__u32 offset = L3_OFFSET +
		       (p->family == FAMILY_IP4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));

	if (!is_open)
		return csum_whole(ctx, offset, size, sum);
	if (csum_whole(ctx, offset, sizeof(struct icmp_header) + p->l4_offset - L3_OFFSET, sum))
		return -1;
	*sum += (__u16)~csum_fold(
		pseudo_sum(&p->key.source, &p->key.destination, p->l4_size, p->key.protocol));
	return 0;
}

static __noinline int ip4_error_make(struct frame_ctx *ctx, const struct packet *p,
				     const struct addr *source)
{
	const __u32 size = sizeof(struct iphdr) + sizeof(struct icmp_header);
	__u32 quote_size = p->l4_offset - L3_OFFSET + p->l4_size;
	struct icmp_header icmp = { .type = ICMP_TIME_EXCEEDED };
	struct iphdr ip = { .version = 4,
			    .ihl = 5,
			    .tos = TOS_ERROR,
			    .ttl = ANSWER_TTL,
			    .protocol = IPPROTO_ICMP,
			    .frag_off = bpf_htons(0x4000) };
	int is_open = csum_is_open(ctx, p);
	struct ethhdr eth;
	__u64 sum = 0;

	if (p->refusal == REFUSAL_NO_BACKEND) {
		icmp.type = ICMP_UNREACHABLE;
		icmp.code = ICMP_PORT_UNREACHABLE;
	} else if (p->refusal == REFUSAL_SIZE) {
		icmp.type = ICMP_UNREACHABLE;
		icmp.code = ICMP_FRAGMENTATION_NEEDED;
		icmp.rest = bpf_htonl(p->mtu & 0xffff); /* RFC 1191, 4 */
	}
	if (quote_size > QUOTE_IP4_MAX)
		quote_size = QUOTE_IP4_MAX;
	ip.tot_len = bpf_htons(size + quote_size);
	ip.saddr = addr_to_ip4(source);
	ip.daddr = addr_to_ip4(&p->key.source);
	ip.check = ~csum_fold((__u32)bpf_csum_diff(0, 0, (__be32 *)&ip, sizeof(ip), 0));
	if (ctx_load(ctx, 0, &eth, sizeof(eth)) || quote_make(ctx, p, size, quote_size))
		return -1;
	macs_swap(&eth);
	if (ctx_store(ctx, 0, &eth, sizeof(eth)) || ctx_store(ctx, L3_OFFSET, &ip, sizeof(ip)) ||
	    ctx_store(ctx, L3_OFFSET + sizeof(ip), &icmp, sizeof(icmp)) ||
	    message_sum(ctx, p, sizeof(struct icmp_header) + quote_size, is_open, &sum))
		return -1;
	icmp.checksum = ~csum_fold(sum);
	return ctx_store(ctx, L3_OFFSET + sizeof(ip), &icmp, sizeof(icmp)) ? -1 : 0;
}

static __noinline int ip6_error_make(struct frame_ctx *ctx, const struct packet *p,
				     const struct addr *source)
{
	const __u32 size = sizeof(struct ipv6hdr) + sizeof(struct icmp_header);
	__u32 icmp_size, quote_size = p->l4_offset - L3_OFFSET + p->l4_size;
	struct icmp_header icmp = { .type = ICMPV6_TIME_EXCEED };
	struct ipv6hdr ip = { .version = 6, .nexthdr = IPPROTO_ICMPV6, .hop_limit = ANSWER_TTL };
	int is_open = csum_is_open(ctx, p);
	struct ethhdr eth;
	__u64 sum = 0;

	if (p->refusal == REFUSAL_NO_BACKEND) {
		icmp.type = ICMPV6_DEST_UNREACH;
		icmp.code = ICMPV6_PORT_UNREACH;
	} else if (p->refusal == REFUSAL_SIZE) {
		icmp.type = ICMPV6_PKT_TOOBIG;
		icmp.rest = bpf_htonl(p->mtu);
	}
	if (quote_size > QUOTE_IP6_MAX)
		quote_size = QUOTE_IP6_MAX;
	icmp_size = sizeof(struct icmp_header) + quote_size;
	ip.payload_len = bpf_htons(icmp_size);
	__builtin_memcpy(&ip.saddr, source, sizeof(ip.saddr));
	__builtin_memcpy(&ip.daddr, &p->key.source, sizeof(ip.daddr));
	if (ctx_load(ctx, 0, &eth, sizeof(eth)) || quote_make(ctx, p, size, quote_size))
		return -1;
	macs_swap(&eth);
	if (ctx_store(ctx, 0, &eth, sizeof(eth)) || ctx_store(ctx, L3_OFFSET, &ip, sizeof(ip)) ||
	    ctx_store(ctx, L3_OFFSET + sizeof(ip), &icmp, sizeof(icmp)) ||
	    message_sum(ctx, p, icmp_size, is_open, &sum))
		return -1;
	icmp.checksum =
		~csum_fold(sum + pseudo_sum(source, &p->key.source, icmp_size, IPPROTO_ICMPV6));
	return ctx_store(ctx, L3_OFFSET + sizeof(ip), &icmp, sizeof(icmp)) ? -1 : 0;
}

/*
 * Answers a TCP or UDP packet whose TTL or hop limit ends here, that is too long for the next hop,
 * or that no backend takes (packet->refusal), back to where it came from. The packet is still as it
 * arrived. The latter two errors come from the VIP, because the client's path leads to the VIP.
 */
__stage enum verdict error_answer(struct frame_ctx *ctx, struct packet *p)
{
	struct addr source;

	if (!p)
		return VERDICT_DROP;
	if (!source_is_answerable(&p->key.source))
		return drop(p, REASON_ICMP_LIMITED);
	if (!token_take(TOKEN_ERROR, ICMP_RATE))
		return drop(p, REASON_ICMP_LIMITED);
	source = p->refusal == REFUSAL_TTL ? error_source(ctx, p) : p->key.destination;
	if (p->family == FAMILY_IP4 ? ip4_error_make(ctx, p, &source) :
				      ip6_error_make(ctx, p, &source))
		return drop(p, REASON_INTERNAL);
	switch (p->refusal) {
	case REFUSAL_NO_BACKEND:
		return answer(p, REASON_REJECTED_UNREACHABLE);
	case REFUSAL_SIZE:
		return answer(p, REASON_TOO_BIG_ANSWERED);
	default:
		return answer(p, REASON_TTL_EXCEEDED);
	}
}

#endif
