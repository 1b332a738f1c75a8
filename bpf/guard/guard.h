/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types of `shunt guard` that cross to Go.
 */
#ifndef SHUNT_GUARD_H
#define SHUNT_GUARD_H

#include "../event/event.h"

enum guard_constant {
	GUARD_RULES_MAX = 64, /* each rule is a bit of a word */
	GUARD_FILES_MAX = 1 << 18, /* protected inodes, executables, and the folders above them */
	GUARD_TASKS_MAX = 1 << 18, /* processes that are trusted or protected */
	GUARD_EXECS_MAX = 1 << 13, /* processes that execute a program at the same moment */
	GUARD_NAME_BYTES = 256, /* of a rule's or a file's name: NAME_MAX and a zero */
	GUARD_PATH_BYTES =
		1024, /* bytes of the names in an event; a longer path is cut at the root's side */
	GUARD_DEPTH_MAX = 24, /* folders */
	GUARD_CGROUP_DEPTH_MAX = 8, /* levels of a cgroup that a rule names */
	GUARD_CGROUP_BYTES = 96, /* bytes of the name of such a level, with a zero */
	GUARD_SENSOR = 1, /* event_header.sensor of struct guard_event */
};

/* Operations that a rule can deny. */
enum guard_op {
	GUARD_WRITE = 0,
	GUARD_CREATE = 1,
	GUARD_DELETE = 2,
	GUARD_RENAME = 3,
	GUARD_LINK = 4,
	GUARD_CHMOD = 5,
	GUARD_MOUNT = 6,
	/* Of each rule that trusts programs, without a word in the policy: */
	GUARD_PROGRAM = 7, /* write the executable of a trusted program */
	GUARD_TRACE = 8, /* access a trusted or protected process as a debugger does */
	GUARD_KILL =
		9, /* signal a protected process, or limit its resources, or write to a file that controls its cgroup */
	GUARD_READ = 10, /* read the contents of a file, or the names in a folder */
	GUARD_EXEC = 11, /* execute a file, or map it as code */
	/* Of a rule of detection that denies, and of no file of the rule's: */
	GUARD_MOUNT_ANY = 12, /* mount something, anywhere */
	GUARD_MODULE = 13, /* load a kernel module */
	GUARD_BPF = 14, /* load a BPF program */
	GUARD_TRACE_ANY = 15, /* access any other process as a debugger does */
	GUARD_MOVE =
		16, /* move a process from one cgroup to another, through a cgroup above a protected one */
	GUARD_OP_COUNT = 17,
};

/* A file, also after its inode has left the kernel's memory. */
struct guard_file {
	__u64 inode;
	__u32 device; /* the file system's, as the kernel has it: major << 20 | minor */
	__u32 generation; /* i_generation: differs between files with one inode number in turn */
};

/* A process; no other one is ever the same. */
struct guard_process {
	__u64 id; /* of the first thread, in the machine's first PID namespace */
	__u64 start; /* since boot, in hundredths of a second, as proc_pid_stat(5) has it */
};

/* An inode's label by one policy; each field a mask of rules. The policy in force has the side of its number's lowest
 * bit, the other side is for the next one, and each side has maps of its own. */
struct guard_side {
	__u64 rules; /* the inode is protected by these rules */
	__u64 above; /* it is a folder above a file or folder that these rules protect */
	__u64 trusts; /* it is an executable that these rules trust */
	__u64 guards; /* it is an executable whose processes these rules protect */
	__u64 interprets; /* it is an interpreter, to which these pass no trust of its starter */
	__u64 generation; /* of the policy; other than the present and next one: the label is void */
};

/* The rules that trust a process, and the rules that protect it; by side. */
struct guard_trust {
	__u64 trusts[2]; /* as in struct guard_side */
	__u64 guards[2];
	__u64 generations[2];
};

/* The same of one generation. */
struct guard_given {
	__u64 trusts;
	__u64 guards;
	__u64 generation;
};

/* The user and cgroup that a rule's trust is limited to. */
struct guard_narrow {
	__u32 has_user;
	__u32 user; /* the kernel's own number, as the machine's first user namespace has it */
	__u32 depth; /* depth of the cgroup below the root of the second hierarchy; 0: any cgroup */
	__u32 unused;
	/* Of the cgroups from the root's side, each with zeros up to its end. */
	char names[GUARD_CGROUP_DEPTH_MAX][GUARD_CGROUP_BYTES];
};

/* The rules whose programs keep their trust when an updater replaces them. */
struct guard_renews {
	__u64 by; /* mask of the rule that trusts the updater; 0: none */
	__u64 rules; /* rules that still trust and protect programs after it has replaced them */
};

/* The policy in force. */
struct guard_state {
	__u64 generation; /* from 1; 0: none yet */
	__u64 loaded_ns; /* CLOCK_BOOTTIME: when it came into force */
};

/* The record that agents keep of their work. */
struct guard_agent {
	__u64 began_ns; /* CLOCK_BOOTTIME: when the protection began */
	__u64 heard_ns; /* CLOCK_BOOTTIME: when an agent last listened */
	__u64 heard; /* events that all agents have read */
	__u64 prepared; /* the last generation that labels were written for, whether or not it came into force */
};

/* The rules that forbid an operation, as masks. */
struct guard_masks {
	__u64 denied;
	__u64 audited;
	__u64 only; /* of both: rules that forbid it only to processes of guard_side.guards */
};

struct guard_count {
	__u64 denied;
	__u64 audited;
	__u64 unrecorded; /* new files that sh_g_files0 or 1 had no room for */
	__u64 untrusted; /* processes that sh_g_tasks had no room for */
};

/* A rule, for people; each text ends with a zero. */
struct guard_rule {
	char name[64];
	char text[824];
	char severity[16]; /* of a rule of detection; empty for other rules */
	char mitre[112]; /* of a rule of detection: ATT&CK's techniques, separated by spaces */
	__u64 trust; /* a digest of the paths of the programs that the rule trusts */
};

/* Argument of sh_key, and its answer. */
struct guard_key {
	__u64 fd; /* a descriptor of the calling process */
	struct guard_file file; /* all 0: it has none */
};

/* Payload of an event: an attempt, and the program that made it. */
struct guard_event {
	struct guard_file file; /* inode 0: a name that does not exist yet */
	struct guard_file program; /* the executable; 0: a thread of the kernel */
	__u64 rules; /* rules that forbid the operation */
	__u64 generation;
	__u32 op;
	__u32 is_denied; /* 0: audited */
	__u32 target; /* of GUARD_TRACE, GUARD_TRACE_ANY and GUARD_KILL: process ID; 0: file is the object */
	__u16 names_size; /* bytes that are used */
	__u16 program_size;
	char comm[TASK_COMM_BYTES];
	/* Each with its zero, the file's own first and the file system's root last. */
	char names[GUARD_PATH_BYTES + GUARD_NAME_BYTES];
	char program_names[GUARD_PATH_BYTES + GUARD_NAME_BYTES];
};

#endif
