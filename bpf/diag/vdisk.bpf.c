// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The path of a virtual machine's disk requests through qemu and the host's kernel.
 *
 *   guest ─► device model ─► BEGIN ─► coroutine ─► BLOCK (format) ─► BLOCK (file) ─► HAND
 *                              ▲                                                       │
 *                              │                                 thread or event loop ─▼
 *                            FINISH ◄─ COMPLETE ◄─ ISSUE ◄─ BIO ◄────────────── CALL, PART
 *
 * Programs only record events; shunt diag vdisk report brings them together. In qemu, uprobes are at symbols that it
 * exports. They read only arguments that have been the same since qemu 3.1 (2018): numbers and, of a vector, its
 * size. A coroutine has a stack of its own, so the stack pointer names it.
 *
 * Invariant: nothing of other processes is recorded, except bios of files that qemu has open, which the
 * kernel may queue by another task if a cgroup's limit holds them back.
 *
 * Registers are read by their offset in struct pt_regs of asm/ptrace.h for x86-64.
 */
#include "vdisk.h"
#include "file.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* The virtual machine's process; 0: all, in a guest. */
volatile const __u32 only_tgid = 0;
/* Address of iomap_dio_bio_end_io; 0: not known, and direct IO has no file. */
volatile const __u64 iomap_dio_end = 0;

enum {
	REG_R9 = 8,
	REG_R8 = 9,
	REG_R10 = 7,
	REG_RAX = 10,
	REG_RCX = 11,
	REG_RDX = 12,
	REG_RSI = 13,
	REG_RDI = 14,
	REG_RSP = 19
};

/* x86-64's numbers of asm/unistd_64.h. */
enum {
	NR_READ = 0,
	NR_WRITE = 1,
	NR_PREAD = 17,
	NR_PWRITE = 18,
	NR_READV = 19,
	NR_WRITEV = 20,
	NR_MSYNC = 26,
	NR_SENDFILE = 40,
	NR_FSYNC = 74,
	NR_FDATASYNC = 75,
	NR_SYNC = 162,
	NR_IO_SUBMIT = 209,
	NR_SPLICE = 275,
	NR_SYNC_RANGE = 277,
	NR_FALLOCATE = 285,
	NR_PREADV = 295,
	NR_PWRITEV = 296,
	NR_SYNCFS = 306,
	NR_COPY_RANGE = 326,
	NR_PREADV2 = 327,
	NR_PWRITEV2 = 328,
	NR_IO_URING_ENTER = 426,
};

/* enum req_op of linux/blk_types.h; unchanged from 6.1 to 6.18. */
#define OP_MASK 0xff
#define OP_WRITE 1
#define OP_FLUSH 2

/* offsetof(QEMUIOVector, size) of qemu's include/qemu/iov.h, on 64 bits */
#define VECTOR_SIZE_AT 32

#define PAGE_BYTES_SHIFT 12
#define MAPPING_FLAGS 3 /* PAGE_MAPPING_FLAGS: set if a page belongs to no file */

struct file {
	struct inode *f_inode;
} KERNEL_STRUCT;

struct kiocb {
	struct file *ki_filp;
	long long ki_pos;
} KERNEL_STRUCT;

struct iomap_dio {
	struct kiocb *iocb;
	long long size; /* bytes of its bios so far, including the one that is being queued */
} KERNEL_STRUCT;

/* The part of struct iomap_dio that names the waiting task. */
struct iomap_dio___waiter {
	struct {
		struct task_struct *waiter;
	} submit;
	_Bool wait_for_completion;
} KERNEL_STRUCT;

struct task_struct___id {
	int pid;
	int tgid;
} KERNEL_STRUCT;

struct bvec_iter {
	__u64 bi_sector;
	unsigned int bi_size;
	unsigned int bi_idx;
	unsigned int bi_bvec_done;
} KERNEL_STRUCT;

struct address_space {
	struct inode *host;
} KERNEL_STRUCT;

struct page {
	unsigned long compound_head;
} KERNEL_STRUCT;

struct folio {
	struct address_space *mapping;
	unsigned long index;
} KERNEL_STRUCT;

struct bio_vec {
	struct page *bv_page;
	unsigned int bv_offset;
} KERNEL_STRUCT;

struct block_device {
	__u32 bd_dev;
} KERNEL_STRUCT;

