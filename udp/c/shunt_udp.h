/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * shunt_udp.h: UDP datagrams that skip the kernel's stack, in C and C++.
 *
 * XDP puts the datagrams into memory that this program maps (AF_XDP). The program needs no capability and
 * no library: over a unix socket it asks shunt's broker for a lease, by the name that the administrator
 * gave it. This file is the whole client; its functions are static, so include it where you use them.
 *
 *	static struct shunt_udp_lease lease;
 *	struct shunt_udp_options options;
 *	struct xdp_desc batch[64];
 *
 *	memset(&options, 0, sizeof(options));
 *	options.name = "feed";
 *	if (shunt_udp_open(&lease, &options) != 0)
 *		... lease.error says why, and lease.end_code
 *	while (shunt_udp_wait(&lease, 1000) >= 0)
 *		for (uint32_t i = 0; i < lease.queue_count; i++) {
 *			struct shunt_udp_queue *queue = &lease.queues[i];
 *			uint32_t count = shunt_udp_receive(queue, batch, 64);
 *			... shunt_udp_packet(queue, &batch[n], &packet)
 *			shunt_udp_release(queue, batch, count);
 *		}
 *	... lease.error says why it is over
 *	shunt_udp_close(&lease);
 *
 *	   +-------- fill <-------- release --------+
 *	   v                                        |
 *	kernel ----> receive ring ----> program ----+ reply, send
 *	   ^                               ^        |
 *	   |                        reserve|        v
 *	   +-- completion <-- kernel <-----+-- transmit ring
 *
 * A frame is in exactly one of these places. If a program gives a frame back twice, its data can change
 * while the program reads it.
 *
 * Keep an ordinary socket open on the same port and read it too (options.also): it gets fragments and
 * other packets that are not plain UDP, and after the lease it gets all datagrams.
 *
 * If the broker leaves its leases to its successor, a lease goes on while the broker is stopped, was
 * killed or is replaced: datagrams come as before, and wait and tend find the next broker.
 *
 * A lease and its queues belong to one thread at a time. This header starts no thread: shunt_udp_wait
 * keeps the lease alive. A program that does not call it for a third of lease.term_ms (10 s unless the
 * broker says otherwise) calls shunt_udp_tend meanwhile. A child of fork cannot do this: the broker takes
 * messages only from the process that connected.
 *
 * Compile with gcc or clang, as C11 or C++17 or later. With -std=c11 include it first, or define
 * _GNU_SOURCE. The header is for Linux 6.1 and later, and for little-endian machines.
 * docs/guide/udp-protocol.md describes the messages; a test compares every size, offset and number here
 * with the broker's.
 */
#ifndef SHUNT_UDP_H
#define SHUNT_UDP_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* struct cmsghdr's macros, F_GET_SEALS, clock_gettime */
#endif

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_xdp.h>
#include <poll.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* ---- Messages over the socket: docs/guide/udp-protocol.md ---- */

enum {
	SHUNT_UDP_VERSION = 1,
	SHUNT_UDP_QUEUES_MAX = 64,
	SHUNT_UDP_ADDRESSES_MAX = 16,
	SHUNT_UDP_NAME_MAX = 63, /* bytes of an offer's name */
	SHUNT_UDP_SIZE_MAX = 8192, /* more than the size of any message, bytes */
	/* The 8 bytes in front of each received packet are the time at which XDP saw it. */
	SHUNT_UDP_FLAG_STAMPED = 1,
	SHUNT_UDP_FLAG_BUSY_POLL = 2,
	/* The broker takes Report in place of Renew. */
	SHUNT_UDP_FLAG_REPORT = 4,
	/* The administrator's advice for waiting for packets: one of these, or none. */
	SHUNT_UDP_FLAG_SPIN = 8, /* look at the rings all the time */
	SHUNT_UDP_FLAG_ADAPTIVE = 16, /* look for SHUNT_UDP_ADAPTIVE_US, then sleep */
	SHUNT_UDP_FLAG_SLEEP = 32, /* sleep at once */
	SHUNT_UDP_ADAPTIVE_US = 50,
	/* The lease outlives the broker's process: Resume. */
	SHUNT_UDP_FLAG_RESUME = 64,
};

#define SHUNT_UDP_NO_CPU 0xffffffffu
#define SHUNT_UDP_NO_SPIN 0xffffffffu /* options.spin_us: sleep at once, against the advice, too */

#define SHUNT_UDP_MAGIC "shuntudp"
#define SHUNT_UDP_SOCKET "/run/shunt/udp.sock" /* where the broker listens */

enum shunt_udp_type {
	SHUNT_UDP_HELLO = 1,
	SHUNT_UDP_WELCOME = 2,
	SHUNT_UDP_REQUEST = 3,
	SHUNT_UDP_GRANT = 4,
	SHUNT_UDP_READY = 5,
	SHUNT_UDP_SERVING = 6,
	SHUNT_UDP_RENEW = 7,
	SHUNT_UDP_RENEWED = 8,
	SHUNT_UDP_END = 9,
	SHUNT_UDP_REPORT = 10,
	SHUNT_UDP_RESUME = 11,
};

enum shunt_udp_mode {
	SHUNT_UDP_ZERO_COPY = 1, /* the driver writes into the memory */
	SHUNT_UDP_COPY = 2, /* the kernel copies each frame */
	SHUNT_UDP_GENERIC = 3, /* the kernel makes an sk_buff of each frame first */
};

/* Why the broker refuses or ends a lease. */
enum shunt_udp_end_code {
	SHUNT_UDP_END_REFUSED = 1, /* no rule allows the process, or there is no such offer */
	SHUNT_UDP_END_BUSY = 2, /* another process has the lease, or one of its queues */
	SHUNT_UDP_END_FAILED =
		3, /* the kernel refused a system call that the lease needs: lease.error says which */
	SHUNT_UDP_END_PROTOCOL =
		4, /* this program sent a message that is not allowed at this point */
	SHUNT_UDP_END_EXPIRED = 5, /* the program did not renew the lease in time */
	SHUNT_UDP_END_REVOKED = 6, /* the offer was changed or removed, or the broker ends */
	SHUNT_UDP_END_TAMPERED = 7, /* the rings had impossible contents */
	SHUNT_UDP_END_TOO_MANY =
		8, /* the user has too many connections, or the program sent too many messages */
	SHUNT_UDP_END_MALFORMED = 9, /* a message could not be read */
};

struct shunt_udp_header {
	uint16_t type;
	uint16_t version;
	uint32_t size; /* of the whole message, bytes */
};

struct shunt_udp_msg_hello {
	struct shunt_udp_header header;
	uint8_t magic[8];
	uint16_t version_min, version_max;
	uint8_t reserved[4];
};

struct shunt_udp_msg_welcome {
	struct shunt_udp_header header;
	uint64_t nonce;
	uint16_t version;
	uint8_t reserved[2];
	uint32_t term_ms;
};

struct shunt_udp_msg_request {
	struct shunt_udp_header header;
	uint64_t nonce;
	char name[SHUNT_UDP_NAME_MAX + 1];
};

/* A destination of the lease's datagrams. */
struct shunt_udp_address {
	uint8_t ip[16]; /* network order; IPv4 as ::ffff:a.b.c.d */
	uint16_t port; /* a number, not in network order */
	uint8_t reserved[6];
};

/* A queue's part of the memory, and its rings. */
struct shunt_udp_layout {
	uint32_t index; /* of the interface's receive queue */
	uint32_t frame_size; /* bytes */
	uint64_t offset; /* of its frames in the memory, bytes */
	uint32_t receive_frames; /* addresses 0 and up, from offset on */
	uint32_t transmit_frames; /* behind them */
	uint32_t receive_ring; /* entries */
	uint32_t transmit_ring; /* 0: the socket cannot send */
	uint32_t fill_ring;
	uint32_t completion_ring;
	uint32_t
		cpu; /* on which the administrator wants the queue's thread: shunt_udp_pin; SHUNT_UDP_NO_CPU: any */
	uint8_t reserved[4];
};

