/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The questions that every parser asks of a frame, at every hook.
 */
#ifndef SHUNT_FRAME_H
#define SHUNT_FRAME_H

#include "packet.h"

/* Whether the frame has this many bytes. Only a multi-buffer frame has more than its linear
 * part, and only for such a frame is the helper worth its call. */
static __always_inline int frame_holds(struct frame_ctx *ctx, struct packet *p, __u32 size)
{
	if (size > p->frame_size)
		p->frame_size = ctx_size(ctx);
	return size <= p->frame_size;
}

#endif
