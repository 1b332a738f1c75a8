/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every type that crosses between the balancer's programs and user space, once. Go is
 * generated from this file through abi.bpf.c; test/abi.golden prints the result, so that
 * a change to the ABI is a readable difference.
 *
 * Byte order is core/types.h's. Words that one side changes while the other reads are a
 * single aligned u64, stored and loaded whole.
 */
#ifndef SHUNT_LB_TYPES_H
#define SHUNT_LB_TYPES_H

#include "../core/types.h"

/* Numbers that user space needs too; an enum, because BTF does not record #define. */
enum constant {
	SHUNT_ABI = 1, /* part of the pin path: /sys/fs/bpf/shunt/<instance>/abi-1/ */
	BACKEND_INDEX_BITS = 20,
	BACKEND_REF_BITS = 28,
	HOP_INTERFACE_SHIFT = 48,
	HOP_INTERFACE_MASK = 0x3ff,
	HOP_CHECK_SHIFT = 58,
	INTERFACE_MAX = 64, /* interfaces with a program of the balancer; pods' do not count */
	INDEX_MAX = 1024, /* these, and pods' behind them: see HOP_INTERFACE_MASK and mark.h */
	INTERFACE_ANY = 0xffffffff, /* see config.h */
	FRONTEND_FRAGMENTS = 0x80, /* in frontend_key.protocol, see struct frontend_key */
	FRONTEND_INSIDE = 0x40, /* in frontend_key.protocol, see struct frontend_key */
	FRONTEND_TUNNELLED = 0x20, /* in frontend_key.protocol, see struct frontend_key */
	FRAGMENT_NOTES_MAX = 16384, /* datagrams in fragments that are under way at once */
	FILTER_ALLOWS = 1,
	FILTER_BITS_SHIFT = 8,
	NONCE_COUNTED = 0x40000000,
	CHECK_MARK = 0x7368, /* the high half of the mark of a health check's socket */
	CHECK_MARK_SHIFT = 16,
};

/* --- our addresses ------------------------------------------------------------ */

enum address_flag {
	ADDRESS_VIP = 1, /* a frontend has this address */
	ADDRESS_SOURCE = 2, /* full NAT sends from this address */
	ADDRESS_HOST_OWN = 4, /* the host has it: its kernel answers ARP, ND and echo */
	ADDRESS_ANNOUNCE = 8, /* for user space: owned_until may become other than 0 */
	ADDRESS_DIRECT = 16, /* a frontend of a direct-return service has it */
};

/* owned_until value: answer for ever. 0: never answer. */
#define OWNED_FOREVER 0xffffffffffffffffULL

struct address {
	__u64 owned_until; /* jiffies; ARP and ND are answered before this moment */
	__u32 flags; /* enum address_flag */
	__u32 check; /* check of the address, in one word with flags: see struct frontend */
};

/* --- services ------------------------------------------------------------------ */

/* With port 0 and FRONTEND_FRAGMENTS in protocol: the one service that all fragments to this
 * address and protocol are for, where they can be placed without their ports.
 * With FRONTEND_INSIDE in protocol: the service that this host's own clients have at an address
 * whose service has SERVICE_INSIDE.
 * With FRONTEND_TUNNELLED in protocol: the service on this node of packets for a service with
 * SERVICE_TUNNELLED, at its address or, for all addresses without one, at the unspecified address
 * (tunnelled.h). */
struct frontend_key {
	struct addr address;
	__be16 port;
	__u8 protocol;
	__u8 pad[5];
};

/*
 * Elements of these maps are recycled without a grace period, so each holds in one word
 * its value and a check of its key: the exclusive or of the address's four 32-bit words,
 * and, for a frontend, of protocol << 16 | port (port 0 in a range). A reader reads the
 * word at once and takes a wrong check for a miss.
 */
struct frontend {
	__u32 service_index;
	__u32 check;
};

/* A range of ports, as prefixes of an LPM trie: the longest match is the narrowest
 * range, and "any" is the empty prefix of the port. */
struct range_key {
	__u32 prefix_length; /* bits that count: 144 + the bits of the port */
	__be32 address[4];
	__u8 protocol;
	__u8 zero;
	__be16 port;
};

