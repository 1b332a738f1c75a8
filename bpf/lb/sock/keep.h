/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The memory of a socket: the VIPs that it has used, each with its backend.
 *
 *   element 0        of connect(); nothing else is written there
 *   elements 1 …     of datagrams that name their destination, the last few VIPs
 *
 * A VIP has one element, and so has a backend among the datagrams': if two VIPs have a backend in
 * common, its answers seem to come from the VIP that was used last.
 *
 * Nothing is locked. Two threads that write to one element at once leave a seal that fits neither,
 * which makes the element empty: the next datagram chooses again.
 */
#ifndef SHUNT_SOCK_KEEP_H
#define SHUNT_SOCK_KEEP_H

#include "../packet.h"
#include "../slot.h"
#include "maps.h"

static __always_inline __u64 choice_seal(const struct sock_choice *c)
{
	__u64 ports = (__u64)c->vip_port << 48 | (__u64)c->port << 32 | c->service;

	return c->vip.high * MIX_0 + c->vip.low * MIX_1 + c->address.high * MIX_2 +
	       c->address.low * MIX_3 + ports * MIX_4 + c->backend * MIX_5 + c->made * MIX_6;
}

static __always_inline struct sock_choices *choices_of(struct bpf_sock_addr *ctx, __u64 flags)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&sh_sk_choices, sk, 0, flags) : 0;
}

/* Copies an element. Returns whether it holds a choice. */
static __always_inline int choice_read(struct sock_choices *all, __u32 index,
				       struct sock_choice *copy)
{
	__builtin_memcpy(copy, &all->of[index], sizeof(*copy));
	return copy->backend && copy->seal == choice_seal(copy);
}

static __always_inline int choice_is_of_vip(const struct sock_choice *c, const struct addr *a,
					    __be16 port)
{
	return c->vip_port == port && addr_equal(&c->vip, a);
}

static __always_inline int choice_is_of_backend(const struct sock_choice *c, const struct addr *a,
						__be16 port)
{
	return c->port == port && addr_equal(&c->address, a);
}

/* Copies the kept choice of a VIP into *kept. Returns whether there is one. */
static __apart int choice_find(struct bpf_sock_addr *ctx, const struct addr *vip, __be16 port,
			       struct sock_choice *kept)
{
	struct sock_choices *all = choices_of(ctx, 0);

	if (!all)
		return 0;
	for (__u32 i = 0; i < CHOICES_MAX; i++)
		if (choice_read(all, i, kept) && choice_is_of_vip(kept, vip, port))
			return 1;
	return 0;
}

/* The element for a datagram's choice: its VIP's, its backend's, an empty one, or the one that was
 * written longest ago. */
static __always_inline __u32 choice_index(struct sock_choices *all, const struct sock_choice *c)
{
	__u32 same_backend = 0, empty = 0, hand;
	struct sock_choice there;

	for (__u32 i = 1; i < CHOICES_MAX; i++) {
		if (!choice_read(all, i, &there))
			empty = empty ?: i;
		else if (choice_is_of_vip(&there, &c->vip, c->vip_port))
			return i;
		else if (choice_is_of_backend(&there, &c->address, c->port))
			same_backend = i;
	}
	if (same_backend)
		return same_backend;
	if (empty)
		return empty;
	hand = all->hand + 1;
	if (hand < 1 || hand >= CHOICES_MAX)
		hand = 1;
	all->hand = hand;
	return hand;
}

/* Keeps a choice. connects: it is connect()'s, and the socket keeps no other one. Returns 0, or -1
 * without memory. */
static __apart int choice_keep(struct bpf_sock_addr *ctx, struct sock_choice *c, int connects)
{
	struct sock_choices *all = choices_of(ctx, BPF_SK_STORAGE_GET_F_CREATE);
	__u32 index;

	if (!all)
		return -1;
	c->seal = choice_seal(c);
	if (connects) {
		__builtin_memset(all, 0, sizeof(*all));
		index = 0;
	} else {
		index = choice_index(all, c);
	}
	if (index >= CHOICES_MAX) /* for the verifier */
		return -1;
	__builtin_memcpy(&all->of[index], c, sizeof(*c));
	return 0;
}

/*
 * The socket goes to an address that is no VIP, or one that is left to packets. It sees that address
 * from now on, even if it had stood for a VIP; after connect(), it sees no VIP at all.
 *
 * Datagrams of an IPv6 socket that is connected to an IPv4 address come by as if they named it
 * (udpv6_sendmsg in net/ipv6/udp.c), so a datagram of a connected socket to its peer forgets none.
 */
static __apart int choices_forget(struct bpf_sock_addr *ctx, const struct addr *to, __be16 port,
				  int connects)
{
	struct sock_choices *all = choices_of(ctx, 0);
	struct bpf_sock *sk = ctx->sk;
	struct sock_choice there;
	int forgotten = 0, keeps;

	if (!all || !sk)
		return 0;
	keeps = !connects && sk->state == BPF_TCP_ESTABLISHED;
	for (__u32 i = 0; i < CHOICES_MAX; i++) {
		if (!all->of[i].backend || (i == 0 && keeps))
			continue;
		if (!connects && choice_read(all, i, &there) &&
		    !choice_is_of_backend(&there, to, port))
			continue;
		__builtin_memset(&all->of[i], 0, sizeof(all->of[i]));
		forgotten = 1;
	}
	if (forgotten)
		outcome_count(OUTCOME_FORGOTTEN);
	return 0;
}

/* Writes the VIP that a peer stands for into *a and *port; 0: it stands for none. connected: only
 * connect()'s choice counts. */
static __apart int vip_find(struct bpf_sock_addr *ctx, struct addr *a, __be16 *port, int connected)
{
	struct sock_choices *all = choices_of(ctx, 0);
	struct sock_choice there;

	if (!all)
		return 0;
	for (__u32 i = 0; i < CHOICES_MAX; i++) {
		if (connected && i)
			return 0;
		if (!choice_read(all, i, &there) || !choice_is_of_backend(&there, a, *port))
			continue;
		*a = there.vip;
		*port = there.vip_port;
		outcome_count(OUTCOME_NAMED_VIP);
		return 1;
	}
	return 0;
}

#endif
