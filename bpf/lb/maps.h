/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps. The comment of each names its key and value, its writers and readers, and the
 * behaviour when it is full and at an upgrade. All are pinned under abi-<SHUNT_ABI>, and a program
 * of the same ABI takes them over as they are. Sizes here are placeholders: user space
 * sets them from `limits` when it loads.
 */
#ifndef SHUNT_MAPS_H
#define SHUNT_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "../core/reasons.h"
#include "types.h"

/* Address -> its uses (struct address). Written by the reconciler, owned_until by announce. Read
 * for every packet. Full: the reconciler refuses the change beforehand. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct addr);
	__type(value, struct address);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_addresses SEC(".maps");

/* Address, exact port and protocol -> index in sh_services. Written by the reconciler.
 * Read for the first packet of a flow. Full: refused beforehand. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct frontend_key);
	__type(value, struct frontend);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_frontends SEC(".maps");

/* The same for ranges and any, as port prefixes; looked up when sh_frontends has no entry.
 * A range is at most 30 prefixes. Written by the reconciler. Full: refused beforehand. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct range_key);
	__type(value, struct frontend);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_ranges SEC(".maps");

/* Index -> service. An array: its elements are never recycled, and generation tells one
 * service from the next one at the index. Written by the reconciler through a memory mapping. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct service);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} sh_services SEC(".maps");

/* Index -> backend; index 0 is no backend. Written by the reconciler (address, port,
 * generation, before a slot names it) and the neighbour watcher (hop, sources: one atomic
 * word each). Read for every packet from a client. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct backend);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} sh_backends SEC(".maps");

/* All Maglev tables, one after the other; struct service has the offsets. Written by the
 * reconciler with aligned atomic stores. Read for the first packet of a flow. Full: the
 * reconciler refuses the change beforehand. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} sh_slots SEC(".maps");

/* Source addresses of full NAT; struct backend names its own. Written by the daemon before a
 * backend names them. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct addr);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} sh_sources SEC(".maps");

/* Tuple of a packet -> its rewrite; two entries a flow. The DIRECTION_BACKEND entry,
 * inserted with NOEXIST, is the claim of the source port. Written and expired by the
 * programs alone, whether the daemon lives or not. Full: counted as table_full; the rings
 * below keep it from getting there. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct flow_key);
	__type(value, struct flow);
	__uint(max_entries, 1);
} sh_flows SEC(".maps");

/* The identity of a datagram -> the verdict on its first fragment, for the
 * later ones, which have no ports (fragment.h). The key is a flow's with the identification
 * for ports. Written and read by the programs alone. Full:
 * the least recently used note goes, and with it one datagram is lost. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct flow_key);
	__type(value, struct note);
	__uint(max_entries, FRAGMENT_NOTES_MAX);
} sh_fragments SEC(".maps");

/* Flows whose handshake is not finished, in the order of their beginning. A new one displaces
 * the oldest, so a flood can displace only unfinished ones. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tracked);
	__uint(max_entries, 1);
} sh_handshakes SEC(".maps");

/* Established flows. A clock hand looks for an element whose flow has ended; living ones are
 * never displaced. Full: counted as flows_full. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tracked);
	__uint(max_entries, 1);
} sh_tracked SEC(".maps");

/* Tuple of a flow, or a client of affinity, of a tracked service -> the backend it stays
 * with. Written by the programs, in slots that are not settled; sh_recall, which the daemon
 * runs, removes ended entries. Full, or over the budget: counted as not_remembered, and the
 * flow follows the slot's previous backend. Memory is taken as needed. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct flow_key);
	__type(value, struct remembered);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_remembered SEC(".maps");

/* A bit for each slot, 64 an element: a flow remembers another backend than the slot's
 * current one. The daemon clears it before sh_recall sets it, and reads it afterwards. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} sh_marks SEC(".maps");

/* Counts of all CPUs together: the hands of the two rings, and new remembered flows, by enum
 * ring. Written by the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, HAND_COUNT);
} sh_hands SEC(".maps");

/* One element. Written by the daemon, the heartbeat by sh_clock. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct settings);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} sh_settings SEC(".maps");

/* Index -> interface; pods' from INTERFACE_MAX on. Written by the daemon when it attaches. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct interface);
	__uint(max_entries, INDEX_MAX);
} sh_interfaces SEC(".maps");

/* ifindex -> index in sh_interfaces, for answers of the routing table, and for the interface that a
 * packet of a pod is at. Written by the daemon. Cannot be full. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, INDEX_MAX);
} sh_ifindexes SEC(".maps");

/* Index as in sh_interfaces -> interface to send out of. Written by the daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, INDEX_MAX);
} sh_tx_ports SEC(".maps");

/* Index in sh_interfaces -> tags that its frames have on the wire; none for most. sh_tx_ports has
 * the parent at that index. Written by the daemon when it attaches. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct vlan_tags);
	__uint(max_entries, INTERFACE_MAX);
} sh_vlan_tags SEC(".maps");

/* Parent and tags -> index in sh_interfaces. Written by the daemon when it attaches; read for each
 * frame with a tag. Cannot be full. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct vlan_key);
	__type(value, __u32);
	__uint(max_entries, INTERFACE_MAX);
} sh_vlans SEC(".maps");

/* Index in sh_interfaces -> its copy of sh_xdp, for sh_vlan; and, INTERFACE_MAX further on, its copy
 * of sh_vlan, for sh_xdp. Written by the daemon when it attaches. The kernel empties it when user
 * space does not hold it any more; it is pinned like all here. Cannot be full. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 2 * INTERFACE_MAX);
} sh_vlan_progs SEC(".maps");

/* Index in sh_interfaces -> its copy of sh_decap, where this host is a backend behind tunnels. Written
 * by the daemon once the interface has a program, read by programs with FEATURE_DECAP. The kernel
 * empties it when user space does not hold it any more; it is pinned like all here. Cannot be full.
 * Both ABIs of an upgrade share it. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, INTERFACE_MAX);
} sh_decap_progs SEC(".maps");

/* Index in sh_interfaces -> its copy of sh_tunnelled, where this host is a node of a cluster that takes
 * packets of other nodes out of tunnels. Written by the daemon before sh_decap calls it. The kernel empties
 * it when nobody in user space holds it any more; it is pinned like all here. Cannot be full. Both ABIs of an
 * upgrade share it. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, INTERFACE_MAX);
} sh_tunnel_progs SEC(".maps");

/* Service index -> traffic, per CPU. Written by the programs, summed by user space, zeroed
 * when another service takes the index. Cannot be full. Outlives the daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct traffic);
	__uint(max_entries, 1);
} sh_svc_traffic SEC(".maps");

/* Backend index -> traffic, per CPU, over all services that share the backend. Written,
 * read and zeroed as above. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct traffic);
	__uint(max_entries, 1);
} sh_be_traffic SEC(".maps");

/* enum reason -> how often, per CPU. Written by the programs, summed by user space, never
 * zeroed. Cannot be full. Outlives the daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct count);
	__uint(max_entries, REASON_COUNT);
} sh_reasons SEC(".maps");

/* Prefix of source addresses of a service -> whether they may use it. Written by the reconciler,
 * longer prefixes first. Read for packets that begin a flow and, with direct return, for all packets
 * of a service with SERVICE_FILTERS. Full: refused beforehand. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct filter_key);
	__type(value, struct filter);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_filters SEC(".maps");

/* Service index -> its counted flows. Written by the programs, and by user space when another
 * service takes the index. Cannot be full. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct service_flows);
	__uint(max_entries, 1);
} sh_svc_flows SEC(".maps");

/* Source address and service -> new flows that it may have at once. Written by the programs, for
 * services with a source_rate. Full: the source that was not seen for the longest time is
 * forgotten, and may begin anew: no source is refused for want of room. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct source_key);
	__type(value, struct source_rate);
	__uint(max_entries, 1 << 16);
} sh_source_rates SEC(".maps");

/* The names of positions, for `shunt status` when no daemon answers. Written and read
 * by user space. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct name_key);
	__type(value, struct name);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sh_names SEC(".maps");

#endif