struct bio {
	struct bio *bi_next;
	struct block_device *bi_bdev;
	unsigned int bi_opf;
	struct bvec_iter bi_iter;
	void *bi_end_io;
	void *bi_private;
	struct bio_vec *bi_io_vec;
} KERNEL_STRUCT;

struct gendisk {
	int major;
	int first_minor;
} KERNEL_STRUCT;

struct request_queue {
	struct gendisk *disk;
} KERNEL_STRUCT;

struct request {
	struct request_queue *q;
	unsigned int cmd_flags;
	unsigned int __data_len;
	__u64 __sector;
	struct bio *bio;
} KERNEL_STRUCT;

/* Of linux/aio_abi.h. */
struct aio_request {
	__u64 data;
	__u32 key, flags;
	__u16 opcode;
	__s16 priority;
	__u32 descriptor;
	__u64 buffer, bytes;
	__s64 offset;
};

enum { AIO_READ = 0, AIO_WRITE = 1, AIO_FSYNC = 2, AIO_FDSYNC = 3, AIO_READV = 7, AIO_WRITEV = 8 };

struct vector {
	__u64 base, bytes;
};

/* clang writes a type in full only if something uses it. */
struct {
	struct vdisk_event event;
	enum vdisk_constant constant;
	enum vdisk_kind kind;
	enum vdisk_op op;
	enum vdisk_hand hand;
	struct vdisk_call call;
} vdisk_types;

/*
 * Files that the process has open. Key: the file; value: 1. User space writes, programs read. Full:
 * user space says so; bios of the file that a cgroup's limit holds back are not seen. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, VDISK_FILES_MAX);
	__type(key, struct vdisk_file);
	__type(value, __u8);
} sh_vd_files SEC(".maps");

/*
 * Handles of requests in qemu, bios and requests to drivers that are followed. Key: the address; value: 1.
 * Programs write and read. Full: the least recently used one is forgotten, and its end is not seen, which the
 * report counts. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, VDISK_OPEN_MAX);
	__type(key, __u64);
	__type(value, __u8);
} sh_vd_open SEC(".maps");

/*
 * Threads of qemu between the beginning of a request and the making of its coroutine. Key: the thread; value: 1.
 * Programs write and read. Full: as sh_vd_open. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, VDISK_FILES_MAX);
	__type(key, __u32);
	__type(value, __u8);
} sh_vd_begun SEC(".maps");

/*
 * System calls of the guest's tasks. Key: the thread; value: struct vdisk_call. Programs write and read. Full: the
 * least recently used call is forgotten, and its bios begin when they are queued. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, VDISK_CALLS_MAX);
	__type(key, __u32);
	__type(value, struct vdisk_call);
} sh_vd_calls SEC(".maps");

static __always_inline int is_ours(void)
{
	return !only_tgid || bpf_get_current_pid_tgid() >> 32 == only_tgid;
}

static __always_inline struct vdisk_event *vdisk_reserve(__u8 kind, __u8 op)
{
	struct event_header *h = event_reserve(sizeof(struct vdisk_event), VDISK_SENSOR);
	__u64 id = bpf_get_current_pid_tgid();
	struct vdisk_event *e;

	if (!h)
		return NULL;
	h->tgid = id >> 32;
	h->tid = (__u32)id;
	e = (void *)(h + 1);
	__builtin_memset(e, 0, sizeof(*e));
	e->kind = kind;
	e->op = op;
	return e;
}

static __always_inline void vdisk_submit(struct vdisk_event *e)
{
	event_submit((struct event_header *)e - 1);
}

/* 0, or an error: since 6.15 a lock of a hash map is given up after a quarter of a second (4fa8d68aa53e; rqspinlock.h). */
static __always_inline long follow(__u64 address)
{
	__u8 one = 1;

	return bpf_map_update_elem(&sh_vd_open, &address, &one, BPF_ANY);
}

static __always_inline int is_followed(__u64 address)
{
	return !!bpf_map_lookup_elem(&sh_vd_open, &address);
}

