// SPDX-License-Identifier: GPL-2.0
/*
 * The function's access to memory: what its VFIO user mapped, nothing else.
 *
 * Pages are pinned when first used and kept until they are unmapped, the user closes or the function goes. A copy is
 * made only when every page of its range is pinned: a range that is mapped in part touches nothing.
 *
 * Two rules keep the VFIO core happy:
 * - The type1 driver, having told us of an unmap, looks whether anything is pinned there, tells us again if so, and
 *   after ten times it BUG()s. A range that was unmapped lately is therefore fenced: for a moment nothing in it is
 *   pinned again, and what is (legitimately, mapped anew) accessed there is copied through vfio_dma_rw() instead.
 * - An unmap waits for us, so it must never wait for a page fault of the host daemon: copies run with faults disabled
 *   under @dma_sem, faults are taken outside.
 */
#include <linux/highmem.h>
#include <linux/iommu.h>
#include <linux/jiffies.h>
#include <linux/pagemap.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/vfio.h>

#include "dxpu.h"

/* Longer than the VFIO core needs from our return to its next look, even on a machine that is badly overloaded. */
#define FENCE_JIFFIES msecs_to_jiffies(100)
/* 1 GiB: beyond it everything is let go and pinned anew. */
#define MAX_PINNED (1UL << (30 - PAGE_SHIFT))
/* Times a copy may find its page gone or its buffer not faulted in before it gives up. */
#define MAX_TRIES 16

void dxpu_dma_init(struct dxpu_port *port)
{
	mutex_init(&port->pin_mutex);
	init_rwsem(&port->dma_sem);
	xa_init(&port->pages);
}

/* Pages leave the cache, then their pins go. @dma_sem makes sure that no copy still looks at them. */
static bool unpin_range(struct dxpu_port *port, unsigned long first, unsigned long last)
{
	unsigned long at = first, start, count;
	bool any = false;
	void *page;

	lockdep_assert_held(&port->pin_mutex);
	for (;;) {
		down_write(&port->dma_sem);
		page = xa_find(&port->pages, &at, last, XA_PRESENT);
		start = at;
		count = 0;
		while (page && count < VFIO_PIN_PAGES_MAX_ENTRIES) {
			xa_erase(&port->pages, at);
			count++;
			if (at == last)
				break;
			page = xa_load(&port->pages, ++at);
		}
		up_write(&port->dma_sem);
		if (!count)
			return any;
		vfio_unpin_pages(port->dma_dev, (dma_addr_t)start << PAGE_SHIFT, count);
		port->pinned -= count;
		any = true;
	}
}

/**
 * dxpu_dma_start() - a user has opened the function
 * @port: the port
 * @vdev: its VFIO device, open until dxpu_dma_stop()
 */
void dxpu_dma_start(struct dxpu_port *port, struct vfio_device *vdev)
{
	mutex_lock(&port->pin_mutex);
	port->dma_dev = vdev;
	memset(port->fence, 0, sizeof(port->fence));
	mutex_unlock(&port->pin_mutex);
}

/**
 * dxpu_dma_stop() - no access from here on; everything pinned is let go
 * @port: the port
 */
void dxpu_dma_stop(struct dxpu_port *port)
{
	mutex_lock(&port->pin_mutex);
	if (port->dma_dev) {
		unpin_range(port, 0, ULONG_MAX);
		port->dma_dev = NULL;
	}
	mutex_unlock(&port->pin_mutex);
}

/**
 * dxpu_dma_unmap() - a range is being unmapped: on return we have nothing pinned there
 * @port: the port
 * @iova: start
 * @length: bytes
 */
void dxpu_dma_unmap(struct dxpu_port *port, u64 iova, u64 length)
{
	unsigned long first = iova >> PAGE_SHIFT;
	unsigned long last = (iova + length - 1) >> PAGE_SHIFT;

	mutex_lock(&port->pin_mutex);
	if (port->dma_dev) {
		struct dxpu_fence *fence = &port->fence[port->fence_next++ % DXPU_FENCES];

		fence->first = first;
		fence->last = last;
		fence->until = jiffies + FENCE_JIFFIES;
		if (unpin_range(port, first, last))
			dxpu_count(port, DXPU_COUNT_DMA_UNMAPS);
	}
	mutex_unlock(&port->pin_mutex);
}

