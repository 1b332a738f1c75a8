/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types of `shunt diag io` that cross to Go.
 */
#ifndef SHUNT_IO_H
#define SHUNT_IO_H

#include "../event/event.h"

enum io_constant {
	IO_PATH_BYTES = 2048, /* bytes of io_path.names; a longer path is cut at the root's side */
	IO_NAME_BYTES = 256, /* NAME_MAX of linux/limits.h is 255, without the zero */
	IO_PATH_DEPTH = 40, /* folders */
	IO_ROWS_MAX = 16384, /* processes × files in one interval */
	IO_FILES_MAX = 16384, /* files whose paths have been reported */
	IO_DISKS_MAX = 1024,
	IO_SIZES_COUNT = 8, /* writes of at most 4, 16, 32, 64, 128, 256 and 512 KiB, and larger */
	IO_SENSOR_PATH = 1, /* event_header.sensor of struct io_path */
};

/* The reasons why an IO is in no row. */
enum io_missed {
	IO_MISSED_ROWS_FULL = 0,
	IO_MISSED_COUNT = 1,
};

/* A file; all 0 if an IO has none. */
struct io_file {
	__u64 inode; /* 0 with a device: the block device itself, so a file system's metadata */
	__u32 device; /* the file system's, as the kernel has it: major << 20 | minor */
	__u32 generation; /* i_generation: differs between files with one inode number in turn */
};

struct io_key {
	struct io_file file;
	__u64 start_ns; /* CLOCK_BOOTTIME: when the process began */
	__u32 tgid;
	__u32 is_kernel; /* 1: a thread of the kernel */
};

/* The IO of one process and one file, in one interval. An IO of a sample 1/N counts N times. */
struct io_count {
	__u64 reads; /* requests to the block layer (bios) */
	__u64 read_bytes;
	__u64 writes; /* writes that bypass the page cache */
	__u64 written_bytes;
	__u64 flushes; /* from the page cache, by this task, of pages that any process wrote */
	__u64 flushed_bytes;
	__u64 dirtied_bytes; /* that this process wrote to the page cache, for any task to flush */
	__u64 cgroup_id;
	__u64 last_jiffies; /* time of the last IO, when comm was read */
	__u64 told_jiffies; /* when the file's path was reported, or found reported; 0: not yet */
	__u32 disk; /* the device of the last request, as the kernel has it; 0: none yet */
	__u32 mntns; /* of the process: inode number of /proc/PID/ns/mnt */
	char comm[TASK_COMM_BYTES]; /* of the process's first thread */
	__u32 write_sizes[IO_SIZES_COUNT]; /* writes by size; 0 unless asked for */
	__u32 flush_sizes[IO_SIZES_COUNT]; /* flushes by size; 0 unless asked for */
};

struct io_bytes {
	__u64 count;
	__u64 bytes;
};

/* Payload of an event: the path of a file. */
struct io_path {
	struct io_file file;
	__u32 links; /* 0: deleted */
	__u16 names_size; /* bytes of names that are used */
	__u16 is_cut; /* 1: there are folders above the last name */
	/* Each with its zero, the file's own first and the root's side last. */
	char names[IO_PATH_BYTES + IO_NAME_BYTES];
};

/* Requests of a disk that have ended, since the start: only the ones seen, for their times. [0]: reads; [1]: writes. */
struct io_disk {
	__u64 requests[2];
	__u64 bytes[2];
	__u64 wait_ns[2]; /* from the creation of the request to its end */
	__u64 device_ns
		[2]; /* the part of wait_ns in driver and device; 0 if the kernel takes no stamp */
	__u64 unstamped[2]; /* requests without a time of creation */
	__u64 other_writes; /* of other kinds, which the kernel counts as writes of the disk */
};

#endif
