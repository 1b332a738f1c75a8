/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * No program: what user space must know of bpf/core, which all products share.
 */
#include <linux/bpf.h>

#include "reasons.h"
#include "types.h"

enum reason core_reason;
struct count core_count;
