// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Programs for user space that sweep the tables of flows, compare them with the slots, the
 * services' backends and the host's addresses, and read their clock. Run with BPF_PROG_RUN,
 * never attached. All need CAP_BPF and CAP_PERFMON.
 *
 * Flows end without any of this (lb/flow.h); a sweep only frees memory early and counts.
 * A run is for one caller at a time: the working memory of lb/scratch.h is per CPU, and these
 * programs can be preempted. So their object never shares that memory with the one at XDP,
 * whose interrupts would write into it.
 */
#include "remember.h"
#include "slot.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/*
 * Copies an entry during a walk, and says whether it is a living flow's. Key and value are the
 * table's own memory, which another CPU may hand to another flow at any moment: hence the copies,
 * and the seal over both.
 */
static __always_inline int flow_take(const struct flow_key *key_live, const struct flow *live,
				     struct flow_key *key, struct flow *copy)
{
	__builtin_memcpy(key, key_live, sizeof(*key));
	__builtin_memcpy(copy, live, sizeof(*copy));
	/* The compiler must not read the live entry again in place of the copy. */
	asm volatile("" : : "r"(key), "r"(copy) : "memory");
	return copy->seal == flow_seal(key, copy) && life_belongs(copy->life, copy->nonce) &&
	       !(life_state(copy->life) & FLOW_DEAD);
}

/* The same of a remembered flow. */
static __always_inline int remembered_take(const struct flow_key *key_live,
					   const struct remembered *live, struct flow_key *key,
					   struct remembered *copy)
{
	__builtin_memcpy(key, key_live, sizeof(*key));
	__builtin_memcpy(copy, live, sizeof(*copy));
	asm volatile("" : : "r"(key), "r"(copy) : "memory"); /* as in flow_take */
	return copy->seal == remembered_seal(key, copy) &&
	       !(remembered_flags(copy->word) & REMEMBERED_DEAD);
}

/* Whether an entry stands for a flow in use: a connection that has been answered and is not closed,
 * or a conversation over UDP. Each has two entries; the client's counts. */
static __always_inline int flow_is_open(const struct flow *copy)
{
	return copy->direction == DIRECTION_CLIENT && (life_state(copy->life) & FLOW_ESTABLISHED) &&
	       !state_is_closed(life_state(copy->life));
}

struct sweeping {
	struct sweep found;
	const struct settings *settings;
	__u64 now;
};

/* Deleting while walking can end the walk of one bucket early, or enter another twice: the next
 * sweep meets the missed entries. */
static long flow_sweep(void *map, struct flow_key *key_live, struct flow *live, struct sweeping *s)
{
	struct flow_key key;
	struct flow copy;

	s->found.entries++;
	if (!flow_take(key_live, live, &key, &copy))
		return 0;
	if (flow_is_over(&key, &copy, s->settings, s->now)) {
		s->found.expired += flow_end(&key, live, &copy);
		return 0;
	}
	if (copy.direction == DIRECTION_CLIENT) {
		s->found.flows++;
		s->found.established += flow_is_open(&copy);
	}
	return 0;
}

/* Ends every flow that is over and counts the rest. Returns 0, or -1 without settings. */
SEC("syscall")
int sh_sweep(struct sweep *ctx)
{
	struct sweeping s = { .settings = settings_get(), .now = bpf_jiffies64() };

	if (!s.settings)
		return -1;
	bpf_for_each_map_elem(&sh_flows, flow_sweep, &s, 0);
	ctx->entries = s.found.entries;
	ctx->flows = s.found.flows;
	ctx->established = s.found.established;
	ctx->expired = s.found.expired;
	return 0;
}

/* Flows in use, of each backend and of each service, by their indexes: in maps of the caller's
 * own, which begin with zeros. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set by the caller, for both maps */
	__type(key, __u32);
	__type(value, __u64);
} sh_be_open SEC(".maps"), sh_svc_open SEC(".maps");

struct counting {
	const struct settings *settings;
	__u64 now;
};

static __always_inline void open_count(void *map, __u32 index)
{
	__u64 *count = bpf_map_lookup_elem(map, &index);

	if (count)
		(*count)++;
}

