/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * More streams of events beside that of event.h, for events that must not take each other's room. Each is a
 * ring buffer and an array of numbers, as sh_events and sh_event_seq are, and has a reader of its own.
 */
#ifndef SHUNT_RING_H
#define SHUNT_RING_H

#include "event.h"

/* event_reserve in another stream. */
static __always_inline struct event_header *event_reserve_in(void *ring, void *numbers,
							     __u64 payload_size, __u16 sensor)
{
	struct event_header *h;
	__u64 *sequence, number;
	__u32 zero = 0;

	sequence = bpf_map_lookup_elem(numbers, &zero);
	if (!sequence)
		return NULL;
	number = __sync_fetch_and_add(sequence, 1);
	h = bpf_ringbuf_reserve(ring, sizeof(*h) + payload_size, 0);
	if (!h)
		return NULL;
	__builtin_memset(h, 0, sizeof(*h));
	h->time_ns = bpf_ktime_get_boot_ns();
	h->sequence = number;
	h->cpu = bpf_get_smp_processor_id();
	h->size = payload_size;
	h->sensor = sensor;
	h->version = EVENT_VERSION;
	return h;
}

#endif
