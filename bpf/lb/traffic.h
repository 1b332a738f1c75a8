/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The traffic of services and backends. A packet is counted for both, or for neither.
 */
#ifndef SHUNT_TRAFFIC_H
#define SHUNT_TRAFFIC_H

#include "lookup.h"

static __always_inline void traffic_add(struct traffic *t, __u64 bytes, __u8 direction, int begins)
{
	if (direction == DIRECTION_CLIENT) {
		t->packets_in++;
		t->bytes_in += bytes;
	} else {
		t->packets_out++;
		t->bytes_out += bytes;
	}
	if (begins)
		t->flows_created++;
}

/* Counts a packet, and a flow if it begins one. */
static __always_inline void traffic_count(__u32 service, __u32 backend_reference, __u64 bytes,
					  __u8 direction, int begins)
{
	__u32 backend = backend_reference & BACKEND_INDEX_MASK;
	struct traffic *of_service = bpf_map_lookup_elem(&sh_svc_traffic, &service);
	struct traffic *of_backend = bpf_map_lookup_elem(&sh_be_traffic, &backend);

	if (!of_service || !of_backend)
		return;
	traffic_add(of_service, bytes, direction, begins);
	traffic_add(of_backend, bytes, direction, begins);
}

/* Counts a flow whose packet is counted elsewhere. */
static __always_inline void traffic_flow_count(__u32 service, __u32 backend_reference)
{
	__u32 backend = backend_reference & BACKEND_INDEX_MASK;
	struct traffic *of_service = bpf_map_lookup_elem(&sh_svc_traffic, &service);
	struct traffic *of_backend = bpf_map_lookup_elem(&sh_be_traffic, &backend);

	if (!of_service || !of_backend)
		return;
	of_service->flows_created++;
	of_backend->flows_created++;
}

#endif