static long flow_count(void *map, struct flow_key *key_live, struct flow *live, struct counting *c)
{
	struct service *service;
	struct flow_key key;
	struct flow copy;
	__u32 index;

	if (!flow_take(key_live, live, &key, &copy) || !flow_is_open(&copy) ||
	    flow_is_over(&key, &copy, c->settings, c->now))
		return 0;
	if (backend_find(copy.backend))
		open_count(&sh_be_open, copy.backend & BACKEND_INDEX_MASK);
	index = copy.service_index;
	service = bpf_map_lookup_elem(&sh_services, &index);
	if (service && service->live && service->generation == copy.service_generation)
		open_count(&sh_svc_open, index);
	return 0;
}

/* Counts the flows in use, and changes none. Returns 0, or -1 without settings. */
SEC("syscall")
int sh_count(void *ctx)
{
	struct counting c = { .settings = settings_get(), .now = bpf_jiffies64() };

	if (!c.settings)
		return -1;
	bpf_for_each_map_elem(&sh_flows, flow_count, &c, 0);
	return 0;
}

struct recalling {
	struct recall found;
	const struct settings *settings;
	__u16 now;
};

/* Whether an entry's backend lives and its slot names another; then the slot is marked. 0: the
 * slot names the same, or the backend is gone. -1: the slot says nothing about the entry. */
static __noinline int slot_mark(const struct service *service, const struct remembered *r)
{
	__u64 table = *(volatile __u64 *)&service->table;
	__u64 slot = slot_get(table, r->hash), *marks;
	__u32 index, word;

	if (slot_state(slot) != SLOT_CLOSING && slot_state(slot) != SLOT_MARKED)
		return -1;
	if (remembered_backend(r) == slot_current(slot) || !backend_find(remembered_backend(r)))
		return 0;
	index = (table >> 32) + (((__u64)r->hash * (__u32)table) >> 32);
	word = index / 64;
	marks = bpf_map_lookup_elem(&sh_marks, &word);
	if (marks)
		__sync_fetch_and_or(marks, 1ULL << (index % 64));
	return 1;
}

/* Whether a flow without its entry would follow its client's, which names another backend. */
static __always_inline int client_differs(const struct service *service, const struct flow_key *key,
					  const struct remembered *r)
{
	struct remembered of_client;
	struct flow_key client;

	if (!service->affinity_ticks || (remembered_flags(r->word) & REMEMBERED_CLIENT) ||
	    !backend_find(remembered_backend(r)))
		return 0;
	client_key(&client, &key->source, r->service);
	return remembered_find(&client, &of_client) &&
	       remembered_backend(&of_client) != remembered_backend(r);
}

static long entry_recall(void *map, struct flow_key *key_live, struct remembered *live,
			 struct recalling *c)
{
	struct service *service;
	struct remembered copy;
	struct flow_key key;
	__u32 index;
	int mark;

	c->found.entries++;
	if (!remembered_take(key_live, live, &key, &copy))
		return 0;
	index = copy.service & 0xffffff;
	service = bpf_map_lookup_elem(&sh_services, &index);
	if (!service || !service->live || service->generation != copy.service >> 24) {
		if (!c->found.look)
			c->found.expired += remembered_end(&key, live, &copy);
		return 0;
	}
	/* If a packet has come in between, the flow goes on, and counts. */
	if (remembered_is_over(&copy, c->settings, service->affinity_ticks, key.protocol, c->now) &&
	    !c->found.look && remembered_end(&key, live, &copy)) {
		c->found.expired++;
		return 0;
	}
	mark = slot_mark(service, &copy);
	if (mark > 0)
		c->found.marked++;
	else if (mark == 0 && !c->found.look && service->tracking != TRACKING_ALWAYS &&
		 !client_differs(service, &key, &copy))
		c->found.agreed += remembered_end(&key, live, &copy);
	return 0;
}

/*
 * Goes through the remembered flows: ends entries that are over, and in closing or marked slots
 * those with the slot's backend; marks such slots (sh_marks) if a flow has another backend. The
 * caller clears the marks before. Deleting while walking can end the walk of one bucket early:
 * a caller that relies on the marks has a look make them first. Returns 0, or -1 without settings.
 */
