/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A program at tc includes this file, so that every machine makes the same object of the same sources.
 *
 * struct __sk_buff points to two structs, bpf_sock and bpf_flow_keys. Into BTF, clang writes only the
 * names of such structs, after everything else and in the order of the addresses at which clang
 * holds them (FixupDerivedTypes in BTFDebug.h of LLVM 19): even the length of the sources' path
 * can reverse that order. With a variable that points to one of them, clang writes that struct in
 * full, in its proper place, and the one name that remains has no order.
 */
#ifndef SHUNT_SK_BUFF_H
#define SHUNT_SK_BUFF_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* It is in a section that no loader reads. */
static struct bpf_sock *const bpf_sock_in_full SEC(".btf_only") __attribute__((used)) = 0;

#endif
