/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which service a packet is for, and which backend a new flow of it goes to.
 */
#ifndef SHUNT_SERVICE_H
#define SHUNT_SERVICE_H

#include "flow.h"

#define RANGE_PREFIX_FULL 160 /* address 128, protocol and zero 16, port 16 */
#define SERVICE_NONE 0xffffffff

/* The index of the service at the packet's destination, or SERVICE_NONE. */
static __noinline __u32 service_find(const struct packet *p)
{
	struct frontend_key exact = { .address = p->key.destination,
				      .port = p->key.destination_port,
				      .protocol = p->key.protocol };
	struct range_key range = { .prefix_length = RANGE_PREFIX_FULL,
				   .protocol = p->key.protocol,
				   .port = p->key.destination_port };
	__u32 check = addr_check(&p->key.destination) ^ (__u32)p->key.protocol << 16;
	struct frontend *found = bpf_map_lookup_elem(&sh_frontends, &exact);
	__u64 word;

	if (found) {
		check ^= bpf_ntohs(p->key.destination_port);
	} else {
		__builtin_memcpy(range.address, &p->key.destination, sizeof(range.address));
		found = bpf_map_lookup_elem(&sh_ranges, &range);
	}
	if (!found)
		return SERVICE_NONE;
	word = *(volatile __u64 *)found;
	return word_belongs(word, check) ? (__u32)word : SERVICE_NONE;
}

/* Finalizer of MurmurHash3 (Appleby, public domain): every input bit reaches every
 * output bit, which the sum of products alone does not give. */
static __always_inline __u32 flow_hash(const struct flow_key *key, __u32 seed)
{
	__u64 h = key_mix(key) ^ ((__u64)seed << 32 | seed);

	h ^= h >> 33;
	h *= 0xff51afd7ed558ccdULL;
	h ^= h >> 33;
	h *= 0xc4ceb9fe1a85ec53ULL;
	h ^= h >> 33;
	return h >> 32;
}

/* The backend reference in the flow's slot; 0 when the service has none. */
static __always_inline __u32 slot_backend(const struct service *service, __u32 hash)
{
	__u64 table = *(volatile __u64 *)&service->table;
	__u32 index = (table >> 32) + (((__u64)hash * (__u32)table) >> 32);
	__u64 *slot;

	if (!(__u32)table)
		return 0;
	slot = bpf_map_lookup_elem(&sh_slots, &index);
	if (!slot)
		return 0;
	return *(volatile __u64 *)slot >> BACKEND_REF_BITS & BACKEND_REF_MASK;
}

/* The backend of a reference, or NULL when nobody or another generation has its place. */
static __always_inline struct backend *backend_find(__u32 reference)
{
	__u32 index = reference & BACKEND_INDEX_MASK;
	struct backend *backend = bpf_map_lookup_elem(&sh_backends, &index);

	if (!backend || !backend->live || backend->generation != reference >> BACKEND_INDEX_BITS)
		return 0;
	return backend;
}

#endif
