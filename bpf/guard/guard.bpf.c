// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Files that are protected by their inode, and not by their name.
 *
 *   operation ─► hook ─► label of the inode ─► rules that forbid it ─► is the process trusted?
 *                          │ none                │ none                  │ yes
 *                          └─────────────────────┴───────────────────────┴─► go on
 *                                                                  no ─► event ─► -EPERM, or go on (audit)
 *
 * Labels come from user space at load. From then on the programs keep them: a name that appears in a
 * labelled folder gives its inode the folder's label, and so does a rename into one. Trust comes from the
 * executable's inode at exec, goes on to forks, and where a rule says so to the programs that a process starts.
 *
 * Invariant: nothing here needs the agent. The links are pinned, and protect until they are removed.
 */
#include "control.h"
#include "renew.h"
#include <bpf/bpf_tracing.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* Unchanged from 6.1 to 6.18. */
#define OPEN_READS 0x1 /* FMODE_READ of linux/fs.h */
#define OPEN_WRITES 0x2 /* FMODE_WRITE */
#define OPEN_EXECUTES 0x20 /* __FMODE_EXEC, in f_flags: no program can ask for it */
#define OPEN_TRUNCATES 01000 /* O_TRUNC of asm-generic/fcntl.h */
#define MAY_WRITE 0x2 /* linux/fs.h */
#define MAY_READ 0x4
#define MAY_ACCESS 0x10 /* set by access(2), which only asks */
#define MAY_OPEN 0x20
#define PROTECTION_WRITE 0x2 /* PROT_WRITE of asm-generic/mman-common.h */
#define PROTECTION_EXEC 0x4 /* PROT_EXEC */
#define PROTECTION_ANY 0x7 /* read, write and execute: processors can read with any of them */
#define MAP_TYPE 0x0f
#define MAP_PRIVATE 0x02
#define VM_SHARED 0x8
#define TRACE_ATTACH 0x2 /* PTRACE_MODE_ATTACH of linux/ptrace.h */
#define ATTRIBUTE_SIZE (1 << 3) /* ATTR_* of linux/fs.h */
#define ATTRIBUTE_FORCE (1 << 9) /* set by the kernel, because of an allowed write */
#define ATTRIBUTES (1 << 0 | 1 << 1 | 1 << 2) /* mode, user, group */
#define ATTRIBUTES_TIME (1 << 4 | 1 << 5) /* times of access and change */
#define THREAD 0x00010000 /* CLONE_THREAD of linux/sched.h */
#define COMMAND_LOAD 5 /* BPF_PROG_LOAD of linux/bpf.h */
#define SET_FLAGS 0x40086602 /* FS_IOC_SETFLAGS of linux/fs.h */
#define SET_FLAGS_32 0x40046602
#define SET_XFLAGS 0x401c5820 /* FS_IOC_FSSETXATTR */

struct iattr {
	unsigned int ia_valid;
} KERNEL_STRUCT;

struct vm_area_struct {
	unsigned long vm_flags;
	struct file *vm_file;
} KERNEL_STRUCT;

enum kernel_read_file_id {
	READING_MODULE = 2,
	READING_MODULE_COMPRESSED = 3, /* on newer kernels, which decompress modules themselves */
};

enum kernel_load_data_id {
	LOADING_MODULE = 2,
};

/* clang writes a type in full only if something uses it. */
struct {
	struct guard_event event;
	enum guard_constant constant;
	enum guard_op op;
	struct guard_key key;
	struct guard_narrow narrow;
	struct guard_renews renews;
} guard_types;

SEC("lsm/file_open")
int BPF_PROG(sh_open, struct file *file)
{
	int ret = 0;

	if (file->f_mode & OPEN_WRITES || file->f_flags & OPEN_TRUNCATES)
		ret = inode_judge(file->f_inode, file->f_path.dentry, GUARD_WRITE, 0);
	if (!ret && (file->f_mode & OPEN_WRITES || file->f_flags & OPEN_TRUNCATES))
		birth_note(file->f_inode, (file->f_mode & OPEN_CREATED) != 0);
	if (ret || !(file->f_mode & OPEN_READS) || file->f_flags & OPEN_EXECUTES ||
	    !is_forbidden(GUARD_READ))
		return ret;
	return inode_judge(file->f_inode, file->f_path.dentry, GUARD_READ, 0);
}

