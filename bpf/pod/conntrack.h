/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Conntrack's entry of a connection: read, and kept right while packets go past conntrack.
 *
 * A connection's entry lives as long as conntrack sees packets. It sees none that take the shortcut, so
 * the program sets the time that is left itself:
 *
 *   any packet, less than half of the time left ─► all of it     (as conntrack does with each packet)
 *   FIN                                         ─► ending_ms     conntrack would have 120 s
 *   FIN, already ending                         ─► closed_ms     both sides have ended, or a repetition
 *   RST                                         ─► closed_ms
 *   data while ending                           ─► ending_ms     the other side still sends
 *
 * FIN and RST take the shortcut too. Conntrack has not seen the data before them, so it would find them
 * outside of the window, which rules usually drop ("ct state invalid drop"), and closing would hang.
 *
 * The kernel's functions are in since Linux 6.0 (net/netfilter/nf_conntrack_bpf.c).
 */
#ifndef SHUNT_POD_CONNTRACK_H
#define SHUNT_POD_CONNTRACK_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

/* Of enum ip_conntrack_status, linux/netfilter/nf_conntrack_common.h. */
#define CT_SEEN_REPLY (1 << 1)
#define CT_ASSURED (1 << 2)
/* SRC_NAT, DST_NAT and SEQ_ADJUST: addresses or sequence numbers are rewritten. */
#define CT_TRANSLATED (1 << 4 | 1 << 5 | 1 << 6)
/* TCP_CONNTRACK_ESTABLISHED of enum tcp_conntrack, linux/netfilter/nf_conntrack_tcp.h. */
#define CT_TCP_ESTABLISHED 3
/* IP_CT_TCP_FLAG_BE_LIBERAL of the same: packets outside of the window are not invalid. */
#define CT_TCP_BE_LIBERAL 0x08

/* The fields of the kernel's types that are read here; the loader finds their offsets. */
struct ip_ct_tcp_state {
	__u8 flags;
} __attribute__((preserve_access_index));

struct ip_ct_tcp {
	struct ip_ct_tcp_state seen[2];
	__u8 state;
} __attribute__((preserve_access_index));

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
} __attribute__((preserve_access_index));

struct nf_conn {
	__u32 timeout; /* the moment when the entry ends, low half of jiffies */
	unsigned long status;
	union nf_conntrack_proto proto;
} __attribute__((preserve_access_index));

/* Of net/netfilter/nf_conntrack_bpf.c, the 12 bytes that all kernels take. */
struct bpf_ct_opts {
	__s32 netns_id; /* -1: the namespace of the packet's interface */
	__s32 error;
	__u8 l4proto;
	__u8 dir; /* set by the kernel: 0: as the connection began; 1: the other direction */
	__u8 reserved[2];
};

struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *ctx, struct bpf_sock_tuple *tuple,
				  __u32 tuple_size, struct bpf_ct_opts *opts,
				  __u32 opts_size) __ksym;
int bpf_ct_change_timeout(struct nf_conn *entry, __u32 timeout_ms) __ksym;
void bpf_ct_release(struct nf_conn *entry) __ksym;

/* Times of the host's conntrack, which user space reads from its sysctls. */
volatile const __u32 jiffies_per_second = 250;
volatile const __u32 tcp_ms = 432000000; /* nf_conntrack_tcp_timeout_established */
volatile const __u32 udp_ms = 30000; /* nf_conntrack_udp_timeout */
volatile const __u32 udp_stream_ms = 120000; /* nf_conntrack_udp_timeout_stream */
volatile const __u32 ending_ms = 120000; /* nf_conntrack_tcp_timeout_fin_wait, tcp_ms / 4 at most */
volatile const __u32 closed_ms = 10000; /* nf_conntrack_tcp_timeout_close, ending_ms / 4 at most */

/* The kinds of TCP segments that make a difference to the entry. */
enum segment {
	SEGMENT_BARE = 0,
	SEGMENT_DATA,
	SEGMENT_FIN,
	SEGMENT_RST,
};

/* The time that the entry lives from now on; 0: unchanged. */
static __always_inline __u32 entry_time(const struct nf_conn *entry, __u8 protocol,
					enum segment segment)
{
	__s32 left = entry->timeout - (__u32)bpf_jiffies64();
	__u64 left_ms = left > 0 ? (__u64)left * 1000 / jiffies_per_second : 0;
	__u32 whole_ms;

	if (protocol == IPPROTO_UDP) {
		whole_ms = entry->status & CT_ASSURED ? udp_stream_ms : udp_ms;
		return left_ms < whole_ms / 2 ? whole_ms : 0;
	}
	if (segment == SEGMENT_RST)
		return closed_ms;
	if (segment == SEGMENT_FIN)
		return left_ms > ending_ms ? ending_ms : closed_ms;
	if (left_ms > ending_ms)
		return left_ms < tcp_ms / 2 ? tcp_ms : 0;
	return segment == SEGMENT_DATA && left_ms < ending_ms / 2 ? ending_ms : 0;
}

#endif
