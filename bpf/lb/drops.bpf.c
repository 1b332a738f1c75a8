// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Counts the frames that the kernel refused after our verdict. They never come back to
 * the program at XDP, so three tracepoints count them:
 *
 *   XDP_TX ──────► ring of the driver ─► xdp_bulk_tx: the count of dropped frames
 *   XDP_REDIRECT ─┬► refused at once ──► xdp_redirect_err: one frame, too long or not sendable
 *                 └► devmap's queue ───► xdp_devmap_xmit: the count of dropped frames
 *
 * A frame refused at once never enters the queue, so none is counted twice. Of kernels
 * 6.1 to 6.18 only veth reports XDP_TX through xdp_bulk_tx.
 *
 * The size of a frame is not known there, so packets are counted and bytes are not.
 *
 * Tracepoints see the whole machine. Ours is a device listed in sh_ifindexes, in the
 * network namespace where its index means anything.
 */
#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "maps.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Inode of the network namespace (stat of /proc/self/ns/net). 0: every namespace. */
volatile const __u32 netns_inode = 0;

/* The fields of the kernel's types that are read; the loader fits the offsets to its kernel. */
struct ns_common {
	unsigned int inum;
} __attribute__((preserve_access_index));

struct net {
	struct ns_common ns;
} __attribute__((preserve_access_index));

typedef struct {
	struct net *net;
} possible_net_t;

struct net_device {
	int ifindex;
	possible_net_t nd_net;
} __attribute__((preserve_access_index));

static __always_inline int device_is_ours(const struct net_device *dev)
{
	__u32 ifindex = dev->ifindex;

	if (netns_inode && dev->nd_net.net->ns.inum != netns_inode)
		return 0;
	return bpf_map_lookup_elem(&sh_ifindexes, &ifindex) != 0;
}

static __always_inline void refused_add(__u32 reason, int frames)
{
	struct count *count;

	if (frames <= 0)
		return;
	count = bpf_map_lookup_elem(&sh_reasons, &reason);
	/* Tracepoints fire in interrupts too, above a program that is adding. */
	if (count)
		__sync_fetch_and_add(&count->packets, frames);
}

SEC("tp_btf/xdp_bulk_tx")
int BPF_PROG(sh_bulk_tx, const struct net_device *dev, int sent, int drops, int err)
{
	if (drops > 0 && device_is_ours(dev))
		refused_add(REASON_TX_REFUSED, drops);
	return 0;
}

/* dev is where the frame came in. Redirects by index and by map both end here. */
SEC("tp_btf/xdp_redirect_err")
int BPF_PROG(sh_redir_err, const struct net_device *dev)
{
	if (device_is_ours(dev))
		refused_add(REASON_REDIRECT_REFUSED, 1);
	return 0;
}

/* A queue holds frames that came in by one device: from is the device whose program decided. */
SEC("tp_btf/xdp_devmap_xmit")
int BPF_PROG(sh_devmap_xmit, const struct net_device *from, const struct net_device *to, int sent,
	     int drops)
{
	if (drops > 0 && from && device_is_ours(from))
		refused_add(REASON_REDIRECT_REFUSED, drops);
	return 0;
}