enum forwarding {
	FORWARDING_NAT = 0,
	FORWARDING_NAT_DESTINATION = 1,
	FORWARDING_DSR_L2 = 2, /* with this and all below, backends answer the client themselves */
	FORWARDING_DSR_IPIP = 3,
	FORWARDING_DSR_GUE = 4,
};

/* Which flows of a tracked service are remembered. */
enum tracking {
	TRACKING_AUTO = 0,
	TRACKING_ALWAYS = 1,
	TRACKING_NONE = 2,
};

/* Parts of the program that are loaded only while something needs them (config.h). */
enum feature {
	FEATURE_DIRECT = 0x01, /* backends that answer the client themselves */
	FEATURE_REMEMBER = 0x02, /* slots in transition: direct return, and affinity */
	FEATURE_MSS = 0x04, /* an upper bound for the size of TCP segments */
	FEATURE_HOST = 0x08, /* this host itself is a client or a backend */
	FEATURE_CARRY = 0x10, /* flows of another ABI are being carried over (carry.h) */
	FEATURE_ADDRESSES = 0x20, /* services whose slot the two addresses alone decide */
	FEATURE_VLAN = 0x40, /* interfaces whose frames pass their parent with tags (vlan.h) */
	FEATURE_DECAP = 0x80, /* this host is a backend behind tunnels (hand.h) */
	FEATURE_TC_INTERFACES = 0x100, /* interfaces at tc, beside others at XDP (mark.h) */
	FEATURE_STAMPS = 0x200, /* stamps of probes, in programs of their own (stamping.h) */
	FEATURE_TUNNELLED = 0x400, /* services in two levels (tunnelled.h) */
};

/* The senders of answers that only the flow table tells from foreign packets. */
enum to_client {
	TO_CLIENTS_ROUTED = 0x01, /* backends of a nat-destination service, through this host */
	TO_CLIENTS_HOST = 0x02, /* a backend that is this host itself */
};

/* The features of a service beyond plain balancing. */
enum service_flag {
	SERVICE_REJECTS = 0x01, /* packets get an answer if no backend takes new flows */
	SERVICE_HASHES_ADDRESSES = 0x02, /* the slot depends on the two addresses alone */
	SERVICE_FILTERS = 0x04, /* sh_filters names the permitted sources */
	SERVICE_INSIDE = 0x08, /* this host's sockets have another one, see struct frontend_key */
	SERVICE_PASSES_BEGUN = 0x10, /* with NAT, TCP in mid-connection without a flow passes */
	SERVICE_DRAWS = 0x20, /* a client without an entry gets the backend of its flow's slot */
	SERVICE_TUNNELLED =
		0x40, /* packets placed on this host use another service, see struct frontend_key */
};

struct service {
	__u64 table; /* first slot << 32 | slot count, one word so that both change together */
	__u64 table_before; /* the same for the table that SLOT_PREVIOUS_BEFORE refers to */
	__u32 seed; /* of the flow hash */
	__u8 generation;
	__u8 forwarding; /* enum forwarding */
	__u8 live; /* 0: the index is free, and generation is that of its last owner */
	__u8 tracking; /* enum tracking */
	__u32 affinity_ticks; /* how long a client is remembered; 0: flows are placed one by one */
	__u32 affinity_seconds; /* the same time in seconds, for user space */
	__u32 flags; /* enum service_flag */
	__u32 flows_max; /* most flows at once; 0: as many as the table holds */
	__u32 source_rate; /* most new flows per source address and second; 0: no limit */
	__u16 tcp_mss; /* the largest TCP segment, in bytes; 0: the two sides agree on one */
	__u16 pad;
};

/*
 * A list entry of a service: a prefix of source addresses, in an LPM trie. The longest one decides,
 * from either list; one of length 0 of the family stands for sources in no list.
 */
struct filter_key {
	__u32 prefix_length; /* bits that count: 32 + the bits of the address as 128 bits */
	__u32 service; /* generation:8 | index:24: the index's next service inherits none */
	__be32 address[4];
};

/* In one word, as struct frontend has it: elements are recycled without a grace period. */
struct filter {
	__u32 verdict; /* bits of the address:8 << FILTER_BITS_SHIFT | FILTER_ALLOWS or 0 */
	__u32 check; /* the exclusive or of service and the prefix's four 32-bit words */
};

