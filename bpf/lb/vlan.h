/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * VLANs at native XDP, which the kernel has for their parent alone. A VLAN's interface has its own
 * record and its own copy of sh_xdp, which sees frames without their tags; the code here takes tags off
 * and puts them on, in sh_vlan, and where a frame goes out of another interface.
 *
 *   frame ─► sh_xdp ─┬─► no tag: as ever
 *                    └─► sh_vlan: tags off ─► the VLAN's sh_xdp ─┬─► passes, back: tags on again
 *                                                                └─► on: the tags of the other interface
 */
#ifndef SHUNT_VLAN_H
#define SHUNT_VLAN_H

#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>

#include "config.h"
#include "maps.h"

#define VLAN_ID_MASK 0xfff

/* Bytes of the tags in a frame. */
static __always_inline __u32 tags_size(const struct vlan_tags *tags)
{
	return ((tags->tag[0].protocol != 0) + (tags->tag[1].protocol != 0)) *
	       (__u32)sizeof(struct vlan_tag);
}

/* Puts tags behind the MAC addresses, of this size together. */
static __always_inline int tags_push(struct frame_ctx *ctx, const struct vlan_tags *tags,
				     __u32 size)
{
	void *data = ctx_data(ctx), *data_end = ctx_data_end(ctx);
	__u8 macs[2 * ETH_ALEN];
	struct vlan_tag *tag;

	if (data + sizeof(macs) > data_end)
		return -1;
	__builtin_memcpy(macs, data, sizeof(macs));
	if (ctx_head_grow(ctx, size))
		return -1;
	data = ctx_data(ctx), data_end = ctx_data_end(ctx);
	tag = data + sizeof(macs);
	if ((void *)(tag + 1) > data_end)
		return -1;
	__builtin_memcpy(data, macs, sizeof(macs));
	tag[0] = tags->tag[0];
	if (size == sizeof(*tag))
		return 0;
	if ((void *)(tag + 2) > data_end)
		return -1;
	tag[1] = tags->tag[1];
	return 0;
}

/* Gives a frame that leaves by an interface the tags it has there. */
static __apart int tags_push_of(struct frame_ctx *ctx, __u32 index)
{
	struct vlan_tags *tags = bpf_map_lookup_elem(&sh_vlan_tags, &index);
	__u32 size = tags ? tags_size(tags) : 0;

	return size ? tags_push(ctx, tags, size) : 0;
}

/* Hands a frame with tags on to sh_vlan; returns if there is none. For the place of the call, see
 * chain.h. */
static __always_inline void vlan_hand_on(struct frame_ctx *ctx)
{
	bpf_tail_call(ctx, &sh_vlan_progs, INTERFACE_MAX + interface_index);
}

#endif
