/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whole Internet checksums, where the sender left its own to hardware.
 *
 * Such a sender (any veth, most virtual machines) stores the folded sum of the
 * pseudo-header, not its complement, and XDP sees the frame before anyone completes it.
 */
#ifndef SHUNT_CSUM_WHOLE_H
#define SHUNT_CSUM_WHOLE_H

#include "csum.h"
#include "scratch.h"

#define CSUM_CHUNK 512 /* the most that bpf_csum_diff takes */
#define CSUM_CHUNKS_MAX (65536 / CSUM_CHUNK)

struct chunk {
	__u8 bytes[CSUM_CHUNK + 4];
};

SCRATCH(sh_chunk, struct chunk);

struct csum_walk {
	struct frame_ctx *ctx;
	__u64 sum;
	__u32 offset;
	__u32 left;
	__u32 failed;
	__u32 pad;
};

static long csum_chunk_add(__u32 index, void *context)
{
	struct csum_walk *walk = context;
	__u32 size = walk->left, last;
	struct chunk *chunk = scratch_of(&sh_chunk);
	__s64 sum;

	if (size > CSUM_CHUNK)
		size = CSUM_CHUNK;
	/* The verifiers of 6.1 and 6.12 learn no lower bound from a comparison with zero, and
	 * clang 19 would compare one copy of size and pass another: so the bound is put on one
	 * less, out of clang's sight. Goes when we support neither of the two. */
	last = size - 1;
	asm volatile("" : "+r"(last));
	if (!chunk || last >= CSUM_CHUNK)
		return 1;
	size = last + 1;
	if (ctx_load(walk->ctx, walk->offset, chunk->bytes, size)) {
		walk->failed = 1;
		return 1;
	}
	__builtin_memset(&chunk->bytes[size], 0, 4); /* up to a whole word */
	sum = bpf_csum_diff(0, 0, (__be32 *)chunk->bytes, (size + 3) & ~3U, 0);
	walk->sum += (__u32)sum;
	walk->offset += size;
	walk->left -= size;
	return 0;
}

/*
 * The sum of size bytes from offset on, fragments of a multi-buffer frame included; not
 * folded. offset must be even relative to the summed bytes. Returns 0, or -1 when the frame
 * is shorter. *sum must have a value before: the verifier takes it for an argument.
 */
__stage int csum_whole(struct frame_ctx *ctx, __u32 offset, __u32 size, __u64 *sum)
{
	struct csum_walk walk = { .ctx = ctx, .offset = offset, .left = size };

	if (!sum)
		return -1;
	bpf_loop(CSUM_CHUNKS_MAX, csum_chunk_add, &walk, 0);
	*sum = walk.sum;
	return walk.failed || walk.left ? -1 : 0;
}

#endif
