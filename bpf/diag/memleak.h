/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types of `shunt diag memleak` that cross to Go. Times are CLOCK_MONOTONIC, ns.
 */
#ifndef SHUNT_MEMLEAK_H
#define SHUNT_MEMLEAK_H

#include "../event/task.h"

enum leak_constant {
	LEAK_STACK_DEPTH = 32, /* frames */
	LEAK_STACKS_MAX = 65536, /* more than there are stacks: of two with one hash, one fits */
	LEAK_CACHES_MAX = 4096, /* slab caches; a machine has some hundred */
	LEAK_TABLE_SIZE = 262144, /* allocations that are live; set at load */
	LEAK_BULK_MAX = 4096, /* objects that are freed at once */
	LEAK_CALLS_MAX = 16384, /* threads of a process that are in a call of the allocator */
	LEAK_CACHE_NAME_BYTES = 32,
	LEAK_MULTIPLIER =
		0x9e3779b9, /* 2^32 divided by the golden ratio: spreads neighbouring addresses */
};

/* The kinds of allocated memory. */
enum leak_kind {
	LEAK_KMALLOC = 0,
	LEAK_SLAB = 1, /* an object of a named cache */
	LEAK_PAGES = 2,
	LEAK_VMALLOC = 3, /* a range of virtual addresses of the kernel */
	LEAK_PERCPU = 4,
	LEAK_MALLOC = 5, /* of a process: from malloc() or a similar function */
	LEAK_MMAP = 6, /* of a process: from mmap() */
	LEAK_KINDS_COUNT = 7,
};

/* The counts of each kind. A free of kfree() and kmem_cache_free() is LEAK_KMALLOC's. */
enum leak_count {
	LEAK_ALLOCS = 0, /* allocations put into the table */
	LEAK_FREES = 1, /* allocations taken out of the table */
	LEAK_FREES_OLDER =
		2, /* not in the table: allocated before the start, not watched or not kept */
	LEAK_FULL = 3, /* allocations that found the table full */
	LEAK_ALLOCS_BUSY = 4, /* allocations not kept, because the table was in use on this CPU */
	LEAK_FREES_BUSY = 5, /* frees not carried out, for the same reason: they look like leaks */
	LEAK_UNFREED = 6, /* allocations at an address still in the table: its free was not seen */
	LEAK_NO_STACK = 7, /* allocations kept without a stack, because there was no room for it */
	LEAK_NO_CACHE = 8, /* allocations kept without their cache's name, for the same reason */
	LEAK_CAUGHT = 9, /* frees that only the second of the two programs saw */
	LEAK_ENDLESS = 10, /* calls of a process whose end was not seen, or that found no room */
	LEAK_COUNTS_COUNT = 11,
};

/* Tracepoints of frees that have two programs. */
enum leak_pair {
	LEAK_PAIR_KFREE = 0,
	LEAK_PAIR_SLAB = 1,
	LEAK_PAIR_PAGES = 2,
	LEAK_PAIRS_COUNT = 3,
};

/* A live allocation. */
struct leak_alloc {
	__u64 bytes;
	__u64 birth_ns;
	__u64 cache; /* of LEAK_SLAB: the key of the cache's name; otherwise 0 */
	__u64 call_site; /* address that called the allocator; 0: not known */
	__u64 cgroup_id; /* of the task that ran, in the second hierarchy */
	__s32 stack; /* the key of its stack; negative: there is none */
	__u32 tgid; /* of the task that ran; 0: idle */
	__u32 kind; /* enum leak_kind */
	__u32 is_reclaimable; /* 1: the kernel takes it back when memory is short */
};

/* A call of a process's allocator that goes on. */
struct leak_call {
	__u64 stack; /* the stack pointer when the call began: calls from within it are below */
	__u64 bytes;
	__u64 other; /* the address that it may move; posix_memalign(): where it stores one */
	struct leak_alloc moved; /* the entry of that address, which was taken out of the table */
	__u32 op; /* enum leak_op of memleak_user.h */
	__u32 was; /* enum leak_was of memleak_user.h */
};

/* A slab cache. */
struct leak_cache {
	char name[LEAK_CACHE_NAME_BYTES];
	__u32 bytes; /* of an object */
	__u32 is_reclaimable;
};

/* The innermost frame first; 0 ends it. */
struct leak_stack {
	__u64 frames[LEAK_STACK_DEPTH];
};

#endif
