/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The guest's half of `shunt diag vdisk`: programs above the block layer. Below it, the guest uses the host's in vdisk.bpf.c,
 * which includes this file. All tasks are watched, because any of them may use the disk:
 *
 *   system call ─► file system ─► BIO ─► ISSUE ─► virtio ─► qemu ─► COMPLETE ─► RETURN
 */
#ifndef SHUNT_VDISK_GUEST_H
#define SHUNT_VDISK_GUEST_H

/* Calls that read or write files, or wait for that. */
static __always_inline int is_of_files(__u64 number)
{
	switch (number) {
	case NR_READ:
	case NR_WRITE:
	case NR_READV:
	case NR_WRITEV:
	case NR_MSYNC:
	case NR_SENDFILE:
	case NR_SYNC:
	case NR_SPLICE:
	case NR_SYNC_RANGE:
	case NR_SYNCFS:
	case NR_COPY_RANGE:
		return 1;
	}
	return is_watched(number);
}

SEC("raw_tp/sys_enter")
int sh_vd_gcall(__u64 *ctx)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct vdisk_call call = {};

	if (!is_of_files(ctx[1]))
		return 0;
	call.began_ns = bpf_ktime_get_boot_ns();
	call.number = ctx[1];
	bpf_map_update_elem(&sh_vd_calls, &tid, &call, BPF_ANY);
	return 0;
}

SEC("raw_tp/sys_exit")
int sh_vd_greturn(__u64 *ctx)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct vdisk_call *call = bpf_map_lookup_elem(&sh_vd_calls, &tid);
	struct vdisk_event *e;

	if (!call)
		return 0;
	if (call->bios) {
		e = vdisk_reserve(VDISK_RETURN, 0);
		if (e) {
			e->id = call->number;
			e->other = call->began_ns;
			e->bytes = call->bios;
			e->result = ctx[1];
			vdisk_submit(e);
		}
	}
	bpf_map_delete_elem(&sh_vd_calls, &tid);
	return 0;
}

/* The inode whose pages the bio carries, and where in it the first one is; NULL: they are no file's. */
static __always_inline struct inode *cached_of(struct bio *bio, __u64 *position)
{
	struct bio_vec *vector = BPF_CORE_READ(bio, bi_io_vec);
	struct address_space *mapping;
	unsigned long head;
	struct folio *folio;
	struct page *page;

	vector = &vector[BPF_CORE_READ(bio, bi_iter.bi_idx)];
	page = BPF_CORE_READ(vector, bv_page);
	head = BPF_CORE_READ(page, compound_head);
	folio = (void *)(head & 1 ? head - 1 : (unsigned long)page);
	mapping = BPF_CORE_READ(folio, mapping);
	if (!mapping || ((unsigned long)mapping & MAPPING_FLAGS))
		return NULL;
	*position = BPF_CORE_READ(folio, index);
	*position += ((unsigned long)page - (unsigned long)folio) / bpf_core_type_size(struct page);
	*position <<= PAGE_BYTES_SHIFT;
	*position += BPF_CORE_READ(vector, bv_offset) + BPF_CORE_READ(bio, bi_iter.bi_bvec_done);
	return BPF_CORE_READ(mapping, host);
}

/*
 * The task that waits for a request past the page cache, if a task of the kernel queues its bio, because a cgroup's limit
 * held it back; NULL otherwise.
 */
static __always_inline struct task_struct *held_for(struct bio *bio)
{
	struct task_struct *task = (void *)bpf_get_current_task(), *waiter;
	struct iomap_dio___waiter *dio;

	if (!direct_of(bio) || !(BPF_CORE_READ(task, flags) & TASK_KERNEL))
		return NULL;
	dio = (void *)BPF_CORE_READ(bio, bi_private);
	if (!bpf_core_field_exists(dio->submit.waiter) || !BPF_CORE_READ(dio, wait_for_completion))
		return NULL;
	waiter = BPF_CORE_READ(dio, submit.waiter);
	return waiter == task ? NULL : waiter;
}

static __always_inline struct inode *file_of_bio(struct bio *bio, __u64 *position)
{
	struct kiocb *request = direct_of(bio);
	__s64 before;

	if (!request)
		return cached_of(bio, position);
	before = direct_before(bio);
	if (before < 0)
		return NULL;
	*position = BPF_CORE_READ(request, ki_pos) + before;
	return BPF_CORE_READ(request, ki_filp, f_inode);
}

static __always_inline void bio_describe(struct vdisk_event *e, struct bio *bio)
{
	e->id = (__u64)bio;
	e->offset = BPF_CORE_READ(bio, bi_iter.bi_sector);
	e->bytes = BPF_CORE_READ(bio, bi_iter.bi_size);
	e->device = BPF_CORE_READ(bio, bi_bdev, bd_dev);
}

static __always_inline int guest_bio_queued(struct bio *bio)
{
	struct task_struct___id *waiter = (void *)held_for(bio);
	__u32 tid = bpf_get_current_pid_tgid();
	struct inode *inode = NULL;
	struct vdisk_call *call;
	struct io_file file = {};
	struct event_header *h;
	struct vdisk_event *e;
	__u64 position = 0;

	if (BPF_CORE_READ(bio, bi_iter.bi_size))
		inode = file_of_bio(bio, &position);
	if (inode) {
		file = file_of(0, inode);
		file_tell(&file, inode);
	}
	if (waiter)
		tid = BPF_CORE_READ(waiter, pid);
	call = bpf_map_lookup_elem(&sh_vd_calls, &tid);
	follow((__u64)bio);
	e = vdisk_reserve(VDISK_BIO, op_of_bio(BPF_CORE_READ(bio, bi_opf)));
	if (!e)
		return 0;
	bio_describe(e, bio);
	e->inode = file.inode;
	e->file_device = file.device;
	e->position = position;
	e->result = file.generation;
	if (waiter) {
		e->is_foreign = 1;
		h = (void *)e - sizeof(*h);
		h->tid = tid;
		h->tgid = BPF_CORE_READ(waiter, tgid);
	}
	if (call) {
		e->other = call->began_ns;
		__sync_fetch_and_add(&call->bios, 1);
	}
	vdisk_submit(e);
	return 0;
}

SEC("tp_btf/block_bio_queue")
int sh_vd_gbio_btf(__u64 *ctx)
{
	return guest_bio_queued((void *)ctx[0]);
}

SEC("raw_tp/block_bio_queue")
int sh_vd_gbio_raw(__u64 *ctx)
{
	return guest_bio_queued((void *)ctx[0]);
}

#endif
