/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The outer headers, up to the inner one. Nothing here writes to the frame, and nothing
 * drops: before the inner destination is known, the packet may be for another host.
 *
 * One IPv6 extension header is followed: the destination options with a tunnel
 * encapsulation limit (RFC 2473, 4.1.1), which Linux tunnels send unless told otherwise.
 * A packet with other headers is not from one of our tunnels, and passes.
 */
#ifndef SHUNT_DECAP_OUTER_H
#define SHUNT_DECAP_OUTER_H

#include "../../core/frame.h"
#include "tunnel.h"

#define OPTION_ENCAP_LIMIT 4 /* RFC 2473, 4.1.1 */

static __always_inline enum verdict outer4_parse(struct frame_ctx *ctx, struct tunnel *t)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct iphdr *ip = data + ETH_HLEN;
	__u32 header_size, total_size;

	if ((void *)(ip + 1) > data_end)
		return pass(&t->outer, REASON_MALFORMED);
	header_size = ip->ihl * 4;
	total_size = bpf_ntohs(ip->tot_len);
	if (ip->version != 4 || header_size < sizeof(*ip) || total_size < header_size ||
	    !frame_holds(ctx, &t->outer, ETH_HLEN + total_size))
		return pass(&t->outer, REASON_MALFORMED);
	t->outer.key.source = addr_from_ip4(ip->saddr);
	t->outer.key.destination = addr_from_ip4(ip->daddr);
	t->offset = ETH_HLEN + header_size;
	t->end = ETH_HLEN + total_size;
	t->outer.key.protocol = ip->protocol;
	t->ecn = ip->tos & 3;
	if (ip->frag_off & bpf_htons(IP4_OFFSET_BITS))
		t->outer.fragment = FRAGMENT_LATER;
	else if (ip->frag_off & bpf_htons(IP4_FRAGMENT_BITS))
		t->outer.fragment = FRAGMENT_FIRST;
	return VERDICT_NEXT;
}

/* Steps over the two extension headers that matter: one is part of a tunnel, and with the
 * other one the packet is not whole. Both have 8 bytes here. */
static __always_inline enum verdict outer6_extensions(struct tunnel *t, void *data, void *data_end)
{
	__u8 *header = data + (t->offset & OFFSET_MASK);

	if (t->outer.key.protocol != IPPROTO_DSTOPTS && t->outer.key.protocol != IPPROTO_FRAGMENT)
		return VERDICT_NEXT;
	if ((void *)(header + 8) > data_end || t->offset + 8 > t->end)
		return pass(&t->outer, REASON_MALFORMED);
	if (t->outer.key.protocol == IPPROTO_FRAGMENT) {
		__be16 field = *(__be16 *)(header + 2);

		t->outer.fragment = field & bpf_htons(IP6_OFFSET_BITS) ? FRAGMENT_LATER :
									 FRAGMENT_FIRST;
	} else if (header[1] != 0 || header[2] != OPTION_ENCAP_LIMIT || header[3] != 1) {
		return pass(&t->outer, REASON_DECAP_NO_TUNNEL);
	}
	t->outer.key.protocol = header[0];
	t->offset += 8;
	return VERDICT_NEXT;
}

static __always_inline enum verdict outer6_parse(struct frame_ctx *ctx, struct tunnel *t)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct ipv6hdr *ip = data + ETH_HLEN;

	if ((void *)(ip + 1) > data_end)
		return pass(&t->outer, REASON_MALFORMED);
	t->offset = ETH_HLEN + sizeof(*ip);
	t->end = t->offset + bpf_ntohs(ip->payload_len);
	if (ip->version != 6 || !frame_holds(ctx, &t->outer, t->end))
		return pass(&t->outer, REASON_MALFORMED);
	t->outer.key.source = addr_from_ip6(&ip->saddr);
	t->outer.key.destination = addr_from_ip6(&ip->daddr);
	t->outer.key.protocol = ip->nexthdr;
	t->ecn = ((__u8 *)ip)[1] >> 4 & 3;
	/* RFC 4291 gives them no meaning on the wire, and they would match IPv4 in the maps. */
	if (addr_is_mapped(&t->outer.key.source) || addr_is_mapped(&t->outer.key.destination))
		return pass(&t->outer, REASON_DECAP_NO_TUNNEL);
	return outer6_extensions(t, data, data_end);
}