SEC("syscall")
int sh_recall(struct recall *ctx)
{
	struct recalling c = { .settings = settings_get(), .now = ticks_now() };

	c.found.look = ctx->look;

	if (!c.settings)
		return -1;
	bpf_for_each_map_elem(&sh_remembered, entry_recall, &c, 0);
	ctx->entries = c.found.entries;
	ctx->expired = c.found.expired;
	ctx->agreed = c.found.agreed;
	ctx->marked = c.found.marked;
	return 0;
}

/* The backends of each service, in a map of the caller's own. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* set by the caller */
	__type(key, struct member);
	__type(value, __u8);
} sh_members SEC(".maps");

static __noinline int is_stray(__u32 service, __u32 backend)
{
	struct member key = { .service = service, .backend = backend & BACKEND_REF_MASK };

	return !bpf_map_lookup_elem(&sh_members, &key);
}

static long flow_stray(void *map, struct flow_key *key_live, struct flow *live,
		       struct strays *found)
{
	struct flow_key key;
	struct flow copy;

	if (flow_take(key_live, live, &key, &copy) &&
	    is_stray(copy.service_index | (__u32)copy.service_generation << 24, copy.backend))
		found->flows += flow_end(&key, live, &copy);
	return 0;
}

static long entry_stray(void *map, struct flow_key *key_live, struct remembered *live,
			struct strays *found)
{
	struct remembered copy;
	struct flow_key key;

	if (remembered_take(key_live, live, &key, &copy) &&
	    is_stray(copy.service, remembered_backend(&copy)))
		found->remembered += remembered_end(&key, live, &copy);
	return 0;
}

/* Ends every flow, tracked or remembered, whose backend is not in sh_members as its service's. A
 * packet that comes in between may make one of them live on, and deleting while walking can end
 * the walk of one bucket early: so user space runs it until it finds none. Returns 0. */
SEC("syscall")
int sh_strays(struct strays *ctx)
{
	struct strays found = {};

	/* In this order: an entry of a client may yet begin a flow. */
	bpf_for_each_map_elem(&sh_remembered, entry_stray, &found, 0);
	bpf_for_each_map_elem(&sh_flows, flow_stray, &found, 0);
	ctx->flows = found.flows;
	ctx->remembered = found.remembered;
	return 0;
}

/* NAT sources that the host no longer has, in a map of the caller's own. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* set by the caller */
	__type(key, struct addr);
	__type(value, __u8);
} sh_departed SEC(".maps");

/* The entries that one run of sh_sourceless ended; its context, out. */
struct sourceless {
	__u64 entries; /* of sh_flows, of two for each flow */
	__u64 open; /* flows that were in use, with a backend that is still there */
};

/* Judges clients' entries only: each takes its twin along. */
static long flow_sourceless(void *map, struct flow_key *key_live, struct flow *live,
			    struct sourceless *found)
{
	struct flow_key key;
	struct flow copy;
	int ended;

	if (!flow_take(key_live, live, &key, &copy) || copy.direction != DIRECTION_CLIENT ||
	    !bpf_map_lookup_elem(&sh_departed, &copy.source))
		return 0;
	ended = flow_end(&key, live, &copy);
	found->entries += ended;
	if (ended && backend_find(copy.backend))
		found->open += flow_is_open(&copy);
	return 0;
}

/* Ends every flow that NAT sends from an address in sh_departed, which no backend names any more.
 * Like sh_strays, user space runs it until it finds none. Returns 0. */
SEC("syscall")
int sh_sourceless(struct sourceless *ctx)
{
	struct sourceless found = {};

	bpf_for_each_map_elem(&sh_flows, flow_sourceless, &found, 0);
	ctx->entries = found.entries;
	ctx->open = found.open;
	return 0;
}

/*
 * Gives the caller the programs' time, in jiffies. With beat it also notes that time as the daemon's
 * last sign that it keeps next hops fresh. Returns 0, or -1 without settings.
 */
SEC("syscall")
int sh_clock(struct clock *ctx)
{
	struct settings *settings = settings_get();
	__u64 now = bpf_jiffies64();

	if (ctx->beat) {
		if (!settings)
			return -1;
		*(volatile __u64 *)&settings->heartbeat = now;
	}
	ctx->jiffies = now;
	return 0;
}