/* blk_aio_preadv(disk, offset, vector, flags, callback, its argument), and the same of pwritev. */
static __always_inline int begin(__u64 *regs, __u8 op)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct vdisk_event *e;
	__u8 one = 1;

	e = vdisk_reserve(VDISK_BEGIN, op);
	if (!e)
		return 0;
	e->id = regs[REG_RDI];
	e->stack = regs[REG_RSP];
	if (op == VDISK_FLUSH) {
		e->other = regs[REG_RDX];
	} else {
		e->offset = regs[REG_RSI];
		e->other = regs[REG_R9];
		bpf_probe_read_user(&e->bytes, sizeof(e->bytes),
				    (void *)(regs[REG_RDX] + VECTOR_SIZE_AT));
	}
	vdisk_submit(e);
	bpf_map_update_elem(&sh_vd_begun, &tid, &one, BPF_ANY);
	return 0;
}

SEC("uprobe/blk_aio_preadv")
int sh_vd_read(__u64 *ctx)
{
	return begin(ctx, VDISK_READ);
}

SEC("uprobe/blk_aio_pwritev")
int sh_vd_write(__u64 *ctx)
{
	return begin(ctx, VDISK_WRITE);
}

SEC("uprobe/blk_aio_flush")
int sh_vd_flush(__u64 *ctx)
{
	return begin(ctx, VDISK_FLUSH);
}

/* qemu_coroutine_create(function, argument): the first one of a request has the request's handle. */
SEC("uprobe/qemu_coroutine_create")
int sh_vd_coro(__u64 *ctx)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct vdisk_event *e;

	if (bpf_map_lookup_elem(&sh_vd_begun, &tid)) {
		bpf_map_delete_elem(&sh_vd_begun, &tid);
		follow(ctx[REG_RSI]);
	}
	e = vdisk_reserve(VDISK_COROUTINE, 0);
	if (!e)
		return 0;
	e->id = ctx[REG_RSI];
	e->stack = ctx[REG_RSP];
	vdisk_submit(e);
	return 0;
}

/* bdrv_co_preadv_part(edge, offset, bytes, …), and the same of pwritev and without _part. */
static __always_inline int block(__u64 *regs, __u8 op)
{
	struct vdisk_event *e = vdisk_reserve(VDISK_BLOCK, op);

	if (!e)
		return 0;
	e->id = regs[REG_RDI];
	e->offset = regs[REG_RSI];
	e->bytes = regs[REG_RDX];
	e->stack = regs[REG_RSP];
	vdisk_submit(e);
	return 0;
}

SEC("uprobe/bdrv_co_preadv_part")
int sh_vd_bread(__u64 *ctx)
{
	return block(ctx, VDISK_READ);
}

SEC("uprobe/bdrv_co_pwritev_part")
int sh_vd_bwrite(__u64 *ctx)
{
	return block(ctx, VDISK_WRITE);
}

static __always_inline int hand(__u64 *regs, __s32 to)
{
	struct vdisk_event *e = vdisk_reserve(VDISK_HAND, 0);

	if (!e)
		return 0;
	e->result = to;
	e->stack = regs[REG_RSP];
	vdisk_submit(e);
	return 0;
}

SEC("uprobe/thread_pool_submit_co")
int sh_vd_thread(__u64 *ctx)
{
	return hand(ctx, VDISK_HAND_THREAD);
}

SEC("uprobe/laio_co_submit")
int sh_vd_aio(__u64 *ctx)
{
	return hand(ctx, VDISK_HAND_AIO);
}

SEC("uprobe/luring_co_submit")
int sh_vd_uring(__u64 *ctx)
{
	return hand(ctx, VDISK_HAND_URING);
}

/* qemu_aio_unref(handle): the last use of a handle, whose fourth word is the caller's argument. */
SEC("uprobe/qemu_aio_unref")
int sh_vd_finish(__u64 *ctx)
{
	__u64 handle = ctx[REG_RDI];
	struct vdisk_event *e;

	if (!is_followed(handle))
		return 0;
	bpf_map_delete_elem(&sh_vd_open, &handle);
	e = vdisk_reserve(VDISK_FINISH, 0);
	if (!e)
		return 0;
	e->id = handle;
	bpf_probe_read_user(&e->other, sizeof(e->other), (void *)(handle + 3 * sizeof(__u64)));
	vdisk_submit(e);
	return 0;
}

