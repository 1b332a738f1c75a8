/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How programs know the probes of `shunt diag ping` among the packets that pass a tracepoint.
 */
#ifndef SHUNT_PING_PROBE_H
#define SHUNT_PING_PROBE_H

#include <bpf/bpf_endian.h>

#include "ping.h"

/* A client's own session; a server serves all. */
volatile const __u64 only_session = 0;
/* Inode number of the network namespace that the tool is in. */
volatile const __u32 only_netns = 0;
/* 1: probes may be datagrams of UDP, too. Without it, such packets are not looked at. */
volatile const __u32 with_udp = 0;
/* 1: places in all network namespaces are noted. Rows get stamps of the tool's own namespace nevertheless. */
volatile const __u32 all_netns = 0;

#define ICMP4 1 /* IPPROTO_ICMP of linux/in.h */
#define ICMP6 58 /* IPPROTO_ICMPV6 of linux/in6.h */
#define UDP 17 /* IPPROTO_UDP of linux/in.h */
/* RFC 792 and RFC 4443, section 4 */
#define ECHO4_REQUEST 8
#define ECHO4_REPLY 0
#define ECHO6_REQUEST 128
#define ECHO6_REPLY 129
#define IP6_HEADER_BYTES 40
typedef struct {
	struct net *net;
} possible_net_t;

struct net_device {
	int ifindex;
	possible_net_t nd_net;
} KERNEL_STRUCT;

struct sk_buff {
	struct net_device *dev;
	unsigned int len;
	unsigned int data_len;
	__u16 network_header;
	unsigned char *head;
	unsigned char *data;
} KERNEL_STRUCT;

/* An echo message or a datagram of ours. */
struct message {
	__u64 session;
	__u64 sequence;
	__u32 netns; /* where the packet is */
	__u8 kind;
	__u8 is_request;
};

/* As they are in a packet. With UDP, ports, length and checksum are in the place of the first five fields. */
struct echo {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__u16 id;
	__u16 sequence;
	struct probe_head head;
};

static __always_inline int echo_read(struct message *m, const struct echo *e, __u8 protocol)
{
	__u8 request = protocol == ICMP4 ? ECHO4_REQUEST : ECHO6_REQUEST;
	__u8 reply = protocol == ICMP4 ? ECHO4_REPLY : ECHO6_REPLY;

	if (e->head.magic_be != bpf_htonl(PROBE_MAGIC) || e->head.version != PROBE_VERSION)
		return -1;
	if (protocol != UDP &&
	    (e->code > PING_CODE_MAX || (e->type != request && e->type != reply)))
		return -1;
	if (only_session && e->head.session != only_session)
		return -1;
	m->is_request = protocol == UDP ? !(e->head.is_answer & 1) : e->type == request;
	m->kind = e->head.kind;
	m->session = e->head.session;
	m->sequence = bpf_be64_to_cpu(e->head.sequence_be);
	return 0;
}

/* Bytes of the IP header with this beginning; 0: no message of ours can follow it. Extension headers of IPv6 and
 * fragments are not followed: the tool's packets have none. */
static __always_inline __u32 header_bytes(const __u8 *ip, __u8 *protocol)
{
	if (ip[0] >> 4 == 4 && (ip[9] == ICMP4 || (with_udp && ip[9] == UDP))) {
		*protocol = ip[9];
		return (ip[0] & 15) * 4;
	}
	if (ip[0] >> 4 == 6 && (ip[6] == ICMP6 || (with_udp && ip[6] == UDP))) {
		*protocol = ip[6];
		return IP6_HEADER_BYTES;
	}
	return 0;
}

static __always_inline __u32 netns_of(struct sk_buff *skb, int is_typed)
{
	return is_typed ? skb->dev->nd_net.net->ns.inum :
			  BPF_CORE_READ(skb, dev, nd_net.net, ns.inum);
}

/* A packet that leaves has its IP header at the offset of the network header. */
static __always_inline void *ip_of_leaving(struct sk_buff *skb, int is_typed)
{
	return FIELD(is_typed, skb, head) + FIELD(is_typed, skb, network_header);
}

/* A packet that arrives has its IP header where its data begins. */
static __always_inline void *ip_of_arriving(struct sk_buff *skb, int is_typed)
{
	return FIELD(is_typed, skb, data);
}

/* Reads the probe whose IP header is at ip; -1: it is none of ours, or in a namespace that is not watched. */
static __always_inline int probe_read(struct message *m, struct sk_buff *skb, void *ip,
				      int is_typed)
{
	void *end = FIELD(is_typed, skb, data) + FIELD(is_typed, skb, len) -
		    FIELD(is_typed, skb, data_len);
	__u32 header;
	struct echo e;
	__u8 first[10], protocol;

	if (ip + sizeof(first) > end || bpf_probe_read_kernel(first, sizeof(first), ip))
		return -1;
	header = header_bytes(first, &protocol);
	if (!header || ip + header + sizeof(e) > end ||
	    bpf_probe_read_kernel(&e, sizeof(e), ip + header) || echo_read(m, &e, protocol))
		return -1;
	m->netns = netns_of(skb, is_typed);
	if (m->kind != PROBE_KIND_PROBE || (!all_netns && m->netns != only_netns))
		return -1;
	return 0;
}

#endif
