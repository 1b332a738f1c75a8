// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The live memory of the kernel, and the code that allocated it. memleak_user.h does the same for a process.
 *
 *   allocated ─► in the sample? ─► the table: address ─► size, stack, time, cgroup
 *   freed     ─► in the sample? ─► out of the table; not there: older than the start, and no leak
 *
 * An allocation that is still in the table is live. User space reads the table at each interval, and reports
 * the allocations that are old and become more.
 *
 * Invariants: an address is always in the sample or never, so a free is left out exactly if its allocation
 * was. An allocation that could not be kept or taken out is counted, by its kind. An address that is allocated
 * while it is in the table proves that a free was not seen: it is counted, and the new allocation takes the
 * place.
 */
#include "memleak.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Allocations of this process, the tool itself, are left out. 0: none are. */
volatile const __u32 except_tgid = 0;
/* Only allocations of tasks in this cgroup of the second hierarchy are watched; 0: all. */
volatile const __u64 only_cgroup = 0;
/* An address is in the sample if these bits of its hash are 0. User space sets more to sample less. */
volatile __u32 sample_mask = 0;

#define E2BIG 7 /* asm-generic/errno-base.h: a hash map is full */
#define ENOENT 2
#define ERRNO_MAX 4095 /* MAX_ERRNO of linux/err.h: results above minus this are errors */
#define GFP_RECLAIMABLE 0x10 /* ___GFP_RECLAIMABLE of linux/gfp_types.h */
#define MIGRATE_MOVABLE 1 /* linux/mmzone.h: memory of user space, and the page cache */
#define MIGRATE_RECLAIMABLE 2
#define PAGE_BYTES 4096

struct kmem_cache {
	unsigned int allocflags;
	unsigned int object_size;
	const char *name;
} KERNEL_STRUCT;

struct vmap_area {
	unsigned long va_start;
} KERNEL_STRUCT;

/* clang writes a type in full only if something uses it. */
struct {
	enum leak_constant constant;
	enum leak_kind kind;
	enum leak_count count;
	enum leak_pair pair;
} leak_types;

/*
 * Live allocations. Key: the address, for pages that of their struct page; value: struct leak_alloc.
 * Programs write and delete; user space reads, and deletes entries that are not in the sample any more.
 * Full: the allocation is counted as not kept. The size is set at load, and the memory is taken then, because
 * to allocate here would be an allocation that is watched. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LEAK_TABLE_SIZE);
	__type(key, __u64);
	__type(value, struct leak_alloc);
} sh_leaks SEC(".maps");

/*
 * Stacks of the kernel. Key: a hash of the stack; value: struct leak_stack. Programs write, user space
 * reads. Full, or two stacks with one hash: the allocation has no stack, and that is counted. Upgrade:
 * never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, LEAK_STACKS_MAX);
	__type(key, __u32);
	__type(value, struct leak_stack);
} sh_leak_stacks SEC(".maps");

/*
 * Names of slab caches. Key: address of the kernel's struct kmem_cache; value: struct leak_cache. Programs
 * write, user space reads. Full: the allocation has no name, and that is counted. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LEAK_CACHES_MAX);
	__type(key, __u64);
	__type(value, struct leak_cache);
} sh_leak_caches SEC(".maps");

/*
 * Counts of events, and of losses. Key: enum leak_kind * LEAK_COUNTS_COUNT + enum leak_count; value: a
 * count. Programs write, user space reads. Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LEAK_KINDS_COUNT *LEAK_COUNTS_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} sh_leak_counts SEC(".maps");

/*
 * Frees that were not seen, by allocating stack. Key: the stack's key in sh_leak_stacks; value: a count.
 * Programs write, user space reads. Full: it is in sh_leak_counts nevertheless. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LEAK_STACKS_MAX);
	__type(key, __s32);
	__type(value, __u64);
} sh_leak_unfreed SEC(".maps");

/*
 * The last address that the first program of a pair got on this CPU. Key: enum leak_pair; value: the address.
 * The first program writes, the second one reads. Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LEAK_PAIRS_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} sh_leak_last SEC(".maps");

/* An interrupt may come between, so the addition is one instruction. */
static __always_inline void leak_count(__u32 kind, __u32 what)
{
	__u32 key = kind * LEAK_COUNTS_COUNT + what;
	__u64 *count = bpf_map_lookup_elem(&sh_leak_counts, &key);

	if (count)
		__sync_fetch_and_add(count, 1);
}

