// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Connections that some programs must not make.
 *
 *   connect, bind, listen, accept, sendmsg, socket ─► security hooks, where BPF programs may decide there (LSM)
 *   connect, bind, sendmsg of UDP, socket          ─► programs at a cgroup, everywhere
 *   fork, exec, end of a process                   ─► processes started by a program of a rule with children
 *
 * User space loads one of the two groups that decide, and the third one only if a rule needs it.
 *
 * Invariant: nothing here needs the agent. The links are pinned, and deny until they are removed.
 */
#include "conjudge.h"
#include <bpf/bpf_tracing.h>

char _license[] SEC("license") = "Dual BSD/GPL";

#define EPERM 1
#define FAMILY_UNSPECIFIED 0 /* AF_UNSPEC of linux/socket.h */
#define FAMILY_PACKET 17
#define FAMILY_XDP 44
#define SOCKET_RAW 3 /* SOCK_RAW of linux/net.h */
#define SOCKET_PACKET 10 /* SOCK_PACKET: AF_INET with this type is AF_PACKET */
#define PROTOCOL_ICMP 1 /* IPPROTO_* of linux/in.h and linux/in6.h */
#define PROTOCOL_UDP 17
#define PROTOCOL_ICMPV6 58
#define PROTOCOL_UDPLITE 136
#define THREAD 0x00010000 /* CLONE_THREAD of linux/sched.h */

/* The verdicts of a program at a cgroup. */
#define ALLOW 1
#define REFUSE 0

struct sockaddr {
	unsigned short sa_family;
	char sa_data[26];
} __attribute__((aligned(4)));

struct msghdr {
	void *msg_name;
	int msg_namelen;
} KERNEL_STRUCT;

struct linux_binprm {
	struct file *file;
} KERNEL_STRUCT;

struct fdtable {
	struct file **fd;
} KERNEL_STRUCT;

struct files_struct {
	struct fdtable *fdt;
} KERNEL_STRUCT;

struct task_struct___files {
	struct files_struct *files;
} KERNEL_STRUCT;

/* clang writes a type in full only if something uses it. */
struct {
	struct connect_event event;
	enum connect_constant constant;
	enum connect_op op;
	enum connect_address_kind address_kind;
	struct connect_file file;
	struct connect_question question;
} connect_types;

static __always_inline void address4_put(struct connect_attempt *a, __be32 address)
{
	__u32 *words = (void *)a->address;

	words[0] = 0;
	words[1] = 0;
	words[2] = bpf_htonl(0xffff);
	words[3] = address;
}

/* Sets the kind of the address: whether it is the unspecified one, of either family, and its meaning. */
static __always_inline void address_classify(struct connect_attempt *a)
{
	const __u64 *halves = (const void *)a->address;

	if (halves[0] || (halves[1] && halves[1] != MAPPED))
		a->address_kind = CONNECT_GIVEN;
	else
		a->address_kind = a->op == CONNECT_CONNECT ? CONNECT_SELF : CONNECT_ANY;
}

/* 0, or -EPERM. A branch, and no negation of denied, which a compiler may make of it: the verifier of Linux 6.12 and later
 * needs the range of an LSM program's result, and knows no range of a number that was negated. */
static __always_inline int refuse_if(int denied)
{
	if (!denied)
		return 0;
	asm volatile("");
	return -EPERM;
}

/* 0, or -EPERM: judges an operation with an address that user space gave to a socket. */
static __noinline int given_judge(struct socket *sock, const void *address, __u32 op)
{
	struct connect_attempt a = { .op = op };
	struct sock *sk = BPF_CORE_READ(sock, sk);
	struct sockaddr given = {};
	__u16 family;

	bpf_probe_read_kernel(&given, sizeof(given), address);
	family = given.sa_family;
	/* For a socket of IPv4, AF_UNSPEC means IPv4 in all calls but connect, where it takes the address away. */
	if (family == FAMILY_UNSPECIFIED &&
	    BPF_CORE_READ(sk, __sk_common.skc_family) == FAMILY_INET)
		family = FAMILY_INET;
	if (family != FAMILY_INET && family != FAMILY_INET6)
		return 0;
	a.port = bpf_ntohs(*(__be16 *)given.sa_data);
	a.protocol = BPF_CORE_READ(sk, sk_protocol);
	if (family == FAMILY_INET) {
		address4_put(&a, *(__be32 *)(given.sa_data + 2));
	} else {
		__u32 *from = (void *)(given.sa_data + 6), *to = (void *)a.address;

		for (int i = 0; i < 4; i++)
			to[i] = from[i];
	}
	address_classify(&a);
	return refuse_if(attempt_judge(&a));
}

