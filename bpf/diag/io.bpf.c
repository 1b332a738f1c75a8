// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The process and the file of each IO of a disk.
 *
 *   read, from disk ─────────────► bio ─► the reader's row: reads
 *   write past the page cache ───► bio ─► the writer's row: writes
 *   write to the page cache ─► dirty page ─► the writer's row: dirtied
 *                                  │
 *                                  └─► later, a bio of the task that flushes ─► its row: flushes
 *   request that ends ───────────────────► the disk's row
 *
 * The file is the one whose pages the bio carries. A bio past the page cache carries the program's own
 * pages, and leads to the file by its owner, struct iomap_dio.
 *
 * User space swaps the map of rows for an empty one at each interval, and the kernel waits for programs
 * that still use the old one. So each IO is in exactly one interval, and rows do not pile up.
 *
 * Invariant: an IO is in exactly one row, or counted in sh_io_missed. A bio that was made from another one
 * by the block layer (dm, md) is not counted again.
 */
#include "cast.h"
#include "file.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Only files with this inode number; 0: all IO. */
volatile const __u64 only_inode = 0;
/* Address of iomap_dio_bio_end_io; 0: not known, and writes past the page cache have no file. */
volatile const __u64 iomap_dio_end = 0;
/* Address of mq_flush_data_end_io; 0: not known, and writes with a flush are counted twice. */
volatile const __u64 flush_data_end = 0;
/* 1: writes are counted by size too. */
volatile const __u32 with_sizes = 0;
/* Of sample_mask + 1 IOs one is watched, and stands for all of them. User space sets it: a power of 2, less 1. */
volatile __u32 sample_mask = 0;

/* enum req_op of linux/blk_types.h, and the flag behind BIO_CLONED; unchanged from 6.1 to 6.18. */
#define OP_MASK 0xff
#define OP_READ 0
#define OP_WRITE 1
#define OP_DISCARD 3
#define OP_DRIVER 34 /* REQ_OP_DRV_IN: this and all higher numbers are commands for a driver */
#define BIO_CLONED_BIT (1 << 1)

/* A row looks again this long after it has found its file's name told, because files are deleted and renamed: a
 * quarter of a second to 2.6 s, for kernels have 1000 to 100 jiffies a second. To read jiffies is a load; to read the
 * clock is a call of some 60 ns in a virtual machine. */
#define LOOK_AGAIN_JIFFIES 256

#define PAGE_BYTES_SHIFT 12
#define MAPPING_FLAGS 3 /* PAGE_MAPPING_FLAGS: set if a page belongs to no file */
#define FOLIO_ORDER_MASK 0xff /* folio_order() in linux/mm.h */

/* The fields of struct task_struct that event/task.h leaves out. */
struct task_struct___io {
	int tgid;
} KERNEL_STRUCT;

struct address_space {
	struct inode *host;
} KERNEL_STRUCT;

struct page {
	unsigned long compound_head;
	struct address_space *mapping;
} KERNEL_STRUCT;

struct folio {
	unsigned long _flags_1;
} KERNEL_STRUCT;

/* The struct until 6.5. */
struct folio___order {
	unsigned char _folio_order;
} KERNEL_STRUCT;

enum pageflags { PG_head = 6 };

struct bio_vec {
	struct page *bv_page;
} KERNEL_STRUCT;

struct bvec_iter {
	unsigned int bi_size;
	unsigned int bi_idx;
} KERNEL_STRUCT;

struct block_device {
	__u32 bd_dev;
} KERNEL_STRUCT;

struct bio {
	struct block_device *bi_bdev;
	unsigned int bi_opf;
	unsigned short bi_flags;
	struct bvec_iter bi_iter;
	void *bi_end_io;
	void *bi_private;
	struct bio_vec *bi_io_vec;
} KERNEL_STRUCT;

struct file {
	struct inode *f_inode;
} KERNEL_STRUCT;

struct kiocb {
	struct file *ki_filp;
} KERNEL_STRUCT;

struct iomap_dio {
	struct kiocb *iocb;
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
	__u64 start_time_ns;
	__u64 io_start_time_ns;
	void *end_io;
} KERNEL_STRUCT;

