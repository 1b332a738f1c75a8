// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Runs in the place of sh_xdp while another ABI takes over, and hands every packet on to the
 * program of the ABI that is in charge. Links can be changed only one by one, and a flow would be
 * lost if its two directions met different flow tables; sh_switch changes all interfaces in
 * one store.
 */
#include "switch.h"

char _license[] SEC("license") = "Dual BSD/GPL";

SEC("xdp.frags")
int sh_gate(struct xdp_md *ctx)
{
	if (switch_state() == SWITCH_OLD)
		bpf_tail_call_static(ctx, &sh_gates, GATE_OLD);
	else
		bpf_tail_call_static(ctx, &sh_gates, GATE_NEW);
	return XDP_PASS; /* there is no such program: as without shunt */
}