/* Whether the file of a descriptor may be under a rule that forbids to read it. A file that the kernel opened to
 * execute it is read for that, by a process that may execute it. */
static __always_inline int is_secret(struct file *file)
{
	struct guard_state *state;

	if (file->f_flags & OPEN_EXECUTES || !is_forbidden(GUARD_READ))
		return 0;
	state = state_get();
	return state && (side_cached(file->f_inode, state->generation) || is_moved());
}

/* Descriptors from before the policy, or from a trusted program. Runs at every read and write, so it returns at once
 * for an inode without a label: an inode that is open is in memory, and has its label in sh_g_labels0 or 1. */
SEC("lsm/file_permission")
int BPF_PROG(sh_permission, struct file *file, int mask)
{
	struct guard_state *state = state_get();

	if (mask & MAY_READ && is_secret(file) &&
	    inode_judge(file->f_inode, file->f_path.dentry, GUARD_READ, 0))
		return -EPERM;
	if (!(mask & MAY_WRITE) || !state)
		return 0;
	if (!side_cached(file->f_inode, state->generation) && !is_moved())
		return 0;
	return inode_judge(file->f_inode, file->f_path.dentry, GUARD_WRITE, 0);
}

/* An open of a cgroup's file for writing; and, without an open, a process that moves from one cgroup to another, or begins
 * in another one (CLONE_INTO_CGROUP). This program runs for each folder of each path, and the next one at each read and
 * write, so both are attached only while a rule protects a cgroup. */
SEC("lsm/inode_permission")
int BPF_PROG(sh_control, struct inode *inode, int mask)
{
	if (!(mask & MAY_WRITE) || mask & MAY_ACCESS || !is_control(inode))
		return 0;
	return control_judge(inode, !(mask & MAY_OPEN));
}

/* A write by a descriptor from before the policy, or from a trusted program. */
SEC("lsm/file_permission")
int BPF_PROG(sh_control_fd, struct file *file, int mask)
{
	if (!(mask & MAY_WRITE) || !is_control(file->f_inode))
		return 0;
	return control_judge(file->f_inode, 0);
}

/* The loader that is given a program as its argument maps it as code, without executing it. A program that was
 * executed maps its own file, and was judged already. */
static __noinline int code_judge(struct file *file)
{
	struct task_struct___guard *task = (void *)bpf_get_current_task();

	if (!file || !is_forbidden(GUARD_EXEC))
		return 0;
	if (BPF_CORE_READ(task, mm, exe_file, f_inode) == file->f_inode)
		return 0;
	return inode_judge(file->f_inode, file->f_path.dentry, GUARD_EXEC, 0);
}

SEC("lsm/mmap_file")
int BPF_PROG(sh_mmap, struct file *file, unsigned long reqprot, unsigned long prot,
	     unsigned long flags)
{
	if (!file)
		return 0;
	if (prot & PROTECTION_EXEC && code_judge(file))
		return -EPERM;
	if (prot & PROTECTION_ANY && is_secret(file) &&
	    inode_judge(file->f_inode, file->f_path.dentry, GUARD_READ, 0))
		return -EPERM;
	if (!(prot & PROTECTION_WRITE) || (flags & MAP_TYPE) == MAP_PRIVATE)
		return 0;
	return inode_judge(file->f_inode, file->f_path.dentry, GUARD_WRITE, 0);
}