static bool fenced(struct dxpu_port *port, unsigned long first, unsigned long last)
{
	unsigned int i;

	lockdep_assert_held(&port->pin_mutex);
	for (i = 0; i < DXPU_FENCES; i++) {
		struct dxpu_fence *fence = &port->fence[i];

		if (fence->until && first <= fence->last && last >= fence->first && time_before(jiffies, fence->until))
			return true;
	}
	return false;
}

/*
 * An entry of the cache carries the directions the mapping has been asked for, as tag 0 (the function reads), 1 (it
 * writes) or 3 (both): what was pinned for one is not usable for the other.
 */
static void *tag_page(struct page *page, int prot)
{
	return xa_tag_pointer(page, prot == IOMMU_READ ? 0 : prot == IOMMU_WRITE ? 1 : 3);
}

static struct page *page_of(void *entry)
{
	return xa_untag_pointer(entry);
}

static int prot_of(void *entry)
{
	switch (xa_pointer_tag(entry)) {
	case 0:
		return IOMMU_READ;
	case 1:
		return IOMMU_WRITE;
	}
	return IOMMU_READ | IOMMU_WRITE;
}

static bool usable(void *entry, int prot)
{
	return entry && (prot_of(entry) & prot) == prot;
}

static int errno_of_pin(int error)
{
	/* What a device would see: nothing there, or not in that direction. */
	return error == -ENOMEM ? -ENOMEM : -ENXIO;
}

/* Pins [at, at + count), none of which is in the cache. */
static int pin_run(struct dxpu_port *port, unsigned long at, unsigned int count, int prot, struct page **pages)
{
	unsigned int i;
	int ret;

	ret = vfio_pin_pages(port->dma_dev, (dma_addr_t)at << PAGE_SHIFT, count, prot, pages);
	if (ret < 0)
		return errno_of_pin(ret);
	for (i = 0; i < count; i++) {
		void *old = xa_store(&port->pages, at + i, tag_page(pages[i], prot), GFP_KERNEL_ACCOUNT);

		if (xa_is_err(old)) {
			/* What is in the cache is let go with it; the rest here. */
			vfio_unpin_pages(port->dma_dev, (dma_addr_t)(at + i) << PAGE_SHIFT, count - i);
			port->pinned += i;
			return -ENOMEM;
		}
	}
	port->pinned += count;
	atomic64_add(count, &port->counters[DXPU_COUNT_DMA_PINNED]);
	return 0;
}

/* The common case: all of it was used before. */
static bool is_cached(struct dxpu_port *port, unsigned long first, unsigned long last, int prot)
{
	unsigned long at;

	down_read(&port->dma_sem);
	for (at = first; at <= last; at++)
		if (!usable(xa_load(&port->pages, at), prot))
			break;
	up_read(&port->dma_sem);
	return at > last;
}

/* Makes sure that all of [first, last] is in the cache, for those directions. -EAGAIN: fenced. */
static int pin_range(struct dxpu_port *port, unsigned long first, unsigned long last, int prot)
{
	struct page **pages;
	unsigned long at = first;
	int ret = 0;

	if (is_cached(port, first, last, prot))
		return 0;
	pages = kmalloc_array(VFIO_PIN_PAGES_MAX_ENTRIES, sizeof(*pages), GFP_KERNEL_ACCOUNT);
	if (!pages)
		return -ENOMEM;
	mutex_lock(&port->pin_mutex);
	if (!port->dma_dev || !READ_ONCE(port->live)) {
		ret = -ENXIO;
		goto unlock;
	}
	if (fenced(port, first, last)) {
		ret = -EAGAIN;
		goto unlock;
	}
	if (port->pinned + (last - first) >= MAX_PINNED)
		unpin_range(port, 0, ULONG_MAX);
	while (at <= last && !ret) {
		void *entry = xa_load(&port->pages, at);
		unsigned int count = 1;
		int need = prot;

		if (usable(entry, prot)) {
			at++;
			continue;
		}
		/* Pinned for the other direction: again, for both, which the mapping may refuse. */
		if (entry) {
			need |= prot_of(entry);
			unpin_range(port, at, at);
		}
		while (at + count <= last && count < VFIO_PIN_PAGES_MAX_ENTRIES && !xa_load(&port->pages, at + count))
			count++;
		ret = pin_run(port, at, count, need, pages);
		at += count;
	}
unlock:
	mutex_unlock(&port->pin_mutex);
	kfree(pages);
	return ret;
}

