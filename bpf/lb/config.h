/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Values that are fixed when a program is loaded. The verifier knows these values and removes
 * the branches they rule out. One copy of the program is loaded per interface.
 */
#ifndef SHUNT_CONFIG_H
#define SHUNT_CONFIG_H

#include "types.h"

/* enum feature: the parts of the program that entries of the maps need. The daemon loads the
 * program anew before it writes an entry that needs more. */
volatile const __u32 features = 0;

/* Bit 1 << index in sh_interfaces: the interface is at tc, so XDP cannot send out of it, and sh_deliver
 * does (mark.h). It is 0 without FEATURE_TC_INTERFACES. An index from INTERFACE_MAX on is a pod's, and
 * always such an interface. */
volatile const __u64 tc_interfaces = 0;

/* Position of the program's interface in sh_interfaces and sh_tx_ports; INTERFACE_ANY: one copy is at
 * the interfaces of all pods, and finds each packet's in sh_ifindexes (own_index). */
volatile const __u32 interface_index = 0;

/* Generic XDP, and tc, keep the sk_buff and its note that the checksum is still to be filled in,
 * so a partial checksum stays partial. Native XDP loses the note. */
volatile const __u8 generic_mode = 0;

/* 1: send back by redirecting to the own interface. veth's XDP_TX queues the frame for its peer
 * but wakes only a peer that has an XDP program (drivers/net/veth.c, veth_xdp_flush); its
 * redirect also wakes one that has GRO on. A bond turns XDP_TX into a redirect of its own
 * (bond_xdp_get_xmit_slave), after which Linux 6.12.117 finds pages of a veth below it in a bad
 * state; ours, to the bond, does no harm. */
volatile const __u8 redirect_back = 0;

/* Elements of sh_handshakes and sh_tracked. */
volatile const __u32 handshake_count = 1;
volatile const __u32 tracked_count = 1;

/* Jiffies per second. */
volatile const __u32 jiffies_per_second = 250;

/* A tick, the unit in which remembered flows age, is 1 << tick_shift jiffies: the shortest
 * that is at least a second, because 16 bits have to hold half a day. */
volatile const __u8 tick_shift = 8;

/* The daemon counts as dead when its heartbeat is older. */
#define HEARTBEAT_SECONDS_MAX 10

#endif
