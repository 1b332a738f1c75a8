/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A peer of c/subject.c: libxdp's own socket with the program that it brings, and a loop that spins. It runs until SIGTERM:
 *
 *	libxdp TASK CPU INTERFACE		TASK: echo receive
 *
 * It prints "ready" once its socket is there, and at the end of receive "took N". libxdp's program takes all packets of the
 * interface, also ARP.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/if_link.h>
#include <linux/if_xdp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <xdp/xsk.h>

#define BATCH 64
#define RING 2048 /* libxdp's own */
#define FRAMES (2 * RING)
#define FRAME_SIZE 2048

static volatile sig_atomic_t ended;

static struct xsk_ring_prod fill, transmit;
static struct xsk_ring_cons completion, receive;
static struct xsk_socket *xsk;
static uint8_t *frames;

static void end(int number)
{
	(void)number;
	ended = 1;
}

static int fail(const char *task, int error)
{
	fprintf(stderr, "libxdp: %s: %s\n", task, strerror(error));
	return 1;
}

static void swap(uint8_t *a, uint8_t *b, size_t size)
{
	uint8_t kept[6];

	memcpy(kept, a, size);
	memcpy(a, b, size);
	memcpy(b, kept, size);
}

/* Makes an answer of a datagram over IPv4 without options. Sums of checksums do not change. */
static void answer(uint8_t *packet)
{
	swap(packet, packet + 6, 6);
	swap(packet + 26, packet + 30, 4);
	swap(packet + 34, packet + 36, 2);
}

/* Gives frames back to the kernel to receive into. The fill ring has room for all. */
static void refill(const uint64_t *addresses, uint32_t count)
{
	uint32_t at;

	if (count == 0)
		return;
	if (xsk_ring_prod__reserve(&fill, count, &at) != count)
		abort();
	for (uint32_t i = 0; i < count; i++)
		*xsk_ring_prod__fill_addr(&fill, at + i) = addresses[i];
	xsk_ring_prod__submit(&fill, count);
}

/* Takes back the frames that were sent. */
static void complete(void)
{
	uint64_t addresses[BATCH];
	uint32_t at, count = xsk_ring_cons__peek(&completion, BATCH, &at);

	for (uint32_t i = 0; i < count; i++)
		addresses[i] = *xsk_ring_cons__comp_addr(&completion, at + i) &
			       ~(uint64_t)(FRAME_SIZE - 1);
	xsk_ring_cons__release(&completion, count);
	refill(addresses, count);
}

/* Sends the received frames if there is room for all; otherwise they go back. */
static void reply(uint32_t from, uint32_t count)
{
	uint64_t left[BATCH];
	uint32_t to, sent = count;

	if (xsk_ring_prod__reserve(&transmit, count, &to) != count)
		sent = 0;
	for (uint32_t i = 0; i < count; i++) {
		const struct xdp_desc *in = xsk_ring_cons__rx_desc(&receive, from + i);

		left[i] = in->addr & ~(uint64_t)(FRAME_SIZE - 1);
		if (sent == 0)
			continue;
		answer(frames + in->addr);
		*xsk_ring_prod__tx_desc(&transmit, to + i) = *in;
	}
	if (sent == 0) {
		refill(left, count);
		return;
	}
	xsk_ring_prod__submit(&transmit, sent);
	if (xsk_ring_prod__needs_wakeup(&transmit))
		sendto(xsk_socket__fd(xsk), NULL, 0, MSG_DONTWAIT, NULL, 0);
}

static uint64_t take(int echoes)
{
	uint64_t addresses[BATCH];
	uint32_t at, count = xsk_ring_cons__peek(&receive, BATCH, &at);

	if (count > 0 && echoes) {
		reply(at, count);
	} else if (count > 0) {
		for (uint32_t i = 0; i < count; i++)
			addresses[i] = xsk_ring_cons__rx_desc(&receive, at + i)->addr &
				       ~(uint64_t)(FRAME_SIZE - 1);
		refill(addresses, count);
	}
	xsk_ring_cons__release(&receive, count);
	if (echoes)
		complete();
	return count;
}

static int open_socket(const char *interface)
{
	struct xsk_umem_config memory = { .fill_size = 2 * FRAMES,
					  .comp_size = RING,
					  .frame_size = FRAME_SIZE };
	struct xsk_socket_config config = { .rx_size = RING,
					    .tx_size = RING,
					    .xdp_flags = XDP_FLAGS_DRV_MODE,
					    .bind_flags = XDP_USE_NEED_WAKEUP };
	struct xsk_umem *umem;
	uint64_t addresses[BATCH];
	int error;

	frames = mmap(NULL, FRAMES * FRAME_SIZE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (frames == MAP_FAILED)
		return errno;
	error = xsk_umem__create(&umem, frames, FRAMES * FRAME_SIZE, &fill, &completion, &memory);
	if (error != 0)
		return -error;
	for (uint64_t i = 0; i < FRAMES; i += BATCH) {
		for (uint64_t n = 0; n < BATCH; n++)
			addresses[n] = (i + n) * FRAME_SIZE;
		refill(addresses, BATCH);
	}
	return -xsk_socket__create(&xsk, interface, 0, umem, &receive, &transmit, &config);
}

int main(int argc, char **argv)
{
	cpu_set_t set;
	uint64_t taken = 0;
	int error, echoes;

	if (argc != 4)
		return 2;
	echoes = strcmp(argv[1], "echo") == 0;
	if (atoi(argv[2]) >= 0) {
		CPU_ZERO(&set);
		CPU_SET((size_t)atoi(argv[2]), &set);
		if (sched_setaffinity(0, sizeof(set), &set) < 0)
			return fail("run on the CPU", errno);
	}
	signal(SIGTERM, end);
	error = open_socket(argv[3]);
	if (error != 0)
		return fail("open a socket of libxdp", error);
	printf("ready\n");
	fflush(stdout);
	while (!ended)
		taken += take(echoes);
	printf("took %llu\n", (unsigned long long)taken);
	fflush(stdout);
	xsk_socket__delete(xsk); /* with the program */
	return 0;
}