/*
 * The UDP header of a packet that may be GUE. Its checksum is not verified: tunnels may send
 * zero (RFC 6935, RFC 6936), and damage to the payload shows in the inner packet's
 * own checksums. A later fragment has no ports, so no host can tell its kind.
 */
static __always_inline enum verdict gue_udp_parse(struct frame_ctx *ctx, struct tunnel *t)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct udphdr *udp = data + (t->offset & OFFSET_MASK);
	__u32 size;

	if (t->outer.fragment == FRAGMENT_LATER || !gue_port)
		return pass(&t->outer, REASON_DECAP_NO_TUNNEL);
	if ((void *)(udp + 1) > data_end || t->offset + sizeof(*udp) > t->end ||
	    udp->dest != gue_port)
		return pass(&t->outer, REASON_DECAP_NO_TUNNEL);
	t->is_gue = 1;
	if (t->outer.fragment)
		return VERDICT_NEXT;
	size = bpf_ntohs(udp->len);
	if (size < sizeof(*udp) || t->offset + size > t->end)
		return pass(&t->outer, REASON_DECAP_GUE_UNKNOWN);
	t->end = t->offset + size;
	t->offset += sizeof(*udp);
	return VERDICT_NEXT;
}

/*
 * The GUE header (draft-ietf-intarea-gue-09, 3):
 *
 *   version:2 control:1 header_length:5 │ protocol:8 │ flags:16 │ header_length * 4 bytes
 *
 * Bytes of the header that no flag names are private data, and skipped. Packets with
 * any flag are refused: some flags say that the payload is a part of a packet, encrypted, or
 * without its checksum, and the draft and Linux number them differently.
 */
static __always_inline enum verdict gue_parse(struct frame_ctx *ctx, struct tunnel *t)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	__u8 *gue = data + (t->offset & OFFSET_MASK);
	__u32 size;

	if ((void *)(gue + 4) > data_end)
		return pass(&t->outer, REASON_DECAP_GUE_UNKNOWN);
	size = 4 + (gue[0] & 0x1f) * 4;
	if (gue[0] & 0xe0 || gue[2] || gue[3] || t->offset + size > t->end)
		return pass(&t->outer, REASON_DECAP_GUE_UNKNOWN);
	t->outer.key.protocol = gue[1];
	t->offset += size;
	if (t->outer.key.protocol != IPPROTO_IPIP && t->outer.key.protocol != IPPROTO_IPV6)
		return pass(&t->outer, REASON_DECAP_GUE_UNKNOWN);
	return VERDICT_NEXT;
}

/* Whether the packet is a tunnel's to this interface. On NEXT, offset is the inner header's, and
 * protocol says its version. */
static __always_inline enum verdict tunnel_recognise(struct frame_ctx *ctx, struct tunnel *t)
{
	enum verdict verdict;

	if (t->outer.key.protocol == IPPROTO_UDP) {
		verdict = gue_udp_parse(ctx, t);
		if (verdict != VERDICT_NEXT)
			return verdict;
	} else if (t->outer.key.protocol != IPPROTO_IPIP && t->outer.key.protocol != IPPROTO_IPV6) {
		return pass(&t->outer, REASON_DECAP_NO_TUNNEL);
	}
	if (!bpf_map_lookup_elem(&sh_dc_locals, &t->outer.key.destination))
		return pass(&t->outer, REASON_DECAP_NOT_LOCAL);
	if (t->outer.fragment)
		return pass(&t->outer, REASON_DECAP_FRAGMENT);
	return t->is_gue ? gue_parse(ctx, t) : VERDICT_NEXT;
}

#endif