/* Bytes of a vector; 0: it has more parts than are added up. */
static __always_inline __u64 vector_bytes(__u64 at, __u64 count)
{
	struct vector part;
	__u64 sum = 0;

	if (count > VDISK_VECTOR_MAX)
		return 0;
	for (__u32 i = 0; i < VDISK_VECTOR_MAX && i < count; i++) {
		if (bpf_probe_read_user(&part, sizeof(part), (void *)(at + i * sizeof(part))))
			return 0;
		sum += part.bytes;
	}
	return sum;
}

/* One of the requests of io_submit(context, count, requests). */
static __always_inline void aio_part(__u64 requests, __u32 i)
{
	struct aio_request r = {};
	struct vdisk_event *e;
	__u64 at = 0;

	if (bpf_probe_read_user(&at, sizeof(at), (void *)(requests + i * sizeof(at))) ||
	    bpf_probe_read_user(&r, sizeof(r), (void *)at))
		return;
	e = vdisk_reserve(VDISK_PART, r.opcode == AIO_READ || r.opcode == AIO_READV ? VDISK_READ :
				      r.opcode == AIO_WRITE || r.opcode == AIO_WRITEV ?
										      VDISK_WRITE :
										      VDISK_FLUSH);
	if (!e)
		return;
	e->offset = r.offset;
	e->result = r.descriptor;
	e->bytes = r.bytes;
	if (r.opcode == AIO_READV || r.opcode == AIO_WRITEV)
		e->bytes = vector_bytes(r.buffer, r.bytes);
	vdisk_submit(e);
}

static __always_inline void aio_parts(__u64 requests, __u64 count)
{
	struct vdisk_event *e;

	for (__u32 i = 0; i < VDISK_BATCH_MAX && i < count; i++)
		aio_part(requests, i);
	if (count <= VDISK_BATCH_MAX)
		return;
	e = vdisk_reserve(VDISK_CUT, 0);
	if (!e)
		return;
	e->id = count - VDISK_BATCH_MAX;
	vdisk_submit(e);
}

static __always_inline int is_watched(__u64 number)
{
	switch (number) {
	case NR_PREAD:
	case NR_PWRITE:
	case NR_FSYNC:
	case NR_FDATASYNC:
	case NR_IO_SUBMIT:
	case NR_FALLOCATE:
	case NR_PREADV:
	case NR_PWRITEV:
	case NR_PREADV2:
	case NR_PWRITEV2:
	case NR_IO_URING_ENTER:
		return 1;
	}
	return 0;
}

static __always_inline __u8 op_of(__u64 number)
{
	switch (number) {
	case NR_PREAD:
	case NR_PREADV:
	case NR_PREADV2:
		return VDISK_READ;
	case NR_FSYNC:
	case NR_FDATASYNC:
		return VDISK_FLUSH;
	case NR_FALLOCATE:
		return VDISK_ZERO;
	}
	return VDISK_WRITE;
}

SEC("raw_tp/sys_enter")
int sh_vd_call(__u64 *ctx)
{
	__u64 number = ctx[1], regs[21] = {}, bytes = 0;
	struct vdisk_event *e;

	if (!is_ours() || !is_watched(number))
		return 0;
	if (bpf_probe_read_kernel(regs, sizeof(regs), (void *)ctx[0]))
		return 0;
	if (number == NR_PREAD || number == NR_PWRITE)
		bytes = regs[REG_RDX];
	else if (number == NR_FALLOCATE)
		bytes = regs[REG_R10];
	else if (number == NR_PREADV || number == NR_PWRITEV || number == NR_PREADV2 ||
		 number == NR_PWRITEV2)
		bytes = vector_bytes(regs[REG_RSI], regs[REG_RDX]);
	e = vdisk_reserve(VDISK_CALL, op_of(number));
	if (!e)
		return 0;
	e->id = number;
	e->bytes = bytes;
	if (number != NR_IO_SUBMIT)
		e->result = regs[REG_RDI];
	if (number == NR_FALLOCATE)
		e->offset = regs[REG_RDX];
	else if (number != NR_IO_SUBMIT && number != NR_IO_URING_ENTER &&
		 op_of(number) != VDISK_FLUSH)
		e->offset = regs[REG_R10];
	vdisk_submit(e);
	if (number == NR_IO_SUBMIT)
		aio_parts(regs[REG_RDX], regs[REG_RSI]);
	return 0;
}

