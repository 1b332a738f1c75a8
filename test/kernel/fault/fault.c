// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A module for tests in virtual machines: faults of a known size, for the tools that have to find them.
 *
 * A number written to a file of /sys/kernel/debug/shunt_fault causes a fault, in the writing task:
 *
 *   irqoff      interrupts are off on this CPU for so many ns; reading gives the begin and the end of the last time,
 *               CLOCK_MONOTONIC, ns
 *   preemptoff  preemption is off for so many ns, and interrupts are on
 *   slab        so many objects of the cache shunt_fault are allocated, and kept
 *   page        so many pages
 *   vmalloc     so many ranges of addresses
 *   drop        all kept memory is freed; the number does not matter
 */
#include <linux/debugfs.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/timekeeping.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>

#define HELD_MAX_NS (1000 * NSEC_PER_MSEC)
#define OBJECT_BYTES 1000
#define RANGE_BYTES (64 << 10)
#define KEPT_MAX 100000 /* of one number */

/* A kept object begins with its place in a list. */
struct object {
	struct list_head list;
	char rest[OBJECT_BYTES - sizeof(struct list_head)];
};

static struct dentry *folder;
static struct kmem_cache *cache;
static DEFINE_MUTEX(mutex);
static LIST_HEAD(objects);
static LIST_HEAD(pages);
static LIST_HEAD(ranges);
static u64 held_begin_ns, held_end_ns;

static noinline int fault_irqoff(u64 ns)
{
	unsigned long flags;
	u64 begin;

	local_irq_save(flags);
	begin = ktime_get_mono_fast_ns();
	while (ktime_get_mono_fast_ns() - begin < ns)
		cpu_relax();
	held_begin_ns = begin;
	held_end_ns = ktime_get_mono_fast_ns();
	local_irq_restore(flags);
	return 0;
}

static noinline int fault_preemptoff(u64 ns)
{
	u64 begin;

	preempt_disable();
	begin = ktime_get_mono_fast_ns();
	while (ktime_get_mono_fast_ns() - begin < ns)
		cpu_relax();
	preempt_enable();
	return 0;
}

static noinline int fault_slab(u64 count)
{
	while (count--) {
		struct object *o = kmem_cache_alloc(cache, GFP_KERNEL);

		if (!o)
			return -ENOMEM;
		list_add(&o->list, &objects);
	}
	return 0;
}

static noinline int fault_page(u64 count)
{
	while (count--) {
		struct page *p = alloc_page(GFP_KERNEL);

		if (!p)
			return -ENOMEM;
		list_add(&p->lru, &pages);
	}
	return 0;
}

static noinline int fault_vmalloc(u64 count)
{
	while (count--) {
		struct object *o = vmalloc(RANGE_BYTES);

		if (!o)
			return -ENOMEM;
		list_add(&o->list, &ranges);
	}
	return 0;
}

static int fault_drop(u64 unused)
{
	struct object *o, *next;
	struct page *p, *next_page;

	list_for_each_entry_safe(o, next, &objects, list)
		kmem_cache_free(cache, o);
	list_for_each_entry_safe(o, next, &ranges, list)
		vfree(o);
	list_for_each_entry_safe(p, next_page, &pages, lru) {
		list_del(&p->lru);
		__free_page(p);
	}
	INIT_LIST_HEAD(&objects);
	INIT_LIST_HEAD(&ranges);
	return 0;
}

static const struct fault {
	const char *name;
	int (*make)(u64 number);
	u64 most;
} faults[] = {
	{ "irqoff", fault_irqoff, HELD_MAX_NS },
	{ "preemptoff", fault_preemptoff, HELD_MAX_NS },
	{ "slab", fault_slab, KEPT_MAX },
	{ "page", fault_page, KEPT_MAX },
	{ "vmalloc", fault_vmalloc, KEPT_MAX },
	{ "drop", fault_drop, U64_MAX },
};

static ssize_t fault_write(struct file *file, const char __user *from, size_t size, loff_t *at)
{
	const struct fault *f = file_inode(file)->i_private;
	u64 number;
	int err = kstrtoull_from_user(from, size, 10, &number);

	if (err)
		return err;
	if (number > f->most)
		return -ERANGE;
	mutex_lock(&mutex);
	err = f->make(number);
	mutex_unlock(&mutex);
	return err ? err : size;
}

static ssize_t fault_read(struct file *file, char __user *to, size_t size, loff_t *at)
{
	char text[64];
	int length = scnprintf(text, sizeof(text), "%llu %llu\n", held_begin_ns, held_end_ns);

	return simple_read_from_buffer(to, size, at, text, length);
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.write = fault_write,
	.read = fault_read,
};

/* A cache with a constructor is not merged with others, so it keeps its name. */
static void object_init(void *object)
{
	memset(object, 0, OBJECT_BYTES);
}

static int __init fault_init(void)
{
	int i;

	cache = kmem_cache_create("shunt_fault", sizeof(struct object), 0, 0, object_init);
	if (!cache)
		return -ENOMEM;
	folder = debugfs_create_dir("shunt_fault", NULL);
	for (i = 0; i < ARRAY_SIZE(faults); i++)
		debugfs_create_file(faults[i].name, 0600, folder, (void *)&faults[i], &operations);
	return 0;
}

static void __exit fault_exit(void)
{
	debugfs_remove(folder);
	fault_drop(0);
	kmem_cache_destroy(cache);
}

module_init(fault_init);
module_exit(fault_exit);
MODULE_LICENSE("Dual BSD/GPL");
MODULE_DESCRIPTION("Faults of a known size, for tests");