SEC("lsm/file_mprotect")
int BPF_PROG(sh_mprotect, struct vm_area_struct *vma, unsigned long reqprot, unsigned long prot)
{
	struct file *file = vma->vm_file;

	if (!file)
		return 0;
	if (prot & PROTECTION_EXEC && code_judge(file))
		return -EPERM;
	if (prot & PROTECTION_ANY && is_secret(file) &&
	    inode_judge(file->f_inode, file->f_path.dentry, GUARD_READ, 0))
		return -EPERM;
	if (!(prot & PROTECTION_WRITE) || !(vma->vm_flags & VM_SHARED))
		return 0;
	return inode_judge(file->f_inode, file->f_path.dentry, GUARD_WRITE, 0);
}

SEC("lsm/file_ioctl")
int BPF_PROG(sh_ioctl, struct file *file, unsigned int cmd, unsigned long arg)
{
	if (cmd != SET_FLAGS && cmd != SET_FLAGS_32 && cmd != SET_XFLAGS)
		return 0;
	return inode_judge(file->f_inode, file->f_path.dentry, GUARD_CHMOD, 0);
}

SEC("lsm/inode_create")
int BPF_PROG(sh_create, struct inode *dir, struct dentry *dentry, __u16 mode)
{
	return inode_judge(dir, dentry, GUARD_CREATE, 0);
}

SEC("lsm/inode_mkdir")
int BPF_PROG(sh_mkdir, struct inode *dir, struct dentry *dentry, __u16 mode)
{
	return inode_judge(dir, dentry, GUARD_CREATE, 0);
}

SEC("lsm/inode_mknod")
int BPF_PROG(sh_mknod, struct inode *dir, struct dentry *dentry, __u16 mode, __u32 dev)
{
	return inode_judge(dir, dentry, GUARD_CREATE, 0);
}

SEC("lsm/inode_symlink")
int BPF_PROG(sh_symlink, struct inode *dir, struct dentry *dentry, const char *old_name)
{
	return inode_judge(dir, dentry, GUARD_CREATE, 0);
}

SEC("lsm/inode_link")
int BPF_PROG(sh_link, struct dentry *old_dentry, struct inode *dir, struct dentry *new_dentry)
{
	int ret = inode_judge(old_dentry->d_inode, old_dentry, GUARD_LINK, 0);

	return ret ? ret : inode_judge(dir, new_dentry, GUARD_CREATE, 0);
}

SEC("lsm/inode_unlink")
int BPF_PROG(sh_unlink, struct inode *dir, struct dentry *dentry)
{
	int ret = inode_judge(dentry->d_inode, dentry, GUARD_DELETE, 0);

	return ret ? ret : inode_judge(dir, dentry, GUARD_DELETE, 0);
}

SEC("lsm/inode_rmdir")
int BPF_PROG(sh_rmdir, struct inode *dir, struct dentry *dentry)
{
	int ret = inode_judge(dentry->d_inode, dentry, GUARD_DELETE, 0);

	return ret ? ret : inode_judge(dir, dentry, GUARD_DELETE, 0);
}

/* Gives a file or folder the label of the folder that it is moved into, or of the file that it replaces. */
static __noinline int arrival_label(struct inode *inode, struct inode *folder)
{
	__u64 *moved = moved_get();

	if (!moved || !inode)
		return 0;
	if (label_join(inode, folder) && (inode->i_mode & MODE_TYPE) == MODE_FOLDER)
		__sync_fetch_and_add(moved, 1);
	return 0;
}

/* With RENAME_EXCHANGE the kernel calls this for both directions. */
SEC("lsm/inode_rename")
int BPF_PROG(sh_rename, struct inode *old_dir, struct dentry *old_dentry, struct inode *new_dir,
	     struct dentry *new_dentry)
{
	int ret = inode_judge(old_dentry->d_inode, old_dentry, GUARD_RENAME, 1);

