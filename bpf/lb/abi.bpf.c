/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * No program: the maps and types for user space. User space makes and pins the maps from
 * here. The file names every shared type, so that BTF has all of them and Go can be
 * generated from it. All programs are loaded onto the maps of this object.
 */
#include "maps.h"

/* Types that no map's key or value names. */
enum constant abi_constant;
enum address_flag abi_address_flag;
enum forwarding abi_forwarding;
enum tracking abi_tracking;
enum draining abi_draining;
enum slot_state abi_slot_state;
enum slot_flag abi_slot_flag;
enum feature abi_feature;
enum to_client abi_to_client;
enum service_flag abi_service_flag;
enum remembered_flag abi_remembered_flag;
enum flow_state abi_flow_state;
enum direction abi_direction;
enum ring abi_ring;
enum timeout abi_timeout;
enum name_kind abi_name_kind;
enum chain_position abi_chain_position;
enum switch_word abi_switch_word;
enum switch_state abi_switch_state;
enum gate abi_gate;
struct sweep abi_sweep;
struct recall abi_recall;
struct check abi_check;
struct member abi_member;
struct strays abi_strays;
struct clock abi_clock;