/* The lowest bits of a product depend on those of the address, which are alike: the bits above are taken. */
static __always_inline int is_sampled(__u64 address)
{
	return !(((address >> 3) * LEAK_MULTIPLIER >> 20) & sample_mask);
}

static __always_inline void unfreed_count(__u32 kind, __s32 stack)
{
	__u64 one = 1, *count;

	leak_count(kind, LEAK_UNFREED);
	count = bpf_map_lookup_elem(&sh_leak_unfreed, &stack);
	if (count)
		__sync_fetch_and_add(count, 1);
	else
		bpf_map_update_elem(&sh_leak_unfreed, &stack, &one, BPF_NOEXIST);
}

/* Callers ask is_watched first: an address that it refuses costs nothing more. */
static __always_inline int is_watched(__u64 address)
{
	if (!address || !is_sampled(address))
		return 0;
	if (except_tgid && bpf_get_current_pid_tgid() >> 32 == except_tgid)
		return 0;
	return !only_cgroup || bpf_get_current_cgroup_id() == only_cgroup;
}

/* A stack finds no room if another stack has its hash. Its first frames are this program and the tracepoint: with one
 * frame less it has another hash. */
static __always_inline __s32 stack_get(void *ctx)
{
	__s32 stack = bpf_get_stackid(ctx, &sh_leak_stacks, 2);

	if (stack < 0)
		stack = bpf_get_stackid(ctx, &sh_leak_stacks, 1);
	if (stack < 0)
		stack = bpf_get_stackid(ctx, &sh_leak_stacks, 0);
	return stack;
}

/* of_user: the stack is the process's. */
static __always_inline void leak_put_of(void *ctx, __u64 address, struct leak_alloc *a, int of_user)
{
	struct leak_alloc *old;
	int err; /* before Linux 6.4 the upper half of the result is not set */

	a->birth_ns = bpf_ktime_get_ns();
	a->cgroup_id = bpf_get_current_cgroup_id();
	a->tgid = bpf_get_current_pid_tgid() >> 32;
	a->stack = of_user ? bpf_get_stackid(ctx, &sh_leak_stacks, BPF_F_USER_STACK) :
			     stack_get(ctx);
	if (a->stack < 0)
		leak_count(a->kind, LEAK_NO_STACK);
	old = bpf_map_lookup_elem(&sh_leaks, &address);
	if (old)
		unfreed_count(old->kind < LEAK_KINDS_COUNT ? old->kind : 0, old->stack);
	err = bpf_map_update_elem(&sh_leaks, &address, a, BPF_ANY);
	leak_count(a->kind, !err ? LEAK_ALLOCS : (err == -E2BIG ? LEAK_FULL : LEAK_ALLOCS_BUSY));
}

static __always_inline void leak_put(void *ctx, __u64 address, struct leak_alloc *a)
{
	leak_put_of(ctx, address, a, 0);
}

static __always_inline int leak_take(__u64 address, __u32 kind)
{
	int err; /* before Linux 6.4 the upper half of the result is not set */

	if (!address || !is_sampled(address))
		return 0;
	err = bpf_map_delete_elem(&sh_leaks, &address);
	leak_count(kind, !err ? LEAK_FREES : (err == -ENOENT ? LEAK_FREES_OLDER : LEAK_FREES_BUSY));
	return 0;
}

