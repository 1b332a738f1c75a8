/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * More streams of events beside the one of event.h, for events that must not take each other's room. Each is
 * a ring buffer and an array of numbers, as sh_events and sh_event_seq are, and has a reader of its own.
 */
#ifndef SHUNT_RING_H
#define SHUNT_RING_H

#include "event.h"

/* Room for an event in a stream, as event_reserve; NULL: none, and counted. event_head puts *number into the header. There is
 * no check in between: 6.1 takes a second one for a path on which there is no room. */
static __always_inline struct event_header *event_room(void *ring, void *numbers,
						       __u64 payload_size, __u64 *number)
{
	__u32 zero = 0;
	__u64 *sequence = bpf_map_lookup_elem(numbers, &zero);

	if (!sequence)
		return NULL;
	*number = __sync_fetch_and_add(sequence, 1);
	return bpf_ringbuf_reserve(ring, sizeof(struct event_header) + payload_size, 0);
}

/* The part of a header that does not depend on the current task. */
static __always_inline void event_head(struct event_header *h, __u64 number, __u64 payload_size,
				       __u16 sensor)
{
	__builtin_memset(h, 0, sizeof(*h));
	h->time_ns = bpf_ktime_get_boot_ns();
	h->sequence = number;
	h->cpu = bpf_get_smp_processor_id();
	h->size = payload_size;
	h->sensor = sensor;
	h->version = EVENT_VERSION;
}

#endif
