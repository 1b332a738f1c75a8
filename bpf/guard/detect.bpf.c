/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The events that detection judges. They come from tracepoints alone, which every kernel allows: no
 * trampoline, no kprobe.
 *
 *   sched_process_exec ──► exec           inet_sock_set_state ──► connect (io_uring's too)
 *   module_load ─────────► module         a system call's own tracepoint ──► the others
 *
 * There are three streams, so that no storm takes the room of another kind's events: executed programs,
 * frequent events (open, connect, accept), and all other events, which are rare.
 *
 * Invariant: a program looks at the current process alone, and only at one in the scope, and a system call
 * that has failed is no event.
 */
#include "look.h"
#include "../event/ring.h"
#include <bpf/bpf_tracing.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* The cgroup whose processes are watched, with the cgroups below it; 0: all. Set at load. */
volatile const __u64 only_cgroup;
volatile const __u32 only_level; /* depth of that cgroup; the root has 0 */
/* The process that reads the events; it makes none itself. Set at load. */
volatile const __u32 own_tgid;

/* Kinds of opens that are events only if sh_d_names has the file: enum detect_filter. Set at load. */
volatile const __u32 open_filters;

/* clang writes a type in full only if something uses it. */
struct {
	struct detect_event event;
	enum detect_constant constant;
	enum detect_type type;
	enum detect_kind kind;
	enum detect_direction direction;
	struct detect_shed shed;
	struct detect_name name;
	enum detect_filter filter;
} detect_types;

/*
 * Events of executed programs: as sh_events, which has the rare ones. Upgrade: never pinned. The size is
 * set at load.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} sh_d_execs SEC(".maps");

/* Numbers of sh_d_execs: as sh_event_seq. Upgrade: never pinned. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sh_d_execs_seq SEC(".maps");

/*
 * Frequent events: as sh_events. Upgrade: never pinned. The size is set at load.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} sh_d_often SEC(".maps");

/* Numbers of sh_d_often: as sh_event_seq. Upgrade: never pinned. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sh_d_often_seq SEC(".maps");

/*
 * Events that are left out, by type. Key: enum detect_type; value: a mask. 0: none; all bits: all; otherwise each event
 * whose number on this CPU has a bit of the mask. User space writes, programs read. Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DETECT_TYPES_MAX);
	__type(key, __u32);
	__type(value, __u64);
} sh_d_masks SEC(".maps");

/*
 * Counts of events that were left out. Key: enum detect_type; value: struct detect_shed of a CPU. Programs write,
 * user space reads. Never full. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DETECT_TYPES_MAX);
	__type(key, __u32);
	__type(value, struct detect_shed);
} sh_d_sheds SEC(".maps");

/*
 * Names of files that a rule can match: opens of other files are no events. Key: struct detect_name; value: 1.
 * User space writes before the programs are attached, programs read. Full: refused at load. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DETECT_NAMES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct detect_name);
	__type(value, __u32);
} sh_d_names SEC(".maps");

/*
 * Calls of setuid(2) and its like that have begun. Key: the thread's ID; value: struct detect_call. Programs
 * write at the beginning, and take it away at the end. Full: the oldest goes, and its event has no former
 * user. Upgrade: never pinned.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, DETECT_CALLS_MAX);
	__type(key, __u32);
	__type(value, struct detect_call);
} sh_d_calls SEC(".maps");

#define STATE_SYN_SENT 2 /* TCP_SYN_SENT of net/tcp_states.h */
#define STATE_CLOSE 7
#define FMODE_WRITE 2 /* of linux/fs.h */
#define MODE_OTHERS_READ 0004 /* S_IROTH */
#define BPF_COMMAND_LOAD 5 /* BPF_PROG_LOAD of linux/bpf.h */

/* Records of tracepoints of system calls, as their formats in tracefs have them. */
struct call_enter {
	__u64 common;
	__u64 number;
	__u64 args[6];
};

struct call_exit {
	__u64 common;
	__u64 number;
	__s64 result;
};

static __always_inline int is_in_scope(void)
{
	if (bpf_get_current_pid_tgid() >> 32 == own_tgid)
		return 0;
	return !only_cgroup || bpf_get_current_ancestor_cgroup_id(only_level) == only_cgroup;
}

static __always_inline struct detect_cred cred_now(void)
{
	struct task_struct___look *task = (void *)bpf_get_current_task();
	struct detect_cred cred;

	cred.uid = BPF_CORE_READ(task, cred, uid.val);
	cred.euid = BPF_CORE_READ(task, cred, euid.val);
	return cred;
}

static __noinline int args_look(struct detect_event *e)
{
	struct task_struct___look *task = (void *)bpf_get_current_task();
	unsigned long begin = BPF_CORE_READ(task, mm, arg_start);
	unsigned long size = BPF_CORE_READ(task, mm, arg_end) - begin;

	if (!e || !begin)
		return 0;
	if (size > DETECT_ARGS_BYTES)
		size = DETECT_ARGS_BYTES;
	if (!bpf_probe_read_user(e->args, size & (2 * DETECT_ARGS_BYTES - 1), (void *)begin))
		e->args_size = size;
	return 0;
}

static __noinline int event_fill(struct detect_event *e)
{
	struct task_struct___look *task = (void *)bpf_get_current_task();
	struct file *program = BPF_CORE_READ(task, mm, exe_file);

	if (!e)
		return 0;
	e->cred = cred_now();
	bpf_get_current_comm(e->comm, sizeof(e->comm));
	for (int i = 0; i < DETECT_FDS; i++) {
		struct file *file = file_at(task, i);

		if (file)
			fd_look(&e->fds[i], file);
	}
	parents_look(e);
	if (program) {
		e->program = file_of(BPF_CORE_READ(program, f_inode));
		e->program_links = BPF_CORE_READ(program, f_inode, i_nlink);
		e->program_size = path_walk(e->program_names, program);
	}
	return args_look(e);
}

/* Whether an event is left out. Counts the event. */
static __always_inline int is_shed(__u32 type)
{
	__u64 *mask = bpf_map_lookup_elem(&sh_d_masks, &type);
	struct detect_shed *shed;
	__u64 number;

	if (!mask || !*mask)
		return 0;
	shed = bpf_map_lookup_elem(&sh_d_sheds, &type);
	if (!shed)
		return 0;
	number = __sync_fetch_and_add(&shed->seen, 1);
	if (!(number & *mask) && *mask != ~0ULL)
		return 0;
	__sync_fetch_and_add(&shed->left_out, 1);
	return 1;
}

/* An event of the current process, of a type that is a constant; NULL: lost or left out, and counted. The caller
 * submits it. */
static __always_inline struct detect_event *event_begin(const __u32 type)
{
	void *ring = &sh_events, *numbers = &sh_event_seq;
	struct event_header *h;
	struct detect_event *e;
	__u64 number;

	if (is_shed(type))
		return NULL;
	if (type == DETECT_EXEC) {
		ring = &sh_d_execs;
		numbers = &sh_d_execs_seq;
	} else if (type == DETECT_OPEN || type == DETECT_CONNECT || type == DETECT_ACCEPT) {
		ring = &sh_d_often;
		numbers = &sh_d_often_seq;
	}
	h = event_room(ring, numbers, sizeof(*e), &number);
	if (!h)
		return NULL;
	event_head(h, number, sizeof(*e), DETECT_SENSOR);
	event_task(h);
	e = (void *)(h + 1);
	__builtin_memset(e, 0, __builtin_offsetof(struct detect_event, args));
	e->type = type;
	event_fill(e);
	return e;
}

static __always_inline void event_end(struct detect_event *e)
{
	event_submit((struct event_header *)e - 1);
}

static __always_inline void object_user(struct detect_event *e, const void *text)
{
	long size = bpf_probe_read_user_str(e->object, GUARD_PATH_BYTES, text);

	e->object_size = size > 0 ? size : 0;
}

SEC("raw_tp/sched_process_exec")
int sh_d_exec(struct bpf_raw_tracepoint_args *ctx)
{
	struct linux_binprm *program = (void *)ctx->args[2];
	struct detect_event *e;
	long size;

	if (!is_in_scope())
		return 0;
	e = event_begin(DETECT_EXEC);
	if (!e)
		return 0;
	e->parent_outs = parent_outs();
	size = bpf_probe_read_kernel_str(e->object, GUARD_PATH_BYTES,
					 BPF_CORE_READ(program, filename));
	e->object_size = size > 0 ? size : 0;
	event_end(e);
	return 0;
}

/* The first step of connect is made by the process itself; others may happen in an interrupt. */
SEC("raw_tp/inet_sock_set_state")
int sh_d_connect(struct bpf_raw_tracepoint_args *ctx)
{
	struct sock *sk = (void *)ctx->args[0];
	int state = (int)ctx->args[2];
	__u64 key = (__u64)sk;
	struct detect_event *e;
	__u32 one = 1;

	if (state == STATE_CLOSE)
		bpf_map_delete_elem(&sh_d_opened, &key);
	if (state != STATE_SYN_SENT || !is_in_scope())
		return 0;
	bpf_map_update_elem(&sh_d_opened, &key, &one, BPF_ANY);
	e = event_begin(DETECT_CONNECT);
	if (!e)
		return 0;
	socket_look(&e->socket, sk);
	event_end(e);
	return 0;
}

SEC("tracepoint")
int sh_d_accept(struct call_exit *ctx)
{
	struct task_struct___look *task = (void *)bpf_get_current_task();
	struct detect_fd socket = {};
	struct detect_event *e;
	struct file *file;

	if (ctx->result < 0 || !is_in_scope())
		return 0;
	file = file_at(task, ctx->result);
	if (!file)
		return 0;
	fd_look(&socket, file);
	if (socket.kind != DETECT_INET)
		return 0;
	e = event_begin(DETECT_ACCEPT);
	if (!e)
		return 0;
	e->socket = socket;
	event_end(e);
	return 0;
}

/* Only descriptors of sockets: shells copy pipes and files all the time. */
SEC("tracepoint")
int sh_d_dup(struct call_exit *ctx)
{
	struct task_struct___look *task = (void *)bpf_get_current_task();
	struct detect_fd copied = {};
	struct detect_event *e;
	struct file *file;

	if (ctx->result < 0 || ctx->result > 2 || !is_in_scope())
		return 0;
	file = file_at(task, ctx->result);
	if (!file)
		return 0;
	fd_look(&copied, file);
	if (copied.kind != DETECT_INET && copied.kind != DETECT_UNIX)
		return 0;
	e = event_begin(DETECT_DUP);
	if (!e)
		return 0;
	e->fd = ctx->result;
	event_end(e);
	return 0;
}

static __noinline int is_named(struct dentry *dentry, __u32 is_write, __u32 level)
{
	struct detect_name key = { .is_write = is_write, .level = level };

	bpf_probe_read_kernel_str(key.name, sizeof(key.name), BPF_CORE_READ(dentry, d_name.name));
	return bpf_map_lookup_elem(&sh_d_names, &key) != NULL;
}

/* Whether a rule can match an open, by the names of the file and of two folders above, through mounts. A file below
 * more than DETECT_MOUNTS_MAX mounts over each other is always an event. */
static __noinline int is_wanted(struct file *file, __u32 is_write)
{
	struct dentry *dentry;
	struct mount *mount;

	if (!file || !(open_filters & (is_write ? DETECT_FILTER_WRITES : DETECT_FILTER_READS)))
		return 1;
	dentry = BPF_CORE_READ(file, f_path.dentry);
	mount = (void *)BPF_CORE_READ(file, f_path.mnt) - bpf_core_field_offset(struct mount, mnt);
	for (__u32 level = 0; level < DETECT_NAME_LEVELS; level++) {
		struct dentry *parent;
		int over = 0;

		while (dentry == BPF_CORE_READ(mount, mnt.mnt_root)) {
			struct mount *outer = BPF_CORE_READ(mount, mnt_parent);

			if (!outer || outer == mount)
				return 0; /* there is no outer mount: this is the root */
			if (++over > DETECT_MOUNTS_MAX)
				return 1;
			dentry = BPF_CORE_READ(mount, mnt_mountpoint);
			mount = outer;
		}
		if (is_named(dentry, is_write, level))
			return 1;
		parent = BPF_CORE_READ(dentry, d_parent);
		if (parent == dentry) /* the file has no folder */
			return 0;
		dentry = parent;
	}
	return 0;
}

/* Only opens for writing, and opens of files that not all users may read, if a rule can match them. */
SEC("tracepoint")
int sh_d_open(struct call_exit *ctx)
{
	struct task_struct___look *task = (void *)bpf_get_current_task();
	struct detect_event *e;
	struct inode *inode;
	struct file *file;
	__u32 is_write, mode;

	if (ctx->result < 0 || !is_in_scope())
		return 0;
	file = file_at(task, ctx->result);
	if (!file)
		return 0;
	inode = BPF_CORE_READ(file, f_inode);
	mode = BPF_CORE_READ(inode, i_mode);
	is_write = BPF_CORE_READ(file, f_mode) & FMODE_WRITE;
	if (mode & MODE_OTHERS_READ) {
		if (!is_write ||
		    ((mode & MODE_TYPE) != MODE_FILE && (mode & MODE_TYPE) != MODE_BLOCK))
			return 0;
	}
	if (!is_wanted(file, is_write != 0))
		return 0;
	e = event_begin(DETECT_OPEN);
	if (!e)
		return 0;
	e->is_write = is_write != 0;
	e->mode = mode;
	e->file = file_of(inode);
	e->object_size = path_walk(e->object, file);
	event_end(e);
	return 0;
}

SEC("tracepoint")
int sh_d_cred_from(struct call_enter *ctx)
{
	__u32 thread = bpf_get_current_pid_tgid();
	struct detect_call call = {};

	if (!is_in_scope())
		return 0;
	call.before = cred_now();
	bpf_map_update_elem(&sh_d_calls, &thread, &call, BPF_ANY);
	return 0;
}

SEC("tracepoint")
int sh_d_cred_to(struct call_exit *ctx)
{
	__u32 thread = bpf_get_current_pid_tgid();
	struct detect_cred now = cred_now(), before;
	struct detect_call *call;
	struct detect_event *e;

	if (!is_in_scope())
		return 0;
	call = bpf_map_lookup_elem(&sh_d_calls, &thread);
	if (!call)
		return 0;
	before = call->before;
	bpf_map_delete_elem(&sh_d_calls, &thread);
	if (ctx->result < 0 || (now.uid == before.uid && now.euid == before.euid))
		return 0;
	e = event_begin(DETECT_SETUID);
	if (!e)
		return 0;
	e->before = before;
	event_end(e);
	return 0;
}

struct module {
	char name[56]; /* MODULE_NAME_LEN of linux/module.h */
} KERNEL_STRUCT;

SEC("raw_tp/module_load")
int sh_d_module(struct bpf_raw_tracepoint_args *ctx)
{
	struct module *module = (void *)ctx->args[0];
	struct detect_event *e;
	long size;

	if (!is_in_scope())
		return 0;
	e = event_begin(DETECT_MODULE);
	if (!e)
		return 0;
	size = bpf_core_read_str(e->object, sizeof(module->name), &module->name);
	e->object_size = size > 0 ? size : 0;
	event_end(e);
	return 0;
}

/* Only loads of programs: making maps and links is no event. */
SEC("tracepoint")
int sh_d_bpf(struct call_enter *ctx)
{
	struct detect_event *e;

	if (ctx->args[0] != BPF_COMMAND_LOAD || !is_in_scope())
		return 0;
	e = event_begin(DETECT_BPF);
	if (!e)
		return 0;
	e->number = ctx->args[0];
	event_end(e);
	return 0;
}

/* Requests that give control or change something, of linux/ptrace.h: a debugger makes many others. */
static __always_inline int is_control(__u64 request)
{
	return request == 4 /* POKETEXT */ || request == 5 /* POKEDATA */ ||
	       request == 13 /* SETREGS */ || request == 16 /* ATTACH */ ||
	       request == 0x4205 /* SETREGSET */ || request == 0x4206 /* SEIZE */;
}

SEC("tracepoint")
int sh_d_ptrace(struct call_enter *ctx)
{
	struct detect_event *e;

	if (!is_control(ctx->args[0]) || !is_in_scope())
		return 0;
	e = event_begin(DETECT_PTRACE);
	if (!e)
		return 0;
	e->number = ctx->args[0];
	e->target = ctx->args[1];
	event_end(e);
	return 0;
}

/* process_vm_writev(2): the target is the first argument. */
SEC("tracepoint")
int sh_d_poke(struct call_enter *ctx)
{
	struct detect_event *e;

	if (!is_in_scope())
		return 0;
	e = event_begin(DETECT_PTRACE);
	if (!e)
		return 0;
	e->number = 0xffffffff;
	e->target = ctx->args[0];
	event_end(e);
	return 0;
}

SEC("tracepoint")
int sh_d_mount(struct call_enter *ctx)
{
	struct detect_event *e;

	if (!is_in_scope())
		return 0;
	e = event_begin(DETECT_MOUNT);
	if (!e)
		return 0;
	object_user(e, (void *)ctx->args[1]);
	event_end(e);
	return 0;
}

SEC("tracepoint")
int sh_d_memfd(struct call_exit *ctx)
{
	struct task_struct___look *task = (void *)bpf_get_current_task();
	struct detect_event *e;
	struct file *file;

	if (ctx->result < 0 || !is_in_scope())
		return 0;
	file = file_at(task, ctx->result);
	if (!file)
		return 0;
	e = event_begin(DETECT_MEMFD);
	if (!e)
		return 0;
	e->file = file_of(BPF_CORE_READ(file, f_inode));
	e->object_size = path_walk(e->object, file);
	event_end(e);
	return 0;
}
