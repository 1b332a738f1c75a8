/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * tcp_mss: the largest segment that a service's clients and backends may send.
 *
 * Each side names in its SYN the largest segment that it takes (RFC 9293, 3.7.1), and the other keeps
 * to it: so a larger value in a SYN that passes here is reduced. A SYN without a value means 536 or
 * 1220 bytes, and is left alone. NAT sees both sides' SYNs, direct return only the client's.
 */
#ifndef SHUNT_MSS_H
#define SHUNT_MSS_H

#include "csum_whole.h"
#include "flow.h"
#include "rewrite.h"

#define TCP_OPTION_END 0
#define TCP_OPTION_NOTHING 1 /* a single byte, RFC 9293, 3.1; all others have a length */
#define TCP_OPTION_MSS 2
#define TCP_OPTION_MSS_SIZE 4

#define TCP_OPTIONS_SIZE_MAX 40 /* 15 words of header without the first 5 */
#define TCP_OPTIONS_ROOM 64 /* a power of two, for the verifier */

/* A SYN's options, and the progress of the search among them. A value read from here is any number to
 * the verifier, so it checks a step of the search once, for all results of the step before. */
struct options {
	__u8 bytes[TCP_OPTIONS_ROOM];
	__u32 size; /* bytes of all options */
	__u32 at; /* offset of the next option */
	__u32 found; /* where the value of the MSS option lies; 0: not found */
};

SCRATCH(sh_options, struct options);

/* A byte of the options. Linux 6.1's verifier learns no bound of at from a comparison of its sum with
 * 1, and clang 19 would drop a mask that such a comparison makes superfluous: so the mask comes after
 * an assembly that clang cannot see through. Goes when we do not support 6.1 any more. */
static __always_inline __u8 option_byte(const struct options *options, __u32 at)
{
	asm volatile("" : "+r"(at));
	return options->bytes[at & (TCP_OPTIONS_ROOM - 1)];
}

/* Reads the next option. 0: there may be others behind it. */
static long option_next(__u32 i, void *context)
{
	struct options *options = scratch_of(&sh_options);
	__u32 at, length = 1;
	__u8 option;

	if (!options)
		return 1;
	at = options->at;
	if (at + 1 >= options->size)
		return 1;
	option = option_byte(options, at);
	if (option == TCP_OPTION_END)
		return 1;
	if (option != TCP_OPTION_NOTHING)
		length = option_byte(options, at + 1);
	if (!length)
		return 1;
	if (option == TCP_OPTION_MSS) {
		if (length == TCP_OPTION_MSS_SIZE && at + length <= options->size)
			options->found = at + 2;
		return 1;
	}
	options->at = at + length;
	return 0;
}

/* The offset of the option's value in the copied options; 0: there is none, or the options' lengths
 * are wrong. */
static __always_inline __u32 mss_find(struct options *options, __u32 size)
{
	options->size = size;
	options->at = 0;
	options->found = 0;
	bpf_loop(TCP_OPTIONS_SIZE_MAX, option_next, 0, 0);
	return *(volatile __u32 *)&options->found;
}

/* A value of 16 bits as checksums add it up: from the wire, and turned round where it begins
 * with the second byte of a word (RFC 1071, 2 (B)). */
static __always_inline __u16 csum_word(__be16 value, __u32 offset)
{
	return offset & 1 ? bpf_htons(bpf_ntohs(value) << 8 | bpf_ntohs(value) >> 8) : value;
}

/* Updates the transport checksum for words that have changed by plus - minus, unless the sender
 * left it to hardware: then it covers only the pseudo-header. */
static __always_inline int csum_adjust(struct frame_ctx *ctx, struct packet *p, __u16 plus,
				       __u16 minus)
{
	__u64 pseudo = pseudo_sum(&p->key.source, &p->key.destination, p->l4_size, p->key.protocol);
	__u32 offset = transport_csum_offset(p);
	__u64 segment = 0;
	__sum16 check;
	int done = ctx_csum_replace(ctx, offset, 0, csum_fold((__u64)plus + (__u16)~minus), 0);

	if (done <= 0)
		return done;
	if (ctx_load(ctx, offset, &check, sizeof(check)))
		return -1;
	if (check == csum_fold_short(pseudo)) {
		if (csum_whole(ctx, p->l4_offset, p->l4_size, &segment))
			return -1;
		/* The sum of the segment as it came: it verifies only if it is complete. */
		if (csum_fold(segment + minus + (__u16)~plus + pseudo) != 0xffff)
			return 0;
	}
	check = csum_update(check, plus, minus);
	return ctx_store(ctx, offset, &check, sizeof(check));
}

/* Reduces a SYN's option to the service's value. 0, or -1: the frame could not be read. */
__stage int mss_clamp(struct frame_ctx *ctx, struct packet *p, __u32 service_index)
{
	struct service *service = bpf_map_lookup_elem(&sh_services, &service_index);
	struct options *options = scratch_of(&sh_options);
	__u32 at, size, offset, last;
	struct tcphdr *tcp;
	__be16 before, after;

	if (!p || !service || !options || !service->tcp_mss)
		return 0;
	tcp = ctx_data(ctx) + (p->l4_offset & L4_OFFSET_MAX);
	if ((void *)(tcp + 1) > ctx_data_end(ctx))
		return 0;
	offset = (p->l4_offset & L4_OFFSET_MAX) + sizeof(*tcp);
	size = tcp->doff * 4 - (__u32)sizeof(*tcp);
	/* As in csum_chunk_add: the bound is put on one less, out of clang's sight. */
	last = size - 1;
	asm volatile("" : "+r"(last));
	if (last >= TCP_OPTIONS_SIZE_MAX)
		return 0;
	size = last + 1;
	if (ctx_load(ctx, offset, options->bytes, size))
		return 0;
	at = mss_find(options, size);
	if (!at)
		return 0;
	before = bpf_htons((__u16)option_byte(options, at) << 8 | option_byte(options, at + 1));
	if (bpf_ntohs(before) <= service->tcp_mss)
		return 0;
	after = bpf_htons(service->tcp_mss);
	if (ctx_store(ctx, offset + at, &after, sizeof(after)))
		return -1;
	return csum_adjust(ctx, p, csum_word(after, at), csum_word(before, at));
}

/* Before a packet of the service goes on: bounds the segment size that its sender names. */
static __always_inline int mss_limit(struct frame_ctx *ctx, struct packet *p, __u32 service_index)
{
	if (!(features & FEATURE_MSS) || !(p->tcp_flags & TCP_SYN) || p->fragment)
		return 0;
	return mss_clamp(ctx, p, service_index);
}

#endif