/* clang writes a type in full only if something other than a map inside a map uses it. */
struct {
	struct io_key key;
	struct io_count count;
	struct io_path path;
	enum io_constant constant;
	enum io_missed missed;
} io_types;

/* The maps inside of sh_io_rows. */
struct io_rows {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, IO_ROWS_MAX);
	__type(key, struct io_key);
	__type(value, struct io_count);
};

/*
 * The rows of the interval. Key: 0; value: a hash of struct io_key and struct io_count. Programs write
 * the hash, user space swaps and reads it. Full: the IO is counted in sh_io_missed. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct io_rows);
} sh_io_rows SEC(".maps");

/*
 * IOs that are in no row, since the start. Key: enum io_missed; value: how many, and their bytes.
 * Programs write, user space reads. Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, IO_MISSED_COUNT);
	__type(key, __u32);
	__type(value, struct io_bytes);
} sh_io_missed SEC(".maps");

/*
 * Ended requests by disk, since the start. Key: the disk, major << 20 | minor; value: struct io_disk of
 * this CPU. Programs write, user space reads. Full: the disk's waits are
 * the kernel's, in whole ms. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, IO_DISKS_MAX);
	__type(key, __u32);
	__type(value, struct io_disk);
} sh_io_disks SEC(".maps");

/* The number of IOs that this one stands for; 0: it is not in the sample. */
static __always_inline __u64 io_weight(void)
{
	__u32 mask = sample_mask;

	if (mask && (bpf_get_prandom_u32() & mask))
		return 0;
	return (__u64)mask + 1;
}

static __always_inline void io_miss(__u32 why, __u64 count, __u64 bytes)
{
	struct io_bytes *missed = bpf_map_lookup_elem(&sh_io_missed, &why);

	if (!missed)
		return;
	__sync_fetch_and_add(&missed->count, count);
	__sync_fetch_and_add(&missed->bytes, bytes);
}

/* The index of a size among IO_SIZES_COUNT. */
static __always_inline __u32 size_of(__u32 bytes)
{
	if (bytes <= 4 << 10)
		return 0;
#pragma unroll
	for (__u32 n = 1; n < IO_SIZES_COUNT - 1; n++) {
		if (bytes <= (8U << 10) << n)
			return n;
	}
	return IO_SIZES_COUNT - 1;
}

/* The row of the current process and the file; it is made if there is none. */
static __always_inline struct io_count *row_get(int typed, const struct io_file *file)
{
	struct task_struct *task = typed ? (void *)bpf_get_current_task_btf() :
					   (void *)bpf_get_current_task();
	struct task_struct *leader = FIELD(typed, task, group_leader);
	struct io_key key = { .file = *file };
	struct io_count fresh = {}, *row;
	__u32 zero = 0;
	void *rows;

	rows = bpf_map_lookup_elem(&sh_io_rows, &zero);
	if (!rows)
		return NULL;
	key.tgid = FIELD(typed, (struct task_struct___io *)task, tgid);
	key.start_ns = FIELD(typed, leader, start_boottime);
	key.is_kernel = !!(FIELD(typed, task, flags) & TASK_KERNEL);
	row = bpf_map_lookup_elem(rows, &key);
	if (!row) {
		fresh.cgroup_id = bpf_get_current_cgroup_id();
		fresh.mntns = BPF_CORE_READ(task, nsproxy, mnt_ns, ns.inum);
		bpf_map_update_elem(rows, &key, &fresh, BPF_NOEXIST);
		row = bpf_map_lookup_elem(rows, &key);
		if (!row)
			return NULL;
	}
	/* A process that reads its program has the name of the one that started it until then. */
	row->last_jiffies = bpf_jiffies64();
	COMM_READ(typed, &row->comm, leader);
	return row;
}

static __always_inline int is_other(const struct io_file *file)
{
	return only_inode && file->inode != only_inode;
}

