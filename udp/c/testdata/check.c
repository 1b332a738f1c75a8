/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The tests of the header:
 *
 *	check rings                    wraps indices, gives a frame back twice; needs no broker
 *	check parse < frames           each: u32 length, bytes; prints the kind of each, and its reply
 *	check account SOCKET COUNT     receives, sends, outlives terms, and compares counters
 *	check stale SOCKET COUNT US    is too slow, and drops datagrams that are older
 */
#include "../shunt_udp.h"

#define CHECK(what)                                                                \
	do {                                                                       \
		if (!(what)) {                                                     \
			printf("line %d: %s: errno %d\n", __LINE__, #what, errno); \
			exit(1);                                                   \
		}                                                                  \
	} while (0)

/* A ring of 4 whose indices are about to wrap. */
static void make_ring(struct shunt_udp_ring *ring, uint32_t *mine, uint32_t *theirs, void *entries,
		      uint32_t ahead)
{
	static uint32_t flags;

	memset(ring, 0, sizeof(*ring));
	*mine = *theirs = ring->own = ring->limit = 0xfffffffe;
	ring->mine = mine;
	ring->theirs = theirs;
	ring->flags = &flags;
	ring->entries = entries;
	ring->size = 4;
	ring->ahead = ahead;
}

/* A broker that does not take reports gets none; one that does gets the queues' counters. */
static void renewals(void)
{
	static struct shunt_udp_lease lease;
	static union {
		struct shunt_udp_msg_renew renew;
		struct shunt_udp_msg_report report;
	} m;
	int ends[2];

	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
	lease.connection = ends[0];
	lease.number = 7;
	lease.queue_count = 2;
	lease.queues[1].counts.stale = 1;
	lease.queues[1].counts.tx_short = 2;
	lease.queues[1].counts.kicks = 3;
	lease.queues[1].counts.wakeups = 4;
	lease.queues[2].counts.kicks = 5; /* of no queue */
	shunt_udp_renew(&lease, 0);
	CHECK(recv(ends[1], &m, sizeof(m), 0) == sizeof(m.renew));
	CHECK(m.renew.header.type == SHUNT_UDP_RENEW && m.renew.lease == 7 &&
	      m.renew.sequence == 1);
	lease.reports = 1;
	shunt_udp_renew(&lease, 0);
	CHECK(recv(ends[1], &m, sizeof(m), 0) == sizeof(m.report));
	CHECK(m.report.header.type == SHUNT_UDP_REPORT && m.report.lease == 7 &&
	      m.report.sequence == 2);
	CHECK(m.report.claims[0].kicks == 0 && m.report.claims[1].stale == 1 &&
	      m.report.claims[1].tx_short == 2 && m.report.claims[1].kicks == 3 &&
	      m.report.claims[1].wakeups == 4 && m.report.claims[2].kicks == 0);
	close(ends[0]);
	close(ends[1]);
}

static int rings(void)
{
	static struct shunt_udp_queue q;
	static uint64_t fill[4], completion[4], free_frames[2];
	static struct xdp_desc receive[4];
	static uint8_t memory[3 * 2048];
	struct xdp_desc batch[4];
	uint32_t rx[2], fr[2], cr[2];

	q.layout.frame_size = 2048;
	q.layout.receive_frames = 2;
	q.layout.transmit_frames = 1;
	q.frames = memory;
	q.free = free_frames;
	q.free[q.free_count++] = 2 * 2048;
	make_ring(&q.receive, &rx[0], &rx[1], receive, 0);
	make_ring(&q.fill, &fr[0], &fr[1], fill, 4);
	make_ring(&q.completion, &cr[0], &cr[1], completion, 0);
	for (uint32_t i = 0; i < 8; i++) { /* over 2^32 */
		shunt_udp_descriptor(&q.receive, rx[1])->addr = i % 2 * 2048 + 256;
		shunt_udp_descriptor(&q.receive, rx[1])->len = 60 + i;
		rx[1]++;
		CHECK(shunt_udp_receive(&q, batch, 4) == 1);
		CHECK(batch[0].len == 60 + i && rx[0] == rx[1] && q.counts.held == 1);
		shunt_udp_release(&q, batch, 1);
		CHECK(*shunt_udp_entry(&q.fill, fr[0] - 1) == i % 2 * 2048 && !q.fault);
		fr[1]++;
	}
	shunt_udp_descriptor(&q.receive, rx[1]++)->addr = 2 * 2048; /* no receive frame */
	CHECK(shunt_udp_receive(&q, batch, 4) == 0 && q.counts.invalid == 1);
	CHECK(shunt_udp_reserve(&q, batch, 4) == 1 && q.counts.tx_short == 3);
	CHECK(batch[0].addr == 2 * 2048 && batch[0].len == 2048);
	shunt_udp_release(&q, batch, 1);
	CHECK(!q.fault && q.counts.held == 0);
	shunt_udp_release(&q, batch, 1); /* again */
	CHECK(q.fault && strstr(q.fault, "twice"));
	q.fault = NULL;
	batch[0].addr = 0;
	for (int i = 0; i < 4; i++)
		shunt_udp_release(&q, batch, 1);
	CHECK(!q.fault);
	shunt_udp_release(&q, batch, 1); /* more than the ring has places */
	CHECK(q.fault && strstr(q.fault, "twice"));
	q.fault = NULL;
	q.fd = -1; /* each poll fails, and is counted */
	q.busy_poll = 1;
	CHECK(shunt_udp_receive(&q, batch, 4) == 0 && q.counts.polls == 1 && !q.fault);
	shunt_udp_descriptor(&q.receive, rx[1])->addr = 256;
	shunt_udp_descriptor(&q.receive, rx[1]++)->len = 60;
	CHECK(shunt_udp_receive(&q, batch, 4) == 1 && q.counts.polls == 1);
	q.layout.cpu = SHUNT_UDP_NO_CPU;
	CHECK(shunt_udp_pin(&q) == 0);
	q.layout.cpu = 8191;
	CHECK(shunt_udp_pin(&q) == -1 && errno == EINVAL);
	q.layout.cpu = 8192;
	CHECK(shunt_udp_pin(&q) == -1 && errno == EINVAL);
	rx[1] += 5;
	CHECK(shunt_udp_receive(&q, batch, 4) == 0 && q.fault && strstr(q.fault, "contradict"));
	renewals();
	return 0;
}

static void print(const struct shunt_udp_address *a)
{
	for (int i = 0; i < 16; i++)
		printf("%02x", a->ip[i]);
	printf(" %u ", a->port);
}

static int parse(void)
{
	static struct shunt_udp_queue q;
	static uint8_t frame[2048];
	struct shunt_udp_datagram p;
	struct xdp_desc d;

	memset(&d, 0, sizeof(d));
	q.frames = frame;
	q.layout.transmit_ring = 1;
	while (fread(&d.len, sizeof(d.len), 1, stdin) == 1) {
		uint8_t *exact =
			(uint8_t *)malloc(d.len + 1u); /* so that a sanitizer sees its end */

		CHECK(exact && fread(exact, 1, d.len, stdin) == d.len);
		q.frames = exact;
		if (shunt_udp_packet(&q, &d, &p) == 0) {
			print(&p.source);
			print(&p.destination);
			printf("%td %u ", p.payload - exact, p.payload_size);
			CHECK(shunt_udp_reply(&q, &d) == 0);
			for (uint32_t i = 0; i < d.len; i++)
				printf("%02x", exact[i]);
			printf("\n");
		} else {
			CHECK(shunt_udp_reply(&q, &d) == -1);
			printf("-\n");
		}
		free(exact);
	}
	return 0;
}

/* Answers with a frame of its own, in which it copies the question. */
static void answer(struct shunt_udp_queue *queue, const struct xdp_desc *question)
{
	struct shunt_udp_datagram p;
	struct xdp_desc copy;

	CHECK(shunt_udp_reserve(queue, &copy, 1) == 1);
	memcpy(shunt_udp_bytes(queue, &copy), shunt_udp_bytes(queue, question), question->len);
	copy.len = question->len;
	CHECK(shunt_udp_packet(queue, &copy, &p) == 0);
	p.payload[0] = 'x'; /* by which the test knows the answering program */
	CHECK(shunt_udp_reply(queue, &copy) == 0);
	CHECK(shunt_udp_send(queue, &copy, 1) == 1);
	CHECK(shunt_udp_flush(queue) == 0);
}

static int account(const char *path, uint64_t want)
{
	static struct shunt_udp_lease lease;
	struct shunt_udp_kernel_counts k;
	struct shunt_udp_options options;
	struct xdp_desc batch[16];
	uint64_t seen = 0, end;

	memset(&options, 0, sizeof(options));
	options.socket = path;
	options.name = "nothing";
	CHECK(shunt_udp_open(&lease, &options) == -1);
	CHECK(lease.end_code == SHUNT_UDP_END_REFUSED && strstr(lease.error, "add a rule"));
	options.name = "echo";
	if (shunt_udp_open(&lease, &options) != 0) {
		printf("%s\n", lease.error);
		return 1;
	}
	printf("serving\n");
	fflush(stdout);
	/* Four terms at least: without renewing it would be over. */
	end = shunt_udp_now(CLOCK_MONOTONIC) + 4000000ull * lease.term_ms;
	while (seen < want || shunt_udp_now(CLOCK_MONOTONIC) < end) {
		if (shunt_udp_wait(&lease, 50) < 0) {
			printf("%s\n", lease.error);
			return 1;
		}
		for (uint32_t i = 0; i < lease.queue_count; i++) {
			uint32_t count = shunt_udp_receive(&lease.queues[i], batch, 16);

			for (uint32_t n = 0; n < count; n++)
				answer(&lease.queues[i], &batch[n]);
			shunt_udp_release(&lease.queues[i], batch, count);
			seen += count;
		}
	}
	for (uint32_t i = 0; i < lease.queue_count; i++) {
		struct shunt_udp_queue *q = &lease.queues[i];
		int agrees = 0;

		/* Datagrams may come between the two questions, so that one look says nothing. */
		for (int look = 0; look < 100 && !agrees; look++) {
			CHECK(shunt_udp_ask(&lease, 5000) == 0);
			CHECK(shunt_udp_statistics(q, &k) == 0);
			agrees = q->broker.matched == q->broker.passed_no_socket + k.taken +
							      k.waiting + k.dropped + k.ring_full;
		}
		CHECK(agrees);
		CHECK(k.taken == q->counts.delivered && k.invalid == 0 && k.tx_invalid == 0);
		CHECK(q->counts.sent == q->counts.delivered && q->counts.held == 0);
	}
	shunt_udp_close(&lease);
	printf("done\n");
	return 0;
}

/* Works on each datagram for so long, and prints how many were too old. */
static int stale(const char *path, uint64_t want, uint32_t age_us)
{
	static struct shunt_udp_lease lease;
	struct shunt_udp_queue *q = &lease.queues[0];
	struct shunt_udp_kernel_counts k;
	struct shunt_udp_options options;
	struct xdp_desc batch[16];

	memset(&options, 0, sizeof(options));
	options.socket = path;
	options.name = "echo";
	options.max_age_us = age_us;
	if (shunt_udp_open(&lease, &options) != 0) {
		printf("%s\n", lease.error);
		return 1;
	}
	printf("serving\n");
	fflush(stdout);
	while (q->counts.stale < want || q->counts.delivered < want) {
		uint64_t begin = shunt_udp_now(CLOCK_MONOTONIC);
		uint32_t count = shunt_udp_receive(q, batch, 16);

		for (uint32_t i = 0; i < count; i++)
			CHECK(shunt_udp_stamp(q, &batch[i]) + age_us * 1000ull >= begin);
		while (shunt_udp_now(CLOCK_MONOTONIC) < begin + count * 100000ull)
			;
		shunt_udp_release(q, batch, count);
		CHECK(shunt_udp_wait(&lease, 100) >= 0);
	}
	CHECK(shunt_udp_statistics(q, &k) == 0);
	CHECK(k.taken == q->counts.delivered + q->counts.stale + q->counts.invalid);
	CHECK(q->counts.invalid == 0 && k.invalid == 0);
	printf("claims %llu %llu %llu %llu\n", (unsigned long long)q->counts.stale,
	       (unsigned long long)q->counts.tx_short, (unsigned long long)q->counts.kicks,
	       (unsigned long long)q->counts.wakeups);
	shunt_udp_close(&lease);
	return 0;
}

/* Waits for packets until it has slept or need not be expected to, and prints that. */
static int advice(const char *path, uint32_t spin_us)
{
	static struct shunt_udp_lease lease;
	struct shunt_udp_options options;
	struct xdp_desc batch[16];
	int spins;

	memset(&options, 0, sizeof(options));
	options.socket = path;
	options.name = "echo";
	options.spin_us = spin_us;
	if (shunt_udp_open(&lease, &options) != 0) {
		printf("%s\n", lease.error);
		return 1;
	}
	spins = lease.advice == SHUNT_UDP_FLAG_SPIN && spin_us == 0;
	for (int round = 0; lease.wakeups == 0 && (!spins || round < 5); round++) {
		CHECK(shunt_udp_wait(&lease, 20000) >= 0);
		for (uint32_t i = 0; i < lease.queue_count; i++)
			shunt_udp_release(&lease.queues[i], batch,
					  shunt_udp_receive(&lease.queues[i], batch, 16));
	}
	printf("flag %u, slept %s\n", lease.advice, lease.wakeups > 0 ? "true" : "false");
	shunt_udp_close(&lease);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 2 && strcmp(argv[1], "rings") == 0)
		return rings();
	if (argc == 2 && strcmp(argv[1], "parse") == 0)
		return parse();
	if (argc == 4 && strcmp(argv[1], "account") == 0)
		return account(argv[2], strtoull(argv[3], NULL, 10));
	if (argc == 5 && strcmp(argv[1], "stale") == 0)
		return stale(argv[2], strtoull(argv[3], NULL, 10), (uint32_t)atoi(argv[4]));
	if (argc == 4 && strcmp(argv[1], "advice") == 0)
		return advice(argv[2], (uint32_t)strtoul(argv[3], NULL, 10));
	return 2;
}
