/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Echoes or receives datagrams in one of the ways that are compared, until SIGTERM:
 *
 *	subject WAY TASK CPU SOCKET	WAY: recvfrom recvfrom-spin recvmmsg-spin recvmmsg-busy sleep adaptive spin
 *					TASK: echo receive
 *
 * CPU is the one to run on, -1 any; SOCKET is the broker's. It prints "ready" once it answers, and at the end "took N".
 */
#include "../../../udp/c/shunt_udp.h"

#include <netinet/in.h>
#include <sched.h>
#include <signal.h>

#define BATCH 64
#define PORT 5000
#define ROOM (8 << 20) /* bytes of a socket's queue, also above net.core.rmem_max */
#define ADAPTIVE_US 50 /* as a program that has little to lose would spin */

static volatile sig_atomic_t ended;
static int echoes;
static uint64_t taken;

static void end(int number)
{
	(void)number;
	ended = 1;
}

static int fail(const char *what)
{
	fprintf(stderr, "subject: %s: %s\n", what, strerror(errno));
	return 1;
}

static void ready(void)
{
	printf("ready\n");
	fflush(stdout);
}

static int listen_socket(void)
{
	struct sockaddr_in at;
	struct timeval wait = { 0, 10000 }; /* so that a blocking one notices its end */
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), room = ROOM;

	memset(&at, 0, sizeof(at));
	at.sin_family = AF_INET;
	at.sin_port = htons(PORT);
	if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof(at)) < 0 ||
	    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) < 0 ||
	    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room)) < 0)
		return -1;
	return fd;
}

static int one_by_one(int flags)
{
	static char buffer[2048];
	int fd = listen_socket();

	if (fd < 0)
		return fail("listen");
	for (ready(); !ended;) {
		struct sockaddr_in from;
		socklen_t size = sizeof(from);
		ssize_t n = recvfrom(fd, buffer, sizeof(buffer), flags, (struct sockaddr *)&from,
				     &size);

		taken += n >= 0;
		if (n >= 0 && echoes)
			sendto(fd, buffer, (size_t)n, MSG_DONTWAIT, (struct sockaddr *)&from, size);
	}
	return 0;
}

/* recvmmsg, spinning or with busy polling, and sendmmsg for the answers. */
static int in_batches(int polls)
{
	static char buffers[BATCH][2048];
	static struct sockaddr_in from[BATCH];
	static struct iovec parts[BATCH];
	static struct mmsghdr batch[BATCH];
	int fd = listen_socket(), us = 50, budget = BATCH;

	if (fd < 0)
		return fail("listen");
	if (polls && (setsockopt(fd, SOL_SOCKET, SO_BUSY_POLL, &us, sizeof(us)) < 0 ||
		      setsockopt(fd, SOL_SOCKET, SO_BUSY_POLL_BUDGET, &budget, sizeof(budget)) < 0))
		return fail("ask for busy polling");
	for (ready(); !ended;) {
		for (int i = 0; i < BATCH; i++) {
			parts[i].iov_base = buffers[i];
			parts[i].iov_len = sizeof(buffers[i]);
			batch[i].msg_hdr.msg_name = &from[i];
			batch[i].msg_hdr.msg_namelen = sizeof(from[i]);
			batch[i].msg_hdr.msg_iov = &parts[i];
			batch[i].msg_hdr.msg_iovlen = 1;
		}
		int n = recvmmsg(fd, batch, BATCH, MSG_DONTWAIT, NULL);

		for (int i = 0; i < n; i++)
			parts[i].iov_len = batch[i].msg_len;
		if (n > 0)
			taken += (uint64_t)n;
		if (n > 0 && echoes)
			sendmmsg(fd, batch, (unsigned int)n, MSG_DONTWAIT);
	}
	return 0;
}

static void take(struct shunt_udp_queue *queue)
{
	struct xdp_desc batch[BATCH];
	uint32_t count = shunt_udp_receive(queue, batch, BATCH), answers = 0, sent;

	taken += count;
	if (!echoes) {
		shunt_udp_release(queue, batch, count);
		return;
	}
	for (uint32_t i = 0; i < count; i++) {
		if (shunt_udp_reply(queue, &batch[i]) == 0)
			batch[answers++] = batch[i];
		else
			shunt_udp_release(queue, &batch[i], 1);
	}
	sent = shunt_udp_send(queue, batch, answers);
	shunt_udp_release(queue, batch + sent, answers - sent);
	shunt_udp_flush(queue);
}

static int leased(const char *path, int waits, uint32_t spin_us)
{
	static struct shunt_udp_lease lease;
	struct shunt_udp_options options;

	memset(&options, 0, sizeof(options));
	options.socket = path;
	options.name = "bench";
	options.spin_us = spin_us;
	if (shunt_udp_open(&lease, &options) != 0) {
		fprintf(stderr, "subject: %s\n", lease.error);
		return 1;
	}
	for (ready(); !ended;) {
		if ((waits ? shunt_udp_wait(&lease, 10) : shunt_udp_tend(&lease)) < 0) {
			fprintf(stderr, "subject: %s\n", lease.error);
			return 1;
		}
		take(&lease.queues[0]);
	}
	shunt_udp_close(&lease);
	return 0;
}

static int work(const char *way, const char *path)
{
	if (strcmp(way, "recvfrom") == 0)
		return one_by_one(0);
	if (strcmp(way, "recvfrom-spin") == 0)
		return one_by_one(MSG_DONTWAIT);
	if (strcmp(way, "recvmmsg-spin") == 0)
		return in_batches(0);
	if (strcmp(way, "recvmmsg-busy") == 0)
		return in_batches(1);
	if (strcmp(way, "sleep") == 0)
		return leased(path, 1, 0);
	if (strcmp(way, "adaptive") == 0)
		return leased(path, 1, ADAPTIVE_US);
	if (strcmp(way, "spin") == 0)
		return leased(path, 0, 0);
	return 2;
}

int main(int argc, char **argv)
{
	cpu_set_t set;
	int status;

	if (argc != 5)
		return 2;
	echoes = strcmp(argv[2], "echo") == 0;
	if (atoi(argv[3]) >= 0) {
		CPU_ZERO(&set);
		CPU_SET((size_t)atoi(argv[3]), &set);
		if (sched_setaffinity(0, sizeof(set), &set) < 0)
			return fail("run on the CPU");
	}
	signal(SIGTERM, end);
	status = work(argv[1], argv[4]);
	printf("took %llu\n", (unsigned long long)taken);
	return status;
}
