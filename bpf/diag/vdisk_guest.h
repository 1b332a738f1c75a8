/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The guest's half of `shunt diag vdisk`: programs above the block layer. Below it, they are the host's in vdisk.bpf.c, which
 * includes this file. All tasks are watched, because it is not known who will use the disk:
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

static __always_inline struct inode *file_of_bio(struct bio *bio, __u64 *position)
{
	struct kiocb *request = direct_of(bio);
	struct iomap_dio *dio;

	if (!request)
		return cached_of(bio, position);
	dio = BPF_CORE_READ(bio, bi_private);
	*position = BPF_CORE_READ(request, ki_pos) + BPF_CORE_READ(dio, size) -
		    BPF_CORE_READ(bio, bi_iter.bi_size);
	return BPF_CORE_READ(request, ki_filp, f_inode);
}

static __always_inline int guest_bio_queued(struct bio *bio)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct vdisk_call *call;
	struct io_file file = {};
	struct vdisk_event *e;
	struct inode *inode = NULL;
	__u64 position = 0;

	if (BPF_CORE_READ(bio, bi_iter.bi_size))
		inode = file_of_bio(bio, &position);
	if (inode) {
		file = file_of(inode);
		file_tell(&file, inode);
	}
	call = bpf_map_lookup_elem(&sh_vd_calls, &tid);
	follow((__u64)bio);
	e = vdisk_reserve(VDISK_BIO, op_of_bio(BPF_CORE_READ(bio, bi_opf)));
	if (!e)
		return 0;
	e->id = (__u64)bio;
	e->offset = BPF_CORE_READ(bio, bi_iter.bi_sector);
	e->bytes = BPF_CORE_READ(bio, bi_iter.bi_size);
	e->device = BPF_CORE_READ(bio, bi_bdev, bd_dev);
	e->inode = file.inode;
	e->file_device = file.device;
	e->position = position;
	e->result = file.generation;
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