/*
 * The kernel does not run a program in an interrupt that came into that very program on this CPU, and a softirq
 * that frees memory which RCU has held back frees hundreds. So a second program is at the same tracepoint: of the
 * two, one at most is interrupted. The second one does nothing if the first one has done the work: the address that
 * the first one left shows whether it ran.
 */
static __always_inline int leak_take_first(__u64 address, __u32 kind, __u32 pair)
{
	__u64 *last = bpf_map_lookup_elem(&sh_leak_last, &pair);

	if (last)
		*last = address;
	return leak_take(address, kind);
}

static __always_inline int leak_take_again(__u64 address, __u32 kind, __u32 pair)
{
	__u64 *last = bpf_map_lookup_elem(&sh_leak_last, &pair);

	if (last && *last != address)
		leak_count(kind, LEAK_CAUGHT);
	if (address && is_sampled(address) && !bpf_map_delete_elem(&sh_leaks, &address))
		leak_count(kind, LEAK_FREES);
	return 0;
}

static __always_inline int kmalloc_done(void *ctx, __u64 call_site, __u64 address, __u64 bytes,
					__u64 gfp)
{
	struct leak_alloc a = { .kind = LEAK_KMALLOC, .bytes = bytes, .call_site = call_site };

	if (!is_watched(address))
		return 0;
	a.is_reclaimable = !!(gfp & GFP_RECLAIMABLE);
	leak_put(ctx, address, &a);
	return 0;
}

/* Learns the cache when its first object is allocated. */
static __always_inline struct leak_cache *cache_get(struct kmem_cache *s)
{
	__u64 key = (__u64)s;
	struct leak_cache fresh = {}, *c = bpf_map_lookup_elem(&sh_leak_caches, &key);
	const char *name;

	if (c)
		return c;
	name = BPF_CORE_READ(s, name);
	bpf_probe_read_kernel_str(fresh.name, sizeof(fresh.name), name);
	fresh.bytes = BPF_CORE_READ(s, object_size);
	fresh.is_reclaimable = !!(BPF_CORE_READ(s, allocflags) & GFP_RECLAIMABLE);
	bpf_map_update_elem(&sh_leak_caches, &key, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&sh_leak_caches, &key);
}

static __always_inline int slab_done(void *ctx, __u64 call_site, __u64 address,
				     struct kmem_cache *s)
{
	struct leak_alloc a = { .kind = LEAK_SLAB, .call_site = call_site };
	struct leak_cache *c;

	if (!is_watched(address))
		return 0;
	c = cache_get(s);
	if (c) {
		a.cache = (__u64)s;
		a.bytes = c->bytes;
		a.is_reclaimable = c->is_reclaimable;
	} else {
		a.bytes = BPF_CORE_READ(s, object_size);
		leak_count(LEAK_SLAB, LEAK_NO_CACHE);
	}
	leak_put(ctx, address, &a);
	return 0;
}

/* Pages that can be moved are user space's and the page cache's: they are not watched. */
static __always_inline int pages_done(void *ctx, __u64 page, __u32 order, __u32 migrate)
{
	struct leak_alloc a = { .kind = LEAK_PAGES, .bytes = PAGE_BYTES };

	if (migrate == MIGRATE_MOVABLE || !is_watched(page))
		return 0;
	a.bytes <<= order & 31;
	a.is_reclaimable = migrate == MIGRATE_RECLAIMABLE;
	leak_put(ctx, page, &a);
	return 0;
}

static __always_inline int range_done(void *ctx, __u64 address, __u64 bytes)
{
	struct leak_alloc a = { .kind = LEAK_VMALLOC, .bytes = bytes };

	if (is_watched(address))
		leak_put(ctx, address, &a);
	return 0;
}

static __always_inline int percpu_done(void *ctx, __u64 call_site, __u64 address, __u64 bytes)
{
	struct leak_alloc a = { .kind = LEAK_PERCPU, .bytes = bytes, .call_site = call_site };

	if (is_watched(address))
		leak_put(ctx, address, &a);
	return 0;
}

