// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Frames with VLAN tags at an interface (lb/vlan.h). One copy is loaded for each interface that is a
 * VLAN's parent, and sh_xdp hands frames with tags on to it.
 *
 * Like the kernel, it takes a tag with identifier 0, which is one for priority alone, for none
 * (__netif_receive_skb_core in net/core/dev.c).
 */
#include "../ctx/xdp.h"

#include "chain.h"
#include "config.h"
#include "port.h"
#include "vlan.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* The interface's ifindex. */
volatile const __u32 parent = 0;

/* The tags that the frame begins with. Returns their size; 0 if there are none, or more than two. */
static __always_inline __u32 tags_read(struct frame_ctx *ctx, struct vlan_tags *tags)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	struct vlan_tag *tag = data + offsetof(struct ethhdr, h_proto);

	for (int i = 0; i < 3; i++, tag++) {
		if ((void *)tag + sizeof(__be16) > data_end)
			return 0;
		if (!is_tag(tag->protocol))
			return i * sizeof(*tag);
		if (i == 2 || (void *)(tag + 1) > data_end)
			return 0;
		tags->tag[i] = *tag;
	}
	return 0;
}

/* A tag as sh_vlans has it: none if it is one for priority alone. */
static __always_inline struct vlan_tag tag_identity(struct vlan_tag tag)
{
	tag.control &= bpf_htons(VLAN_ID_MASK);
	if (!tag.control)
		tag.protocol = 0;
	return tag;
}

/* Index in sh_interfaces of the interface that the frame belongs to; INTERFACE_MAX: none of ours. */
static __always_inline __u32 vlan_index(const struct vlan_tags *tags)
{
	struct vlan_key key = { .parent = parent };
	__u32 *index;

	key.tags.tag[0] = tag_identity(tags->tag[0]);
	key.tags.tag[1] = tag_identity(tags->tag[1]);
	if (!key.tags.tag[0].protocol) {
		key.tags.tag[0] = key.tags.tag[1];
		key.tags.tag[1] = (struct vlan_tag){};
	}
	if (!key.tags.tag[0].protocol)
		return interface_index;
	index = bpf_map_lookup_elem(&sh_vlans, &key);
	return index ? *index : INTERFACE_MAX;
}

/* Takes tags of this size off. */
static __always_inline int tags_pop(struct frame_ctx *ctx, __u32 size)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	__u8 macs[2 * ETH_ALEN];

	if (data + sizeof(macs) > data_end)
		return -1;
	__builtin_memcpy(macs, data, sizeof(macs));
	if (ctx_head_cut(ctx, size))
		return -1;
	data = ctx_data(ctx), data_end = ctx_data_end(ctx);
	if (data + sizeof(macs) > data_end)
		return -1;
	__builtin_memcpy(data, macs, sizeof(macs));
	return 0;
}

/* The verdict of the interface's sh_xdp. A tail call from a subprogram ends that alone, so it comes
 * back (x86 since Linux 5.10, arm64 since 6.0). The value for a map without a program must not seem the
 * only result: not to the compiler, hence the assembly, and not to the verifier, which in Linux 6.1
 * looks at no other exit of a function, but takes a __stage's value for any. */
__stage int vlan_enter(struct frame_ctx *ctx, __u32 index)
{
	int verdict = XDP_PASS;

	bpf_tail_call(ctx, &sh_vlan_progs, index);
	asm volatile("" : "+r"(verdict));
	return verdict;
}

SEC("xdp.frags")
int sh_vlan(struct frame_ctx *ctx)
{
	__u32 size, index, frame_size = ctx_size_hint(ctx);
	struct vlan_tags tags = {};
	int verdict;

	size = tags_read(ctx, &tags);
	index = size ? vlan_index(&tags) : INTERFACE_MAX;
	if (index >= INTERFACE_MAX) {
		count_reason(REASON_VLAN, frame_size);
		chain_after(ctx);
		return XDP_PASS;
	}
	if (tags_pop(ctx, size))
		goto fault;
	verdict = vlan_enter(ctx, index);
	if (verdict != XDP_PASS && verdict != XDP_TX)
		return verdict;
	if (tags_push(ctx, &tags, size))
		goto fault;
	if (verdict == XDP_TX)
		return redirect_back ? (int)port_redirect(index, frame_size) : XDP_TX;
	chain_after(ctx);
	return XDP_PASS;
fault:
	count_reason(REASON_INTERNAL, frame_size);
	return XDP_DROP;
}