/* The inode whose pages the bio carries; NULL: they are no file's. */
static __always_inline struct inode *bio_cached_inode(int typed, struct bio *bio)
{
	/* As a number: 6.1 lets no program add an unknown number to a pointer whose type it knows. */
	void *vectors = (void *)word_read(typed, &bio->bi_io_vec);
	__u64 index = FIELD(typed, bio, bi_iter.bi_idx);
	struct bio_vec *first = vectors + index * bpf_core_type_size(struct bio_vec);
	unsigned long head, mapping;
	struct page *page;

	page = (void *)word_read(typed, &first->bv_page);
	head = word_read(typed, &page->compound_head);
	if (head & 1)
		page = (void *)(head - 1);
	mapping = word_read(typed, &page->mapping);
	if (!mapping || (mapping & MAPPING_FLAGS))
		return NULL;
	if (CAN_CAST(typed))
		return CASTED((void *)mapping, address_space)->host;
	return BPF_CORE_READ((struct address_space *)mapping, host);
}

static __always_inline struct inode *bio_direct_inode(int typed, struct bio *bio)
{
	struct iomap_dio *dio = FIELD(typed, bio, bi_private);

	if (CAN_CAST(typed))
		return CASTED(dio, iomap_dio)->iocb->ki_filp->f_inode;
	return BPF_CORE_READ(dio, iocb, ki_filp, f_inode);
}

static __always_inline int bio_queued(int typed, struct bio *bio)
{
	__u64 weight = io_weight();
	struct io_file file = {};
	struct inode *inode;
	struct block_device *disk;
	struct io_count *row;
	__u32 op, bytes;
	int flushed = 0;

	if (!weight)
		return 0;
	op = FIELD(typed, bio, bi_opf) & OP_MASK;
	bytes = FIELD(typed, bio, bi_iter.bi_size);
	if (op > OP_WRITE || !bytes || (FIELD(typed, bio, bi_flags) & BIO_CLONED_BIT))
		return 0;
	if (iomap_dio_end && (__u64)FIELD(typed, bio, bi_end_io) == iomap_dio_end) {
		inode = bio_direct_inode(typed, bio);
	} else {
		inode = bio_cached_inode(typed, bio);
		flushed = inode && op == OP_WRITE;
	}
	if (inode && CAN_CAST(typed))
		file = file_of(1, inode);
	else if (inode)
		file = file_of(0, inode);
	if (is_other(&file))
		return 0;
	row = row_get(typed, &file);
	if (!row) {
		io_miss(IO_MISSED_ROWS_FULL, weight, weight * bytes);
		return 0;
	}
	if (inode &&
	    (!row->told_jiffies || row->last_jiffies - row->told_jiffies > LOOK_AGAIN_JIFFIES) &&
	    file_tell(&file, inode))
		row->told_jiffies = row->last_jiffies;
	disk = FIELD(typed, bio, bi_bdev);
	row->disk = FIELD(typed, disk, bd_dev);
	if (with_sizes && op == OP_WRITE)
		__sync_fetch_and_add(flushed ? &row->flush_sizes[size_of(bytes)] :
					       &row->write_sizes[size_of(bytes)],
				     (__u32)weight);
	__sync_fetch_and_add(op == OP_READ ? &row->reads :
			     flushed       ? &row->flushes :
					     &row->writes,
			     weight);
	__sync_fetch_and_add(op == OP_READ ? &row->read_bytes :
			     flushed       ? &row->flushed_bytes :
					     &row->written_bytes,
			     weight * bytes);
	return 0;
}

/* The first word of a folio is its flags, as a number or in a struct (6.18). */
static __always_inline __u32 folio_bytes(int typed, struct folio *folio)
{
	struct folio___order *older = (void *)folio;
	unsigned long flags = word_read(typed, folio);
	__u32 order = 0;

	if (flags & (1UL << bpf_core_enum_value(enum pageflags, PG_head))) {
		if (bpf_core_field_exists(older->_folio_order))
			order = BPF_CORE_READ(older, _folio_order);
		else
			order = BPF_CORE_READ(folio, _flags_1) & FOLIO_ORDER_MASK;
	}
	return 1U << ((PAGE_BYTES_SHIFT + order) & 31);
}

static __always_inline int folio_dirtied(int typed, struct folio *folio,
					 struct address_space *mapping)
{
	__u64 weight = io_weight();
	struct inode *inode;
	struct io_count *row;
	struct io_file file;

