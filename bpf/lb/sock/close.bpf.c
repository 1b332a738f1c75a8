// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Closes the sockets whose backend is gone, and no others. User space has these programs walk
 * through the sockets of one network namespace after another, once a backend has been removed or is
 * down.
 *
 *   socket ─► connect()'s choice ─► does this very backend live, and may the socket go on? ─► it stays
 *                   │ nothing                             │ no
 *                   ▼                                     ▼
 *               it stays                     closed, or named to user space where
 *                                            this kernel has no bpf_sock_destroy (before 6.5)
 *
 * With a backend that is down, established connections of TCP go on, as flow_deserts (balance.h) has
 * it for packets: it may yet serve them. Datagrams and handshakes do not: their packets could get
 * another backend, but a socket cannot.
 *
 * Invariant: the reference in the socket's own storage decides, with its generation. A peer's address
 * does not: another backend may have it by now.
 *
 * A backend that has left one service, and is another one's still, lives. User space says which pairs
 * of service and backend these are (sh_sk_left), out of the pairs that sockets have (sh_pairs_…).
 *
 * Datagrams of sockets that are not connected look for a backend themselves.
 */
#include <linux/bpf.h>
#include <linux/in6.h>

#include "keep.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define AF_INET6 10 /* of include/linux/socket.h; any other socket here is of AF_INET */

/* Types that user space needs and that no map names. */
const struct sock_gone sock_gone_type;
const struct sock_pair sock_pair_type;
const enum sock_end sock_ends;
const enum sock_limit sock_limits;

/* For tests: nothing is closed here, as on a kernel that cannot. */
volatile const __u8 names_only = 0;

/* The kernel's part of any socket (include/net/sock.h); these members alone. */
struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	int skc_bound_dev_if;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
} __attribute__((preserve_access_index));

/* The context of an iterator of sockets (include/linux/bpf.h, net/ipv4/tcp_ipv4.c, net/ipv4/udp.c). */
struct iter_meta {
	void *seq;
};

struct iter_socket {
	struct iter_meta *meta;
	struct sock_common *sk;
};

extern int bpf_sock_destroy(struct sock_common *sk) __ksym __attribute__((weak));

/* The words of an address, one by one: the verifier knows the kernel's type. */
static __always_inline struct addr addr_of_words(const struct in6_addr *a)
{
	return (struct addr){
		.high = (__u64)a->in6_u.u6_addr32[1] << 32 | a->in6_u.u6_addr32[0],
		.low = (__u64)a->in6_u.u6_addr32[3] << 32 | a->in6_u.u6_addr32[2],
	};
}

/* A backend that has left a service, and is another one's still -> the moment, CLOCK_MONOTONIC in ns,
 * before which choices of it by sockets of that service are void; a later one chose it as the
 * service's own again. Generations cannot tell these apart. Written by user space before a walk, as
 * many as sockets have at a time; not pinned. Cannot be full: user space walks more often. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct sock_pair);
	__type(value, __u64);
	__uint(max_entries, PAIRS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_sk_left SEC(".maps");

static __always_inline int pair_has_left(const struct sock_choice *choice)
{
	struct sock_pair pair = { .service = choice->service, .backend = choice->backend };
	__u64 *moment = bpf_map_lookup_elem(&sh_sk_left, &pair);

	return moment && choice->made < *moment;
}

/* Copies connect()'s choice, if the socket is connected to it. Returns whether it is. */
static __always_inline int connection_read(struct sock_common *sk, struct sock_choice *choice)
{
	struct sock_choices *all = bpf_sk_storage_get(&sh_sk_choices, sk, 0, 0);

	return all && choice_read(all, 0, choice) && choice->port == sk->skc_dport;
}

/* The reason to close a socket, or END_NOT. established: it goes on with a backend that is down. */
static __always_inline enum sock_end socket_ends(struct sock_common *sk, int established)
{
	struct sock_choice choice;
	struct backend *backend;

	if (!connection_read(sk, &choice))
		return END_NOT;
	backend = backend_find(choice.backend);
	if (!backend)
		return END_GONE;
	if (pair_has_left(&choice))
		return END_LEFT;
	return backend->draining == DRAINING_DOWN && !established ? END_DOWN : END_NOT;
}

