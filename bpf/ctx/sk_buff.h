/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A program at tc includes this file, so that every machine makes the same object of the same sources.
 *
 * struct __sk_buff points to two structs, bpf_sock and bpf_flow_keys. In BTF, clang writes of such
 * ones no more than the name, after everything else and in the order of the addresses where it
 * holds them (FixupDerivedTypes in BTFDebug.h of LLVM 19): an order that even the length of the
 * sources' path turns round. A variable that points to one has it written in full, where it
 * belongs, and one name alone has no order.
 */
#ifndef SHUNT_SK_BUFF_H
#define SHUNT_SK_BUFF_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* In a section that no loader reads. */
static struct bpf_sock *const bpf_sock_in_full SEC(".btf_only") __attribute__((used)) = 0;

#endif