/* The number stays in the registers, in the word after the 15th: orig_rax. */
SEC("raw_tp/sys_exit")
int sh_vd_return(__u64 *ctx)
{
	struct vdisk_event *e;
	__u64 number = 0;

	if (!is_ours())
		return 0;
	bpf_probe_read_kernel(&number, sizeof(number), (void *)(ctx[0] + 15 * sizeof(__u64)));
	if (!is_watched(number))
		return 0;
	e = vdisk_reserve(VDISK_RETURN, op_of(number));
	if (!e)
		return 0;
	e->id = number;
	e->result = ctx[1];
	vdisk_submit(e);
	return 0;
}

static __always_inline __u8 op_of_bio(__u32 flags)
{
	flags &= OP_MASK;
	return flags == OP_FLUSH ? VDISK_FLUSH : flags & OP_WRITE ? VDISK_WRITE : VDISK_READ;
}

/* The file's request that the bio belongs to; NULL: it belongs to none past the page cache. */
static __always_inline struct kiocb *direct_of(struct bio *bio)
{
	struct iomap_dio *dio = BPF_CORE_READ(bio, bi_private);

	if (!iomap_dio_end || (__u64)BPF_CORE_READ(bio, bi_end_io) != iomap_dio_end)
		return NULL;
	return BPF_CORE_READ(dio, iocb);
}

/* Bytes of the file's request before a bio past the page cache, with those in holes; -1: not known. */
static __always_inline __s64 direct_before(struct bio *bio)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct iomap_dio *dio = BPF_CORE_READ(bio, bi_private);
	__u64 size = BPF_CORE_READ(dio, size);
	__u64 bytes = BPF_CORE_READ(bio, bi_iter.bi_size);

	/* A bio that is queued late may not be the last one so far. */
	if (size < bytes || (size > bytes && (BPF_CORE_READ(task, flags) & TASK_KERNEL)))
		return -1;
	return size - bytes;
}

static __always_inline int bio_queued(struct bio *bio)
{
	struct kiocb *request = direct_of(bio);
	struct vdisk_file file = {};
	__u64 address = (__u64)bio;
	struct vdisk_event *e;

	if (request) {
		file.inode = BPF_CORE_READ(request, ki_filp, f_inode, i_ino);
		file.device = BPF_CORE_READ(request, ki_filp, f_inode, i_sb, s_dev);
	}
	if (!is_ours() && (!request || !bpf_map_lookup_elem(&sh_vd_files, &file))) {
		/* The address may have been one of qemu's before. */
		bpf_map_delete_elem(&sh_vd_open, &address);
		return 0;
	}
	e = vdisk_reserve(VDISK_BIO, op_of_bio(BPF_CORE_READ(bio, bi_opf)));
	if (!e)
		return 0;
	e->id = address;
	e->offset = BPF_CORE_READ(bio, bi_iter.bi_sector);
	e->bytes = BPF_CORE_READ(bio, bi_iter.bi_size);
	e->device = BPF_CORE_READ(bio, bi_bdev, bd_dev);
	e->is_foreign = !is_ours();
	if (request) {
		e->other = (__u64)BPF_CORE_READ(bio, bi_private);
		e->inode = file.inode;
		e->file_device = file.device;
		e->position = BPF_CORE_READ(request, ki_pos);
		e->result = direct_before(bio) + 1;
	}
	vdisk_submit(e);
	follow(address);
	return 0;
}

/* block_split(the bio that is cut off, …): it is queued without a trace of its own. */
static __always_inline int bio_split(struct bio *bio)
{
	struct vdisk_event *e;

	if (!is_ours())
		return 0;
	follow((__u64)bio);
	e = vdisk_reserve(VDISK_SPLIT, op_of_bio(BPF_CORE_READ(bio, bi_opf)));
	if (!e)
		return 0;
	e->id = (__u64)bio;
	e->offset = BPF_CORE_READ(bio, bi_iter.bi_sector);
	e->bytes = BPF_CORE_READ(bio, bi_iter.bi_size);
	vdisk_submit(e);
	return 0;
}

