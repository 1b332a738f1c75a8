// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Services at the socket: the data of this host's programs to a VIP go to a backend from the first
 * packet on, because the socket is given the backend's address.
 *
 *   connect, sendmsg       VIP      ─► backend     once a connection, or a datagram
 *   recvmsg, getpeername   backend  ─► VIP         in the program's view
 *   bind                   a port that the host has a service at is refused
 *
 * Invariant: no packet is touched, and the only state is the socket's own, which goes with it, and
 * the backends of the clients of affinity.
 * A call that is for no service leaves as it came.
 */
#include <linux/errno.h>

#include "choose.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Types that user space needs and that no map names. */
const enum sock_outcome sock_outcomes;
const enum sock_limit sock_limits;

#define ALLOW 1
#define REFUSE 0

static __always_inline struct addr address6_get(const struct bpf_sock_addr *ctx)
{
	return (struct addr){ .high = (__u64)ctx->user_ip6[1] << 32 | ctx->user_ip6[0],
			      .low = (__u64)ctx->user_ip6[3] << 32 | ctx->user_ip6[2] };
}

static __always_inline void address6_set(struct bpf_sock_addr *ctx, const struct addr *a)
{
	ctx->user_ip6[0] = a->high;
	ctx->user_ip6[1] = a->high >> 32;
	ctx->user_ip6[2] = a->low;
	ctx->user_ip6[3] = a->low >> 32;
}

static __always_inline int go4(struct bpf_sock_addr *ctx, int connects)
{
	struct call call = { .to = addr_from_ip4(ctx->user_ip4),
			     .port = ctx->user_port,
			     .protocol = ctx->protocol,
			     .connects = connects };
	int error = call_translate(ctx, &call);

	if (error) {
		bpf_set_retval(error);
		return REFUSE;
	}
	ctx->user_ip4 = addr_to_ip4(&call.to);
	ctx->user_port = call.port;
	return ALLOW;
}

static __always_inline int go6(struct bpf_sock_addr *ctx, int connects)
{
	struct call call = { .to = address6_get(ctx),
			     .port = ctx->user_port,
			     .protocol = ctx->protocol,
			     .connects = connects };
	int error = call_translate(ctx, &call);

	if (error) {
		bpf_set_retval(error);
		return REFUSE;
	}
	address6_set(ctx, &call.to);
	ctx->user_port = call.port;
	return ALLOW;
}

static __always_inline int name4(struct bpf_sock_addr *ctx, int connected)
{
	struct addr a = addr_from_ip4(ctx->user_ip4);
	__be16 port = ctx->user_port;

	if (vip_find(ctx, &a, &port, connected)) {
		ctx->user_ip4 = addr_to_ip4(&a);
		ctx->user_port = port;
	}
	return ALLOW;
}

static __always_inline int name6(struct bpf_sock_addr *ctx, int connected)
{
	struct addr a = address6_get(ctx);
	__be16 port = ctx->user_port;

	if (vip_find(ctx, &a, &port, connected)) {
		address6_set(ctx, &a);
		ctx->user_port = port;
	}
	return ALLOW;
}

static __always_inline int take(struct bpf_sock_addr *ctx, const struct addr *at)
{
	struct call call = { .to = *at, .port = ctx->user_port, .protocol = ctx->protocol };
	int error = bind_judge(ctx, &call);

	if (!error)
		return ALLOW;
	bpf_set_retval(error);
	return REFUSE;
}

SEC("cgroup/connect4")
int sh_connect4(struct bpf_sock_addr *ctx)
{
	return go4(ctx, 1);
}

SEC("cgroup/connect6")
int sh_connect6(struct bpf_sock_addr *ctx)
{
	return go6(ctx, 1);
}

SEC("cgroup/sendmsg4")
int sh_sendmsg4(struct bpf_sock_addr *ctx)
{
	return go4(ctx, 0);
}

SEC("cgroup/sendmsg6")
int sh_sendmsg6(struct bpf_sock_addr *ctx)
{
	return go6(ctx, 0);
}

SEC("cgroup/recvmsg4")
int sh_recvmsg4(struct bpf_sock_addr *ctx)
{
	return name4(ctx, 0);
}

SEC("cgroup/recvmsg6")
int sh_recvmsg6(struct bpf_sock_addr *ctx)
{
	return name6(ctx, 0);
}

SEC("cgroup/getpeername4")
int sh_peername4(struct bpf_sock_addr *ctx)
{
	return name4(ctx, 1);
}

SEC("cgroup/getpeername6")
int sh_peername6(struct bpf_sock_addr *ctx)
{
	return name6(ctx, 1);
}

SEC("cgroup/bind4")
int sh_bind4(struct bpf_sock_addr *ctx)
{
	struct addr at = addr_from_ip4(ctx->user_ip4);

	return take(ctx, &at);
}

SEC("cgroup/bind6")
int sh_bind6(struct bpf_sock_addr *ctx)
{
	struct addr at = address6_get(ctx);

	return take(ctx, &at);
}