struct shunt_udp_msg_grant {
	struct shunt_udp_header header;
	uint64_t lease;
	uint32_t interface;
	uint32_t queue_count;
	uint32_t address_count;
	uint32_t flags; /* SHUNT_UDP_FLAG_... */
	struct shunt_udp_address addresses[SHUNT_UDP_ADDRESSES_MAX];
	struct shunt_udp_layout queues[SHUNT_UDP_QUEUES_MAX];
};

struct shunt_udp_msg_ready {
	struct shunt_udp_header header;
	uint64_t lease;
};

struct shunt_udp_msg_serving {
	struct shunt_udp_header header;
	uint64_t lease;
	uint32_t mode;
	uint32_t term_ms;
	char reason[256];
};

struct shunt_udp_msg_renew {
	struct shunt_udp_header header;
	uint64_t lease;
	uint64_t sequence;
};

/* The counters of a queue that only this program knows: shunt_udp_counts has more. */
struct shunt_udp_claim {
	uint64_t stale;
	uint64_t tx_short;
	uint64_t kicks;
	uint64_t wakeups;
};

struct shunt_udp_msg_report {
	struct shunt_udp_header header;
	uint64_t lease;
	uint64_t sequence;
	struct shunt_udp_claim claims[SHUNT_UDP_QUEUES_MAX];
};

/* Sent in place of Request, to the broker's successor. Its files are copies of Grant's files. */
struct shunt_udp_msg_resume {
	struct shunt_udp_header header;
	uint64_t nonce;
	uint64_t lease;
	uint32_t queue_count;
	uint8_t reserved[4];
};

/* matched = passed_no_socket + the datagrams that the queue's socket was given. */
struct shunt_udp_count {
	uint64_t matched; /* datagrams to the lease's addresses */
	/* Matched datagrams for which the queue had no socket: they go to the kernel's stack, or are dropped
	 * if the administrator set on_no_socket: drop. */
	uint64_t passed_no_socket;
};

struct shunt_udp_msg_renewed {
	struct shunt_udp_header header;
	uint64_t lease;
	uint64_t sequence;
	struct shunt_udp_count counts[SHUNT_UDP_QUEUES_MAX];
};

struct shunt_udp_msg_end {
	struct shunt_udp_header header;
	uint32_t code;
	uint8_t reserved[4];
	char text[512];
};

/* ---- The program's interface ---- */

struct shunt_udp_options {
	const char *socket; /* of the broker; NULL: SHUNT_UDP_SOCKET */
	const char *name; /* of the offer */
	/* The time for which wait looks at the rings before it sleeps; SHUNT_UDP_NO_SPIN: it sleeps at once; 0: as the
	 * administrator advises (lease.advice), and without advice it sleeps at once. */
	uint32_t spin_us;
	/* receive drops datagrams that XDP saw longer ago, and counts them as stale; 0: it drops none. The
	 * administrator must have set timestamps. */
	uint32_t max_age_us;
	int also; /* another descriptor that wait watches: the ordinary socket; 0: none */
	int open_ms; /* how long open may take; 0: 20 s, as a queue that was just closed may need 10 */
};

/* One of a socket's rings. Indices run freely and wrap at 2^32. Entries are this side's from own up to
 * limit: the entries that the kernel has filled, or has emptied (its index plus size). */
struct shunt_udp_ring {
	uint32_t *mine, *theirs,
		*flags; /* shared with the kernel: this side's index, the kernel's */
	void *entries; /* shared with the kernel */
	void *map; /* for munmap */
	size_t map_size;
	uint32_t size; /* entries, a power of two */
	uint32_t
		ahead; /* of the kernel's index: 0 where this side consumes, size where it produces */
	uint32_t own, limit;
};

/* The program's own counters of a queue. Each renewal and the end report stale, tx_short, kicks and
 * wakeups to the broker, and `shunt udp show` prints them. */
struct shunt_udp_counts {
	uint64_t delivered; /* frames that receive gave to the program */
	uint64_t invalid; /* frames from the kernel that lie outside the memory */
	uint64_t stale; /* datagrams that were older than options.max_age_us */
	uint64_t sent; /* frames that send put into the ring */
	uint64_t tx_short; /* frames for which send or reserve had no room */
	uint64_t kicks; /* system calls to have frames sent */
	uint64_t wakeups; /* times that datagrams of this queue woke wait */
	uint64_t polls; /* system calls that run the driver's work: queue.busy_poll */
	uint32_t held,
		held_max; /* frames that the program has; near receive_frames the kernel drops */
};

struct shunt_udp_queue {
	struct shunt_udp_layout layout;
	struct shunt_udp_counts counts;
	struct shunt_udp_count broker; /* as the last Renewed said: see shunt_udp_ask */
	int fd; /* the AF_XDP socket */
	const char *fault; /* why the queue has stopped; NULL: it works */

	int stamped;
	/* Whether this program runs the driver's work in place of interrupts, because the administrator set
	 * busy_poll. receive and wait do it; call them often, as datagrams wait meanwhile. */
	int busy_poll;
	uint64_t max_age_ns;
	uint8_t *frames;
	struct shunt_udp_ring receive, transmit, fill, completion;
	uint64_t *free; /* addresses of frames for reserve */
	uint32_t free_count;
	uint32_t sending; /* frames between send and completion */
};

/* Whether a broker is there. */
enum shunt_udp_state {
	SHUNT_UDP_OPENING = 0,
	SHUNT_UDP_HELD = 1, /* it is */
	SHUNT_UDP_ALONE = 2, /* it has gone: connect to its successor at renew_at */
	SHUNT_UDP_GREETING = 3, /* Welcome is awaited from a successor */
	SHUNT_UDP_RESUMING = 4, /* and Serving */
};

/* The fields down to error may be read. */
struct shunt_udp_lease {
	struct shunt_udp_queue queues[SHUNT_UDP_QUEUES_MAX];
	struct shunt_udp_address addresses[SHUNT_UDP_ADDRESSES_MAX];
	uint32_t queue_count, address_count;
	uint32_t mode; /* enum shunt_udp_mode */
	char reason[256]; /* why not zero-copy */
	uint32_t term_ms; /* a lease ends if it is not renewed for so long */
	uint64_t wakeups; /* times that wait was woken */
	uint64_t resumed; /* times that a successor of the broker has taken the lease over */
	uint32_t advice; /* SHUNT_UDP_FLAG_SPIN, _ADAPTIVE or _SLEEP; 0: none */
	uint32_t end_code; /* enum shunt_udp_end_code; 0: the broker has not said that it is over */
	char error[768]; /* the operation that failed, the reason, and the remedy */

	int connection;
	int also;
	int over; /* the lease is over, or was never had */
	int reports; /* the broker takes the counters */
	int resumes; /* the lease outlives the broker's process */
	int state; /* enum shunt_udp_state */
	uint64_t again_ns; /* the wait after the next try that fails */
	char path[108]; /* of the broker's socket */
	uint64_t number;
	uint64_t sequence, answered; /* of the last Renew and Renewed */
	uint64_t renew_at, look_at; /* CLOCK_MONOTONIC, ns */
	uint64_t spin_ns; /* UINT64_MAX: without limit */
	int memory_fd;
	uint8_t *memory;
	size_t memory_size;
};

/* A received UDP packet. The payload lies in the frame, and is valid as long as that is held. */
struct shunt_udp_datagram {
	struct shunt_udp_address source, destination;
	uint8_t *payload;
	uint32_t payload_size;
};

/* The kernel's counters of a queue, since the lease began. waiting and taken: see shunt_udp_statistics. */
struct shunt_udp_kernel_counts {
	uint32_t taken; /* packets that the program received, modulo 2^32 */
	uint32_t waiting; /* packets in the ring */
	uint64_t dropped; /* packets without a free frame, or larger than one */
	uint64_t ring_full; /* packets that met a full ring: the program is too slow */
	uint64_t invalid; /* addresses that the program gave back and that are no frame's */
	uint64_t tx_invalid; /* addresses that the program sent and that are no frame's */
};

/* ---- Rings ---- */

