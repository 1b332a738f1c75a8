/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types of `shunt diag vdisk` that cross to Go.
 */
#ifndef SHUNT_VDISK_H
#define SHUNT_VDISK_H

#include "../event/event.h"

enum vdisk_constant {
	VDISK_FILES_MAX = 4096, /* files that the process has open */
	VDISK_OPEN_MAX = 65536, /* requests under way, and their parts */
	VDISK_SENSOR = 2, /* event_header.sensor; 1 is IO_SENSOR_PATH */
	VDISK_CALLS_MAX = 65536, /* tasks of the guest that are in a system call */
	VDISK_BATCH_MAX = 64, /* requests in one io_submit(); VDISK_CUT counts further ones */
	VDISK_PARTS_MAX = 32, /* bios of one request that are looked at */
	VDISK_VECTOR_MAX = 16, /* parts of a vector whose bytes are added up */
};

/* The kinds of events. Fields that a kind does not name are 0. */
enum vdisk_kind {
	VDISK_BEGIN =
		1, /* the device model asks; id: the disk in qemu; other: its callback's argument */
	VDISK_COROUTINE =
		2, /* qemu makes a coroutine; id: its argument, which is the request's handle */
	VDISK_BLOCK = 3, /* qemu's block layer asks one of its nodes; id: the edge of the graph */
	VDISK_HAND =
		4, /* a coroutine hands a file's request over to a thread or the kernel; result: enum vdisk_hand */
	VDISK_FINISH =
		5, /* the device model knows of the end; id: the handle; other: as of VDISK_BEGIN */
	VDISK_CALL = 6, /* a system call begins; id: its number; result: the descriptor */
	VDISK_PART = 7, /* one request in an io_submit() call; result: the descriptor */
	VDISK_RETURN =
		8, /* a system call ends; id: its number; result: its result; of a guest's also other: when it began, bytes: count of bios */
	VDISK_BIO =
		9, /* id: the bio; offset: sector; other: the file's request; file, position: where in which file */
	VDISK_SPLIT = 10, /* a bio is split; id: the part that was cut off; offset: its sector */
	VDISK_REMAP = 11, /* id: the bio; offset: sector before; other: device before */
	VDISK_ISSUE =
		12, /* id: the request to a driver; offset: sector; result: why its end will not be seen, or 0 */
	VDISK_COMPLETE = 13, /* id: the same; offset: sector; result: the error */
	VDISK_CUT = 14, /* id: the count of requests of an io_submit() call that are in no event */
	VDISK_POINT =
		15, /* a point that the user named is passed; id: its number; stack: in qemu, else 0; of a guest's other: when its system call began */
};

enum vdisk_op {
	VDISK_READ = 0,
	VDISK_WRITE = 1,
	VDISK_FLUSH = 2,
	VDISK_ZERO = 3, /* of calls: fallocate(), by which qemu fills new clusters with zeros */
	VDISK_OTHER =
		4, /* of a guest's requests: discard, and everything except read, write and flush */
};

enum vdisk_hand {
	VDISK_HAND_THREAD = 1, /* thread pool */
	VDISK_HAND_AIO = 2, /* io_submit() */
	VDISK_HAND_URING = 3, /* io_uring */
};

struct vdisk_event {
	__u64 id;
	__u64 offset; /* in bytes; of bios and requests in 512-byte sectors of the device */
	__u64 bytes; /* 0: not known */
	__u64 other; /* of a guest's bios: when the system call began, CLOCK_BOOTTIME; 0: no call */
	__u64 stack; /* stack pointer in qemu, which tells coroutines apart */
	__u64 inode; /* of bios: the file's; 0: not known */
	__u64 position; /* of bios: where the file's request begins, or a guest's bio, in bytes */
	__u32 device; /* of the block layer, as the kernel has it: major << 20 | minor */
	__u32 file_device; /* of bios: the file system's */
	/* Of a guest's bios: the file's generation. Of others: 1 and how many bytes of the file's request come before; 0: not known. */
	__s32 result;
	__u8 kind; /* enum vdisk_kind */
	__u8 op; /* enum vdisk_op */
	__u8 is_foreign; /* of bios: 1: a task of the kernel queued it for the process; a guest's event names the waiting task */
	__u8 reserved;
};

/* A system call of a task in the guest. */
struct vdisk_call {
	__u64 began_ns; /* CLOCK_BOOTTIME */
	__u64 number;
	__u64 bios; /* bios that were queued during the call */
};

struct vdisk_file {
	__u64 inode;
	__u32 device; /* the file system's, as the kernel has it */
	__u32 reserved;
};

#endif
