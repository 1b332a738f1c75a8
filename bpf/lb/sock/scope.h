/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Loopback addresses, which name another host in each network namespace.
 *
 *   frontend 127.0.0.1:P     all of 127.0.0.0/8 at P, in the host's namespace alone
 *   frontend [::1]:P         ::1 at P, in the host's namespace alone
 *
 * The host's namespace is the one that the sockets' daemon is in. A server at a pod's loopback address
 * is the pod's own.
 */
#ifndef SHUNT_SOCK_SCOPE_H
#define SHUNT_SOCK_SCOPE_H

#include "../../core/addr.h"
#include "types.h"

/* The cookie of the host's network namespace. Set when the programs are loaded. */
volatile const __u64 host_netns = 0;

#define LOOPBACK4 bpf_htonl(0x7f000001) /* 127.0.0.1 */
#define LOOPBACK6_LOW (1ULL << 56) /* ::1 in wire order */

static __always_inline int socket_is_host(struct bpf_sock_addr *ctx)
{
	return bpf_get_netns_cookie(ctx) == host_netns;
}

static __always_inline int addr_is_loopback(const struct addr *a)
{
	if (addr_is_mapped(a))
		return (__u8)addr_to_ip4(a) ==
		       127; /* wire order: the lowest byte is the first octet */
	return !a->high && a->low == LOOPBACK6_LOW;
}

/* The loopback address of a's family that frontends have. */
static __always_inline struct addr addr_loopback(const struct addr *a)
{
	return addr_is_mapped(a) ? addr_from_ip4(LOOPBACK4) : (struct addr){ .low = LOOPBACK6_LOW };
}

/* Writes the address whose frontend is looked up into *at. 0: the address belongs to the socket's own
 * namespace alone. */
static __always_inline int address_scope(struct bpf_sock_addr *ctx, const struct addr *to,
					 struct addr *at)
{
	*at = *to;
	if (!addr_is_loopback(to))
		return 1;
	*at = addr_loopback(to);
	return socket_is_host(ctx);
}

#endif
