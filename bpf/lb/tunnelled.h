/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Direct return in two levels, for the nodes of a cluster (docs/design/55-direct-return-in-a-cluster.md).
 * The service of level 1 has nodes for backends, and the one of level 2 the endpoints on this node:
 *
 *   client ─► level 1 ─┬─► another node ─► outer headers ─► sh_decap there ─► sh_tunnelled ─┐
 *                      └─► this node ───────────────────────────────────────────────────────┴─► level 2 ─► NAT
 *
 * A frontend of level 2 is one of packets that level 1 has placed here, and of no others: it makes no
 * address ours.
 *
 * Invariant: level 2 never encapsulates, so a packet is in outer headers once at most.
 */
#ifndef SHUNT_TUNNELLED_H
#define SHUNT_TUNNELLED_H

#include "packet.h"
#include "service.h"

/* To level 2. At XDP that is another program (hand.h), and at tc the stages go on there. */
static __always_inline enum verdict tunnelled_send(struct packet *p)
{
	p->egress = INTERFACE_ANY;
	return VERDICT_HOST;
}

static __always_inline int is_tunnelled(const struct packet *p, enum verdict verdict)
{
	return verdict == VERDICT_HOST && p->egress == INTERFACE_ANY;
}

/* The service that a frontend beside an ordinary one names, or SERVICE_NONE. */
static __always_inline __u32 frontend_at(const struct frontend_key *key)
{
	struct frontend *found = bpf_map_lookup_elem(&sh_frontends, key);
	__u32 check;
	__u64 word;

	if (!found)
		return SERVICE_NONE;
	check = addr_check(&key->address) ^ (__u32)key->protocol << 16 ^ bpf_ntohs(key->port);
	word = *(volatile __u64 *)found;
	return word_belongs(word, check) ? (__u32)word : SERVICE_NONE;
}

/* The index of the service of level 2 at the packet's destination, or SERVICE_NONE: the one at its
 * address, or else the one at the unspecified address, for a node does not know the addresses of all
 * others. The result is noted, as in service_find. */
__stage __u32 tunnelled_find(const struct packet *p)
{
	struct settings *settings = settings_get();
	struct frontend_key key = {}, exact;
	struct known *known;
	__u32 index, epoch;

	if (!p || !settings)
		return SERVICE_NONE;
	epoch = *(volatile __u32 *)&settings->epoch;
	key.address = p->key.destination;
	key.port = p->key.destination_port;
	key.protocol = p->key.protocol | FRONTEND_TUNNELLED;
	known = known_at(&key.address, key.port, key.protocol);
	if (known && known_is(known, &key.address, key.port, key.protocol, epoch))
		return known->service_index;
	exact = key;
	index = frontend_at(&key);
	if (index == SERVICE_NONE) {
		key.address.high = 0;
		key.address.low = 0;
		if (p->family == FAMILY_IP4)
			key.address = addr_from_ip4(0);
		index = frontend_at(&key);
	}
	if (index != SERVICE_NONE && known) {
		known->key = exact;
		known->epoch = epoch;
		known->flags = ADDRESS_VIP;
		known->service_index = index;
	}
	return index;
}

/*
 * The index of the service that a client behind an interface at tc has in place of this one. Such clients are
 * pods of this node: decapsulation needs XDP, so no way to clients outside is at tc alone. For level 1 it is the
 * service for clients in the cluster, with NAT: the answer of another node would come from an address that may be
 * this node's own, which the stack takes for forged.
 */
__stage __u32 inside_find(const struct packet *p, __u32 service_index)
{
	struct service *service = bpf_map_lookup_elem(&sh_services, &service_index);
	struct frontend_key key = {};
	__u32 index;

	if (!p || !service || !(service->flags & SERVICE_TUNNELLED) ||
	    !(service->flags & SERVICE_INSIDE))
		return service_index;
	key.address = p->key.destination;
	key.port = p->key.destination_port;
	key.protocol = p->key.protocol | FRONTEND_INSIDE;
	index = frontend_at(&key);
	return index == SERVICE_NONE ? service_index : index;
}

/* Goes on with *service_index, a service of level 2. */
static __always_inline enum verdict tunnelled_go_on(struct packet *p, __u32 *service_index)
{
	if (p->fragment == FRAGMENT_LATER) /* it has met no first one, whose note is NAT's */
		return drop(p, REASON_FRAGMENT_EARLY);
	*service_index = tunnelled_find(p);
	return *service_index == SERVICE_NONE ? drop(p, REASON_TUNNELLED_UNKNOWN) : VERDICT_NEXT;
}

#endif
