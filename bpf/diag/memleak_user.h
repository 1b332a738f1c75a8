/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Memory of one process: programs at the functions of its C library. The table, and the programs of the kernel's memory,
 * are in memleak.bpf.c, which includes this file.
 *
 *   malloc(bytes) ─► the call: thread ─► bytes ─► … ─► its end: address ─► the table, with the stack of the caller
 *   free(address) ─► out of the table
 *
 * Allocators call each other: realloc() may call malloc(), and malloc() mmap(). The outermost call is the one that the
 * process made, so calls from within it are left out. They are the ones with a lower stack pointer.
 *
 * The stack is taken at the end of the call: the instruction and the registers are the caller's then, so that its function
 * is at the top, whether the library was built with frame pointers or not.
 *
 * Registers are read by their offset in struct pt_regs of asm/ptrace.h for x86-64.
 */
#ifndef SHUNT_MEMLEAK_USER_H
#define SHUNT_MEMLEAK_USER_H

enum leak_register {
	REG_RAX = 10,
	REG_RDX = 12,
	REG_RSI = 13,
	REG_RDI = 14,
	REG_RIP = 16,
	REG_RSP = 19
};

/* How a call's end is read. */
enum leak_op {
	OP_ALLOCATE = 0, /* the result is the address; 0: there is none */
	OP_MOVE = 1, /* realloc(): as OP_ALLOCATE; the argument is free unless the call failed */
	OP_STORE = 2, /* posix_memalign(): the result is 0 if the address was stored */
	OP_MAP = 3, /* mmap(): the result is the address, or MAP_FAILED */
	OP_REMAP = 4, /* mremap(): as OP_MAP; the argument is free unless the call failed */
};

/* The state that a moved address had in the table. */
enum leak_was {
	WAS_NOTHING = 0, /* no address was given, or it is not in the sample */
	WAS_LIVE = 1,
	WAS_OLDER = 2, /* not in the table: allocated before the start */
};

#define MAP_FAILED (~0ULL) /* sys/mman.h */

/*
 * Calls that go on. Key: the thread; value: struct leak_call. Programs write, read and delete. Full: the call is counted as
 * endless. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LEAK_CALLS_MAX);
	__type(key, __u64);
	__type(value, struct leak_call);
} sh_leak_calls SEC(".maps");

static __always_inline __u32 kind_of(__u32 op)
{
	return op == OP_MAP || op == OP_REMAP ? LEAK_MMAP : LEAK_MALLOC;
}

/* Takes an address out of the table before it is moved: when the call ends another thread may have it. */
static __always_inline void move_begun(struct leak_call *call)
{
	struct leak_alloc *live;

	if (!call->other || !is_sampled(call->other))
		return;
	call->was = WAS_OLDER;
	live = bpf_map_lookup_elem(&sh_leaks, &call->other);
	if (!live)
		return;
	call->moved = *live;
	if (!bpf_map_delete_elem(&sh_leaks, &call->other))
		call->was = WAS_LIVE;
}

static __always_inline int call_begun(__u64 *ctx, __u32 op, __u64 bytes, __u64 other)
{
	struct leak_call *outer,
		call = { .stack = ctx[REG_RSP], .bytes = bytes, .other = other, .op = op };
	__u64 thread = bpf_get_current_pid_tgid();

	outer = bpf_map_lookup_elem(&sh_leak_calls, &thread);
	if (outer && outer->stack > call.stack)
		return 0;
	if (outer && outer->stack < call.stack)
		leak_count(kind_of(outer->op), LEAK_ENDLESS);
	if (op == OP_MOVE || op == OP_REMAP)
		move_begun(&call);
	if (bpf_map_update_elem(&sh_leak_calls, &thread, &call, BPF_ANY))
		leak_count(kind_of(op), LEAK_ENDLESS);
	return 0;
}

