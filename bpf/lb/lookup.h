/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Look-ups that more than one stage makes.
 */
#ifndef SHUNT_LOOKUP_H
#define SHUNT_LOOKUP_H

#include "count.h"
#include "packet.h"
#include "config.h"
#include "maps.h"

static __always_inline void count_reason(__u32 reason, __u64 bytes)
{
	count_in(&sh_reasons, reason, bytes);
}

static __always_inline struct settings *settings_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sh_settings, &zero);
}

/* The check of an address, as struct frontend describes it. */
static __always_inline __u32 addr_check(const struct addr *a)
{
	__u64 both = a->high ^ a->low;

	return (__u32)both ^ (__u32)(both >> 32);
}

/* Whether a word {meaning:32, check:32} is the key's; if not, we read a recycled element. */
static __always_inline int word_belongs(__u64 word, __u32 check)
{
	if (word >> 32 == check)
		return 1;
	count_reason(REASON_FLOW_RECYCLED, 0);
	return 0;
}

/* Whether an address may be a VIP or a NAT source: if not, it needs no look-up in sh_addresses. Its
 * bit is found by Fibonacci hashing (Knuth, vol. 3, 6.4). */
static __always_inline int addr_may_be_own(const struct settings *settings, const struct addr *a)
{
	__u32 bit = addr_check(a) * 0x9e3779b1U / (0x100000000ULL / OWN_BITS);

	return settings->own_addresses[bit / 64] >> (bit % 64) & 1;
}

/* Returns the flags of an address (enum address_flag), 0 if it is not ours. */
static __always_inline __u32 address_flags(const struct addr *a)
{
	struct address *address = bpf_map_lookup_elem(&sh_addresses, a);
	__u64 word;

	if (!address)
		return 0;
	word = *(volatile __u64 *)&address->flags;
	return word_belongs(word, addr_check(a)) ? word : 0;
}

#endif
