/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * No program: the types of bpf/core, which all products share, for user space.
 */
#include "packet.h"
#include "stamp.h"

enum reason core_reason;
enum verdict core_verdict;
enum stamp_constant core_stamp_constant;
struct count core_count;
struct stamp core_stamp;