/*
 * The number of a service's flows with NONCE_COUNTED, which began while it had a flows_max.
 * The CPU that makes the client's entry counts it, and the one that ends it takes it off.
 */
struct service_flows {
	__s32 count; /* changed atomically */
	__u32 generation; /* of the service; flows of earlier generations do not count */
};

/* The source whose new flows are counted. */
struct source_key {
	struct addr source; /* IPv6: the /64 */
	__u32 service; /* generation:8 | index:24 */
	__u32 pad;
};

struct source_rate {
	__u64 tag; /* a hash of the key, because elements are recycled while they are read */
	__u64 word; /* credit:32 | jiffies:32 of that credit. A new flow costs jiffies_per_second,
	             * and each jiffy brings the service's source_rate. By compare-and-swap only. */
};

/*
 * A slot: flags:4 | state:4 | current backend:28 | previous backend:28. A backend reference
 * is generation:8 | index:20; 0 is no backend. docs/design/13-just-enough-tracking.md has the
 * rules; the state, never a comparison of the two backends, says whether flows are looked up.
 */
enum slot_state {
	SLOT_SETTLED = 0,
	SLOT_TRANSITION = 1, /* flows are looked up, and new flows are remembered */
	SLOT_CLOSING = 2, /* flows are looked up, not remembered: a scan of the table is due */
	SLOT_MARKED = 3, /* flows are looked up: some have another backend than the current one */
};

enum slot_flag {
	SLOT_PREVIOUS_DRAINS = 1, /* the previous backend has weight 0 in this service */
	SLOT_PREVIOUS_BEFORE = 2, /* the previous backend is found in table_before */
};

#define SLOT_STATE_SHIFT 56
#define SLOT_FLAGS_SHIFT 60

#define BACKEND_INDEX_MASK 0xfffff
#define BACKEND_REF_MASK 0xfffffff

/* Whether a backend takes new flows. */
enum draining {
	DRAINING_NOT = 0,
	DRAINING_STAY = 1, /* no new flows, in any service; its present flows go on */
	DRAINING_DOWN = 2, /* no new flows, and only established TCP connections stay: it is down */
};

struct backend {
	struct addr address;
	__u64 hop; /* HOP_*; 0: not resolved */
	__u64 sources; /* first index in sh_sources << 32 | count */
	__be16 port; /* 0 keeps the packet's destination port */
	__u8 generation;
	__u8 live; /* 0: the index is free, and generation is that of its last owner */
	__u8 draining; /* enum draining */
	__u8 pad[3];
};

/* A next hop in one word: check:6 | index of the interface:10 | MAC:48 (first octet lowest).
 * check is zero in a backend, and six bits of the flow's nonce in a flow. */
#define HOP_MAC_MASK 0xffffffffffffULL

struct interface {
	struct addr address4; /* source of ICMP errors that shunt sends; zero: the VIP */
	struct addr address6;
	__u32 ifindex; /* 0: the element is free */
	__u32 mtu; /* bytes of a packet without its Ethernet header */
	__u8 mac[6];
	__u8 pad[2];
};

/* A tag as it stands in front of a frame's EtherType (IEEE 802.1Q, 9.3). */
struct vlan_tag {
	__be16 protocol; /* ETH_P_8021Q or ETH_P_8021AD; 0: there is no tag */
	__be16 control; /* priority:3 | drop eligible:1 | VLAN identifier:12 */
};

struct vlan_tags {
	struct vlan_tag tag[2]; /* the outer first */
};

/* The parent and tags of an interface's frames, which come in by the parent. */
struct vlan_key {
	__u32 parent; /* ifindex of the parent */
	struct vlan_tags tags; /* control has the VLAN identifier only */
};

/* --- flows --------------------------------------------------------------------- */

/* The sender of the packets that an entry rewrites. Every NAT flow has one entry of each. */
enum direction {
	DIRECTION_CLIENT = 0, /* from the client: becomes source -> backend */
	DIRECTION_BACKEND = 1, /* from the backend: becomes VIP -> client */
};