/* The same with the socket's own address. */
static __noinline int own_judge(struct socket *sock, __u32 op)
{
	struct connect_attempt a = { .op = op };
	struct sock *sk = BPF_CORE_READ(sock, sk);
	__u16 family = BPF_CORE_READ(sk, __sk_common.skc_family);

	if (family != FAMILY_INET && family != FAMILY_INET6)
		return 0;
	a.port = BPF_CORE_READ(sk, __sk_common.skc_num);
	a.protocol = BPF_CORE_READ(sk, sk_protocol);
	if (family == FAMILY_INET)
		address4_put(&a, BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr));
	else
		bpf_core_read(a.address, sizeof(a.address), &sk->__sk_common.skc_v6_rcv_saddr);
	address_classify(&a);
	return refuse_if(attempt_judge(&a));
}

/* Disconnecting is no connection. */
SEC("lsm/socket_connect")
int BPF_PROG(sh_connect, struct socket *sock, struct sockaddr *address)
{
	__u16 family = 0;

	bpf_probe_read_kernel(&family, sizeof(family), address);
	return family == FAMILY_UNSPECIFIED ? 0 : given_judge(sock, address, CONNECT_CONNECT);
}

SEC("lsm/socket_bind")
int BPF_PROG(sh_bind, struct socket *sock, struct sockaddr *address)
{
	return given_judge(sock, address, CONNECT_BIND);
}

SEC("lsm/socket_listen")
int BPF_PROG(sh_listen, struct socket *sock)
{
	return own_judge(sock, CONNECT_LISTEN);
}

SEC("lsm/socket_accept")
int BPF_PROG(sh_accept, struct socket *sock)
{
	return own_judge(sock, CONNECT_ACCEPT);
}

/* Datagrams to an address, and the first data of a connection (TCP Fast Open), for which sh_connect does not run. */
SEC("lsm/socket_sendmsg")
int BPF_PROG(sh_sendmsg, struct socket *sock, struct msghdr *message)
{
	void *address = BPF_CORE_READ(message, msg_name);

	return address ? given_judge(sock, address, CONNECT_CONNECT) : 0;
}

/* No hook sees the addresses of a socket of this kind, so making it counts as every call that it permits. */
static __always_inline int kind_judge(__u32 op, __u16 protocol)
{
	struct connect_attempt a = { .op = op,
				     .address_kind = CONNECT_UNKNOWN,
				     .protocol = protocol };

	return attempt_judge(&a);
}

static __always_inline int is_raw(int family, int type)
{
	if (family == FAMILY_PACKET || family == FAMILY_XDP)
		return 1;
	if (family == FAMILY_INET && type == SOCKET_PACKET)
		return 1;
	return (family == FAMILY_INET || family == FAMILY_INET6) && type == SOCKET_RAW;
}

static __always_inline int is_inet(int family)
{
	return family == FAMILY_INET || family == FAMILY_INET6;
}

/* Whether the hooks see all addresses of a protocol. Not of the others: SCTP and DCCP take addresses from socket
 * options, and MPTCP from its peer. */
static __always_inline int is_asked(__u32 protocol)
{
	return !protocol || protocol == PROTOCOL_TCP || protocol == PROTOCOL_UDP ||
	       protocol == PROTOCOL_UDPLITE || protocol == PROTOCOL_ICMP ||
	       protocol == PROTOCOL_ICMPV6;
}

/* Whether the rules forbid to make a socket. */
static __always_inline int socket_judge(int family, int type, __u32 protocol)
{
	if (is_raw(family, type))
		return kind_judge(CONNECT_RAW, protocol);
	if (!is_inet(family) || is_asked(protocol))
		return 0;
	return kind_judge(CONNECT_CONNECT, protocol) || kind_judge(CONNECT_BIND, protocol);
}

SEC("lsm/socket_create")
int BPF_PROG(sh_socket, int family, int type, int protocol, int kern)
{
	return refuse_if(!kern && socket_judge(family, type, protocol));
}

static __always_inline int judge4(struct bpf_sock_addr *ctx, __u32 op)
{
	struct connect_attempt a = { .op = op };

	a.port = bpf_ntohs(ctx->user_port);
	a.protocol = ctx->protocol;
	address4_put(&a, ctx->user_ip4);
	address_classify(&a);
	return attempt_judge(&a) ? REFUSE : ALLOW;
}

static __always_inline int judge6(struct bpf_sock_addr *ctx, __u32 op)
{
	struct connect_attempt a = { .op = op };
	__u32 *to = (void *)a.address;

	a.port = bpf_ntohs(ctx->user_port);
	a.protocol = ctx->protocol;
	to[0] = ctx->user_ip6[0];
	to[1] = ctx->user_ip6[1];
	to[2] = ctx->user_ip6[2];
	to[3] = ctx->user_ip6[3];
	address_classify(&a);
	return attempt_judge(&a) ? REFUSE : ALLOW;
}

SEC("cgroup/connect4")
int sh_connect4(struct bpf_sock_addr *ctx)
{
	return judge4(ctx, CONNECT_CONNECT);
}

SEC("cgroup/connect6")
int sh_connect6(struct bpf_sock_addr *ctx)
{
	return judge6(ctx, CONNECT_CONNECT);
}

