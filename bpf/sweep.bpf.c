// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What user space asks of the flow table: to be swept, and what time it is there. Run
 * with BPF_PROG_RUN, never attached. Both need CAP_BPF and CAP_PERFMON.
 *
 * Flows end without any of this (lib/flow.h); a sweep only frees memory early and counts.
 * A run is for one caller at a time: the workspace of lib/flow.h is per CPU, and this
 * program can be preempted. So its object never shares sh_scratch with the one at XDP,
 * whose interrupts would write into it.
 */
#include "lib/flow.h"

char _license[] SEC("license") = "Dual BSD/GPL";

struct sweeping {
	struct sweep found;
	const struct settings *settings;
	__u64 now;
};

/*
 * Key and value are the table's own memory, which another CPU may hand to another flow at
 * any moment: hence the copies, and the seal over both. Deleting while walking can end the
 * walk of one bucket early, or enter another twice: the next sweep meets what was missed.
 */
static long flow_sweep(void *map, struct flow_key *key_live, struct flow *live, struct sweeping *s)
{
	struct flow_key key;
	struct flow copy;

	__builtin_memcpy(&key, key_live, sizeof(key));
	__builtin_memcpy(&copy, live, sizeof(copy));
	/* The compiler must not read the live entry again where the copy is meant. */
	asm volatile("" : : "r"(&key), "r"(&copy) : "memory");
	s->found.entries++;
	if (copy.seal != flow_seal(&key, &copy) || !life_belongs(copy.life, copy.nonce) ||
	    (life_state(copy.life) & FLOW_DEAD))
		return 0;
	if (flow_is_over(&key, &copy, s->settings, s->now)) {
		s->found.expired += flow_end(&key, live, &copy);
		return 0;
	}
	if (copy.direction == DIRECTION_CLIENT) {
		s->found.flows++;
		if (life_state(copy.life) & FLOW_ESTABLISHED)
			s->found.established++;
	}
	return 0;
}

/* Ends every flow that is over and counts the rest. Returns 0, or -1 without settings. */
SEC("syscall")
int sh_sweep(struct sweep *ctx)
{
	struct sweeping s = { .settings = settings_get(), .now = bpf_jiffies64() };

	if (!s.settings)
		return -1;
	bpf_for_each_map_elem(&sh_flows, flow_sweep, &s, 0);
	ctx->entries = s.found.entries;
	ctx->flows = s.found.flows;
	ctx->established = s.found.established;
	ctx->expired = s.found.expired;
	return 0;
}

/*
 * Says both clocks at one moment, from which user space measures the rate of jiffies. A
 * ktime_ns other than zero on entry asks for a heartbeat too: the programs' sign that the
 * daemon keeps next hops fresh. Returns 0, or -1 without settings.
 */
SEC("syscall")
int sh_clock(struct clock *ctx)
{
	struct settings *settings = settings_get();
	__u64 now = bpf_jiffies64();

	if (ctx->ktime_ns) {
		if (!settings)
			return -1;
		*(volatile __u64 *)&settings->heartbeat = now;
	}
	ctx->jiffies = now;
	ctx->ktime_ns = bpf_ktime_get_ns();
	return 0;
}