	if (!ret)
		ret = inode_judge(old_dir, old_dentry, GUARD_RENAME, 0);
	if (!ret)
		ret = inode_judge(new_dentry->d_inode, new_dentry, GUARD_DELETE, 0);
	if (!ret && old_dir != new_dir)
		ret = inode_judge(new_dir, new_dentry, GUARD_CREATE, 0);
	if (ret)
		return ret;
	if (old_dir != new_dir)
		arrival_label(old_dentry->d_inode, new_dir);
	if (new_dentry->d_inode && old_dentry->d_inode) {
		/* programs change a file by putting another one in its place */
		arrival_label(old_dentry->d_inode, new_dentry->d_inode);
		side_renew(old_dentry->d_inode, new_dentry->d_inode, 0);
		side_renew(old_dentry->d_inode, new_dentry->d_inode, 1);
	}
	return 0;
}

static __always_inline int attributes_judge(struct dentry *dentry, struct iattr *attributes)
{
	unsigned int valid = attributes->ia_valid;

	if (valid & ATTRIBUTE_FORCE)
		return 0;
	if (valid & ATTRIBUTE_SIZE) {
		int ret = inode_judge(dentry->d_inode, dentry, GUARD_WRITE, 0);

		if (ret)
			return ret;
		birth_note(dentry->d_inode, 0);
		valid &= ~ATTRIBUTES_TIME; /* a change of size also sets the times */
	}
	if (!(valid & (ATTRIBUTES | ATTRIBUTES_TIME)))
		return 0;
	return inode_judge(dentry->d_inode, dentry, GUARD_CHMOD, 0);
}

/* User space loads sh_setattr or sh_setattr_map, by the arguments that the hook has in the running kernel. */
SEC("lsm/inode_setattr")
int BPF_PROG(sh_setattr, struct dentry *dentry, struct iattr *attributes)
{
	return attributes_judge(dentry, attributes);
}

SEC("lsm/inode_setattr")
int BPF_PROG(sh_setattr_map, void *idmap, struct dentry *dentry, struct iattr *attributes)
{
	return attributes_judge(dentry, attributes);
}

SEC("lsm/inode_setxattr")
int BPF_PROG(sh_setxattr, void *idmap, struct dentry *dentry)
{
	return inode_judge(dentry->d_inode, dentry, GUARD_CHMOD, 0);
}

SEC("lsm/inode_removexattr")
int BPF_PROG(sh_removexattr, void *idmap, struct dentry *dentry)
{
	return inode_judge(dentry->d_inode, dentry, GUARD_CHMOD, 0);
}

/* The hook for ACLs since 6.2; before, they are extended attributes. */
SEC("lsm/inode_set_acl")
int BPF_PROG(sh_set_acl, void *idmap, struct dentry *dentry)
{
	return inode_judge(dentry->d_inode, dentry, GUARD_CHMOD, 0);
}

SEC("lsm/inode_remove_acl")
int BPF_PROG(sh_remove_acl, void *idmap, struct dentry *dentry)
{
	return inode_judge(dentry->d_inode, dentry, GUARD_CHMOD, 0);
}

SEC("lsm/sb_mount")
int BPF_PROG(sh_mount, const char *dev_name, const struct path *path)
{
	if (machine_judge(path->dentry, GUARD_MOUNT_ANY, 0))
		return -EPERM;
	return inode_judge(path->dentry->d_inode, path->dentry, GUARD_MOUNT, 1);
}

SEC("lsm/move_mount")
int BPF_PROG(sh_move_mount, const struct path *from, const struct path *to)
{
	int ret = machine_judge(to->dentry, GUARD_MOUNT_ANY, 0);

	if (!ret)
		ret = inode_judge(from->dentry->d_inode, from->dentry, GUARD_MOUNT, 1);
	return ret ? ret : inode_judge(to->dentry->d_inode, to->dentry, GUARD_MOUNT, 1);
}

SEC("lsm/sb_umount")
int BPF_PROG(sh_umount, struct vfsmount *mnt, int flags)
{
	return inode_judge(mnt->mnt_root->d_inode, mnt->mnt_root, GUARD_MOUNT, 1);
}

/* A dentry gets its inode: a new file, a link, or one that the kernel reads from disk. */
SEC("lsm/d_instantiate")
int BPF_PROG(sh_instantiate, struct dentry *dentry, struct inode *inode)
{
	struct dentry *parent = dentry->d_parent;

	if (!inode || !parent || parent == dentry)
		return 0;
	if (parent->d_inode)
		label_join(inode, parent->d_inode);
	return 0;
}

