/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The addresses of a socket.
 */
#ifndef SHUNT_SOCKET_H
#define SHUNT_SOCKET_H

#include "guard.h"
#include <bpf/bpf_endian.h>

#define FAMILY_INET 2 /* AF_INET of linux/socket.h */
#define FAMILY_INET6 10
#define PROTOCOL_TCP 6

struct in6_addr {
	__u8 octets[16];
};

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
} KERNEL_STRUCT;

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
} KERNEL_STRUCT;

struct socket {
	struct sock *sk;
} KERNEL_STRUCT;

#endif