/* The address that a call has allocated; 0: none. */
static __always_inline __u64 call_result(__u64 *ctx, struct leak_call *call)
{
	__u64 address = ctx[REG_RAX];

	switch (call->op) {
	case OP_STORE:
		if ((__u32)address ||
		    bpf_probe_read_user(&address, sizeof(address), (void *)call->other))
			return 0;
		return address;
	case OP_MAP:
	case OP_REMAP:
		return address == MAP_FAILED ? 0 : address;
	}
	return address;
}

/* Counts a moved address as free, or puts it back if the call has failed. */
static __always_inline void move_ended(struct leak_call *call, __u64 address)
{
	__u32 kind = kind_of(call->op);

	if (!address && (call->bytes || call->op == OP_REMAP)) {
		if (call->was == WAS_LIVE)
			bpf_map_update_elem(&sh_leaks, &call->other, &call->moved, BPF_ANY);
		return;
	}
	if (call->was != WAS_NOTHING)
		leak_count(kind, call->was == WAS_LIVE ? LEAK_FREES : LEAK_FREES_OLDER);
}

/* The end of any call. */
static __always_inline int call_ended(__u64 *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid(), address;
	struct leak_call *call = bpf_map_lookup_elem(&sh_leak_calls, &thread);
	struct leak_alloc a = { .call_site = ctx[REG_RIP] };

	/* The return address is off the stack. Another stack pointer: a call from within has ended. */
	if (!call || call->stack + sizeof(__u64) != ctx[REG_RSP])
		return 0;
	address = call_result(ctx, call);
	a.kind = kind_of(call->op);
	a.bytes = call->bytes;
	if (call->op == OP_MOVE || call->op == OP_REMAP)
		move_ended(call, address);
	/* Memory from before the start is no leak, also after it was moved. */
	if (address && is_sampled(address) && call->was != WAS_OLDER)
		leak_put_of(ctx, address, &a, 1);
	bpf_map_delete_elem(&sh_leak_calls, &thread);
	return 0;
}

SEC("uretprobe/malloc")
int sh_user_end(__u64 *ctx)
{
	return call_ended(ctx);
}

/* malloc(bytes), valloc(bytes), pvalloc(bytes) */
SEC("uprobe/malloc")
int sh_user_malloc(__u64 *ctx)
{
	return call_begun(ctx, OP_ALLOCATE, ctx[REG_RDI], 0);
}

/* calloc(count, bytes) */
SEC("uprobe/calloc")
int sh_user_calloc(__u64 *ctx)
{
	return call_begun(ctx, OP_ALLOCATE, ctx[REG_RDI] * ctx[REG_RSI], 0);
}

/* aligned_alloc(alignment, bytes), memalign(alignment, bytes) */
SEC("uprobe/aligned_alloc")
int sh_user_align(__u64 *ctx)
{
	return call_begun(ctx, OP_ALLOCATE, ctx[REG_RSI], 0);
}

/* posix_memalign(address, alignment, bytes) */
SEC("uprobe/posix_memalign")
int sh_user_store(__u64 *ctx)
{
	return call_begun(ctx, OP_STORE, ctx[REG_RDX], ctx[REG_RDI]);
}

/* realloc(address, bytes) */
SEC("uprobe/realloc")
int sh_user_move(__u64 *ctx)
{
	return call_begun(ctx, OP_MOVE, ctx[REG_RSI], ctx[REG_RDI]);
}

/* mmap(address, bytes, …) */
SEC("uprobe/mmap")
int sh_user_map(__u64 *ctx)
{
	return call_begun(ctx, OP_MAP, ctx[REG_RSI], 0);
}

/* mremap(address, bytes before, bytes, …) */
SEC("uprobe/mremap")
int sh_user_remap(__u64 *ctx)
{
	return call_begun(ctx, OP_REMAP, ctx[REG_RDX], ctx[REG_RDI]);
}

/* free(address) */
SEC("uprobe/free")
int sh_user_free(__u64 *ctx)
{
	return leak_take(ctx[REG_RDI], LEAK_MALLOC);
}

/* munmap(address, bytes) */
SEC("uprobe/munmap")
int sh_user_unmap(__u64 *ctx)
{
	return leak_take(ctx[REG_RDI], LEAK_MMAP);
}

#endif