/* Copies within one page, faults disabled. Returns bytes left. Small aligned accesses are single ones, as on a bus. */
static unsigned long copy_in_page(void *kernel, void __user *user, size_t bytes, bool write)
{
	unsigned long left;

	if (!((unsigned long)kernel & (bytes - 1)) && (bytes == 8 || bytes == 4 || bytes == 2)) {
		u64 value = 0;

		if (write) {
			left = __copy_from_user_inatomic(&value, user, bytes);
			if (left)
				return left;
			/* Everything written before is seen before. */
			smp_wmb();
			if (bytes == 8)
				WRITE_ONCE(*(u64 *)kernel, value);
			else if (bytes == 4)
				WRITE_ONCE(*(u32 *)kernel, value);
			else
				WRITE_ONCE(*(u16 *)kernel, value);
			return 0;
		}
		if (bytes == 8)
			value = READ_ONCE(*(u64 *)kernel);
		else if (bytes == 4)
			value = READ_ONCE(*(u32 *)kernel);
		else
			value = READ_ONCE(*(u16 *)kernel);
		/* Everything read after is read after. */
		smp_rmb();
		return __copy_to_user_inatomic(user, &value, bytes);
	}
	if (write)
		return __copy_from_user_inatomic(kernel, user, bytes);
	return __copy_to_user_inatomic(user, kernel, bytes);
}

/* One piece that lies in one page. -ENXIO: the page has left the cache. -EFAULT: faulting in did not help. */
static int copy_piece(struct dxpu_port *port, u64 iova, char __user *user, size_t bytes, bool write)
{
	int prot = write ? IOMMU_WRITE : IOMMU_READ;
	unsigned long left;
	unsigned int tries;
	void *entry;

	for (tries = 0; tries < MAX_TRIES; tries++) {
		down_read(&port->dma_sem);
		entry = xa_load(&port->pages, iova >> PAGE_SHIFT);
		if (!usable(entry, prot)) {
			up_read(&port->dma_sem);
			return -ENXIO;
		}
		pagefault_disable();
		left = copy_in_page(page_address(page_of(entry)) + offset_in_page(iova), user, bytes, write);
		pagefault_enable();
		up_read(&port->dma_sem);
		if (!left)
			return 0;
		left = write ? fault_in_readable(user, bytes) : fault_in_safe_writeable(user, bytes);
		if (left)
			return -EFAULT;
	}
	return -EFAULT;
}

/* vfio_dma_rw() works in the user's own task or in a kernel thread; this is neither. */
struct bounce {
	struct work_struct work;
	struct vfio_device *vdev;
	u64 iova;
	void *data;
	size_t bytes;
	bool write;
	int ret;
};

static void bounce_function(struct work_struct *work)
{
	struct bounce *bounce = container_of(work, struct bounce, work);

	bounce->ret = vfio_dma_rw(bounce->vdev, bounce->iova, bounce->data, bounce->bytes, bounce->write);
}