/* The number of entries, of want, that are this side's now, beginning with index own. */
static inline uint32_t shunt_udp_ready(struct shunt_udp_queue *queue, struct shunt_udp_ring *ring,
				       uint32_t want)
{
	if (ring->limit - ring->own < want) {
		ring->limit = __atomic_load_n(ring->theirs, __ATOMIC_ACQUIRE) + ring->ahead;
		if (ring->limit - ring->own > ring->size) {
			queue->fault = "a ring's indices contradict each other";
			return 0;
		}
	}
	return ring->limit - ring->own < want ? ring->limit - ring->own : want;
}

/* Makes entries the kernel's. */
static inline void shunt_udp_publish(struct shunt_udp_ring *ring, uint32_t count)
{
	ring->own += count;
	__atomic_store_n(ring->mine, ring->own, __ATOMIC_RELEASE);
}

static inline struct xdp_desc *shunt_udp_descriptor(struct shunt_udp_ring *ring, uint32_t index)
{
	return (struct xdp_desc *)ring->entries + (index & (ring->size - 1));
}

static inline uint64_t *shunt_udp_entry(struct shunt_udp_ring *ring, uint32_t index)
{
	return (uint64_t *)ring->entries + (index & (ring->size - 1));
}

/* The beginning of the frame that an address lies in. Frames have 2048 or 4096 bytes. */
static inline uint64_t shunt_udp_frame(const struct shunt_udp_queue *queue, uint64_t address)
{
	return address & ~((uint64_t)queue->layout.frame_size - 1);
}

/* Whether a packet lies in one frame of the first count. */
static inline int shunt_udp_valid(const struct shunt_udp_queue *queue, const struct xdp_desc *d,
				  uint32_t count)
{
	uint64_t size = queue->layout.frame_size;

	return d->addr < count * size && d->addr - shunt_udp_frame(queue, d->addr) + d->len <= size;
}

/* Writes the ahead-th entry from the fill ring's end on. It has two places for each frame. */
static inline void shunt_udp_refill(struct shunt_udp_queue *queue, uint64_t address, uint32_t ahead)
{
	if (shunt_udp_ready(queue, &queue->fill, ahead + 1) <= ahead) {
		if (!queue->fault)
			queue->fault = "the fill ring is full: frames were given back twice";
		return;
	}
	*shunt_udp_entry(&queue->fill, queue->fill.own + ahead) = shunt_udp_frame(queue, address);
}

/* Takes sent frames back: received frames into the fill ring, the program's own frames into free. */
static inline void shunt_udp_reap(struct shunt_udp_queue *queue)
{
	uint32_t count = shunt_udp_ready(queue, &queue->completion, queue->completion.size);
	uint64_t received = (uint64_t)queue->layout.receive_frames * queue->layout.frame_size;
	uint64_t all =
		received + (uint64_t)queue->layout.transmit_frames * queue->layout.frame_size;
	uint32_t filled = 0;

	for (uint32_t i = 0; i < count && !queue->fault; i++) {
		uint64_t address = *shunt_udp_entry(&queue->completion, queue->completion.own + i);

		if (address >= all)
			queue->counts.invalid++;
		else if (address < received)
			shunt_udp_refill(queue, address, filled++);
		else if (queue->free_count == queue->layout.transmit_frames)
			queue->fault = "frames were given back twice";
		else
			queue->free[queue->free_count++] = shunt_udp_frame(queue, address);
	}
	if (queue->fault || count == 0)
		return;
	shunt_udp_publish(&queue->completion, count);
	queue->sending -= count;
	if (filled > 0)
		shunt_udp_publish(&queue->fill, filled);
}

static inline void shunt_udp_hold(struct shunt_udp_queue *queue, uint32_t count)
{
	queue->counts.held += count;
	if (queue->counts.held > queue->counts.held_max)
		queue->counts.held_max = queue->counts.held;
}

/* The time at which XDP saw a received frame: CLOCK_MONOTONIC, ns; 0 where the lease has no times. */
static inline uint64_t shunt_udp_stamp(const struct shunt_udp_queue *queue,
				       const struct xdp_desc *d)
{
	uint64_t stamp = 0;

	if (queue->stamped && d->addr - shunt_udp_frame(queue, d->addr) >= sizeof(stamp))
		memcpy(&stamp, queue->frames + d->addr - sizeof(stamp), sizeof(stamp));
	return stamp;
}

static inline uint64_t shunt_udp_now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Runs the driver's work if busy_poll is set and the ring is empty. Returns the number of packets in the ring, up to
 * most. It does not wait. */
static inline uint32_t shunt_udp_poll(struct shunt_udp_queue *queue, uint32_t most)
{
	uint32_t count = shunt_udp_ready(queue, &queue->receive, most);

	if (count > 0 || !queue->busy_poll || queue->fault)
		return count;
	queue->counts.polls++;
	if (recvfrom(queue->fd, NULL, 0, MSG_DONTWAIT, NULL, NULL) < 0) {
		/* The interface is down, and nothing comes anyway. */
	}
	return shunt_udp_ready(queue, &queue->receive, most);
}

/* A mode's name, as the administrator writes it; "unknown" if it is none. */
static inline const char *shunt_udp_mode_text(uint32_t mode)
{
	static const char *const names[] = { "unknown", "zero-copy", "copy", "generic" };

	return names[mode <= SHUNT_UDP_GENERIC ? mode : 0];
}

/* Pins the calling thread to the queue's CPU. Returns 0, also if the administrator named no CPU; or -1 with errno:
 * EINVAL if this program must not use that CPU (Cpus_allowed_list in /proc/self/status). */
static inline int shunt_udp_pin(const struct shunt_udp_queue *queue)
{
	unsigned long set[8192 / (8 * sizeof(long))];
	uint32_t cpu = queue->layout.cpu, bits = 8 * sizeof(long);

	if (cpu == SHUNT_UDP_NO_CPU)
		return 0;
	memset(set, 0, sizeof(set));
	if (cpu < 8192)
		set[cpu / bits] = 1ul << cpu % bits;
	return syscall(SYS_sched_setaffinity, 0, sizeof(set), set) < 0 ? -1 : 0;
}

/* Lends received frames: fills batch from its start and returns the number of frames, 0 if none has
 * come. The program gives each frame back with release, or sends it with send. */
static inline uint32_t shunt_udp_receive(struct shunt_udp_queue *queue, struct xdp_desc *batch,
					 uint32_t batch_size)
{
	uint32_t count, got = 0, stale = 0;
	uint64_t oldest = 0;

	if (queue->sending > 0)
		shunt_udp_reap(queue);
	if (queue->fault)
		return 0;
	count = shunt_udp_poll(queue, batch_size);
	if (count == 0)
		return 0;
	if (queue->max_age_ns > 0)
		oldest = shunt_udp_now(CLOCK_MONOTONIC) - queue->max_age_ns;
	for (uint32_t i = 0; i < count; i++) {
		struct xdp_desc d = *shunt_udp_descriptor(&queue->receive, queue->receive.own + i);

		if (!shunt_udp_valid(queue, &d, queue->layout.receive_frames))
			queue->counts.invalid++;
		else if (shunt_udp_stamp(queue, &d) < oldest)
			shunt_udp_refill(queue, d.addr, stale++);
		else
			batch[got++] = d;
	}
	shunt_udp_publish(&queue->receive, count);
	if (stale > 0 && !queue->fault)
		shunt_udp_publish(&queue->fill, stale);
	queue->counts.stale += stale;
	queue->counts.delivered += got;
	shunt_udp_hold(queue, got);
	return got;
}

/* A frame from its Ethernet header on: d->len bytes, valid until it is released or sent. */
static inline uint8_t *shunt_udp_bytes(const struct shunt_udp_queue *queue,
				       const struct xdp_desc *d)
{
	return queue->frames + d->addr;
}

/* Gives back frames that receive or reserve lent. */
static inline void shunt_udp_release(struct shunt_udp_queue *queue, const struct xdp_desc *batch,
				     uint32_t count)
{
	uint64_t received = (uint64_t)queue->layout.receive_frames * queue->layout.frame_size;
	uint32_t filled = 0;

	for (uint32_t i = 0; i < count && !queue->fault; i++) {
		if (batch[i].addr < received)
			shunt_udp_refill(queue, batch[i].addr, filled++);
		else if (queue->free_count == queue->layout.transmit_frames)
			queue->fault = "frames were given back twice";
		else
			queue->free[queue->free_count++] = shunt_udp_frame(queue, batch[i].addr);
	}
	if (queue->fault)
		return;
	queue->counts.held -= count;
	if (filled > 0)
		shunt_udp_publish(&queue->fill, filled);
}