SEC("cgroup/sendmsg4")
int sh_sendmsg4(struct bpf_sock_addr *ctx)
{
	return judge4(ctx, CONNECT_CONNECT);
}

SEC("cgroup/sendmsg6")
int sh_sendmsg6(struct bpf_sock_addr *ctx)
{
	return judge6(ctx, CONNECT_CONNECT);
}

SEC("cgroup/bind4")
int sh_bind4(struct bpf_sock_addr *ctx)
{
	return judge4(ctx, CONNECT_BIND);
}

SEC("cgroup/bind6")
int sh_bind6(struct bpf_sock_addr *ctx)
{
	return judge6(ctx, CONNECT_BIND);
}

SEC("cgroup/sock_create")
int sh_sock(struct bpf_sock *ctx)
{
	return socket_judge(ctx->family, ctx->type, ctx->protocol) ? REFUSE : ALLOW;
}

/* Puts a process under these rules from now on. */
static __always_inline void process_put(struct guard_process *process, __u64 rules)
{
	struct connect_count *count;

	if (!bpf_map_update_elem(&sh_c_tasks, process, &rules, BPF_ANY))
		return;
	count = count_get();
	if (count)
		count->untracked++;
}

/* A process keeps its rules when it executes another program. */
SEC("tp_btf/sched_process_exec")
int BPF_PROG(sh_exec, struct task_struct *task, int old_pid, struct linux_binprm *bprm)
{
	struct guard_process process = process_of(task);
	__u64 had = rules_of_process(&process), rules;
	struct connect_policy *policy = policy_get();

	if (!policy)
		return 0;
	rules = had | (rules_of_file(BPF_CORE_READ(bprm, file, f_inode)) & policy->children);
	if (rules != had)
		process_put(&process, rules);
	return 0;
}

SEC("tp_btf/task_newtask")
int BPF_PROG(sh_fork, struct task_struct *task, unsigned long clone_flags)
{
	struct task_struct *current = (void *)bpf_get_current_task();
	struct guard_process process = process_of(current);
	struct connect_policy *policy = policy_get();
	__u64 rules;

	if (clone_flags & THREAD || !policy)
		return 0;
	rules = rules_of_process(&process) |
		(rules_of_file(executable(current)) & policy->children);
	if (!rules)
		return 0;
	process = process_of(task);
	process_put(&process, rules);
	return 0;
}

/* The kernel frees a process's first thread last. */
SEC("tp_btf/sched_process_free")
int BPF_PROG(sh_end, struct task_struct *task)
{
	struct guard_process process;

	if (BPF_CORE_READ(task, group_leader) != task)
		return 0;
	process = process_of(task);
	bpf_map_delete_elem(&sh_c_tasks, &process);
	return 0;
}

/* Finds the processes that began before the programs were attached, and puts them under their rules. */
SEC("iter/task")
int sh_walk(struct bpf_iter__task *ctx)
{
	struct connect_policy *policy = policy_get();
	struct connect_count *count = count_get();
	struct task_struct *task = ctx->task, *parent;
	struct guard_process process, above;
	__u64 had, rules;

	if (!task || !policy || !count)
		return 0;
	process = process_of(task);
	parent = BPF_CORE_READ((struct task_struct___connect *)task, real_parent);
	above = process_of(parent);
	had = rules_of_process(&process);
	rules = had | rules_of_process(&above) |
		(rules_of_file(executable(task)) & policy->children);
	if (rules == had)
		return 0;
	process_put(&process, rules);
	count->changed++;
	return 0;
}

/* User space cannot ask every file system for i_generation, so a program reads it. */
SEC("syscall")
int sh_file(struct connect_file *key)
{
	struct task_struct___files *task = (void *)bpf_get_current_task();
	struct file **files = BPF_CORE_READ(task, files, fdt, fd), *file = NULL;

	bpf_probe_read_kernel(&file, sizeof(file), files + key->fd);
	if (file)
		key->file = file_of(BPF_CORE_READ(file, f_inode));
	return 0;
}

/* Says which rules would forbid an operation to a process. */
SEC("syscall")
int sh_ask(struct connect_question *q)
{
	struct connect_attempt a = { .op = q->op,
				     .address_kind = q->address_kind,
				     .port = q->port };
	struct guard_process process = q->process;
	struct guard_file program = q->program;
	__u64 *rules = bpf_map_lookup_elem(&sh_c_programs, &program);

	a.rules = (rules ? *rules : 0) | rules_of_process(&process);
	__builtin_memcpy(a.address, q->address, sizeof(a.address));
	if (a.address_kind == CONNECT_GIVEN)
		address_classify(&a);
	attempt_weigh(&a);
	/* One write each: the verifier takes no address of either field. */
	q->denied = a.is_denied ? a.rules : 0;
	q->audited = a.is_denied ? 0 : a.rules;
	return 0;
}
