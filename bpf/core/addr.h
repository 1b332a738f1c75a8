/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Addresses as the maps have them: 16 bytes for either family (types.h). This file needs no map,
 * so the balancer's programs and the backend's share it.
 */
#ifndef SHUNT_ADDR_H
#define SHUNT_ADDR_H

#include <linux/in6.h>

#include "types.h"

/* ::ffff:a.b.c.d in two words. Little-endian only, as is every object we build. */
#define MAPPED_PREFIX 0xffff0000ULL

static __always_inline struct addr addr_from_ip4(__be32 ip4)
{
	return (struct addr){ .high = 0, .low = (__u64)ip4 << 32 | MAPPED_PREFIX };
}

static __always_inline __be32 addr_to_ip4(const struct addr *a)
{
	return a->low >> 32;
}

static __always_inline struct addr addr_from_ip6(const struct in6_addr *ip6)
{
	struct addr a;

	__builtin_memcpy(&a, ip6, sizeof(a));
	return a;
}

static __always_inline int addr_is_mapped(const struct addr *a)
{
	return a->high == 0 && (__u32)a->low == MAPPED_PREFIX;
}

static __always_inline int addr_equal(const struct addr *a, const struct addr *b)
{
	return a->low == b->low && a->high == b->high; /* all IPv4 addresses have one high word */
}

#endif