	if (!weight || !folio || !mapping)
		return 0;
	inode = FIELD(typed, mapping, host);
	if (!inode)
		return 0;
	file = file_of(typed, inode);
	if (is_other(&file))
		return 0;
	row = row_get(typed, &file);
	if (row)
		__sync_fetch_and_add(&row->dirtied_bytes, weight * folio_bytes(typed, folio));
	else
		io_miss(IO_MISSED_ROWS_FULL, weight, 0);
	return 0;
}

/* Whether the request still goes through its flushes. The kernel ends such a request once when its data are
 * written, and once more, without bytes, when all is done. Until then mq_flush_data_end_io is its end_io
 * (block/blk-flush.c); the flag that says the same is another bit from 6.11 on, and no type has its name. */
static __always_inline int is_in_flush(int typed, struct request *rq)
{
	return flush_data_end && (__u64)FIELD(typed, rq, end_io) == flush_data_end;
}

/* Whether the kernel's account of a disk takes an operation that is no read or write for a write:
 * op_stat_group() in linux/blk_types.h. */
static __always_inline int is_other_write(__u32 op)
{
	return op > OP_WRITE && op < OP_DRIVER && op & 1 && op != OP_DISCARD;
}

static __always_inline int request_ended(int typed, struct request *rq, __u32 bytes)
{
	struct io_disk fresh = {}, *d;
	__u64 now, begin, issued;
	struct request_queue *queue;
	struct gendisk *disk;
	__u32 op, key;

	if (!io_weight())
		return 0;
	now = bpf_ktime_get_ns();
	queue = FIELD(typed, rq, q);
	disk = FIELD(typed, queue, disk);
	op = FIELD(typed, rq, cmd_flags) & OP_MASK;
	if ((op > OP_WRITE && !is_other_write(op)) || !disk)
		return 0;
	key = FIELD(typed, disk, major) << 20 | FIELD(typed, disk, first_minor);
	d = bpf_map_lookup_elem(&sh_io_disks, &key);
	if (!d) {
		bpf_map_update_elem(&sh_io_disks, &key, &fresh, BPF_NOEXIST);
		d = bpf_map_lookup_elem(&sh_io_disks, &key);
		if (!d)
			return 0;
	}
	if (op <= OP_WRITE)
		__sync_fetch_and_add(&d->bytes[op & 1], bytes);
	if (bytes < FIELD(typed, rq, __data_len) || is_in_flush(typed, rq))
		return 0; /* the request has not ended yet */
	if (op > OP_WRITE) {
		__sync_fetch_and_add(&d->other_writes, 1);
		return 0;
	}
	op &= 1;
	__sync_fetch_and_add(&d->requests[op], 1);
	begin = FIELD(typed, rq, start_time_ns);
	issued = FIELD(typed, rq, io_start_time_ns);
	if (!begin || begin > now)
		__sync_fetch_and_add(&d->unstamped[op], 1);
	else
		__sync_fetch_and_add(&d->wait_ns[op], now - begin);
	if (issued && issued <= now)
		__sync_fetch_and_add(&d->device_ns[op], now - issued);
	return 0;
}

SEC("tp_btf/block_bio_queue")
int sh_bio_btf(__u64 *ctx)
{
	return bio_queued(1, (void *)ctx[0]);
}

SEC("raw_tp/block_bio_queue")
int sh_bio_raw(__u64 *ctx)
{
	return bio_queued(0, (void *)ctx[0]);
}

SEC("tp_btf/writeback_dirty_folio")
int sh_dirty_btf(__u64 *ctx)
{
	return folio_dirtied(1, (void *)ctx[0], (void *)ctx[1]);
}

SEC("raw_tp/writeback_dirty_folio")
int sh_dirty_raw(__u64 *ctx)
{
	return folio_dirtied(0, (void *)ctx[0], (void *)ctx[1]);
}

SEC("tp_btf/block_rq_complete")
int sh_end_btf(__u64 *ctx)
{
	return request_ended(1, (void *)ctx[0], ctx[2]);
}

SEC("raw_tp/block_rq_complete")
int sh_end_raw(__u64 *ctx)
{
	return request_ended(0, (void *)ctx[0], ctx[2]);
}