/* block_bio_remap(bio, device before, sector before): of partitions, and of device mapper. */
static __always_inline int bio_remapped(struct bio *bio, __u32 device, __u64 sector)
{
	struct vdisk_event *e;

	if (!is_ours())
		return 0;
	e = vdisk_reserve(VDISK_REMAP, op_of_bio(BPF_CORE_READ(bio, bi_opf)));
	if (!e)
		return 0;
	e->id = (__u64)bio;
	e->offset = sector;
	e->other = device;
	e->bytes = BPF_CORE_READ(bio, bi_iter.bi_size);
	vdisk_submit(e);
	return 0;
}

static __always_inline struct vdisk_event *request_reserve(struct request *rq, __u8 kind)
{
	struct gendisk *disk = BPF_CORE_READ(rq, q, disk);
	struct vdisk_event *e = vdisk_reserve(kind, op_of_bio(BPF_CORE_READ(rq, cmd_flags)));

	if (!e)
		return NULL;
	if (!only_tgid && (BPF_CORE_READ(rq, cmd_flags) & OP_MASK) > OP_FLUSH)
		e->op = VDISK_OTHER;
	e->id = (__u64)rq;
	e->offset = BPF_CORE_READ(rq, __sector);
	e->bytes = BPF_CORE_READ(rq, __data_len);
	e->device = BPF_CORE_READ(disk, major) << 20 | BPF_CORE_READ(disk, first_minor);
	return e;
}

static __always_inline int request_issued(struct request *rq)
{
	struct bio *bio = BPF_CORE_READ(rq, bio);
	struct vdisk_event *e;
	long unfollowed;
	int found = !only_tgid; /* in the guest all count; a flush has no bio */

	for (int i = 0; i < VDISK_PARTS_MAX && bio && !found; i++) {
		found = is_followed((__u64)bio);
		bio = BPF_CORE_READ(bio, bi_next);
	}
	if (!found)
		return 0;
	unfollowed = follow((__u64)rq);
	if (unfollowed)
		unfollowed = follow((__u64)rq);
	e = request_reserve(rq, VDISK_ISSUE);
	if (!e)
		return 0;
	e->result = unfollowed;
	vdisk_submit(e);
	return 0;
}

static __always_inline int request_completed(struct request *rq, __s32 error, __u32 bytes)
{
	__u64 address = (__u64)rq;
	struct vdisk_event *e;

	if (!is_followed(address))
		return 0;
	if (bytes >= BPF_CORE_READ(rq, __data_len))
		bpf_map_delete_elem(&sh_vd_open, &address);
	e = request_reserve(rq, VDISK_COMPLETE);
	if (!e)
		return 0;
	e->bytes = bytes;
	e->result = error;
	vdisk_submit(e);
	return 0;
}

SEC("tp_btf/block_bio_queue")
int sh_vd_bio_btf(__u64 *ctx)
{
	return bio_queued((void *)ctx[0]);
}

SEC("raw_tp/block_bio_queue")
int sh_vd_bio_raw(__u64 *ctx)
{
	return bio_queued((void *)ctx[0]);
}

SEC("tp_btf/block_split")
int sh_vd_spl_btf(__u64 *ctx)
{
	return bio_split((void *)ctx[0]);
}

SEC("raw_tp/block_split")
int sh_vd_spl_raw(__u64 *ctx)
{
	return bio_split((void *)ctx[0]);
}

SEC("tp_btf/block_bio_remap")
int sh_vd_map_btf(__u64 *ctx)
{
	return bio_remapped((void *)ctx[0], ctx[1], ctx[2]);
}

SEC("raw_tp/block_bio_remap")
int sh_vd_map_raw(__u64 *ctx)
{
	return bio_remapped((void *)ctx[0], ctx[1], ctx[2]);
}

SEC("tp_btf/block_rq_issue")
int sh_vd_iss_btf(__u64 *ctx)
{
	return request_issued((void *)ctx[0]);
}

SEC("raw_tp/block_rq_issue")
int sh_vd_iss_raw(__u64 *ctx)
{
	return request_issued((void *)ctx[0]);
}

SEC("tp_btf/block_rq_complete")
int sh_vd_com_btf(__u64 *ctx)
{
	return request_completed((void *)ctx[0], ctx[1], ctx[2]);
}

SEC("raw_tp/block_rq_complete")
int sh_vd_com_raw(__u64 *ctx)
{
	return request_completed((void *)ctx[0], ctx[1], ctx[2]);
}

#include "vdisk_point.h"
#include "vdisk_guest.h"