/* Lends free frames to write packets into, and returns their number. Each descriptor covers its whole
 * frame: write to bytes, from the Ethernet header on, then set len. It never waits. */
static inline uint32_t shunt_udp_reserve(struct shunt_udp_queue *queue, struct xdp_desc *batch,
					 uint32_t batch_size)
{
	uint32_t count = 0;

	if (queue->free_count < batch_size && queue->sending > 0)
		shunt_udp_reap(queue);
	for (; count < batch_size && queue->free_count > 0; count++) {
		batch[count].addr = queue->free[--queue->free_count];
		batch[count].len = queue->layout.frame_size;
		batch[count].options = 0;
	}
	shunt_udp_hold(queue, count);
	queue->counts.tx_short += batch_size - count;
	return count;
}

/* Gives frames to the kernel to be sent, and returns the number that had room in the ring; the program keeps
 * the other frames. The kernel sends them with the next flush at the latest. */
static inline uint32_t shunt_udp_send(struct shunt_udp_queue *queue, const struct xdp_desc *batch,
				      uint32_t count)
{
	uint32_t frames = queue->layout.receive_frames + queue->layout.transmit_frames;
	uint32_t room;

	if (queue->layout.transmit_ring == 0 || queue->fault)
		return 0;
	room = shunt_udp_ready(queue, &queue->transmit, count);
	for (uint32_t i = 0; i < room; i++) {
		struct xdp_desc d = batch[i];

		if (!shunt_udp_valid(queue, &d, frames)) {
			queue->fault = "a frame to be sent lies outside of the memory";
			return 0;
		}
		d.options = 0;
		*shunt_udp_descriptor(&queue->transmit, queue->transmit.own + i) = d;
	}
	shunt_udp_publish(&queue->transmit, room);
	queue->sending += room;
	queue->counts.held -= room;
	queue->counts.sent += room;
	queue->counts.tx_short += count - room;
	return room;
}

/* Makes the kernel send. Frames for which it has no room go with the next flush. 0, or -1 with errno. */
static inline int shunt_udp_flush(struct shunt_udp_queue *queue)
{
	struct shunt_udp_ring *ring = &queue->transmit;

	/* In copy mode a call sends 32 frames (XDP_MAX_TX_SKB_BUDGET, net/xdp/xsk.c). */
	for (uint32_t call = 0; ring->size > 0 && !queue->fault && call <= ring->size / 32;
	     call++) {
		uint32_t left = shunt_udp_ready(queue, ring, ring->size);

		if (queue->fault || left == ring->size ||
		    !(__atomic_load_n(ring->flags, __ATOMIC_RELAXED) & XDP_RING_NEED_WAKEUP))
			break;
		queue->counts.kicks++;
		/* These mean: the rest goes with a later call. */
		if (sendto(queue->fd, NULL, 0, MSG_DONTWAIT, NULL, 0) < 0 && errno != EAGAIN &&
		    errno != EBUSY && errno != ENOBUFS)
			return -1;
		if (shunt_udp_ready(queue, ring, ring->size) == left)
			break; /* the device's own queue is full */
	}
	if (queue->sending > 0)
		shunt_udp_reap(queue);
	if (queue->fault)
		errno = EIO;
	return queue->fault ? -1 : 0;
}

/* Reads the kernel's counters now. 0, or -1 with errno. For each queue, broker.matched =
 * broker.passed_no_socket + taken + waiting + dropped + ring_full. */
static inline int shunt_udp_statistics(const struct shunt_udp_queue *queue,
				       struct shunt_udp_kernel_counts *to)
{
	struct xdp_statistics kernel;
	socklen_t size = sizeof(kernel);

	memset(&kernel, 0, sizeof(kernel)); /* an older kernel fills in less */
	if (getsockopt(queue->fd, SOL_XDP, XDP_STATISTICS, &kernel, &size) < 0)
		return -1;
	to->taken = queue->receive.own;
	to->waiting = __atomic_load_n(queue->receive.theirs, __ATOMIC_ACQUIRE) - queue->receive.own;
	to->dropped = kernel.rx_dropped;
	to->ring_full = kernel.rx_ring_full;
	to->invalid = kernel.rx_invalid_descs;
	to->tx_invalid = kernel.tx_invalid_descs;
	return 0;
}

/* ---- Packets ---- */

static inline uint16_t shunt_udp_load16(const uint8_t *at)
{
	return (uint16_t)(at[0] << 8 | at[1]);
}

static inline void shunt_udp_store16(uint8_t *at, uint32_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

static inline void shunt_udp_endpoint(struct shunt_udp_address *to, const uint8_t *ip, size_t size,
				      const uint8_t *port)
{
	memset(to, 0, sizeof(*to));
	memset(to->ip + 10, 0xff, 2); /* IPv6 overwrites it */
	memcpy(to->ip + 16 - size, ip, size);
	to->port = shunt_udp_load16(port);
}

/* Reads a frame of size bytes: IPv4 (RFC 791) without options, or IPv6 (RFC 8200) without extension
 * headers, and UDP (RFC 768). Neither checksum is verified. -1: it is another packet. */
static inline int shunt_udp_parse(uint8_t *frame, uint32_t size, struct shunt_udp_datagram *to)
{
	uint8_t *ip = frame + 14, *udp;
	uint32_t header = 20, length;

	if (size < 14 + 20 + 8)
		return -1;
	size -= 14;
	switch (shunt_udp_load16(frame + 12)) {
	case 0x0800:
		length = shunt_udp_load16(ip + 2);
		if (ip[0] != 0x45 || ip[9] != 17 || (shunt_udp_load16(ip + 6) & 0x3fff) != 0 ||
		    length > size || length < header + 8)
			return -1;
		length -= header;
		break;
	case 0x86dd:
		header = 40;
		if (size < header + 8 || ip[0] >> 4 != 6 || ip[6] != 17)
			return -1;
		length = shunt_udp_load16(ip + 4);
		if (length > size - header || length < 8)
			return -1;
		break;
	default:
		return -1;
	}
	udp = ip + header;
	if (shunt_udp_load16(udp + 4) < 8 || shunt_udp_load16(udp + 4) > length)
		return -1;
	shunt_udp_endpoint(&to->source, header == 20 ? ip + 12 : ip + 8, header == 20 ? 4 : 16,
			   udp);
	shunt_udp_endpoint(&to->destination, header == 20 ? ip + 16 : ip + 24,
			   header == 20 ? 4 : 16, udp + 2);
	to->payload = udp + 8;
	to->payload_size = shunt_udp_load16(udp + 4) - 8u;
	return 0;
}

/* The UDP packet in a received frame. -1: it is no plain UDP packet. */
static inline int shunt_udp_packet(const struct shunt_udp_queue *queue, const struct xdp_desc *d,
				   struct shunt_udp_datagram *to)
{
	return shunt_udp_parse(shunt_udp_bytes(queue, d), d->len, to);
}

/* RFC 1071: adds 16-bit words; an odd last byte is padded with zero. */
static inline uint32_t shunt_udp_sum(const uint8_t *bytes, uint32_t size, uint32_t sum)
{
	for (; size > 1; bytes += 2, size -= 2)
		sum += shunt_udp_load16(bytes);
	return size > 0 ? sum + (uint32_t)(bytes[0] << 8) : sum;
}

static inline uint32_t shunt_udp_fold(uint32_t sum)
{
	while (sum > 0xffff)
		sum = (sum >> 16) + (sum & 0xffff);
	return ~sum & 0xffff;
}

static inline void shunt_udp_swap(uint8_t *a, uint8_t *b, uint32_t size)
{
	for (uint32_t i = 0; i < size; i++) {
		uint8_t was = a[i];

		a[i] = b[i];
		b[i] = was;
	}
}

/* Turns a received frame into the reply to it, in place: it swaps addresses and ports; the payload keeps
 * its length and has the contents that the program wrote. Send sends the reply. -1: the lease cannot
 * send, or the frame is no plain UDP packet. */
static inline int shunt_udp_reply(const struct shunt_udp_queue *queue, struct xdp_desc *d)
{
	uint8_t *frame = shunt_udp_bytes(queue, d), *ip = frame + 14, *udp, *addresses;
	struct shunt_udp_datagram packet;
	uint32_t size, sum, width;

	if (queue->layout.transmit_ring == 0 || shunt_udp_packet(queue, d, &packet) != 0)
		return -1;
	udp = packet.payload - 8;
	size = packet.payload_size + 8;
	width = ip[0] >> 4 == 4 ? 4 : 16;
	addresses = width == 4 ? ip + 12 : ip + 8;
	shunt_udp_swap(frame, frame + 6, 6);
	shunt_udp_swap(addresses, addresses + width, width);
	shunt_udp_swap(udp, udp + 2, 2);
	if (width == 4) {
		ip[8] = 64; /* Linux's own default (net.ipv4.ip_default_ttl) */
		shunt_udp_store16(ip + 2, 20 + size);
		shunt_udp_store16(ip + 10, 0);
		shunt_udp_store16(ip + 10, shunt_udp_fold(shunt_udp_sum(ip, 20, 0)));
	} else {
		ip[7] = 64;
		shunt_udp_store16(ip + 4, size);
	}
	shunt_udp_store16(udp + 6, 0);
	sum = shunt_udp_fold(
		shunt_udp_sum(udp, size, shunt_udp_sum(addresses, 2 * width, 17 + size)));
	shunt_udp_store16(udp + 6, sum ? sum : 0xffff); /* RFC 768: 0 means that there is none */
	d->len = (uint32_t)(udp + size - frame);
	return 0;
}

/* ---- The lease ---- */

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "messages are little endian");
static_assert(sizeof(off_t) == 8, "rings lie at offsets above 2^32: define _FILE_OFFSET_BITS=64");

