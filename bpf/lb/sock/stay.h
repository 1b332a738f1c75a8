/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Affinity: a client stays with its backend until it has asked for none during the service's affinity
 * time. Then any backend may be its next.
 *
 *   namespace and service ─► sh_sk_clients ─┬► takes new flows, and not over ─► that backend
 *                                           └► else ─► the socket's own slot, and that is noted
 *
 * Invariant: two sockets that ask at the same time are given the same backend, for only the first one
 * of them can note its own.
 */
#ifndef SHUNT_SOCK_STAY_H
#define SHUNT_SOCK_STAY_H

#include "../slot.h"
#include "maps.h"

#define SECOND_NS 1000000000ULL
#define NOTED_NS \
	(SECOND_NS / 8) /* a client's use is noted once in this time, which adds to the timeout */

static __always_inline __u32 stay_check(const struct sock_client *client)
{
	return hash_finish(client->netns * MIX_0, client->service);
}

/* The backend that a client stays with, or 0; an entry that is over is removed. The use is noted only
 * once in NOTED_NS, because CPUs share the element. */
static __noinline __u32 stay_follow(const struct sock_client *client, __u32 seconds, __u64 now)
{
	struct sock_stay *stay = bpf_map_lookup_elem(&sh_sk_clients, client);
	struct backend *backend;
	__u64 word, used;
	__u32 reference;

	if (!stay)
		return 0;
	word = *(volatile __u64 *)&stay->backend;
	used = *(volatile __u64 *)&stay->used;
	reference = word;
	if (word >> 32 != stay_check(client)) /* the element was recycled while it was read */
		return 0;
	backend = backend_find(reference);
	if (!backend || backend->draining ||
	    (now > used && now - used > seconds * SECOND_NS + NOTED_NS)) {
		bpf_map_delete_elem(&sh_sk_clients, client);
		return 0;
	}
	if (now > used + NOTED_NS)
		*(volatile __u64 *)&stay->used = now;
	return reference;
}

/* Notes the backend that was chosen for a client. Returns it, or the backend that another CPU has
 * noted before. */
static __noinline __u32 stay_note(const struct sock_client *client, __u32 reference, __u64 now)
{
	struct sock_stay stay = { .backend = reference, .check = stay_check(client), .used = now };
	struct sock_stay *first;
	__u64 word;

	if (!bpf_map_update_elem(&sh_sk_clients, client, &stay, BPF_NOEXIST))
		return reference;
	first = bpf_map_lookup_elem(&sh_sk_clients, client);
	if (!first)
		return reference;
	word = *(volatile __u64 *)&first->backend;
	return word >> 32 == stay.check ? (__u32)word : reference;
}

#endif