enum flow_state {
	FLOW_DEAD = 0x01, /* a program is deleting the entry: no other program may */
	FLOW_SLOTTED = 0x02, /* sh_tracked holds its key */
	FLOW_REPLIED = 0x04, /* the backend has answered */
	FLOW_ESTABLISHED = 0x08, /* the client has gone on after the backend's answer */
	FLOW_RESET = 0x10, /* the last packet seen was a reset */
	FLOW_FIN_CLIENT = 0x20, /* the client has closed its half */
	FLOW_FIN_BACKEND = 0x40, /* the backend has closed its half */
	FLOW_BACKEND_FIRST = 0x80, /* the backend closed first, and has the TIME-WAIT */
};

/*
 * The rewrite of a packet of this flow. All but the first three words are written once,
 * before the entry is visible, and covered by seal: hash elements are recycled without a
 * grace period, so a reader copies the entry, recomputes the seal over its key and its
 * copy, and takes any difference for a miss. The order of the kernel's copying does not matter.
 */
struct flow {
	__u64 seal; /* seal and life are the same in every ABI: carry.h reads another's */
	__u64 life; /* nonce:24 | enum flow_state:8 | last seen, low 32 bits of jiffies. Changed
	             * by compare-and-swap only, so never in another flow's entry. */
	__u64 hop; /* HOP_*: next hop to the client; unused in DIRECTION_CLIENT */
	struct addr source; /* the packet's new source … */
	struct addr destination; /* … and destination */
	__be16 source_port;
	__be16 destination_port;
	__u32 nonce; /* random, the same in both entries of a flow; NONCE_COUNTED: see service_flows */
	__u32 backend; /* reference: generation:8 | index:20 */
	__u16 service_index;
	__u8 service_generation;
	__u8 direction; /* enum direction */
};

#define LIFE_NONCE_SHIFT 40
#define LIFE_STATE_SHIFT 32

enum note_kind {
	NOTE_NAT = 0,
	NOTE_DIRECT = 1,
	NOTE_PASS = 2, /* the first fragment was for no service, and passed */
};

/* The verdict on the first fragment of a datagram, for the later ones (lb/fragment.h). */
struct note {
	struct flow flow; /* NOTE_NAT: the whole flow; NOTE_DIRECT: its service and backend;
	                   * nonce, life and seal are always the note's own */
	__u32 hash; /* of NOTE_DIRECT: the flow's */
	__u32 kind; /* enum note_kind */
};

/* An element of the rings that bound the flow table. */
struct tracked {
	struct flow_key key; /* of the DIRECTION_CLIENT entry */
	__u32 nonce;
	__u32 pad;
};

enum ring {
	RING_HANDSHAKE = 0,
	RING_ESTABLISHED = 1,
	HAND_BUDGET = 2, /* not a ring: tick << 32 | count of flows newly remembered in this tick */
	HAND_COUNT = 3,
};

/*
 * A flow, or a client, of a tracked service and the backend it stays with. The key is the
 * packet's tuple; a client's has its address, the service in destination.low (generation:8 |
 * index:24), and zeroes. seal covers the key and all of the rest but flags and seen, as in
 * struct flow: elements are recycled without a grace period.
 */
struct remembered {
	__u64 seal;
	__u64 word; /* nonce:12 | enum remembered_flag:8 | seen:16 | backend reference:28. seen is
	             * in ticks (config.h). Changed by compare-and-swap only. */
	__u32 hash; /* of the flow: it decides the slot */
	__u32 service; /* generation:8 | index:24 */
};

enum remembered_flag {
	REMEMBERED_DEAD = 0x01, /* a program is deleting the entry: no other program may */
	REMEMBERED_SYN = 0x02, /* nothing but SYN has been seen */
	REMEMBERED_FIN = 0x04, /* the client has closed its half */
	REMEMBERED_RESET = 0x08, /* the last packet seen was a reset */
	REMEMBERED_CLIENT = 0x10 /* the key is a client's */
};

#define REMEMBERED_SEEN_SHIFT 28
#define REMEMBERED_FLAGS_SHIFT 44
#define REMEMBERED_NONCE_SHIFT 52

/* --- settings, in sh_settings[0] ------------------------------------------------ */