/* Objects that are freed at once pass no tracepoint. */
struct bulk {
	__u64 *addresses;
	__u64 count;
};

static long bulk_turn(__u32 i, struct bulk *b)
{
	__u64 address = 0;

	if (i >= b->count)
		return 1;
	bpf_probe_read_kernel(&address, sizeof(address), &b->addresses[i]);
	leak_take(address, LEAK_KMALLOC);
	return 0;
}

static __always_inline int bulk_freed(__u64 count, __u64 *addresses)
{
	struct bulk b = { addresses, count };

	bpf_loop(LEAK_BULK_MAX, bulk_turn, &b, 0);
	return 0;
}

/* kmalloc(call_site, ptr, bytes_req, bytes_alloc, gfp_flags, node) of trace/events/kmem.h */
SEC("tp_btf/kmalloc")
int sh_kmalloc_btf(__u64 *ctx)
{
	return kmalloc_done(ctx, ctx[0], ctx[1], ctx[3], ctx[4]);
}

SEC("raw_tp/kmalloc")
int sh_kmalloc_raw(__u64 *ctx)
{
	return kmalloc_done(ctx, ctx[0], ctx[1], ctx[3], ctx[4]);
}

/* kfree(call_site, ptr) */
SEC("tp_btf/kfree")
int sh_kfree_btf(__u64 *ctx)
{
	return leak_take_first(ctx[1], LEAK_KMALLOC, LEAK_PAIR_KFREE);
}

SEC("raw_tp/kfree")
int sh_kfree_raw(__u64 *ctx)
{
	return leak_take_first(ctx[1], LEAK_KMALLOC, LEAK_PAIR_KFREE);
}

SEC("tp_btf/kfree")
int sh_kfree2_btf(__u64 *ctx)
{
	return leak_take_again(ctx[1], LEAK_KMALLOC, LEAK_PAIR_KFREE);
}

SEC("raw_tp/kfree")
int sh_kfree2_raw(__u64 *ctx)
{
	return leak_take_again(ctx[1], LEAK_KMALLOC, LEAK_PAIR_KFREE);
}

/* kmem_cache_alloc(call_site, ptr, s, gfp_flags, node) */
SEC("tp_btf/kmem_cache_alloc")
int sh_slab_a_btf(__u64 *ctx)
{
	return slab_done(ctx, ctx[0], ctx[1], (void *)ctx[2]);
}

SEC("raw_tp/kmem_cache_alloc")
int sh_slab_a_raw(__u64 *ctx)
{
	return slab_done(ctx, ctx[0], ctx[1], (void *)ctx[2]);
}

/* kmem_cache_free(call_site, ptr, s) */
SEC("tp_btf/kmem_cache_free")
int sh_slab_f_btf(__u64 *ctx)
{
	return leak_take_first(ctx[1], LEAK_KMALLOC, LEAK_PAIR_SLAB);
}

SEC("raw_tp/kmem_cache_free")
int sh_slab_f_raw(__u64 *ctx)
{
	return leak_take_first(ctx[1], LEAK_KMALLOC, LEAK_PAIR_SLAB);
}

SEC("tp_btf/kmem_cache_free")
int sh_slab_f2_btf(__u64 *ctx)
{
	return leak_take_again(ctx[1], LEAK_KMALLOC, LEAK_PAIR_SLAB);
}

SEC("raw_tp/kmem_cache_free")
int sh_slab_f2_raw(__u64 *ctx)
{
	return leak_take_again(ctx[1], LEAK_KMALLOC, LEAK_PAIR_SLAB);
}

/* kmem_cache_free_bulk(s, size, p) of mm/slub.c */
SEC("fentry/kmem_cache_free_bulk")
int sh_bulk_fn(__u64 *ctx)
{
	__u64 addresses = 0;

	/* The verifier knows no pointers to pointers among arguments. */
	if (bpf_get_func_arg(ctx, 2, &addresses))
		return 0;
	return bulk_freed(ctx[1], (void *)addresses);
}