/* A deleted file leaves memory for ever. */
SEC("lsm/inode_free_security")
int BPF_PROG(sh_free, struct inode *inode)
{
	struct guard_file file;

	if (BPF_CORE_READ(inode, i_nlink))
		return 0;
	file = file_of(inode);
	bpf_map_delete_elem(&sh_g_files0, &file);
	bpf_map_delete_elem(&sh_g_files1, &file);
	return 0;
}

/* A file is about to be executed; for "#!" the kernel calls this again, for the interpreter. A file without a name
 * is run without trust, also as a script. */
SEC("lsm/bprm_check_security")
int BPF_PROG(sh_check, struct linux_binprm *bprm)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct guard_trust sum = {};
	__u64 thread = (__u64)task;

	if (is_forbidden(GUARD_EXEC) &&
	    inode_judge(bprm->file->f_inode, bprm->file->f_path.dentry, GUARD_EXEC, 0))
		return -EPERM;
	if (bprm->interp == bprm->filename) {
		trust_sum(&sum, task->group_leader);
		bpf_map_delete_elem(&sh_g_execs, &thread);
		if (sum.trusts[0] | sum.trusts[1])
			bpf_map_update_elem(&sh_g_execs, &thread, &sum, BPF_ANY);
	}
	if (!bprm->file->f_inode->i_nlink)
		bpf_map_delete_elem(&sh_g_execs, &thread);
	return 0;
}

static __always_inline void process_forget(struct guard_process *process)
{
	bpf_map_delete_elem(&sh_g_tasks, process);
	bpf_map_delete_elem(&sh_g_given0, process);
	bpf_map_delete_elem(&sh_g_given1, process);
}

/* A process is trusted by its executable's label, and by its starter's trust if a rule trusts children. It is not
 * trusted under a debugger, nor with an environment that loads code. */
SEC("lsm.s/bprm_committed_creds")
int BPF_PROG(sh_exec, struct linux_binprm *bprm)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct guard_trust next = {}, going = {}, *kept;
	struct guard_process process = process_of(task);
	struct guard_side sides[2] = {}, *own;
	__u64 thread = (__u64)task;
	int is_script;

	kept = bpf_map_lookup_elem(&sh_g_execs, &thread);
	if (kept) {
		going = *kept;
		trust_renew(&going, task);
		bpf_map_delete_elem(&sh_g_execs, &thread);
	}
	process_forget(&process); /* before the labels are read: see giveRunning */
	own = side_find(bprm->file->f_inode, 0);
	if (own)
		sides[0] = *own;
	own = side_find(bprm->file->f_inode, 1);
	if (own)
		sides[1] = *own;
	is_script = bprm->interp != bprm->filename;
	trust_go_on(&next, &going, &sides[0], 0, is_script);
	trust_go_on(&next, &going, &sides[1], 1, is_script);
	if ((next.trusts[0] | next.trusts[1]) &&
	    (BPF_CORE_READ((struct task_struct___guard *)task, ptrace) ||
	     !environment_is_plain(bprm)))
		next.trusts[0] = next.trusts[1] = 0;
	if (next.trusts[0] | next.trusts[1] | next.guards[0] | next.guards[1])
		trust_put(&process, &next);
	return 0;
}

/* A fork has its parent's trust, and a thread its process's. The new task has its number, and has not run. */
SEC("tp_btf/task_newtask")
int BPF_PROG(sh_fork, struct task_struct *task, unsigned long clone_flags)
{
	struct task_struct *current = bpf_get_current_task_btf();
	struct guard_process process;
	struct guard_trust sum = {};

	if (clone_flags & THREAD)
		return 0;
	trust_sum(&sum, current->group_leader);
	process = process_of(task);
	if (sum.trusts[0] | sum.trusts[1] | sum.guards[0] | sum.guards[1])
		trust_put(&process, &sum);
	return 0;
}

