// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Socket pairs: two sockets of one machine hand each other their data, past TCP, netfilter and devices.
 *
 *   connect()  ─► sh_so_ops at the cgroup: the client's socket goes into the map
 *   accept()   ─► sh_so_ops: is the client in the map? both are now; if not, the server's stays out
 *   first answer ─► sh_so_ops: is the server in the map? if not, the client's is taken out
 *
 *   send() ─► sh_so_msg ─┬─► the other end's queue        (redirected)
 *                        └─► TCP, as if there were no map (passed), for a reason that is counted
 *
 * Invariants:
 *   Order. A reader empties the queue before it looks at data that came by TCP. So a message is redirected only if the
 *   other end has read every byte that went by TCP: own write_seq equals its copied_seq.
 *   Bound. At most limit bytes wait in a queue. Further messages go by TCP, whose window bounds them.
 *   Loss. A socket that is taken out of the map loses its queue. So programs take out only a socket that never had one.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#include "../ctx/sk_buff.h"
#include "sockets.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Types that user space needs and that no map names. */
const enum so_left so_lefts;
const enum so_limit so_limits;
const struct so_seen so_seen_type;

/* Whether sh_so_ports decides; otherwise every port of the cgroup is paired. */
volatile const __u8 some_ports = 0;

/* SK_USER_DATA_PTRMASK of include/net/sock.h: the low bits name the pointer's owner. */
#define USER_DATA_MASK (~7UL)

/* The fields of the kernel's types that are read here; the loader finds their offsets. */
struct list_head {
	struct list_head *next;
} __attribute__((preserve_access_index));

struct sk_psock {
	struct list_head ingress_msg;
	__u32 msg_tot_len; /* since 929e30f93125: 6.6.128, 6.12.75, 6.18.14 */
} __attribute__((preserve_access_index));

struct sock {
	void *sk_user_data;
} __attribute__((preserve_access_index));

struct tcp_sock {
	__u32 write_seq;
	__u32 copied_seq;
	__u32 rcv_nxt;
} __attribute__((preserve_access_index));

static __always_inline void left_count(__u32 left, __u64 bytes)
{
	struct count *count = bpf_map_lookup_elem(&sh_so_counts, &left);

	if (!count)
		return;
	/* A program at a cgroup or a message can be preempted by another on the same CPU. */
	__sync_fetch_and_add(&count->packets, 1);
	__sync_fetch_and_add(&count->bytes, bytes);
}

static __always_inline struct so_control *control(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sh_so_control, &zero);
}

/* Whether messages wait in a socket's queue, and their bytes; *counted: whether the kernel counts the bytes. */
static __always_inline int queue_read(const void *sk, __u32 *bytes, int *counted)
{
	struct sk_psock *psock;
	struct list_head *next;
	void *data;

	*bytes = 0;
	*counted = 0;
	if (bpf_core_read(&data, sizeof(data), &((struct sock *)sk)->sk_user_data))
		return 1;
	psock = (void *)((unsigned long)data & USER_DATA_MASK);
	if (!psock || bpf_core_read(&next, sizeof(next), &psock->ingress_msg.next))
		return 1;
	if (bpf_core_field_exists(psock->msg_tot_len)) {
		*counted = 1;
		if (bpf_core_read(bytes, sizeof(*bytes), &psock->msg_tot_len))
			return 1;
	}
	return (unsigned long)next !=
	       (unsigned long)psock + bpf_core_field_offset(struct sk_psock, ingress_msg);
}

/* The socket at the other end; 0: it has not come. Its address may be stale once it has closed: a value read there then
 * means nothing, and bpf_msg_redirect_hash finds its key no more. */
static __always_inline const struct tcp_sock *other_end(struct so_own *own)
{
	__u64 *at;

	if (!own->other) {
		at = bpf_map_lookup_elem(&sh_so_ends, &own->peer);
		if (at)
			own->other = *at;
	}
	return (void *)own->other;
}

/* Whether the other end can take a message now. */
static __always_inline enum so_left message_judge(struct sk_msg_md *msg, struct so_own *own,
						  __u32 limit)
{
	const struct tcp_sock *mine = bpf_skc_to_tcp_sock(msg->sk), *other = other_end(own);
	__u32 queued, copied;
	int waits, counted;

	if (!other)
		return SO_UNPAIRED;
	if (!mine || bpf_core_read(&copied, sizeof(copied), &other->copied_seq))
		return SO_GONE;
	if (mine->write_seq != copied)
		return SO_ORDER;
	waits = queue_read(other, &queued, &counted);
	if (!waits)
		own->since = 0;
	if (!counted)
		queued = own->since;
	if ((__u64)queued + msg->size > limit)
		return SO_FULL;
	own->since += msg->size;
	return SO_TAKEN;
}

SEC("sk_msg")
int sh_so_msg(struct sk_msg_md *msg)
{
	struct so_control *wanted = control();
	enum so_left left = SO_PASSING;
	struct so_own *own;

	if (!msg->sk || !wanted)
		return SK_PASS;
	own = bpf_sk_storage_get(&sh_so_own, msg->sk, 0, 0);
	if (!own)
		return SK_PASS;
	if (!wanted->passing)
		left = message_judge(msg, own, wanted->limit);
	if (left == SO_TAKEN &&
	    bpf_msg_redirect_hash(msg, &sh_so_socks, &own->peer, BPF_F_INGRESS) != SK_PASS)
		left = SO_GONE;
	left_count(left, msg->size);
	return SK_PASS;
}

