/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From a flow to its slot, and from a slot to a backend.
 */
#ifndef SHUNT_SLOT_H
#define SHUNT_SLOT_H

#include "flow.h"

/* Finalizer of MurmurHash3 (Appleby, public domain): every input bit reaches every
 * output bit, which the sum of products alone does not give. */
static __always_inline __u32 hash_finish(__u64 h, __u32 seed)
{
	h ^= (__u64)seed << 32 | seed;
	h ^= h >> 33;
	h *= 0xff51afd7ed558ccdULL;
	h ^= h >> 33;
	h *= 0xc4ceb9fe1a85ec53ULL;
	h ^= h >> 33;
	return h >> 32;
}

static __always_inline __u32 flow_hash(const struct flow_key *key, __u32 seed)
{
	return hash_finish(key_mix(key), seed);
}

/* The hash of a client that keeps its backend: all its flows have the same slot. */
static __always_inline __u32 client_hash(const struct flow_key *key, __u32 seed)
{
	return hash_finish(key->source.high * MIX_0 + key->source.low * MIX_1, seed);
}

/* The hash for a service whose fragments have the slot of their packet, with or without ports. */
static __always_inline __u32 addresses_hash(const struct flow_key *key, __u32 seed)
{
	return hash_finish(key->source.high * MIX_0 + key->source.low * MIX_1 +
				   key->destination.high * MIX_2 + key->destination.low * MIX_3,
			   seed);
}

/* Another hash of a hash, for values that must not depend on the slot, which the hash's high
 * bits have chosen. 2^32 over the golden ratio, Knuth's multiplicative hash. */
static __always_inline __u32 hash_again(__u32 hash)
{
	return hash * 0x9e3779b1;
}

/* The word of the flow's slot in a table; 0 when the table is empty. */
static __always_inline __u64 slot_get(__u64 table, __u32 hash)
{
	__u32 index = (table >> 32) + (((__u64)hash * (__u32)table) >> 32);
	__u64 *slot;

	if (!(__u32)table)
		return 0;
	slot = bpf_map_lookup_elem(&sh_slots, &index);
	return slot ? *(volatile __u64 *)slot : 0;
}

static __always_inline __u32 slot_current(__u64 slot)
{
	return slot >> BACKEND_REF_BITS & BACKEND_REF_MASK;
}

static __always_inline enum slot_state slot_state(__u64 slot)
{
	return slot >> SLOT_STATE_SHIFT & 0xf;
}

static __always_inline __u32 slot_flags(__u64 slot)
{
	return slot >> SLOT_FLAGS_SHIFT;
}

/* The backend of a reference, or NULL if its index is free or another generation's. */
static __always_inline struct backend *backend_find(__u32 reference)
{
	__u32 index = reference & BACKEND_INDEX_MASK;
	struct backend *backend = bpf_map_lookup_elem(&sh_backends, &index);

	if (!backend || !backend->live || backend->generation != reference >> BACKEND_INDEX_BITS)
		return 0;
	return backend;
}

#endif