/* The kernel frees a process's first thread last. The task of a fork that failed still has the numbers of its
 * parent, and its parent's first thread. */
SEC("lsm/task_free")
int BPF_PROG(sh_end, struct task_struct *task)
{
	struct guard_process process;

	if (BPF_CORE_READ(task, group_leader) != task)
		return 0;
	process = process_of(task);
	process_forget(&process);
	return 0;
}

/* ptrace(2), /proc/PID/mem, process_vm_writev(2), pidfd_getfd(2): one hook for all. */
SEC("lsm/ptrace_access_check")
int BPF_PROG(sh_ptrace, struct task_struct *child, unsigned int mode)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (!(mode & TRACE_ATTACH))
		return 0;
	if (process_judge(child, GUARD_TRACE, 0))
		return -EPERM;
	if (child->group_leader != task->group_leader &&
	    machine_judge(NULL, GUARD_TRACE_ANY,
			  BPF_CORE_READ((struct task_struct___guard *)child, tgid)))
		return -EPERM;
	return trust_lose(child->group_leader, task->group_leader);
}

/* PTRACE_TRACEME: the current process lets its parent control it. */
SEC("lsm/ptrace_traceme")
int BPF_PROG(sh_traceme, struct task_struct *parent)
{
	struct task_struct *task = bpf_get_current_task_btf();

	return trust_lose(task->group_leader, parent->group_leader);
}

/* The kernel's own signals do not come here: signals of a terminal, of a fault, for want of memory. */
SEC("lsm/task_kill")
int BPF_PROG(sh_kill, struct task_struct *target, void *info, int signal)
{
	return signal ? process_judge(target, GUARD_KILL, 0) : 0;
}

/* A file's owner gets the signal of F_SETSIG. The process that set it is not known here, and any process can have
 * caused the signal, so no process is trusted. */
SEC("lsm/file_send_sigiotask")
int BPF_PROG(sh_sigio, struct task_struct *target, void *owner, int signal)
{
	return process_judge(target, GUARD_KILL, 1);
}

/* prlimit(2): a limit of CPU time ends a process. */
SEC("lsm/task_setrlimit")
int BPF_PROG(sh_rlimit, struct task_struct *target, unsigned int resource)
{
	return process_judge(target, GUARD_KILL, 0);
}

/* A module comes from a file (finit_module), or from memory (init_module). */
SEC("lsm/kernel_read_file")
int BPF_PROG(sh_module_file, struct file *file, unsigned int id)
{
	int is_module = id == bpf_core_enum_value(enum kernel_read_file_id, READING_MODULE);

	if (bpf_core_enum_value_exists(enum kernel_read_file_id, READING_MODULE_COMPRESSED))
		is_module |= id == bpf_core_enum_value(enum kernel_read_file_id,
						       READING_MODULE_COMPRESSED);
	if (!file || !is_module)
		return 0;
	return machine_judge(file->f_path.dentry, GUARD_MODULE, 0);
}

SEC("lsm/kernel_load_data")
int BPF_PROG(sh_module_data, unsigned int id)
{
	if (id != bpf_core_enum_value(enum kernel_load_data_id, LOADING_MODULE))
		return 0;
	return machine_judge(NULL, GUARD_MODULE, 0);
}

SEC("lsm/bpf")
int BPF_PROG(sh_bpf, int command)
{
	return command == COMMAND_LOAD ? machine_judge(NULL, GUARD_BPF, 0) : 0;
}

/* User space cannot ask every file system for i_generation, so a program reads it. */
SEC("syscall")
int sh_key(struct guard_key *key)
{
	struct task_struct___guard *task = (void *)bpf_get_current_task();
	struct file **files = BPF_CORE_READ(task, files, fdt, fd), *file = NULL;

	bpf_probe_read_kernel(&file, sizeof(file), files + key->fd);
	if (file)
		key->file = file_of(BPF_CORE_READ(file, f_inode));
	return 0;
}
