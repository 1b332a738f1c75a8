// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * live: programs for both ends of a link that is measured.
 *
 *	BPF_PROG_TEST_RUN ─► sh_offer ──► link ──► subject ──► link ──► sh_sink, or sh_drop
 *
 * The kernel makes frames (BPF_F_TEST_XDP_LIVE_FRAMES), and sh_offer sends each on, or lets it go if its time has
 * not come. The kernel may reuse a frame that a program has changed, so sh_offer writes the head anew each time.
 *
 * Each program has one runner at a time: sh_offer that of the test run, the others that of a link with one queue. So
 * counters are plain variables.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Bytes of a frame that are written anew: Ethernet, IPv4 and UDP headers, and six of the payload. */
#define HEAD_WORDS 6

/* The first two bytes of the payload make up for the source port, so that one checksum fits all flows. */
struct head {
	struct ethhdr eth;
	struct iphdr ip;
	struct udphdr udp;
	__be16 makeup;
} __attribute__((packed));

/* Set before loading. The head is that of flow 0, whose makeup is 0xffff; the flows are a power of two. */
volatile const __u64 head_words[HEAD_WORDS] = {};
volatile const __u32 flow_mask = 0;
volatile const __u32 offer_ifindex = 0;
volatile const __u8 offer_paced = 0;

/* Nanoseconds of CLOCK_MONOTONIC between which frames are sent: length_ns from the first run of the program on, if begin_ns
 * is 0. Set before a run. */
__u64 begin_ns = 0;
__u64 length_ns = 0;

/* Time between two frames, and from begin_ns to the next frame, in picoseconds. Set before a run. */
__u64 spacing_ps = 0;
__u64 next_ps = 0;

/* Frames that were sent, since the program was loaded. */
__u64 offer_count = 0;

/* A delay of more than this many frames is not caught up with: a burst would fill the link's ring. */
#define BEHIND_MAX 64

/* Looks at the clock, some 25 ns each, in one run of the program: the kernel sends the frames of 64 runs together. */
#define LOOKS 40

/* Waits a little for the time of the next frame. When the length is over, it does not wait. */
static __always_inline int frame_is_due(void)
{
	__u64 now_ns, past_ps;

	for (int i = 0; i < LOOKS; i++) {
		now_ns = bpf_ktime_get_ns();
		if (!begin_ns)
			begin_ns = now_ns;
		if (now_ns - begin_ns >= length_ns)
			return 0;
		past_ps = (now_ns - begin_ns) * 1000;
		if (past_ps < next_ps)
			continue;
		if (past_ps > next_ps + BEHIND_MAX * spacing_ps)
			next_ps = past_ps;
		next_ps += spacing_ps;
		return 1;
	}
	return 0;
}

SEC("xdp")
int sh_offer(struct xdp_md *ctx)
{
	__u64 *words = (void *)(long)ctx->data;
	struct head *head = (void *)words;
	__u16 flow;

	if ((void *)(words + HEAD_WORDS) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	if (offer_paced && !frame_is_due())
		return XDP_DROP;
	for (int i = 0; i < HEAD_WORDS; i++)
		words[i] = head_words[i];
	if (flow_mask) {
		flow = offer_count & flow_mask;
		head->udp.source = bpf_htons(bpf_ntohs(head->udp.source) + flow);
		head->makeup = bpf_htons(0xffff - flow);
	}
	offer_count++;
	return bpf_redirect(offer_ifindex, 0);
}

/* The sink takes UDP datagrams with these addresses and this destination port while it is open, and passes all else on. */
__u8 sink_open = 0;
__be32 sink_source = 0;
__be32 sink_destination = 0;
__be16 sink_port = 0;

/* Frames that the sink has taken, and other IPv4 frames that it has seen while it was open. */
__u64 sink_count = 0;
__u64 other_count = 0;

/* The first bytes of a frame that the sink has taken, if sample_size is not 0. */
__u8 sample[64] = {};
__u32 sample_size = 0;

SEC("xdp")
int sh_sink(struct xdp_md *ctx)
{
	void *data_end = (void *)(long)ctx->data_end;
	struct head *head = (void *)(long)ctx->data;

	if (!sink_open || (void *)(head + 1) > data_end || head->eth.h_proto != bpf_htons(ETH_P_IP))
		return XDP_PASS;
	if (head->ip.protocol != IPPROTO_UDP || head->ip.saddr != sink_source ||
	    head->ip.daddr != sink_destination || head->udp.dest != sink_port) {
		other_count++;
		return XDP_PASS;
	}
	sink_count++;
	if (!sample_size && !bpf_xdp_load_bytes(ctx, 0, sample, sizeof(sample)))
		sample_size = sizeof(sample);
	return XDP_DROP;
}

/* Frames that sh_drop has taken. */
__u64 drop_count = 0;

SEC("xdp")
int sh_drop(struct xdp_md *ctx)
{
	drop_count++;
	return XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