static __always_inline int port_listed(__u32 port)
{
	__u32 word = port / 64;
	__u64 *bits = bpf_map_lookup_elem(&sh_so_ports, &word);

	return bits && (*bits >> port % 64 & 1);
}

/* Puts the socket of a new connection into the map. Returns whether it is there. */
static __always_inline int end_join(struct bpf_sock_ops *ops, struct so_own *keys)
{
	struct bpf_sock *sk = ops->sk;
	__u64 at = (unsigned long)sk;
	struct so_own *own;

	if (!sk)
		return 0;
	own = bpf_sk_storage_get(&sh_so_own, sk, keys, BPF_SK_STORAGE_GET_F_CREATE);
	if (own && !bpf_sock_hash_update(ops, &sh_so_socks, &keys->key, BPF_NOEXIST)) {
		bpf_map_update_elem(&sh_so_ends, &keys->key, &at, BPF_ANY);
		return 1;
	}
	left_count(SO_NO_ROOM, 0);
	return 0;
}

static __always_inline void connection_began(struct bpf_sock_ops *ops, int is_server)
{
	struct so_own keys = { .key = { ops->snd_nxt, ops->rcv_nxt },
			       .peer = { ops->rcv_nxt, ops->snd_nxt } };

	if (some_ports && !port_listed(ops->local_port) &&
	    !port_listed(bpf_ntohl(ops->remote_port)))
		return;
	if (ops->sk && bpf_skc_to_mptcp_sock(ops->sk)) {
		left_count(SO_MPTCP, 0);
		return;
	}
	if (!is_server) {
		/* The answer to its first bytes says whether the other end has come. */
		if (end_join(ops, &keys))
			bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags |
							       BPF_SOCK_OPS_RTT_CB_FLAG);
		return;
	}
	/* The client was established before, and has been put into the map. */
	if (!bpf_map_lookup_elem(&sh_so_ends, &keys.peer))
		left_count(SO_FOREIGN, 0);
	else if (end_join(ops, &keys))
		left_count(SO_JOINED, 0);
}

/* The other end has answered, so it is in the map by now or never will be. */
static __always_inline void client_answered(struct bpf_sock_ops *ops)
{
	struct so_own *own;

	bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_RTT_CB_FLAG);
	if (!ops->sk)
		return;
	own = bpf_sk_storage_get(&sh_so_own, ops->sk, 0, 0);
	if (!own || bpf_map_lookup_elem(&sh_so_ends, &own->peer))
		return;
	/* It never had a queue: only the other end could have put anything in. */
	if (!bpf_map_delete_elem(&sh_so_socks, &own->key))
		left_count(SO_FOREIGN, 0);
}

SEC("sockops")
int sh_so_ops(struct bpf_sock_ops *ops)
{
	struct so_control *wanted = control();

	if (!wanted)
		return 1;
	switch (ops->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		if (!wanted->passing)
			connection_began(ops, ops->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB);
		break;
	case BPF_SOCK_OPS_RTT_CB:
		client_answered(ops);
		break;
	}
	return 1;
}

/* Reads how many bytes wait at a socket. */
static __always_inline void seen_read(struct so_seen *seen, struct tcp_sock *tcp)
{
	__u32 queued, copied;
	int waits, counted;

	seen->at = (unsigned long)tcp;
	waits = queue_read(tcp, &queued, &counted);
	seen->queued = counted && queued ? queued : !!waits;
	if (!bpf_core_read(&copied, sizeof(copied), &tcp->copied_seq) &&
	    !bpf_core_read(&seen->unread, sizeof(seen->unread), &tcp->rcv_nxt))
		seen->unread -= copied;
}

/* Fills in one struct so_seen of the packet. The verifier checks a global function once, and not for each call: 6.1 gives up
 * on a loop of 32 with this inside. */
__noinline int sh_so_look_at(struct __sk_buff *skb, __u32 i)
{
	struct so_seen seen = {}, *at;
	struct tcp_sock *tcp;
	struct bpf_sock *sk;

	if (i >= SO_LOOK_MAX)
		return 0;
	at = (void *)(unsigned long)skb->data + i * sizeof(*at);
	if ((void *)(at + 1) > (void *)(unsigned long)skb->data_end)
		return 0;
	seen.key = at->key;
	sk = bpf_map_lookup_elem(&sh_so_socks, &seen.key);
	if (!sk)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (tcp)
		seen_read(&seen, tcp);
	*at = seen;
	bpf_sk_release(sk);
	return 0;
}

/* Run with BPF_PROG_RUN, never attached: the packet is an array of struct so_seen, of which user space sets the keys. It
 * fills in those whose sockets are in the map. An iterator over the map would need no keys, but kernels of hardened
 * machines refuse the iterators that could write to a map's elements. */
SEC("tc")
int sh_so_look(struct __sk_buff *skb)
{
	for (__u32 i = 0; i < SO_LOOK_MAX; i++)
		sh_so_look_at(skb, i);
	return 0;
}
