/*
 * A process whose leaks are known: it reads commands, a letter and a number of four digits, and answers each with one byte.
 * Each kind of allocation is in a function of its own. Nothing but the commands allocates: it uses no stdio.
 */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define KEPT_MAX 100000
#define MAP_BYTES (64 << 10)
#define OWN __attribute__((noinline, noclone))

struct kept {
	void *address;
	size_t bytes; /* of a mapping; otherwise 0 */
};

static struct kept kept[KEPT_MAX];
static int kept_count;
static volatile int is_churning;

static void keep(void *address, size_t bytes)
{
	if (!address || address == MAP_FAILED || kept_count == KEPT_MAX)
		_exit(2);
	kept[kept_count].address = address;
	kept[kept_count++].bytes = bytes;
}

OWN static void leak_malloc(void)
{
	keep(malloc(100), 0);
}

OWN static void leak_calloc(void)
{
	keep(calloc(10, 20), 0);
}

OWN static void *to_grow(void)
{
	return malloc(8);
}

/* From small to large: it has to be moved. */
OWN static void leak_realloc(void)
{
	void *before = to_grow();

	keep(realloc(before, 300), 0);
}

OWN static void leak_large(void)
{
	keep(realloc(NULL, 1 << 20), 0);
}

OWN static void leak_memalign(void)
{
	void *address = NULL;

	if (posix_memalign(&address, 64, 400))
		_exit(2);
	keep(address, 0);
}

OWN static void leak_aligned(void)
{
	keep(aligned_alloc(64, 512), 0);
}

OWN static void leak_map(void)
{
	keep(mmap(NULL, MAP_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
	     MAP_BYTES);
}

OWN static void leak_remap(void)
{
	void *small =
		mmap(NULL, MAP_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	keep(mremap(small, MAP_BYTES, 2 * MAP_BYTES, MREMAP_MAYMOVE), 2 * MAP_BYTES);
}

static void drop(void)
{
	while (kept_count > 0) {
		struct kept *k = &kept[--kept_count];

		if (k->bytes)
			munmap(k->address, k->bytes);
		else
			free(k->address);
	}
}

/* Grows each kept allocation that is not a mapping. */
static void grow(void)
{
	for (int i = 0; i < kept_count; i++) {
		void *to = kept[i].bytes ? kept[i].address : realloc(kept[i].address, 5000);

		if (!to)
			_exit(2);
		kept[i].address = to;
	}
}

static void churn(int rounds)
{
	for (int i = 0; i < rounds; i++) {
		void *some[16], *address = NULL;

		for (int j = 0; j < 16; j++)
			some[j] = malloc(16 + 32 * j + i % 64);
		for (int j = 0; j < 16; j += 2)
			some[j] = realloc(some[j], 3000);
		for (int j = 0; j < 16; j++)
			free(some[j]);
		free(calloc(3, 50));
		if (!posix_memalign(&address, 128, 1000))
			free(address);
		free(aligned_alloc(64, 640));
		free(realloc(malloc(300 << 10), 600 << 10));
		address = malloc(20);
		if (realloc(address, (size_t)-1 / 2)) /* is refused, and the address stays */
			_exit(2);
		free(address);
		address = mmap(NULL, MAP_BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		munmap(address, MAP_BYTES);
	}
}

static void *churn_on(void *unused)
{
	(void)unused;
	while (is_churning)
		churn(1);
	return NULL;
}

/* A child that leaks: its memory is its own. */
static void leak_in_child(int count)
{
	pid_t child = fork();

	if (child == 0) {
		for (int i = 0; i < count; i++)
			leak_malloc();
		_exit(0);
	}
	waitpid(child, NULL, 0);
}

static void (*const leaks[])(void) = {
	['m'] = leak_malloc,   ['c'] = leak_calloc,  ['r'] = leak_realloc, ['l'] = leak_large,
	['p'] = leak_memalign, ['a'] = leak_aligned, ['v'] = leak_map,     ['w'] = leak_remap
};

static void obey(char what, int count, char **argv)
{
	static pthread_t threads[2];

	switch (what) {
	case 'd':
		drop();
		return;
	case 'g':
		grow();
		return;
	case 'f':
		leak_in_child(count);
		return;
	case 'b': /* the noise begins */
		is_churning = 1;
		for (int i = 0; i < 2; i++)
			if (pthread_create(&threads[i], NULL, churn_on, NULL))
				_exit(2);
		return;
	case 'e': /* and ends */
		is_churning = 0;
		for (int i = 0; i < 2; i++)
			pthread_join(threads[i], NULL);
		return;
	case 'u':
		churn(count);
		return;
	case 'x': /* another program, with the same descriptors */
		execv("/proc/self/exe", argv);
		_exit(2);
	}
	for (int i = 0; i < count; i++)
		leaks[(unsigned char)what]();
}

int main(int argc, char **argv)
{
	char order[6] = "";

	(void)argc;
	if (write(1, ".", 1) != 1)
		return 1;
	while (read(0, order, 5) == 5) {
		obey(order[0], atoi(order + 1), argv);
		if (write(1, ".", 1) != 1)
			return 1;
	}
	return 0;
}