/* Writes the fault to lease->error, once. Returns -1. */
__attribute__((format(printf, 2, 3))) static inline int shunt_udp_fail(
	struct shunt_udp_lease *lease, const char *format, ...)
{
	va_list arguments;

	if (!lease->over) {
		va_start(arguments, format);
		vsnprintf(lease->error, sizeof(lease->error), format, arguments);
		va_end(arguments);
	}
	lease->over = 1;
	return -1;
}

/* Sends a message, whose first member is its header. It reports no error: shunt_udp_hear finds a closed
 * connection, and the broker's reason for it. A broker may also not read for up to a term. */
static inline void shunt_udp_tell(struct shunt_udp_lease *lease, uint16_t type, void *message,
				  uint32_t size)
{
	struct shunt_udp_header header;

	header.type = type;
	header.version = SHUNT_UDP_VERSION;
	header.size = size;
	memcpy(message, &header, sizeof(header));
	(void)!send(lease->connection, message, size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Goes on without a broker, and tries to find the next one after a while: 10 ms, and twice as long each time up to a
 * second. */
static inline void shunt_udp_alone(struct shunt_udp_lease *lease)
{
	if (lease->connection >= 0)
		close(lease->connection);
	lease->connection = -1;
	if (lease->state == SHUNT_UDP_HELD)
		lease->again_ns = 10000000;
	lease->state = SHUNT_UDP_ALONE;
	lease->renew_at = shunt_udp_now(CLOCK_MONOTONIC) + lease->again_ns;
	lease->again_ns = lease->again_ns < 500000000 ? 2 * lease->again_ns : 1000000000;
}

/* Whether a successor may take the lease over later. */
static inline int shunt_udp_is_early(const struct shunt_udp_lease *lease, uint32_t end_code)
{
	return lease->state > SHUNT_UDP_HELD &&
	       (end_code == SHUNT_UDP_END_BUSY || end_code == SHUNT_UDP_END_TOO_MANY);
}

/* The next message, into SHUNT_UDP_SIZE_MAX bytes. Its type, 0: none is there, -1: the lease is over. */
static inline int shunt_udp_hear(struct shunt_udp_lease *lease, void *message, int *files,
				 uint32_t *file_count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * 253)]; /* SCM_MAX_FD: the most that can come */
	} control;
	struct iovec part = { message, SHUNT_UDP_SIZE_MAX };
	struct shunt_udp_header *header = (struct shunt_udp_header *)message;
	struct msghdr all;
	struct cmsghdr *c;
	ssize_t size;

	memset(&all, 0, sizeof(all));
	all.msg_iov = &part;
	all.msg_iovlen = 1;
	all.msg_control = &control;
	all.msg_controllen = sizeof(control);
	*file_count = 0;
	size = recvmsg(lease->connection, &all, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (size < 0 &&
	    errno == ECONNRESET) /* it has not read all; its last message may still be there */
		size = recvmsg(lease->connection, &all, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (size < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (size <= 0 && lease->resumes && lease->state != SHUNT_UDP_OPENING) {
		shunt_udp_alone(lease);
		return 0;
	}
	for (c = size > 0 ? CMSG_FIRSTHDR(&all) : NULL; c; c = CMSG_NXTHDR(&all, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		*file_count = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(files, CMSG_DATA(c), *file_count * sizeof(int));
	}
	if (size <= 0)
		return shunt_udp_fail(
			lease, "hear from shunt's broker: it closed the connection; the kernel's "
			       "sockets get the datagrams now; open the lease again");
	if ((size_t)size < sizeof(*header) || header->size != (uint32_t)size ||
	    (header->version != SHUNT_UDP_VERSION && header->type != SHUNT_UDP_END))
		return shunt_udp_fail(
			lease,
			"hear from shunt's broker: it sent a message of %zd bytes that is not "
			"of version %d; use the header of the broker's version",
			size, SHUNT_UDP_VERSION);
	if (header->type == SHUNT_UDP_END && header->size == sizeof(struct shunt_udp_msg_end)) {
		struct shunt_udp_msg_end *end = (struct shunt_udp_msg_end *)message;

		if (shunt_udp_is_early(lease, end->code)) {
			shunt_udp_alone(lease);
			return 0;
		}
		lease->end_code = end->code;
		return shunt_udp_fail(lease, "%.*s", (int)sizeof(end->text), end->text);
	}
	return header->type;
}

static inline void shunt_udp_close_files(const int *files, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		close(files[i]);
}

/* Waits for a message of a type, until a time. 0 or -1. */
static inline int shunt_udp_expect(struct shunt_udp_lease *lease, int type, void *message,
				   uint32_t size, int *files, uint32_t *file_count, uint64_t until)
{
	struct pollfd p = { lease->connection, POLLIN, 0 };
	uint64_t now = shunt_udp_now(CLOCK_MONOTONIC);
	int got = 0;

	for (; got == 0 && now < until; now = shunt_udp_now(CLOCK_MONOTONIC)) {
		poll(&p, 1, (int)((until - now) / 1000000u) + 1);
		got = shunt_udp_hear(lease, message, files, file_count);
	}
	if (got == 0)
		return shunt_udp_fail(
			lease, "hear from shunt's broker: it did not answer in time; open the "
			       "lease again");
	if (got < 0)
		return -1;
	if (got == type && ((struct shunt_udp_header *)message)->size == size &&
	    (*file_count == 0 || type == SHUNT_UDP_GRANT))
		return 0;
	shunt_udp_close_files(files, *file_count);
	return shunt_udp_fail(
		lease,
		"hear from shunt's broker: it sent a message of type %d in place of type %d; "
		"use the header of the broker's version",
		got, type);
}

/* Maps the memory for frames, if nobody can change its size: memfd_create(2). */
static inline int shunt_udp_map_memory(struct shunt_udp_lease *lease)
{
	const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	int have = fcntl(lease->memory_fd, F_GET_SEALS);
	struct stat st;

	if (have < 0 || (have & seals) != seals || fstat(lease->memory_fd, &st) < 0)
		return shunt_udp_fail(
			lease,
			"map the memory for frames: the broker's file is no memfd with a sealed size");
	lease->memory_size = (size_t)st.st_size;
	lease->memory = (uint8_t *)mmap(NULL, lease->memory_size, PROT_READ | PROT_WRITE,
					MAP_SHARED | MAP_POPULATE, lease->memory_fd, 0);
	if (lease->memory != MAP_FAILED)
		return 0;
	lease->memory = NULL;
	return shunt_udp_fail(lease, "map %zu bytes of memory for frames: %s", lease->memory_size,
			      strerror(errno));
}

static inline int shunt_udp_map_ring(struct shunt_udp_queue *queue, struct shunt_udp_ring *ring,
				     uint32_t size, uint32_t entry_size, uint64_t page,
				     const struct xdp_ring_offset *at, int produces)
{
	uint8_t *map;

	if (size == 0)
		return 0;
	ring->map_size = (size_t)at->desc + (size_t)size * entry_size;
	map = (uint8_t *)mmap(NULL, ring->map_size, PROT_READ | PROT_WRITE,
			      MAP_SHARED | MAP_POPULATE, queue->fd, (off_t)page);
	if (map == MAP_FAILED)
		return -1;
	ring->map = map;
	ring->mine = (uint32_t *)(void *)(map + (produces ? at->producer : at->consumer));
	ring->theirs = (uint32_t *)(void *)(map + (produces ? at->consumer : at->producer));
	ring->flags = (uint32_t *)(void *)(map + at->flags);
	ring->entries = map + at->desc;
	ring->size = size;
	ring->ahead = produces ? size : 0;
	ring->own = __atomic_load_n(ring->mine, __ATOMIC_RELAXED);
	ring->limit = ring->own;
	return 0;
}

static inline int shunt_udp_is_ring(uint32_t size)
{
	return size != 0 && (size & (size - 1)) == 0 && size <= 1u << 18;
}

/* Refuses a layout that does not fit into the memory: no access outside of it must be possible. */
static inline int shunt_udp_check(const struct shunt_udp_layout *l, uint64_t memory_size)
{
	uint64_t frames = (uint64_t)l->receive_frames + l->transmit_frames;

	return shunt_udp_is_ring(l->receive_ring) && shunt_udp_is_ring(l->fill_ring) &&
	       shunt_udp_is_ring(l->completion_ring) &&
	       (l->transmit_ring == 0 || shunt_udp_is_ring(l->transmit_ring)) &&
	       (l->frame_size == 2048 || l->frame_size == 4096) && l->receive_frames > 0 &&
	       l->receive_frames <= l->fill_ring / 2 && l->transmit_frames <= 1u << 17 &&
	       l->offset % l->frame_size == 0 && l->offset <= memory_size &&
	       frames * l->frame_size <= memory_size - l->offset;
}

static inline int shunt_udp_map_queue(struct shunt_udp_lease *lease, struct shunt_udp_queue *q)
{
	const struct shunt_udp_layout *l = &q->layout;
	struct xdp_mmap_offsets at;
	socklen_t size = sizeof(at);

	if (!shunt_udp_check(l, lease->memory_size))
		return shunt_udp_fail(lease, "map queue %u: its layout is impossible", l->index);
	q->frames = lease->memory + l->offset;
	q->free = (uint64_t *)calloc(l->transmit_frames + 1u, sizeof(*q->free));
	if (!q->free)
		return shunt_udp_fail(lease, "map queue %u: no memory is left", l->index);
	for (uint32_t i = 0; i < l->transmit_frames; i++)
		q->free[q->free_count++] = (uint64_t)(l->receive_frames + i) * l->frame_size;
	if (getsockopt(q->fd, SOL_XDP, XDP_MMAP_OFFSETS, &at, &size) == 0 && size == sizeof(at) &&
	    shunt_udp_map_ring(q, &q->receive, l->receive_ring, sizeof(struct xdp_desc),
			       XDP_PGOFF_RX_RING, &at.rx, 0) == 0 &&
	    shunt_udp_map_ring(q, &q->transmit, l->transmit_ring, sizeof(struct xdp_desc),
			       XDP_PGOFF_TX_RING, &at.tx, 1) == 0 &&
	    shunt_udp_map_ring(q, &q->fill, l->fill_ring, sizeof(uint64_t),
			       XDP_UMEM_PGOFF_FILL_RING, &at.fr, 1) == 0 &&
	    shunt_udp_map_ring(q, &q->completion, l->completion_ring, sizeof(uint64_t),
			       XDP_UMEM_PGOFF_COMPLETION_RING, &at.cr, 0) == 0)
		return 0;
	return shunt_udp_fail(lease, "map the rings of queue %u: %s", l->index, strerror(errno));
}

/* Renews the lease. */
static inline void shunt_udp_renew(struct shunt_udp_lease *lease, uint64_t now)
{
	struct shunt_udp_msg_report report; /* a Renew is its beginning */

	memset(&report, 0, sizeof(report));
	report.lease = lease->number;
	report.sequence = ++lease->sequence;
	lease->renew_at = now + lease->term_ms * 1000000ull / 3;
	if (!lease->reports) {
		shunt_udp_tell(lease, SHUNT_UDP_RENEW, &report, sizeof(struct shunt_udp_msg_renew));
		return;
	}
	for (uint32_t i = 0; i < lease->queue_count; i++) {
		const struct shunt_udp_counts *counts = &lease->queues[i].counts;

		report.claims[i].stale = counts->stale;
		report.claims[i].tx_short = counts->tx_short;
		report.claims[i].kicks = counts->kicks;
		report.claims[i].wakeups = counts->wakeups;
	}
	shunt_udp_tell(lease, SHUNT_UDP_REPORT, &report, sizeof(report));
}

/* Connects to the broker. 0, or -1 with errno. */
static inline int shunt_udp_dial(struct shunt_udp_lease *lease, int flags)
{
	struct sockaddr_un to;

	memset(&to, 0, sizeof(to));
	to.sun_family = AF_UNIX;
	static_assert(sizeof(to.sun_path) == sizeof(lease->path), "a path of any length fits");
	memcpy(to.sun_path, lease->path, sizeof(to.sun_path));
	lease->connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0);
	if (lease->connection < 0)
		return -1;
	return connect(lease->connection, (struct sockaddr *)&to, sizeof(to));
}

static inline void shunt_udp_greet(struct shunt_udp_lease *lease)
{
	struct shunt_udp_msg_hello hello;

	memset(&hello, 0, sizeof(hello));
	memcpy(hello.magic, SHUNT_UDP_MAGIC, sizeof(hello.magic));
	hello.version_min = hello.version_max = SHUNT_UDP_VERSION;
	shunt_udp_tell(lease, SHUNT_UDP_HELLO, &hello, sizeof(hello));
}

/* Hands copies of the lease's files to the broker's successor. */
static inline void shunt_udp_hand_back(struct shunt_udp_lease *lease, uint64_t nonce)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * (1 + SHUNT_UDP_QUEUES_MAX))];
	} control;
	struct shunt_udp_msg_resume m;
	struct iovec part = { &m, sizeof(m) };
	int files[1 + SHUNT_UDP_QUEUES_MAX];
	size_t size = sizeof(int) * (1 + lease->queue_count);
	struct msghdr all;

	memset(&m, 0, sizeof(m));
	m.header.type = SHUNT_UDP_RESUME;
	m.header.version = SHUNT_UDP_VERSION;
	m.header.size = sizeof(m);
	m.nonce = nonce;
	m.lease = lease->number;
	m.queue_count = lease->queue_count;
	files[0] = lease->memory_fd;
	for (uint32_t i = 0; i < lease->queue_count; i++)
		files[1 + i] = lease->queues[i].fd;
	memset(&all, 0, sizeof(all));
	memset(&control, 0, sizeof(control));
	all.msg_iov = &part;
	all.msg_iovlen = 1;
	all.msg_control = &control;
	all.msg_controllen = CMSG_SPACE(size);
	CMSG_FIRSTHDR(&all)->cmsg_level = SOL_SOCKET;
	CMSG_FIRSTHDR(&all)->cmsg_type = SCM_RIGHTS;
	CMSG_FIRSTHDR(&all)->cmsg_len = CMSG_LEN(size);
	memcpy(CMSG_DATA(CMSG_FIRSTHDR(&all)), files, size);
	(void)!sendmsg(lease->connection, &all, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static inline int shunt_udp_had(const struct shunt_udp_header *header, int type, size_t size)
{
	return header->type == type && header->size == size;
}

/* Finds the broker's successor, step by step, and never waits. 0, or -1: it does not take the lease over, which is
 * over then. */
static inline int shunt_udp_resume(struct shunt_udp_lease *lease, uint64_t now)
{
	union {
		uint64_t align[SHUNT_UDP_SIZE_MAX / 8];
		struct shunt_udp_header header;
		struct shunt_udp_msg_welcome welcome;
		struct shunt_udp_msg_serving serving;
	} m;
	uint32_t file_count = 0;
	int files[253], type;

	if (lease->state == SHUNT_UDP_ALONE) {
		if (now < lease->renew_at)
			return 0;
		if (shunt_udp_dial(lease, SOCK_NONBLOCK) != 0) {
			shunt_udp_alone(lease);
			return 0;
		}
		shunt_udp_greet(lease);
		lease->state = SHUNT_UDP_GREETING;
		lease->renew_at = now + 5000000000ull; /* for an answer */
		return 0;
	}
	type = shunt_udp_hear(lease, &m, files, &file_count);
	shunt_udp_close_files(files, file_count);
	if (type == 0 && lease->state != SHUNT_UDP_ALONE && now >= lease->renew_at)
		shunt_udp_alone(lease);
	if (type <= 0)
		return type;
	if (lease->state == SHUNT_UDP_GREETING &&
	    shunt_udp_had(&m.header, SHUNT_UDP_WELCOME, sizeof(m.welcome))) {
		shunt_udp_hand_back(lease, m.welcome.nonce);
		lease->state = SHUNT_UDP_RESUMING;
		return 0;
	}
	if (lease->state != SHUNT_UDP_RESUMING ||
	    !shunt_udp_had(&m.header, SHUNT_UDP_SERVING, sizeof(m.serving)))
		return shunt_udp_fail(
			lease, "resume the lease: the broker sent a message of type %d", type);
	lease->state = SHUNT_UDP_HELD;
	lease->resumed++;
	lease->term_ms = m.serving.term_ms < 30 ? 30 : m.serving.term_ms;
	lease->renew_at = now + lease->term_ms * 1000000ull / 3;
	return 0;
}

/* Keeps the lease, and sees its end. It makes a system call every 10 ms at most. 0, or -1: the lease is
 * over, lease->error has the reason; the packets in the rings can still be received. */
static inline int shunt_udp_tend(struct shunt_udp_lease *lease)
{
	union {
		uint64_t align[SHUNT_UDP_SIZE_MAX / 8];
		struct shunt_udp_msg_renewed renewed;
	} m;
	uint64_t now = shunt_udp_now(CLOCK_MONOTONIC_COARSE);
	uint32_t file_count = 0;
	int files[253], type = 1;

	for (uint32_t i = 0; i < lease->queue_count; i++)
		if (lease->queues[i].fault)
			return shunt_udp_fail(lease, "queue %u: %s; this program has a fault",
					      lease->queues[i].layout.index,
					      lease->queues[i].fault);
	if (lease->over)
		return -1;
	if (lease->state == SHUNT_UDP_HELD && now >= lease->renew_at)
		shunt_udp_renew(lease, now);
	if (now < lease->look_at)
		return 0;
	lease->look_at = now + 10000000;
	if (lease->state != SHUNT_UDP_HELD)
		return shunt_udp_resume(lease, now);
	while ((type = shunt_udp_hear(lease, &m, files, &file_count)) > 0) {
		shunt_udp_close_files(files, file_count);
		if (type != SHUNT_UDP_RENEWED || m.renewed.header.size != sizeof(m.renewed))
			return shunt_udp_fail(
				lease, "hear from shunt's broker: a message of type %d", type);
		lease->answered = m.renewed.sequence;
		for (uint32_t i = 0; i < lease->queue_count; i++)
			lease->queues[i].broker = m.renewed.counts[i];
	}
	return type;
}

/* Gives the lease back, and all that belongs to it. The connection goes last, so that the broker can lend
 * the queues at once. lease.error stays. */
static inline void shunt_udp_close(struct shunt_udp_lease *lease)
{
	lease->look_at = 0;
	if (lease->reports && lease->state == SHUNT_UDP_HELD &&
	    shunt_udp_tend(lease) == 0) /* an answer that is unread would reset the connection */
		shunt_udp_renew(lease, shunt_udp_now(CLOCK_MONOTONIC));
	for (uint32_t i = 0; i < lease->queue_count; i++) {
		struct shunt_udp_queue *q = &lease->queues[i];
		struct shunt_udp_ring *rings[] = { &q->receive, &q->transmit, &q->fill,
						   &q->completion };

		for (uint32_t r = 0; r < 4; r++)
			if (rings[r]->map)
				munmap(rings[r]->map, rings[r]->map_size);
		free(q->free);
		close(q->fd);
	}
	if (lease->memory)
		munmap(lease->memory, lease->memory_size);
	if (lease->memory_fd >= 0)
		close(lease->memory_fd);
	if (lease->connection >= 0)
		close(lease->connection);
	lease->queue_count = 0;
	lease->memory = NULL;
	lease->memory_fd = lease->connection = -1;
	lease->over = 1;
}

static inline int shunt_udp_connect(struct shunt_udp_lease *lease, const char *path)
{
	if (strlen(path) >= sizeof(lease->path))
		return shunt_udp_fail(lease, "connect to shunt's broker: the path %s is too long",
				      path);
	memcpy(lease->path, path, strlen(path));
	if (shunt_udp_dial(lease, 0) != 0)
		return shunt_udp_fail(
			lease,
			"connect to shunt's broker at %s: %s; does it run, and does this program see its socket?",
			path, strerror(errno));
	return 0;
}

/* Several advices at once are none. */
static inline uint32_t shunt_udp_advice(uint32_t flags)
{
	flags &= SHUNT_UDP_FLAG_SPIN | SHUNT_UDP_FLAG_ADAPTIVE | SHUNT_UDP_FLAG_SLEEP;
	return flags & (flags - 1) ? 0 : flags;
}

/* The time for which wait looks at the rings: the program's, or else the administrator's advice. */
static inline uint64_t shunt_udp_spin_ns(uint32_t own_us, uint32_t advice)
{
	if (own_us == 0 && advice == SHUNT_UDP_FLAG_SPIN)
		return UINT64_MAX;
	if (own_us == 0 && advice == SHUNT_UDP_FLAG_ADAPTIVE)
		return SHUNT_UDP_ADAPTIVE_US * 1000;
	return own_us == SHUNT_UDP_NO_SPIN ? 0 : (uint64_t)own_us * 1000;
}

/* Takes over the lease and the files of Grant. */
static inline int shunt_udp_adopt(struct shunt_udp_lease *lease,
				  const struct shunt_udp_msg_grant *g, const int *files,
				  uint32_t file_count)
{
	if (g->queue_count == 0 || g->queue_count > SHUNT_UDP_QUEUES_MAX ||
	    g->address_count > SHUNT_UDP_ADDRESSES_MAX || file_count != 1 + g->queue_count) {
		shunt_udp_close_files(files, file_count);
		return shunt_udp_fail(
			lease, "ask for a lease: the broker has granted something impossible");
	}
	lease->number = g->lease;
	lease->reports = (g->flags & SHUNT_UDP_FLAG_REPORT) != 0;
	lease->resumes = (g->flags & SHUNT_UDP_FLAG_RESUME) != 0;
	lease->advice = shunt_udp_advice(g->flags);
	lease->address_count = g->address_count;
	memcpy(lease->addresses, g->addresses, sizeof(lease->addresses));
	lease->memory_fd = files[0];
	lease->queue_count = g->queue_count;
	for (uint32_t i = 0; i < g->queue_count; i++) {
		lease->queues[i].layout = g->queues[i];
		lease->queues[i].fd = files[1 + i];
		lease->queues[i].stamped = (g->flags & SHUNT_UDP_FLAG_STAMPED) != 0;
		lease->queues[i].busy_poll = (g->flags & SHUNT_UDP_FLAG_BUSY_POLL) != 0;
	}
	if (shunt_udp_map_memory(lease) != 0)
		return -1;
	for (uint32_t i = 0; i < g->queue_count; i++)
		if (shunt_udp_map_queue(lease, &lease->queues[i]) != 0)
			return -1;
	return 0;
}

static inline int shunt_udp_converse(struct shunt_udp_lease *lease, const char *name,
				     uint64_t until)
{
	union { /* of the longest accepted message */
		uint64_t align[SHUNT_UDP_SIZE_MAX / 8];
		struct shunt_udp_msg_welcome welcome;
		struct shunt_udp_msg_request request;
		struct shunt_udp_msg_grant grant;
		struct shunt_udp_msg_ready ready;
		struct shunt_udp_msg_serving serving;
	} m;
	int files[253];
	uint32_t file_count;
	uint64_t nonce;

	shunt_udp_greet(lease);
	if (shunt_udp_expect(lease, SHUNT_UDP_WELCOME, &m, sizeof(m.welcome), files, &file_count,
			     until) != 0)
		return -1;
	nonce = m.welcome.nonce;
	memset(&m, 0, sizeof(m));
	m.request.nonce = nonce;
	memcpy(m.request.name, name, strlen(name));
	shunt_udp_tell(lease, SHUNT_UDP_REQUEST, &m, sizeof(m.request));
	if (shunt_udp_expect(lease, SHUNT_UDP_GRANT, &m, sizeof(m.grant), files, &file_count,
			     until) != 0 ||
	    shunt_udp_adopt(lease, &m.grant, files, file_count) != 0)
		return -1;
	m.ready.lease = lease->number;
	shunt_udp_tell(lease, SHUNT_UDP_READY, &m, sizeof(m.ready));
	if (shunt_udp_expect(lease, SHUNT_UDP_SERVING, &m, sizeof(m.serving), files, &file_count,
			     until) != 0)
		return -1;
	lease->mode = m.serving.mode;
	lease->term_ms = m.serving.term_ms < 30 ? 30 : m.serving.term_ms;
	memcpy(lease->reason, m.serving.reason, sizeof(lease->reason) - 1);
	return 0;
}

/* Asks the broker for a lease and begins to receive. 0, or -1: then lease->error has the remedy,
 * lease->end_code the reason if the broker refuses, and nothing has to be closed. */
static inline int shunt_udp_open(struct shunt_udp_lease *lease,
				 const struct shunt_udp_options *options)
{
	uint64_t now = shunt_udp_now(CLOCK_MONOTONIC);
	uint64_t limit_ms = options->open_ms > 0 ? (uint64_t)options->open_ms : 20000;

	memset(lease, 0, sizeof(*lease));
	lease->connection = lease->memory_fd = -1;
	lease->also = options->also;
	if (!options->name || strlen(options->name) > SHUNT_UDP_NAME_MAX)
		return shunt_udp_fail(lease, "ask for a lease: its name has 1 to %d bytes",
				      SHUNT_UDP_NAME_MAX);
	if (shunt_udp_connect(lease, options->socket ? options->socket : SHUNT_UDP_SOCKET) != 0 ||
	    shunt_udp_converse(lease, options->name, now + limit_ms * 1000000) != 0) {
		shunt_udp_close(lease);
		return -1;
	}
	lease->spin_ns = shunt_udp_spin_ns(options->spin_us, lease->advice);
	for (uint32_t i = 0; i < lease->queue_count; i++)
		lease->queues[i].max_age_ns = (uint64_t)options->max_age_us * 1000;
	if (options->max_age_us > 0 && !lease->queues[0].stamped) {
		shunt_udp_fail(lease,
			       "drop old datagrams: they come without times; timestamps: true "
			       "in the administrator's entry adds them");
		shunt_udp_close(lease);
		return -1;
	}
	lease->renew_at = shunt_udp_now(CLOCK_MONOTONIC) + lease->term_ms * 1000000ull / 3;
	lease->state = SHUNT_UDP_HELD;
	return 0;
}

static inline int shunt_udp_waiting(struct shunt_udp_lease *lease)
{
	for (uint32_t i = 0; i < lease->queue_count; i++)
		if (shunt_udp_poll(&lease->queues[i], 1) > 0)
			return 1;
	return 0;
}

/* Looks at the rings until a time, and now and then at the rest: 1, 0 or -1 as wait. */
static inline int shunt_udp_spin(struct shunt_udp_lease *lease, uint64_t now, uint64_t until)
{
	struct pollfd also = { lease->also, POLLIN, 0 };
	uint64_t look = now + 100000;

	for (; now < until; now = shunt_udp_now(CLOCK_MONOTONIC)) {
		if (shunt_udp_waiting(lease))
			return 1;
		if (now < look)
			continue;
		look = now + 100000;
		if (shunt_udp_tend(lease) != 0)
			return -1;
		if (lease->also > 0 && poll(&also, 1, 0) > 0)
			return 1;
	}
	return 0;
}

/* Waits until a queue has packets or options.also can be read (1), the timeout (0), or the end of the
 * lease (-1). A signal may end it early (0). */
static inline int shunt_udp_wait(struct shunt_udp_lease *lease, int timeout_ms)
{
	struct pollfd p[SHUNT_UDP_QUEUES_MAX + 2];
	uint32_t n = 0;
	uint64_t now, until, spin;
	int got = 0;

	if (shunt_udp_tend(lease) != 0)
		return -1;
	if (shunt_udp_waiting(lease))
		return 1;
	now = shunt_udp_now(CLOCK_MONOTONIC);
	until = now + (uint64_t)(timeout_ms > 0 ? timeout_ms : 0) * 1000000;
	spin = lease->spin_ns < until - now ? now + lease->spin_ns : until;
	got = shunt_udp_spin(lease, now, spin);
	if (got != 0)
		return got;
	now = shunt_udp_now(CLOCK_MONOTONIC);
	for (; n < lease->queue_count; n++)
		p[n].fd = lease->queues[n].fd;
	p[n++].fd = lease->connection;
	if (lease->also > 0)
		p[n++].fd = lease->also;
	for (uint32_t i = 0; i < n; i++)
		p[i].events = POLLIN;
	while (got == 0 && now < until) {
		uint64_t first = until < lease->renew_at ? until : lease->renew_at;

		p[lease->queue_count].fd = lease->connection; /* -1 while there is no broker */
		got = poll(p, n, now < first ? (int)((first - now + 999999) / 1000000) : 0);
		if (got < 0 && errno != EINTR)
			return shunt_udp_fail(lease, "wait for packets: %s", strerror(errno));
		if (got > 0 && p[lease->queue_count].revents) {
			lease->look_at = 0;
			got--;
		}
		if (shunt_udp_tend(lease) != 0)
			return -1;
		now = shunt_udp_now(CLOCK_MONOTONIC);
	}
	lease->wakeups += got > 0;
	for (uint32_t i = 0; got > 0 && i < lease->queue_count; i++)
		lease->queues[i].counts.wakeups += (p[i].revents & POLLIN) != 0;
	return got > 0;
}

/* Asks the broker for its counters, waits for them and puts them into each queue's broker. It renews the
 * lease, too. A few times a second at most: the broker ends a lease whose holder floods it. 0, or -1. */
static inline int shunt_udp_ask(struct shunt_udp_lease *lease, int timeout_ms)
{
	struct pollfd p = { lease->connection, POLLIN, 0 };
	uint64_t until = shunt_udp_now(CLOCK_MONOTONIC) + (uint64_t)timeout_ms * 1000000, want;

	if (lease->over || lease->state != SHUNT_UDP_HELD)
		return -1;
	shunt_udp_renew(lease, shunt_udp_now(CLOCK_MONOTONIC));
	for (want = lease->sequence; lease->answered < want;) {
		if (shunt_udp_now(CLOCK_MONOTONIC) >= until || lease->state != SHUNT_UDP_HELD)
			return -1;
		poll(&p, 1, timeout_ms);
		lease->look_at = 0;
		if (shunt_udp_tend(lease) != 0)
			return -1;
	}
	return 0;
}

#endif
