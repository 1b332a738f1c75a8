/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The interface that a frame is at. A program for one interface has it as a constant; sh_tc for all
 * pods' interfaces finds it once for each frame, and notes it beside the frame (interface_find).
 */
#ifndef SHUNT_OWN_H
#define SHUNT_OWN_H

#include "config.h"

/* Position in sh_interfaces of the interface that the frame is at. */
static __always_inline __u32 own_index(const struct frame_ctx *ctx)
{
	__u32 index = interface_index;

	return ctx_is_tc() && index == INTERFACE_ANY ? ctx_note(ctx) : index;
}

#endif
