// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Tells how long each program of a chain (lb/chain.h) takes, for as long as somebody measures. The
 * kernel's own run times (BPF_ENABLE_STATS) cannot: it counts a program and all that it tail-calls
 * as one.
 *
 *   frame ─► sh_lap_first ─► before ─► sh_lap_next ─► sh_xdp ─► sh_lap_after ─► after
 *                 ▲             │                       │                         │
 *                 └─────────────┴── whichever returns a verdict ──────────────────┘
 *
 * sh_lap_first is what the interface runs, and the other two stand in sh_chain where sh_xdp and the
 * program after do; sh_measured says what is behind them. A tail call from a subprogram ends that
 * subprogram alone, so the verdict comes back to sh_lap_first, whichever program gives it (x86
 * since Linux 5.10, arm64 since 6.0).
 *
 * A lap counts from the last reading of the clock in a program here to the first in the next one,
 * so it includes a tail call and one reading of the clock. What that takes is measured too.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* enum chain_position: the program before, or sh_xdp where there is none. */
volatile const __u32 first = CHAIN_NEXT;

enum {
	LAP_ALL = 256, /* so many packets of a CPU are measured, whatever their rate, */
	LAP_EVERY = 16, /* and then one of so many: measuring costs more than a fast program */
};

/* Of one CPU, since the measurement began. A packet stays on its CPU. */
struct laps {
	__u64 running; /* the lap that is under way: enum chain_position + 1; 0: none */
	__u64 since; /* nanoseconds: when that began */
	__u64 seen; /* packets, measured or not */
	__u64 measured; /* packets */
	__u64 clock; /* nanoseconds: what a reading of the clock took, once for each of these */
	__u64 packets[CHAIN_COUNT]; /* by enum chain_position */
	__u64 time[CHAIN_COUNT]; /* nanoseconds */
};

/* One element. Written here, read by user space when the measurement ends; goes with it. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct laps);
	__uint(max_entries, 1);
} sh_laps SEC(".maps");

/* enum chain_position -> the program of the chain, while one from here has its place there. Written
 * when the measurement begins, and pinned until it ends: the kernel empties it when nobody in user
 * space holds it any more. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, CHAIN_COUNT);
} sh_measured SEC(".maps");

static __always_inline struct laps *laps_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sh_laps, &zero);
}

static __always_inline void lap_begin(enum chain_position position)
{
	struct laps *laps = laps_get();
	__u64 now;

	if (!laps || (laps->seen++ >= LAP_ALL && laps->seen % LAP_EVERY))
		return;
	laps->running = position + 1;
	laps->measured++;
	now = bpf_ktime_get_ns();
	laps->since = bpf_ktime_get_ns();
	laps->clock += laps->since - now;
}

/* Ends the lap under way; the next is that of running. There is none for a packet that is not
 * measured, or that had come in before the interface ran sh_lap_first. */
static __always_inline void lap_end(__u64 running)
{
	struct laps *laps = laps_get();
	__u64 now, ended;

	if (!laps)
		return;
	ended = laps->running - 1;
	if (ended >= CHAIN_COUNT)
		return;
	now = bpf_ktime_get_ns();
	laps->packets[ended]++;
	laps->time[ended] += now - laps->since;
	laps->running = running;
	if (running)
		laps->since = bpf_ktime_get_ns();
}

/* XDP_PASS, of which the compiler does not know that it is that: a function with a tail call at its
 * end seems to return nothing else. */
static __always_inline int pass(void)
{
	int verdict = XDP_PASS;

	asm volatile("" : "+r"(verdict));
	return verdict;
}

/* Both return the verdict of the last program, or XDP_PASS if nobody is there, as without shunt. */
static __noinline int chain_from_before(struct xdp_md *ctx)
{
	bpf_tail_call_static(ctx, &sh_measured, CHAIN_BEFORE);
	return pass();
}

static __noinline int chain_from_next(struct xdp_md *ctx)
{
	bpf_tail_call_static(ctx, &sh_measured, CHAIN_NEXT);
	return pass();
}

SEC("xdp.frags")
int sh_lap_first(struct xdp_md *ctx)
{
	int verdict;

	lap_begin(first);
	verdict = first == CHAIN_BEFORE ? chain_from_before(ctx) : chain_from_next(ctx);
	lap_end(0);
	return verdict;
}

SEC("xdp.frags")
int sh_lap_next(struct xdp_md *ctx)
{
	lap_end(CHAIN_NEXT + 1);
	bpf_tail_call_static(ctx, &sh_measured, CHAIN_NEXT);
	return XDP_PASS;
}

SEC("xdp.frags")
int sh_lap_after(struct xdp_md *ctx)
{
	lap_end(CHAIN_AFTER + 1);
	bpf_tail_call_static(ctx, &sh_measured, CHAIN_AFTER);
	return XDP_PASS;
}