/* mm_page_alloc(page, order, gfp_flags, migratetype). The verifier lets no program at tp_btf calculate with the
 * address of a page. */
SEC("raw_tp/mm_page_alloc")
int sh_page_a_raw(__u64 *ctx)
{
	return pages_done(ctx, ctx[0], ctx[1], ctx[3]);
}

/* mm_page_free(page, order) */
SEC("raw_tp/mm_page_free")
int sh_page_f_raw(__u64 *ctx)
{
	return leak_take_first(ctx[0], LEAK_PAGES, LEAK_PAIR_PAGES);
}

SEC("raw_tp/mm_page_free")
int sh_page_f2_raw(__u64 *ctx)
{
	return leak_take_again(ctx[0], LEAK_PAGES, LEAK_PAIR_PAGES);
}

/* alloc_vmap_area(addr, size, align, vstart, vend, failed) of trace/events/vmalloc.h, since Linux 6.3 */
SEC("tp_btf/alloc_vmap_area")
int sh_vmap_a_btf(__u64 *ctx)
{
	return (int)ctx[5] ? 0 : range_done(ctx, ctx[0], ctx[1]);
}

SEC("raw_tp/alloc_vmap_area")
int sh_vmap_a_raw(__u64 *ctx)
{
	return (int)ctx[5] ? 0 : range_done(ctx, ctx[0], ctx[1]);
}

/* struct vmap_area *alloc_vmap_area(size, align, vstart, vend, node, gfp_mask) of mm/vmalloc.c in 6.1 */
SEC("fexit/alloc_vmap_area")
int sh_vmap_a_fn(__u64 *ctx)
{
	__u64 result = 0;
	struct vmap_area *area;

	if (bpf_get_func_ret(ctx, &result) || result >= (__u64)-ERRNO_MAX)
		return 0;
	area = (void *)result;
	return range_done(ctx, BPF_CORE_READ(area, va_start), ctx[0]);
}

/* free_vmap_area_noflush(va_start, nr_lazy, nr_lazy_max), since 6.3 */
SEC("tp_btf/free_vmap_area_noflush")
int sh_vmap_f_btf(__u64 *ctx)
{
	return leak_take(ctx[0], LEAK_VMALLOC);
}

SEC("raw_tp/free_vmap_area_noflush")
int sh_vmap_f_raw(__u64 *ctx)
{
	return leak_take(ctx[0], LEAK_VMALLOC);
}

/* free_vmap_area_noflush(va) of mm/vmalloc.c */
SEC("fentry/free_vmap_area_noflush")
int sh_vmap_f_fn(__u64 *ctx)
{
	struct vmap_area *area = (void *)ctx[0];

	return leak_take(BPF_CORE_READ(area, va_start), LEAK_VMALLOC);
}

/* percpu_alloc_percpu(call_site, reserved, is_atomic, size, align, base_addr, off, ptr, bytes_alloc,
 * gfp_flags) of trace/events/percpu.h */
SEC("tp_btf/percpu_alloc_percpu")
int sh_pcpu_a_btf(__u64 *ctx)
{
	return percpu_done(ctx, ctx[0], ctx[7], ctx[8]);
}

SEC("raw_tp/percpu_alloc_percpu")
int sh_pcpu_a_raw(__u64 *ctx)
{
	return percpu_done(ctx, ctx[0], ctx[7], ctx[8]);
}

/* percpu_free_percpu(base_addr, off, ptr) */
SEC("tp_btf/percpu_free_percpu")
int sh_pcpu_f_btf(__u64 *ctx)
{
	return leak_take(ctx[2], LEAK_PERCPU);
}

SEC("raw_tp/percpu_free_percpu")
int sh_pcpu_f_raw(__u64 *ctx)
{
	return leak_take(ctx[2], LEAK_PERCPU);
}

#include "memleak_user.h"