/* Datagrams that name their destination go on with the choices their socket keeps, so choices of
 * backends that have left are forgotten: the next datagram chooses. */
static __always_inline void datagrams_forget(struct sock_common *sk)
{
	struct sock_choices *all = bpf_sk_storage_get(&sh_sk_choices, sk, 0, 0);
	struct sock_choice choice;

	if (!all)
		return;
	for (__u32 i = 1; i < CHOICES_MAX; i++)
		if (choice_read(all, i, &choice) && pair_has_left(&choice))
			all->of[i].backend = 0;
}

/* Closes a socket, or leaves it to user space, and names it in any case. */
static __always_inline void socket_close(struct iter_socket *ctx, struct sock_common *sk,
					 __u8 protocol, enum sock_end end)
{
	struct sock_gone gone = {
		.cookie = bpf_get_socket_cookie(sk),
		.source_port = bpf_htons(sk->skc_num),
		.destination_port = sk->skc_dport,
		.ifindex = sk->skc_bound_dev_if,
		.family = sk->skc_family,
		.protocol = protocol,
		.end = end,
	};

	if (gone.family == AF_INET6) {
		gone.source = addr_of_words(&sk->skc_v6_rcv_saddr);
		gone.destination = addr_of_words(&sk->skc_v6_daddr);
	} else {
		gone.source = addr_from_ip4(sk->skc_rcv_saddr);
		gone.destination = addr_from_ip4(sk->skc_daddr);
	}
	/* Named first: where the buffer is full, the kernel shows the socket once more. Sockets of
	 * TCP and UDP can always be destroyed. */
	if (bpf_sock_destroy && !names_only) {
		gone.closed = 1;
		if (!bpf_seq_write(ctx->meta->seq, &gone, sizeof(gone)))
			bpf_sock_destroy(sk); /* only in this branch, which older kernels remove */
		return;
	}
	bpf_seq_write(ctx->meta->seq, &gone, sizeof(gone));
}

static __always_inline int is_connection(struct sock_common *sk)
{
	return sk->skc_state != BPF_TCP_LISTEN && sk->skc_state != BPF_TCP_CLOSE;
}

SEC("iter/tcp")
int sh_close_tcp(struct iter_socket *ctx)
{
	struct sock_common *sk = ctx->sk;
	enum sock_end end;

	if (!sk || !is_connection(sk))
		return 0;
	end = socket_ends(sk, sk->skc_state != BPF_TCP_SYN_SENT);
	if (end)
		socket_close(ctx, sk, IPPROTO_TCP, end);
	return 0;
}

SEC("iter/udp")
int sh_close_udp(struct iter_socket *ctx)
{
	struct sock_common *sk = ctx->sk;
	enum sock_end end;

	if (!sk)
		return 0;
	datagrams_forget(sk);
	if (sk->skc_state != BPF_TCP_ESTABLISHED) /* it is not connected */
		return 0;
	end = socket_ends(sk, 0);
	if (end)
		socket_close(ctx, sk, IPPROTO_UDP, end);
	return 0;
}

/* Names the pairs that a socket has: of connect(), and of datagrams. The kernel shows a socket once
 * more where the buffer is full, so a pair may be named twice. */
static __always_inline void pairs_name(struct iter_socket *ctx, struct sock_common *sk)
{
	struct sock_choices *all = bpf_sk_storage_get(&sh_sk_choices, sk, 0, 0);
	struct sock_choice choice;
	struct sock_pair pair;

	if (!all)
		return;
	for (__u32 i = 0; i < CHOICES_MAX; i++) {
		if (!choice_read(all, i, &choice))
			continue;
		pair.service = choice.service;
		pair.backend = choice.backend;
		bpf_seq_write(ctx->meta->seq, &pair, sizeof(pair));
	}
}

SEC("iter/tcp")
int sh_pairs_tcp(struct iter_socket *ctx)
{
	struct sock_common *sk = ctx->sk;

	if (sk && is_connection(sk))
		pairs_name(ctx, sk);
	return 0;
}

SEC("iter/udp")
int sh_pairs_udp(struct iter_socket *ctx)
{
	struct sock_common *sk = ctx->sk;

	if (sk)
		pairs_name(ctx, sk);
	return 0;
}
