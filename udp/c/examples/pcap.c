/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Pcap writes the datagrams of a lease into a file that tcpdump and Wireshark read, until it has enough of
 * them. It only receives, so the offer need not allow sending:
 *
 *	pcap --socket /run/shunt/udp.sock --name feed --count 1000 --write feed.pcap
 */
#include "../shunt_udp.h"

#include <getopt.h>

/* The file's beginning: libpcap's format 2.4, in the machine's byte order. */
struct pcap_file {
	uint32_t magic; /* times are in nanoseconds */
	uint16_t major, minor;
	uint32_t zone, accuracy;
	uint32_t snap_length; /* bytes of a packet at most */
	uint32_t link; /* 1: Ethernet */
};

struct pcap_record {
	uint32_t seconds, nanoseconds;
	uint32_t captured, size; /* bytes */
};

/* Writes up to limit packets of a queue, and returns their number. */
static uint32_t record_queue(struct shunt_udp_queue *queue, uint32_t limit, FILE *to)
{
	struct xdp_desc batch[64];
	uint32_t count = shunt_udp_receive(queue, batch, limit < 64 ? limit : 64);
	struct timespec now; /* of the batch: the kernel gives no time with a packet */

	clock_gettime(CLOCK_REALTIME, &now);
	for (uint32_t i = 0; i < count; i++) {
		struct pcap_record record = { (uint32_t)now.tv_sec, (uint32_t)now.tv_nsec,
					      batch[i].len, batch[i].len };

		fwrite(&record, sizeof(record), 1, to);
		fwrite(shunt_udp_bytes(queue, &batch[i]), batch[i].len, 1, to);
	}
	shunt_udp_release(queue, batch, count);
	return count;
}

static int record(struct shunt_udp_lease *lease, uint32_t left, const char *path)
{
	const struct pcap_file begin = { 0xa1b23c4d, 2, 4, 0, 0, 64 << 10, 1 };
	FILE *to = fopen(path, "wb");
	int failed;

	if (!to) {
		fprintf(stderr, "pcap: %s: %s\n", path, strerror(errno));
		return 1;
	}
	fwrite(&begin, sizeof(begin), 1, to);
	while (left > 0 && shunt_udp_wait(lease, 1000) >= 0)
		for (uint32_t i = 0; i < lease->queue_count; i++)
			left -= record_queue(&lease->queues[i], left, to);
	failed = ferror(to);
	failed |= fclose(to);
	if (failed)
		fprintf(stderr, "pcap: write %s: %s\n", path, strerror(errno));
	if (left > 0)
		fprintf(stderr, "pcap: %u packets are missing: %s\n", left, lease->error);
	return failed || left > 0;
}

int main(int argc, char **argv)
{
	static struct shunt_udp_lease lease;
	static const struct option names[] = {
		{ "socket", required_argument, NULL, 's' },
		{ "name", required_argument, NULL, 'n' },
		{ "count", required_argument, NULL, 'c' },
		{ "write", required_argument, NULL, 'w' },
		{ NULL, 0, NULL, 0 },
	};
	const char *path = "feed.pcap";
	struct shunt_udp_options options;
	uint32_t count = 1000;
	int failed;

	memset(&options, 0, sizeof(options));
	options.name = "feed";
	for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
		switch (c) {
		case 's':
			options.socket = optarg;
			break;
		case 'n':
			options.name = optarg;
			break;
		case 'c':
			count = (uint32_t)strtoul(optarg, NULL, 10);
			break;
		case 'w':
			path = optarg;
			break;
		default:
			return 2;
		}
	}
	if (shunt_udp_open(&lease, &options) != 0) {
		fprintf(stderr, "pcap: %s\n", lease.error);
		return 1;
	}
	printf("receiving in %s mode\n", shunt_udp_mode_text(lease.mode));
	fflush(stdout);
	/* One thread has all queues, so the first one's CPU is theirs. */
	if (shunt_udp_pin(&lease.queues[0]) < 0)
		perror("work on the queue's CPU");
	failed = record(&lease, count, path);
	shunt_udp_close(&lease);
	return failed;
}