static int bounce(struct dxpu_port *port, u64 iova, void *data, size_t bytes, bool write)
{
	struct bounce bounce = { .iova = iova, .data = data, .bytes = bytes, .write = write };

	/* Keeps the device open: dxpu_dma_stop() waits for the mutex. */
	mutex_lock(&port->pin_mutex);
	bounce.vdev = port->dma_dev;
	bounce.ret = -ENXIO;
	if (bounce.vdev && READ_ONCE(port->live)) {
		INIT_WORK_ONSTACK(&bounce.work, bounce_function);
		queue_work(system_unbound_wq, &bounce.work);
		flush_work(&bounce.work);
		destroy_work_on_stack(&bounce.work);
	}
	mutex_unlock(&port->pin_mutex);
	return !bounce.ret || bounce.ret == -EPERM ? bounce.ret : -ENXIO;
}

/* The same copy without pinning anything, for ranges that were unmapped a moment ago and may be mapped again. */
static int copy_bounced(struct dxpu_port *port, const struct dxpu_dma_range *range)
{
	bool write = range->direction == DXPU_DMA_WRITE_HOST;
	char __user *user = u64_to_user_ptr(range->buffer);
	u32 done, step;
	u8 *page;
	int ret = 0;

	page = (u8 *)__get_free_page(GFP_KERNEL_ACCOUNT);
	if (!page)
		return -ENOMEM;
	dxpu_count(port, DXPU_COUNT_DMA_BOUNCED);
	/* All of it or nothing: a look at each page first. */
	for (done = 0; write && !ret && done < range->bytes; done += step) {
		step = min_t(u32, range->bytes - done, PAGE_SIZE - offset_in_page(range->iova + done));
		ret = bounce(port, range->iova + done, page, 1, false);
	}
	for (done = 0; !ret && done < range->bytes; done += step) {
		step = min_t(u32, range->bytes - done, PAGE_SIZE - offset_in_page(range->iova + done));
		if (write && copy_from_user(page, user + done, step))
			ret = -EFAULT;
		if (!ret)
			ret = bounce(port, range->iova + done, page, step, write);
		if (!ret && !write && copy_to_user(user + done, page, step))
			ret = -EFAULT;
	}
	free_page((unsigned long)page);
	return ret;
}

static bool bus_master(struct dxpu_port *port)
{
	return dxpu_function_command(port) & PCI_COMMAND_MASTER;
}

static int copy_range(struct dxpu_port *port, const struct dxpu_dma_range *range)
{
	bool write = range->direction == DXPU_DMA_WRITE_HOST;
	char __user *user = u64_to_user_ptr(range->buffer);
	unsigned long first = range->iova >> PAGE_SHIFT;
	unsigned long last = (range->iova + range->bytes - 1) >> PAGE_SHIFT;
	int prot = write ? IOMMU_WRITE : IOMMU_READ;
	u32 done, step;
	int ret;

	ret = pin_range(port, first, last, prot);
	if (ret == -ENOMEM) {
		/* Over RLIMIT_MEMLOCK with all that is kept: once more with only this range. */
		mutex_lock(&port->pin_mutex);
		if (port->dma_dev)
			unpin_range(port, 0, ULONG_MAX);
		mutex_unlock(&port->pin_mutex);
		ret = pin_range(port, first, last, prot);
	}
	if (ret == -EAGAIN) {
		ret = copy_bounced(port, range);
		if (ret != -EPERM)
			return ret;
		/* vfio_dma_rw() wants a mapping that can be read, also to write. Others wait for the fence to fall. */
		schedule_timeout_killable(FENCE_JIFFIES + 1);
		ret = pin_range(port, first, last, prot);
		if (ret == -EAGAIN)
			ret = -ENXIO;
	}
	for (done = 0; !ret && done < range->bytes; done += step) {
		step = min_t(u32, range->bytes - done, PAGE_SIZE - offset_in_page(range->iova + done));
		ret = copy_piece(port, range->iova + done, user + done, step, write);
	}
	return ret;
}

/**
 * dxpu_dma_copy() - one range of DXPU_IOC_DMA; in the host daemon's context
 * @port: the port
 * @range: copied from user space, not checked
 */
