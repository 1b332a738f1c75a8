/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Sends frames out of an interface of ours at XDP.
 */
#ifndef SHUNT_PORT_H
#define SHUNT_PORT_H

#include "lookup.h"

/* Returns XDP_REDIRECT. An interface that has gone has left the device map, too: XDP_DROP. */
static __always_inline int port_redirect(__u32 index, __u32 size)
{
	int action = bpf_redirect_map(&sh_tx_ports, index, XDP_DROP);

	if (action == XDP_DROP)
		count_reason(REASON_EGRESS_UNLISTED, size);
	return action;
}

#endif
