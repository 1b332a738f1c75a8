// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Sends the packets of health checks with direct return: to the VIP, at one backend. A health check
 * is an ordinary socket that connects to the VIP. User space notes at the socket which backend it
 * checks, and marks the socket; a routing rule leads marked packets to a device that does nothing
 * else, and this program is at the egress of that device.
 *
 *   socket ─► rule ─► device: sh_check ─┬─► wrapped as a client's packet is ─► next hop ─► wire
 *                                       └─► dropped, counted
 *
 * The answer comes to the socket as it comes to a client.
 *
 * Invariant: nothing leaves by the device itself.
 */
#include "../ctx/skb.h"

#include <linux/pkt_cls.h>

#include "transport.h"
#include "encap.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Socket -> the check that it is for. Written by user space before the socket connects. It goes
 * with the socket, and it is not pinned: sockets do not outlive the daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__type(key, int);
	__type(value, struct check);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_checks SEC(".maps");

static __always_inline struct check *check_find(struct __sk_buff *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&sh_checks, sk, 0, 0) : 0;
}

/* Reads the network header, the only one that packet_wrap needs. The transport header does not
 * matter: the packet has its backend. */
static __always_inline enum verdict header_stage(struct frame_ctx *ctx, struct packet *p)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);

	if (data + sizeof(struct ethhdr) > data_end)
		return drop(p, REASON_MALFORMED);
	switch (frame_protocol(data)) {
	case bpf_htons(ETH_P_IP):
		return ip4_parse(ctx, p, data, data_end);
	case bpf_htons(ETH_P_IPV6):
		return ip6_parse(ctx, p, data, data_end);
	}
	return drop(p, REASON_NOT_IP);
}

/* Sends the packet to the backend as clients' packets are sent there. Returns tc's action. */
static __always_inline int check_send(struct frame_ctx *ctx, struct packet *p,
				      const struct check *check)
{
	struct settings *settings;
	struct interface *out;
	__u32 zero = 0;

	settings = bpf_map_lookup_elem(&sh_settings, &zero);
	if (!settings || header_stage(ctx, p) != VERDICT_NEXT)
		return TC_ACT_SHOT;
	out = hop_interface(check->hop);
	if (!out) {
		drop(p, REASON_INTERNAL);
		return TC_ACT_SHOT;
	}
	if (check->forwarding != FORWARDING_DSR_L2 &&
	    packet_wrap(ctx, p, settings, check->forwarding, &check->backend, out,
			bpf_get_hash_recalc(ctx)) != VERDICT_NEXT) {
		drop(p, p->reason ?: REASON_TOO_BIG);
		return TC_ACT_SHOT;
	}
	if (ethernet_send(ctx, p, check->hop, out) == VERDICT_DROP)
		return TC_ACT_SHOT;
	return bpf_redirect(out->ifindex, 0);
}

SEC("tc")
int sh_check(struct __sk_buff *ctx)
{
	struct check *check = check_find(ctx);
	struct packet p = {};
	int action;

	if (!check)
		return TC_ACT_SHOT; /* of no check: the kernel's own to its neighbours */
	check->taken = 1;
	ctx_headers_pull(ctx);
	p.frame_size = ctx_size_hint(ctx);
	action = check_send(ctx, &p, check);
	if (p.reason)
		count_reason(p.reason, p.frame_size);
	return action;
}
