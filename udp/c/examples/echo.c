/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Echo answers each datagram of a lease with itself, from AF_XDP and, for datagrams that AF_XDP does
 * not get, from the kernel's socket on the same port:
 *
 *	echo --socket /run/shunt/udp.sock --name echo --address 192.0.2.10 --port 5000
 *
 * It needs no right but the offer's. It goes on without a lease: on the kernel's socket.
 */
#include "../shunt_udp.h"

#include <getopt.h>
#include <netdb.h>

/* The ordinary socket that a program for sockets has anyway. */
static int kernel_socket(const char *address, const char *port)
{
	struct addrinfo hints, *to;
	int fd, code;

	memset(&hints, 0, sizeof(hints));
	hints.ai_flags = AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV;
	hints.ai_socktype = SOCK_DGRAM;
	code = getaddrinfo(address, port, &hints, &to);
	if (code != 0) {
		fprintf(stderr, "echo: %s, port %s: %s\n", address, port, gai_strerror(code));
		return -1;
	}
	fd = socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || bind(fd, to->ai_addr, to->ai_addrlen) < 0) {
		fprintf(stderr, "echo: listen on %s, port %s: %s\n", address, port,
			strerror(errno));
		fd = -1;
	}
	freeaddrinfo(to);
	return fd;
}

/* Answers datagrams that AF_XDP does not get: fragments, options, and all without a lease. */
static void answer_kernel(int fd)
{
	static char buffer[64 << 10];

	for (;;) {
		struct sockaddr_storage from;
		socklen_t from_size = sizeof(from);
		ssize_t size = recvfrom(fd, buffer, sizeof(buffer), 0, (struct sockaddr *)&from,
					&from_size);

		if (size < 0)
			return;
		(void)!sendto(fd, buffer, (size_t)size, 0, (struct sockaddr *)&from, from_size);
	}
}

/* Answers the datagrams of a queue, and returns their number. */
static uint32_t answer_queue(struct shunt_udp_queue *queue)
{
	struct xdp_desc batch[64];
	uint32_t count = shunt_udp_receive(queue, batch, 64), ready = 0, sent;

	for (uint32_t i = 0; i < count; i++) {
		if (shunt_udp_reply(queue, &batch[i]) == 0)
			batch[ready++] = batch[i];
		else /* not plain UDP, or the lease cannot send */
			shunt_udp_release(queue, &batch[i], 1);
	}
	sent = shunt_udp_send(queue, batch, ready);
	shunt_udp_release(queue, batch + sent, ready - sent);
	if (shunt_udp_flush(queue) < 0)
		fprintf(stderr, "echo: send: %s\n", strerror(errno));
	return count;
}

int main(int argc, char **argv)
{
	static struct shunt_udp_lease lease;
	static const struct option names[] = {
		{ "socket", required_argument, NULL, 's' },
		{ "name", required_argument, NULL, 'n' },
		{ "address", required_argument, NULL, 'a' },
		{ "port", required_argument, NULL, 'p' },
		{ NULL, 0, NULL, 0 },
	};
	const char *address = "::", *port = "5000";
	struct shunt_udp_options options;
	struct pollfd kernel;
	uint32_t rounds = 0;

	memset(&options, 0, sizeof(options));
	options.name = "echo";
	options.spin_us = 50;
	for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
		switch (c) {
		case 's':
			options.socket = optarg;
			break;
		case 'n':
			options.name = optarg;
			break;
		case 'a':
			address = optarg;
			break;
		case 'p':
			port = optarg;
			break;
		default:
			return 2;
		}
	}
	options.also = kernel.fd = kernel_socket(address, port);
	kernel.events = POLLIN;
	if (kernel.fd < 0)
		return 1;
	for (;;) {
		if (shunt_udp_open(&lease, &options) == 0) {
			printf("answering on %u queues in %s mode\n", lease.queue_count,
			       shunt_udp_mode_text(lease.mode));
			fflush(stdout);
			/* One thread has all queues, so the first one's CPU is theirs. */
			if (shunt_udp_pin(&lease.queues[0]) < 0)
				fprintf(stderr, "echo: run on CPU %u: %s\n",
					lease.queues[0].layout.cpu, strerror(errno));
			while (shunt_udp_wait(&lease, 1000) >= 0) {
				uint32_t count = 0;

				for (uint32_t i = 0; i < lease.queue_count; i++)
					count += answer_queue(&lease.queues[i]);
				if (count == 0 || rounds++ % 64 == 0) /* so that neither starves */
					answer_kernel(kernel.fd);
			}
		}
		fprintf(stderr, "echo: the kernel's socket answers: %s\n", lease.error);
		shunt_udp_close(&lease);
		if (lease.end_code == SHUNT_UDP_END_PROTOCOL ||
		    lease.end_code == SHUNT_UDP_END_TAMPERED)
			return 1; /* this program has a fault */
		for (uint64_t end = shunt_udp_now(CLOCK_MONOTONIC) + 1000000000;
		     shunt_udp_now(CLOCK_MONOTONIC) < end;) {
			poll(&kernel, 1, 100);
			answer_kernel(kernel.fd);
		}
	}
}
