// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * No programs: internal/event gets the types of event.h from here.
 */
#include "event.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* clang keeps types in the BTF only if something uses them. */
struct {
	struct event_header header;
	enum event_constant constant;
} event_types;
