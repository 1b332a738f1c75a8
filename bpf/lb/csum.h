/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Internet checksums, incremental (RFC 1624, equation 3).
 */
#ifndef SHUNT_CSUM_H
#define SHUNT_CSUM_H

#include "packet.h"

static __always_inline __u16 csum_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/*
 * The same for a sum below 2^36, as sums of a few addresses and words are: a + b 2^16 + c 2^32
 * with c < 16. The product's two upper 16-bit digits both gain a + b + c, so the lower one
 * carries into the upper one exactly the carry that has to go round: the digit below carries one
 * at most, which matters only where a + b + c ends in ffff, and then is due.
 */
static __always_inline __u16 csum_fold_short(__u64 sum)
{
	return sum * 0x0001000100010001ULL >> 48;
}

/* The sum of an address; the IPv4 prefix ffff is one's-complement zero, so one function
 * serves both families. */
static __always_inline __u64 addr_sum(const struct addr *a)
{
	__u64 sum = a->high + a->low;

	sum += sum < a->low; /* the carry goes round: RFC 1071, 2 */
	return (sum & 0xffffffff) + (sum >> 32);
}

/* RFC 793 and RFC 8200, 8.1: addresses, length and protocol */
static __always_inline __u64 pseudo_sum(const struct addr *source, const struct addr *destination,
					__u32 size, __u8 protocol)
{
	return addr_sum(source) + addr_sum(destination) + bpf_htons(size) +
	       ((__u32)bpf_htons(protocol));
}

/* The pseudo-header's sum of a packet as it came, in fewer steps with IPv4. */
static __always_inline __u64 packet_pseudo_sum(const struct packet *p)
{
	__u32 rest = bpf_htons(p->l4_size) + (__u32)bpf_htons((__u16)p->key.protocol);

	if (p->family == FAMILY_IP4)
		return (p->key.source.low >> 32) + (p->key.destination.low >> 32) + rest;
	return addr_sum(&p->key.source) + addr_sum(&p->key.destination) + rest;
}

/* A checksum field after the sum of the words it covers has changed by plus - minus, each of
 * them below 2^35: a sum of a few addresses and words. */
static __always_inline __sum16 csum_update(__sum16 old, __u64 plus, __u64 minus)
{
	return ~csum_fold_short((__u64)(__u16)~old + plus + (__u16)~csum_fold_short(minus));
}

/* The checksum of an IPv4 header after its TTL has gone down by one. The TTL is the high octet of
 * its 16-bit word (RFC 1141). The sum has lost 0x0100, so the complement gains it. */
static __always_inline __sum16 csum_ttl_update(__sum16 old)
{
	__u32 sum = (__u32)old + bpf_htons(0x0100);

	return sum + (sum >= 0xffff);
}

/* plus - minus, in the form that the kernel's helpers take. */
static __always_inline __u32 csum_gain(__u64 plus, __u64 minus)
{
	return (__u32)csum_fold(plus) + (__u16)~csum_fold(minus);
}

#endif
