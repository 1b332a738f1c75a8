/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Sending a frame from XDP out of another interface of ours than the one it came in by.
 */
#ifndef SHUNT_REDIRECT_H
#define SHUNT_REDIRECT_H

#include "mark.h"
#include "port.h"
#include "vlan.h"

/* Out of another interface of ours, with the tags that frames have there; or up, for sh_deliver to
 * send it. */
static __always_inline int frame_redirect(struct frame_ctx *ctx, const struct packet *p)
{
	int err = 0;

	if (features & (FEATURE_VLAN | FEATURE_TC_INTERFACES)) {
		if ((features & FEATURE_TC_INTERFACES) && interface_is_tc(p->egress)) {
			if (!mark_put(ctx, p))
				return XDP_PASS;
			err = -1;
		} else if (features & FEATURE_VLAN) {
			err = tags_push_of(ctx, p->egress);
		}
		if (err) {
			count_reason(REASON_INTERNAL, p->frame_size);
			return XDP_DROP;
		}
	}
	return port_redirect(p->egress, p->frame_size);
}

#endif
