/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The sources that may use a service, and how often: the service's lists of prefixes, and the bound
 * on the new flows of one source address.
 *
 *   source ─► sh_filters ─► allowed ─► sh_source_rates ─► one new flow less left ─► goes on
 *                  └► refused               └► none left ─► dropped
 *
 * Asked where a flow begins. With direct return no stage knows where a flow begins, so every packet
 * of a service with lists is held against them, and SYNs are counted as new flows.
 */
#ifndef SHUNT_FILTER_H
#define SHUNT_FILTER_H

#include "flow.h"
#include "hop.h"
#include "place.h"

#define FILTER_PREFIX_FULL 160 /* service 32, address 128 */

/* How often an element that was recycled as it was read is looked up again. */
#define FILTER_TRIES 2

/* The first bits of a word in wire order. */
static __always_inline __u64 word_prefix(__be64 word, __s32 bits)
{
	if (bits <= 0)
		return 0;
	if (bits >= 64)
		return word;
	return word & bpf_cpu_to_be64(~0ULL << (64 - bits & 63));
}

/* The check of a prefix's key (struct filter), for a prefix of this length. */
static __always_inline __u32 filter_check(const struct addr *source, __u32 service, __u32 bits)
{
	struct addr prefix = {
		.high = word_prefix(source->high, bits),
		.low = word_prefix(source->low, (__s32)bits - 64),
	};

	return addr_check(&prefix) ^ service;
}

/*
 * Whether the lists let a source in. The longest prefix decides, and the reconciler puts one of
 * length 0 behind the others, so finding none means that the lists are being taken away or that
 * the trie is being changed around the look-up: a source that no prefix lets in stays out.
 */
static __always_inline int source_is_allowed(const struct packet *p, __u32 service)
{
	struct filter_key key = { .prefix_length = FILTER_PREFIX_FULL, .service = service };

	__builtin_memcpy(key.address, &p->key.source, sizeof(key.address));
	for (int i = 0; i < FILTER_TRIES; i++) {
		struct filter *found = bpf_map_lookup_elem(&sh_filters, &key);
		__u64 word;
		__u32 bits;

		if (!found)
			return 0;
		word = *(volatile __u64 *)found;
		bits = (__u8)(word >> FILTER_BITS_SHIFT);
		if (word_belongs(word, filter_check(&p->key.source, service, bits)))
			return word & FILTER_ALLOWS;
	}
	return 0;
}

static __always_inline __u64 source_tag(const struct source_key *key)
{
	return key->source.high * MIX_0 + key->source.low * MIX_1 + key->service * MIX_2;
}

/* Returns the credit of a source by now: the credit of then, and that for the time since. */
static __always_inline __u64 credit_now(__u64 word, __u32 now, __u32 rate)
{
	__u64 credit = word >> 32, full = (__u64)rate * jiffies_per_second;
	__u32 age = now - (__u32)word;

	if (age > -jiffies_per_second) /* another CPU's jiffies were ahead */
		age = 0;
	else if (age > jiffies_per_second)
		age = jiffies_per_second;
	credit += (__u64)age * rate;
	return credit < full ? credit : full;
}

/*
 * Takes one of the new flows that a source may have, and says whether there was one. Each second
 * brings `rate` of them, and at most `rate` are kept. A source that exceeds its rate writes
 * nothing. If several CPUs see packets at once a few more may be let through, and a source that
 * was forgotten because the table is full begins anew, with all of them.
 */
static __always_inline int source_may_begin(const struct packet *p, __u32 service, __u32 rate)
{
	struct source_key key = { .source = p->key.source, .service = service };
	__u32 now = bpf_jiffies64();
	struct source_rate fresh, *live;
	__u64 tag;

	if (p->family == FAMILY_IP6)
		key.source.low = 0; /* a host can use a whole /64 (RFC 6177, RFC 7934) */
	tag = source_tag(&key);
	live = bpf_map_lookup_elem(&sh_source_rates, &key);
	if (!live || *(volatile __u64 *)&live->tag != tag) {
		fresh.tag = tag;
		fresh.word = ((__u64)rate - 1) * jiffies_per_second << 32 | now;
		bpf_map_update_elem(&sh_source_rates, &key, &fresh, BPF_NOEXIST);
		return 1;
	}
	for (int i = 0; i < CAS_TRIES; i++) {
		__u64 old = *(volatile __u64 *)&live->word;
		__u64 credit = credit_now(old, now, rate);

		if (credit < jiffies_per_second)
			return 0;
		/* An element that is another's by now can at worst lose one of its flows. */
		if (__sync_val_compare_and_swap(&live->word, old,
						(credit - jiffies_per_second) << 32 | now) == old)
			return 1;
	}
	return 1;
}

/* REASON_NONE: the packet's source may use the service; else the reason why not. begins: the
 * packet begins a flow. */
__stage enum reason client_admit(const struct packet *p, __u32 service_index, int begins)
{
	struct service *service = bpf_map_lookup_elem(&sh_services, &service_index);
	__u32 name, rate;

	if (!p || !service)
		return REASON_INTERNAL;
	name = service_name(service->generation, service_index);
	if ((*(volatile __u32 *)&service->flags & SERVICE_FILTERS) && !source_is_allowed(p, name))
		return REASON_DENIED;
	rate = *(volatile __u32 *)&service->source_rate;
	if (begins && rate && !source_may_begin(p, name, rate))
		return REASON_SOURCE_RATE;
	return REASON_NONE;
}

/* Lets a packet's source use the service, or drops the packet. Without limits it does nothing. */
static __always_inline enum verdict admit(struct packet *p, const struct service *service,
					  __u32 index, int begins)
{
	enum reason reason;

	if (!((service->flags & SERVICE_FILTERS) | service->source_rate))
		return VERDICT_NEXT;
	reason = client_admit(p, index, begins);
	return reason == REASON_NONE ? VERDICT_NEXT : drop(p, reason);
}

/*
 * Whether a service has as many flows as it may. CPUs that ask at the same time may each let one
 * more in. Nobody but the daemon's sweep removes flows that are over from a service that takes
 * no new ones, so without it nothing is bounded.
 */
static __always_inline int service_is_full(const struct service *service, __u32 index)
{
	struct service_flows *flows = service_flows_find(index, service->generation);
	struct settings *settings = settings_get();
	__u32 bound = *(volatile __u32 *)&service->flows_max;
	__s32 count = flows ? *(volatile __s32 *)&flows->count : 0;

	return bound && count > 0 && (__u32)count >= bound && settings &&
	       !daemon_is_silent(settings, bpf_jiffies64());
}

/* Counts a flow whose client's entry has been made. */
static __always_inline void service_flow_begin(const struct flow *f)
{
	struct service_flows *flows;

	if (!(f->nonce & NONCE_COUNTED))
		return;
	flows = service_flows_find(f->service_index, f->service_generation);
	if (flows)
		__sync_fetch_and_add(&flows->count, 1);
}

#endif