int dxpu_dma_copy(struct dxpu_port *port, const struct dxpu_dma_range *range)
{
	bool write = range->direction == DXPU_DMA_WRITE_HOST;
	int ret;

	if (!range->bytes || range->bytes > DXPU_DMA_MAX_BYTES || range->direction > DXPU_DMA_WRITE_HOST ||
	    range->reserved)
		return -EINVAL;
	if (range->iova + range->bytes < range->iova || !bus_master(port)) {
		ret = -ENXIO;
		goto out;
	}
	if (!access_ok(u64_to_user_ptr(range->buffer), range->bytes))
		return -EFAULT;
	dxpu_count(port, write ? DXPU_COUNT_DMA_WRITES : DXPU_COUNT_DMA_READS);
	ret = copy_range(port, range);
	if (!ret)
		atomic64_add(range->bytes,
			     &port->counters[write ? DXPU_COUNT_DMA_WRITE_BYTES : DXPU_COUNT_DMA_READ_BYTES]);
out:
	if (ret == -ENXIO)
		dxpu_count(port, DXPU_COUNT_DMA_UR);
	return ret;
}

static u64 atomic_32(u32 *at, const struct dxpu_atomic *atomic)
{
	u32 old = READ_ONCE(*at), seen, new;

	for (;;) {
		if (atomic->op == DXPU_ATOMIC_FETCH_ADD)
			new = old + (u32)atomic->operand;
		else
			new = atomic->operand;
		if (atomic->op == DXPU_ATOMIC_COMPARE_SWAP && old != (u32)atomic->compare)
			return old;
		seen = cmpxchg(at, old, new);
		if (seen == old)
			return old;
		old = seen;
	}
}

static u64 atomic_64(u64 *at, const struct dxpu_atomic *atomic)
{
	u64 old = READ_ONCE(*at), seen, new;

	for (;;) {
		if (atomic->op == DXPU_ATOMIC_FETCH_ADD)
			new = old + atomic->operand;
		else
			new = atomic->operand;
		if (atomic->op == DXPU_ATOMIC_COMPARE_SWAP && old != atomic->compare)
			return old;
		seen = cmpxchg(at, old, new);
		if (seen == old)
			return old;
		old = seen;
	}
}

/**
 * dxpu_dma_atomic() - an atomic operation on mapped memory
 * @port: the port
 * @atomic: copied from user space, not checked; the old value is filled in
 */
int dxpu_dma_atomic(struct dxpu_port *port, struct dxpu_atomic *atomic)
{
	unsigned long pfn = atomic->iova >> PAGE_SHIFT;
	unsigned int tries;
	void *entry;
	int ret;

	if (atomic->op > DXPU_ATOMIC_COMPARE_SWAP || (atomic->width != 4 && atomic->width != 8) ||
	    atomic->iova & (atomic->width - 1))
		return -EINVAL;
	if (!bus_master(port)) {
		dxpu_count(port, DXPU_COUNT_DMA_UR);
		return -ENXIO;
	}
	for (tries = 0; tries < MAX_TRIES; tries++) {
		ret = pin_range(port, pfn, pfn, IOMMU_READ | IOMMU_WRITE);
		if (ret == -EAGAIN) {
			/* No atomic without a page; the fence lasts a moment. */
			schedule_timeout_uninterruptible(FENCE_JIFFIES / MAX_TRIES * 2);
			continue;
		}
		if (ret)
			break;
		ret = -ENXIO;
		down_read(&port->dma_sem);
		entry = xa_load(&port->pages, pfn);
		if (usable(entry, IOMMU_READ | IOMMU_WRITE)) {
			void *at = page_address(page_of(entry)) + offset_in_page(atomic->iova);

			atomic->old = atomic->width == 4 ? atomic_32(at, atomic) : atomic_64(at, atomic);
			ret = 0;
		}
		up_read(&port->dma_sem);
		break;
	}
	if (ret == -EAGAIN)
		ret = -ENXIO;
	if (ret == -ENXIO)
		dxpu_count(port, DXPU_COUNT_DMA_UR);
	return ret;
}
