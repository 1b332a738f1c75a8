/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The look-up of a packet's service.
 *
 * The two look-ups for it, in sh_addresses and sh_frontends, cost a direct-return packet more
 * than all the rest (57 of 128 ns, Linux 6.18, November 2026). Many flows share few
 * destinations, so each CPU notes the results for the last ones.
 */
#ifndef SHUNT_SERVICE_H
#define SHUNT_SERVICE_H

#include "lookup.h"

#define RANGE_PREFIX_FULL 160 /* address 128, protocol and zero 16, port 16 */
#define SERVICE_NONE 0xffffffff

#define KNOWN_BITS 8

/*
 * A destination that is ours. Valid while settings.epoch has the value from before the look-ups:
 * the daemon counts it up after each change of sh_addresses and sh_frontends, so a destination
 * that was noted during a change has the epoch before.
 */
struct known {
	struct frontend_key key;
	__u32 epoch;
	__u32 flags; /* enum address_flag; 0: nothing is noted here */
	__u32 service_index;
	__u32 pad;
};

/* A hash of the destination -> the last one noted there. Written and read by the program
 * alone. Full: the newer one stays. Not pinned: a program that is replaced begins anew. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct known);
	__uint(max_entries, 1 << KNOWN_BITS);
} sh_known SEC(".maps");

static __always_inline struct known *known_at(const struct addr *a, __be16 port, __u8 protocol)
{
	__u64 h = (a->high ^ a->low) + ((__u64)port << 8 | protocol);
	__u32 index = (h * 0x9e3779b97f4a7c15ULL) >>
		      (64 - KNOWN_BITS); /* 2^64 over the golden ratio */

	return bpf_map_lookup_elem(&sh_known, &index);
}

/* Whether this destination is noted. Compares words, without a branch for each. */
static __always_inline int known_is(const struct known *k, const struct addr *a, __be16 port,
				    __u8 protocol, __u32 epoch)
{
	__u32 noted = (__u32)k->key.port | (__u32)k->key.protocol << 16;
	__u32 wanted = (__u32)port | (__u32)protocol << 16;

	return k->flags && !((k->key.address.high ^ a->high) | (k->key.address.low ^ a->low) |
			     (noted ^ wanted) | (k->epoch ^ epoch));
}

/* Returns the flags of the packet's destination (enum address_flag), 0 if it is not ours. Answers of backends
 * come to few NAT sources and to many ports, so NAT sources are noted without port and protocol. */
static __always_inline __u32 destination_flags(const struct packet *p,
					       const struct settings *settings, __u32 epoch)
{
	const struct addr *a = &p->key.destination;
	struct known *known;
	__u32 flags;

	if (!addr_may_be_own(settings, a))
		return 0;
	known = known_at(a, 0, 0);
	if (known && known_is(known, a, 0, 0, epoch))
		return known->flags;
	flags = address_flags(a);
	if (known && (flags & ADDRESS_SOURCE)) {
		__builtin_memset(&known->key, 0, sizeof(known->key));
		known->key.address = *a;
		known->epoch = epoch;
		known->flags = flags;
	}
	return flags;
}

/* The service of this index, if it is live and its backends answer clients themselves. */
static __always_inline struct service *direct_service_find(__u32 index)
{
	struct service *service = bpf_map_lookup_elem(&sh_services, &index);

	if (!service || !service->live || service->forwarding < FORWARDING_DSR_L2)
		return 0;
	return service;
}

/* The service with a range that has the packet's destination port. */
static __noinline __u32 range_find(const struct packet *p)
{
	struct range_key range = { .prefix_length = RANGE_PREFIX_FULL,
				   .protocol = p->key.protocol,
				   .port = p->key.destination_port };
	__u32 check = addr_check(&p->key.destination) ^ (__u32)p->key.protocol << 16;
	struct frontend *found;
	__u64 word;

	__builtin_memcpy(range.address, &p->key.destination, sizeof(range.address));
	found = bpf_map_lookup_elem(&sh_ranges, &range);
	if (!found)
		return SERVICE_NONE;
	word = *(volatile __u64 *)found;
	return word_belongs(word, check) ? (__u32)word : SERVICE_NONE;
}

/* The index of the service at the packet's destination, or SERVICE_NONE. The result is noted,
 * with the address's flags. */
__stage __u32 service_find(const struct packet *p, __u32 flags, __u32 epoch)
{
	struct frontend_key exact = {};
	__u32 check, index = SERVICE_NONE;
	struct frontend *found;
	struct known *known;
	__u64 word;

	if (!p)
		return SERVICE_NONE;
	exact.address = p->key.destination;
	exact.port = p->key.destination_port;
	exact.protocol = p->key.protocol;
	check = addr_check(&exact.address) ^ (__u32)exact.protocol << 16 ^ bpf_ntohs(exact.port);
	found = bpf_map_lookup_elem(&sh_frontends, &exact);
	known = known_at(&exact.address, exact.port, exact.protocol);
	if (found) {
		word = *(volatile __u64 *)found;
		if (word_belongs(word, check))
			index = word;
	} else {
		index = range_find(p);
	}
	if (index != SERVICE_NONE && known) {
		known->key = exact;
		known->epoch = epoch;
		known->flags = flags;
		known->service_index = index;
	}
	return index;
}

#endif
