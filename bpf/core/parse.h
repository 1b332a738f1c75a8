/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From bytes to struct packet. Nothing here writes to the frame. The network layer is
 * parsed first, because whether a damaged transport header is ours to drop depends on
 * the destination: a packet for no address of ours passes untouched, damaged or not.
 *
 * All headers must lie in the linear part of a multi-buffer frame. Drivers put at least
 * the first 256 bytes there (Documentation/networking/xdp-rx-metadata and the drivers'
 * header split); a header beyond the linear part is malformed to us.
 */
#ifndef SHUNT_PARSE_H
#define SHUNT_PARSE_H

#include "frame.h"

#define EXTENSION_HEADERS_MAX 8

static __always_inline enum verdict ip4_parse(struct frame_ctx *ctx, struct packet *p, void *data,
					      void *data_end)
{
	struct iphdr *ip = data + L3_OFFSET;
	__u32 header_size, total_size;

	if ((void *)(ip + 1) > data_end)
		return pass(p, REASON_MALFORMED);
	header_size = ip->ihl * 4;
	total_size = bpf_ntohs(ip->tot_len);
	if (ip->version != 4 || header_size < sizeof(*ip) || total_size < header_size ||
	    !frame_holds(ctx, p, L3_OFFSET + total_size))
		return pass(p, REASON_MALFORMED);

	p->family = FAMILY_IP4;
	p->ttl = ip->ttl;
	p->key.protocol = ip->protocol;
	p->key.source = addr_from_ip4(ip->saddr);
	p->key.destination = addr_from_ip4(ip->daddr);
	p->l4_offset = L3_OFFSET + header_size;
	p->l4_size = total_size - header_size;
	/* The numbers of IPv6's headers mean nothing to transport_parse in IPv4. */
	if (p->key.protocol == IPPROTO_ROUTING || p->key.protocol == IPPROTO_FRAGMENT ||
	    p->key.protocol == IPPROTO_RAW)
		p->key.protocol = IPPROTO_NONE;
	if (ip->frag_off & bpf_htons(IP4_FRAGMENT_BITS))
		p->key.protocol = IPPROTO_FRAGMENT;
	return VERDICT_NEXT;
}

/* The extension headers that may stand before a transport header that we read. */
static __always_inline int ip6_is_extension(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING ||
	       protocol == IPPROTO_DSTOPTS || protocol == IPPROTO_AH;
}

/*
 * Walks the extension headers (RFC 8200, 4). On return key.protocol is the transport
 * protocol, IPPROTO_FRAGMENT or IPPROTO_ROUTING where the walk has to end early, or
 * IPPROTO_RAW where the chain is longer than we follow.
 */
__stage enum verdict ip6_extensions_walk(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	__u32 offset, end;
	__u8 protocol;

	if (!p)
		return VERDICT_DROP;
	offset = p->l4_offset;
	end = offset + p->l4_size;
	protocol = p->key.protocol;
	for (int i = 0; i <= EXTENSION_HEADERS_MAX; i++) {
		__u8 *header = data + (offset & L4_OFFSET_MAX);
		__u32 size;

		if (protocol == IPPROTO_RAW) /* reserved on the wire, and our own sign here */
			protocol = IPPROTO_NONE;
		if (!ip6_is_extension(protocol))
			break; /* a transport protocol, a fragment, or nothing */
		if (i == EXTENSION_HEADERS_MAX || offset > L4_OFFSET_MAX - 8) {
			protocol = IPPROTO_RAW;
			break;
		}
		if ((void *)(header + 8) > data_end || offset + 8 > end)
			return pass(p, REASON_MALFORMED);
		if (protocol == IPPROTO_ROUTING && header[3] != 0)
			break; /* segments left: the destination is not yet the final one */
		/* RFC 4302, 2.2: AH counts words less two, all others count 8 octets less one */
		size = protocol == IPPROTO_AH ? (header[1] + 2) * 4 : (header[1] + 1) * 8;
		protocol = header[0];
		offset += size;
		if (offset > end)
			return pass(p, REASON_MALFORMED);
	}
	if (offset > L4_OFFSET_MAX - 64)
		protocol = IPPROTO_RAW;
	p->key.protocol = protocol;
	p->l4_size = end - offset;
	p->l4_offset = offset;
	return VERDICT_NEXT;
}

static __always_inline enum verdict ip6_parse(struct frame_ctx *ctx, struct packet *p, void *data,
					      void *data_end)
{
	struct ipv6hdr *ip = data + L3_OFFSET;
	__u32 payload_size;

	if ((void *)(ip + 1) > data_end)
		return pass(p, REASON_MALFORMED);
	payload_size = bpf_ntohs(ip->payload_len);
	if (ip->version != 6 || !frame_holds(ctx, p, L3_OFFSET + sizeof(*ip) + payload_size))
		return pass(p, REASON_MALFORMED);

	p->family = FAMILY_IP6;
	p->ttl = ip->hop_limit;
	p->key.protocol = ip->nexthdr;
	p->key.source = addr_from_ip6(&ip->saddr);
	p->key.destination = addr_from_ip6(&ip->daddr);
	p->l4_offset = L3_OFFSET + sizeof(*ip);
	p->l4_size = payload_size;
	/* RFC 4291 gives these no meaning on the wire, and they could match an IPv4 flow. */
	if (addr_is_mapped(&p->key.source) || addr_is_mapped(&p->key.destination))
		return drop(p, REASON_MAPPED_ADDRESS);
	if (p->key.protocol == IPPROTO_TCP || p->key.protocol == IPPROTO_UDP)
		return VERDICT_NEXT;
	return ip6_extensions_walk(ctx, p);
}

#endif