enum timeout {
	TIMEOUT_TCP_ESTABLISHED = 0,
	TIMEOUT_TCP_HANDSHAKE = 1,
	TIMEOUT_TCP_HALF_CLOSED = 2,
	TIMEOUT_TCP_RESET = 3,
	TIMEOUT_TCP_REST_BACKEND_FIRST = 4,
	TIMEOUT_TCP_REST = 5,
	TIMEOUT_UDP = 6,
	TIMEOUT_COUNT = 7,
};

#define OWN_BITS 512

struct settings {
	__u64 heartbeat; /* jiffies of the daemon's last sign of life */
	__u32 timeouts[TIMEOUT_COUNT]; /* jiffies, by enum timeout */
	__u16 port_first; /* of the NAT pool, host order */
	__u16 port_count;
	__u32 nat_destination; /* enum to_client: answers of backends may go to any address */
	__u32 remember_budget; /* most new entries of sh_remembered per tick */
	struct addr tunnel_source4; /* outer source, mapped; zero: the interface's own address */
	struct addr tunnel_source6;
	__u64 tunnel_vary4; /* host bits of the source that differ by flow, xor'ed into addr.low */
	__u64 tunnel_vary6; /* the same for IPv6 */
	__be16 gue_port;
	__u8 pad[2];
	__u32 epoch; /* goes up after every change of sh_addresses, sh_frontends and sh_ranges */
	__u64 own_addresses[OWN_BITS / 64]; /* a bit (lookup.h) of each VIP and NAT source; bits of
	                                     * addresses that were removed may remain */
};

/* --- counters, per CPU ---------------------------------------------------------- */

struct traffic {
	__u64 packets_in; /* from clients */
	__u64 bytes_in; /* whole frames */
	__u64 packets_out;
	__u64 bytes_out;
	__u64 flows_created;
};

/* The findings of one run of sh_sweep; its context, in and out. */
struct sweep {
	__u64 entries; /* seen */
	__u64 flows; /* of them, client entries that are alive */
	__u64 established;
	__u64 expired; /* entries removed */
};

/* A note of user space at the socket of a health check with direct return. */
struct check {
	struct addr backend; /* at which the VIP is checked */
	__u64 hop; /* HOP_*: to the backend, as in its record */
	__u32 forwarding; /* enum forwarding */
	__u32 taken; /* set by sh_check when it gets a packet of this socket */
};

/* A backend of a service. */
struct member {
	__u32 service; /* generation:8 | index:24 */
	__u32 backend; /* reference: generation:8 | index:20 */
};

/* The flows that one run of sh_strays ended; its context, out. */
struct strays {
	__u64 flows; /* entries of sh_flows, of two for each flow */
	__u64 remembered;
};

/* The findings of one run of sh_recall; its context, in and out. */
struct recall {
	__u64 entries; /* seen */
	__u64 expired; /* of them, removed because nothing was seen for too long */
	__u64 agreed; /* of them, removed because a closing or marked slot names the same backend */
	__u64 marked; /* of them, kept in closing or marked slots that name another backend */
	__u64 look; /* in: 1: mark only, and delete nothing */
};

/* sh_clock's context, in and out. */
struct clock {
	__u64 jiffies;
	__u64 beat; /* in: 1: note the daemon's sign of life */
};

/* While another ABI takes over: the words of sh_switch (switch.h), and indexes of sh_gates. A daemon
 * of any ABI may meet them, so they never change. */
enum switch_word {
	SWITCH_STATE = 0, /* enum switch_state */
	SWITCH_SINCE = 1, /* jiffies when the new ABI took over */
	SWITCH_WORDS = 2,
};

enum switch_state {
	SWITCH_OLD = 0, /* the old ABI is in charge, and the new one may be removed */
	SWITCH_CARRYING = 1, /* the new ABI is in charge, and does not have all flows yet */
	SWITCH_DONE = 2, /* the new ABI is in charge and has all: the old one may be removed */
};

enum gate {
	GATE_OLD = 0,
	GATE_NEW = 1,
	GATE_COUNT = 2,
};

/* Kept for user space alone: the name of a position. */
enum name_kind {
	NAME_SERVICE = 1,
};

struct name_key {
	__u32 kind; /* enum name_kind */
	__u32 index;
};

struct name {
	__u8 text[64]; /* zero-terminated */
};

#endif
