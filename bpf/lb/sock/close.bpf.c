// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Closes the sockets whose backend is gone, and no others. User space has these programs walk
 * through the sockets of one network namespace after another, once a backend has been removed or is
 * down.
 *
 *   socket ─► what connect() chose ─► does this very backend live, and may it go on? ─► it stays
 *                   │ nothing                             │ no
 *                   ▼                                     ▼
 *               it stays                     closed, or named to user space where
 *                                            this kernel has no bpf_sock_destroy (before 6.5)
 *
 * With a backend that is down, established connections of TCP go on, as flow_deserts (balance.h) has
 * it for packets: it may yet serve them. Datagrams and handshakes do not; packets of these are given
 * another backend, which a socket cannot be.
 *
 * Invariant: the reference in the socket's own storage decides, with its generation. No address is
 * compared to find a socket: another backend may have it by now.
 *
 * Datagrams of sockets that are not connected need nothing: each looks for a backend itself.
 */
#include <linux/bpf.h>
#include <linux/in6.h>

#include "keep.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define AF_INET6 10 /* include/linux/socket.h; the other one is AF_INET */

/* Types that user space must know, and no map leads to. */
const struct sock_gone sock_gone_type;

/* For tests: nothing is closed here, as on a kernel that cannot. */
volatile const __u8 names_only = 0;

/* What the kernel has of any socket (include/net/sock.h); these members alone. */
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

/* What an iterator of sockets gets (include/linux/bpf.h, net/ipv4/tcp_ipv4.c, net/ipv4/udp.c). */
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

/* Whether a socket is connected to a backend that it was given, and that is gone, or is down where
 * only what is established goes on. */
static __always_inline int backend_is_gone(struct sock_common *sk, int established)
{
	struct sock_choices *all = bpf_sk_storage_get(&sh_sk_choices, sk, 0, 0);
	struct sock_choice choice;
	struct backend *backend;

	if (!all || !choice_read(all, 0, &choice) || choice.port != sk->skc_dport)
		return 0;
	backend = backend_find(choice.backend);
	return !backend || (backend->draining == DRAINING_DOWN && !established);
}

/* Closes a socket, or leaves it to user space, and names it in any case. */
static __always_inline void socket_close(struct iter_socket *ctx, struct sock_common *sk,
					 __u8 protocol)
{
	struct sock_gone gone = {
		.cookie = bpf_get_socket_cookie(sk),
		.source_port = bpf_htons(sk->skc_num),
		.destination_port = sk->skc_dport,
		.ifindex = sk->skc_bound_dev_if,
		.family = sk->skc_family,
		.protocol = protocol,
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
			bpf_sock_destroy(sk); /* only here: older kernels take the branch out */
		return;
	}
	bpf_seq_write(ctx->meta->seq, &gone, sizeof(gone));
}

SEC("iter/tcp")
int sh_close_tcp(struct iter_socket *ctx)
{
	struct sock_common *sk = ctx->sk;

	if (!sk || sk->skc_state == BPF_TCP_LISTEN || sk->skc_state == BPF_TCP_CLOSE)
		return 0;
	if (backend_is_gone(sk, sk->skc_state != BPF_TCP_SYN_SENT))
		socket_close(ctx, sk, IPPROTO_TCP);
	return 0;
}

SEC("iter/udp")
int sh_close_udp(struct iter_socket *ctx)
{
	struct sock_common *sk = ctx->sk;

	if (!sk || sk->skc_state != BPF_TCP_ESTABLISHED) /* connected */
		return 0;
	if (backend_is_gone(sk, 0))
		socket_close(ctx, sk, IPPROTO_UDP);
	return 0;
}
