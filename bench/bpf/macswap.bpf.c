// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * macswap: the least a balancer with two interfaces can do, for comparison.
 *
 *	client ── a [macswap] b ── servers
 *
 * IPv4 frames from one side get new Ethernet addresses and leave on the other; all else
 * (ARP above all) goes to the kernel. No parsing, no state, no counters: the loss of a
 * balancer against this is its own work, the loss of this against a kernel router is the
 * price of the XDP path. One copy of the program is loaded per direction. With one interface
 * the other program does the same for both.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Set before loading, per direction: Ethernet destination and source, wire order. */
volatile const __u8 hop_addresses[2 * ETH_ALEN] = {};

/* The same towards the client, for one interface. */
volatile const __u8 back_addresses[2 * ETH_ALEN] = {};

/*
 * Where frames leave. Key: 0. Value: ifindex. Written once before attaching, read by the
 * program; cannot fill up; not pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} macswap_out SEC(".maps");

static __always_inline void address(struct ethhdr *eth, const volatile __u8 *addresses)
{
	for (int i = 0; i < ETH_ALEN; i++) {
		eth->h_dest[i] = addresses[i];
		eth->h_source[i] = addresses[ETH_ALEN + i];
	}
}

SEC("xdp.frags")
int sh_macswap(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > data_end || eth->h_proto != bpf_htons(ETH_P_IP))
		return XDP_PASS;
	address(eth, hop_addresses);
	return bpf_redirect_map(&macswap_out, 0, XDP_DROP);
}

SEC("xdp.frags")
int sh_macswap_one(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	int from_client = 1;

	if ((void *)(eth + 1) > data_end || eth->h_proto != bpf_htons(ETH_P_IP))
		return XDP_PASS;
	for (int i = 0; i < ETH_ALEN; i++)
		from_client &= eth->h_source[i] == back_addresses[i];
	if (from_client)
		address(eth, hop_addresses);
	else
		address(eth, back_addresses);
	/* Not XDP_TX: a veth whose peer has no XDP program leaves such frames in the peer's ring. */
	return bpf_redirect_map(&macswap_out, 0, XDP_DROP);
}

char _license[] SEC("license") = "Dual BSD/GPL";
