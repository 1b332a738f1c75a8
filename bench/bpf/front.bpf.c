// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * front: puts a fresh packet in front of a program that is run in a loop.
 *
 * BPF_PROG_TEST_RUN with repeat hands the packet that one run has changed to the next:
 * a program that rewrites would see its own output from the second run on, miss, and
 * look fast. So
 *
 *	run ─► sh_front: length and bytes of the next prepared packet ─► tail call ─► program under test
 *
 * and the same with a stub instead of the program; the difference is the program.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Every prepared packet is this long, a multiple of 8: Ethernet, IPv6 and TCP headers fit. */
#define PACKET_WORDS 10

struct packet {
	__u64 words[PACKET_WORDS];
};

/*
 * The prepared packets. Key: 0 to flow count - 1. Value: a frame from its Ethernet header
 * on. Written by percall before the run, read by sh_front; sized at load; not pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct packet);
} bench_packets SEC(".maps");

/* The measured program. Key: 0. Value: a program. Written by percall between runs; not pinned. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} bench_target SEC(".maps");

/* As large as struct flow_key and struct flow of bpf/core/types.h and bpf/lb/types.h: only the sizes matter. */
struct entry_key {
	__u64 source[2]; /* IPv4 in the last half of the second word */
	__u64 destination[2];
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 pad[3];
};

#define ENTRY_WORDS 9

struct entry {
	__u64 words[ENTRY_WORDS]; /* zero */
};

/*
 * A table like the one in which NAT finds its flows, with as much room and as many entries. Key: of a
 * prepared packet. Value: zeroes. Written by percall before the run, read by sh_stub_find;
 * sized at load; not pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, struct entry_key);
	__type(value, struct entry);
} bench_entries SEC(".maps");

/* Flow count - 1; the count is a power of two. Set before loading. */
volatile const __u32 packet_mask = 0;

/* The next packet's key. Only one CPU runs this, so a plain variable will do. */
__u32 packet_next = 0;

SEC("xdp.frags")
int sh_front(struct xdp_md *ctx)
{
	__u32 key = packet_next & packet_mask;
	struct packet *fresh = bpf_map_lookup_elem(&bench_packets, &key);
	struct packet *now;
	long grown;

	if (!fresh)
		return XDP_ABORTED;
	packet_next = key + 1;
	/* Takes off the headers that the program pushed in front the last time. */
	grown = (long)ctx->data_end - (long)ctx->data - (long)sizeof(*now);
	if (grown && bpf_xdp_adjust_head(ctx, grown))
		return XDP_ABORTED;
	now = (void *)(long)ctx->data;
	if ((void *)(now + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	for (int i = 0; i < PACKET_WORDS; i++)
		now->words[i] = fresh->words[i];
	bpf_tail_call(ctx, &bench_target, 0);
	return XDP_ABORTED;
}

/* The floor for programs that rewrite in place. */
SEC("xdp.frags")
int sh_stub_drop(struct xdp_md *ctx)
{
	return XDP_DROP;
}

/* The floor for programs that encapsulate: pushes an outer IPv4 header of constants. */
SEC("xdp.frags")
int sh_stub_push(struct xdp_md *ctx)
{
	struct ethhdr *eth;
	struct iphdr *ip;

	if (bpf_xdp_adjust_head(ctx, -(int)sizeof(*ip)))
		return XDP_ABORTED;
	eth = (void *)(long)ctx->data;
	ip = (void *)(eth + 1);
	if ((void *)(ip + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	__builtin_memset(eth, 2, 2 * ETH_ALEN);
	eth->h_proto = bpf_htons(ETH_P_IP);
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 4;
	ip->ihl = 5;
	ip->ttl = 64;
	ip->protocol = 4; /* IPIP, RFC 2003 */
	ip->saddr = bpf_htonl(0x0a000001);
	ip->daddr = bpf_htonl(0x0a000002);
	return XDP_TX;
}

/* The floor for programs that find a flow's state in a table: finds an entry, and reads the whole
 * of it. Without an entry it drops. The choice of the next packet depends on the read bytes: else
 * the CPU would begin with the next look-up while it waits for this one, which a program that has
 * more to do between the two cannot expect. */
SEC("xdp.frags")
int sh_stub_find(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct iphdr *ip = (void *)(eth + 1);
	struct tcphdr *tcp = (void *)(ip + 1);
	struct entry_key key = { .protocol = IPPROTO_TCP };
	struct entry *found;
	__u64 zero = 0;

	if ((void *)(tcp + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	key.source[1] = ip->saddr;
	key.destination[1] = ip->daddr;
	key.source_port = tcp->source;
	key.destination_port = tcp->dest;
	found = bpf_map_lookup_elem(&bench_entries, &key);
	if (!found)
		return XDP_DROP;
	for (int i = 0; i < ENTRY_WORDS; i++)
		zero |= found->words[i];
	packet_next += zero;
	return XDP_TX;
}

char _license[] SEC("license") = "Dual BSD/GPL";
