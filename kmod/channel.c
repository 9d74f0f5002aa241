// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/dxpu. See uapi/dxpu.h for what each command means.
 *
 * A file is unclaimed or serves one port. What user space passes is copied once and checked; nothing it does, or leaves
 * undone, touches more than the port it serves.
 */
#define pr_fmt(fmt) "dxpu: " fmt

#include <linux/fs.h>
#include <linux/jiffies.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>

#include "dxpu.h"

/**
 * struct dxpu_channel - an open file
 * @bus: the one there is
 * @port: claimed port, NULL before
 * @lock: claiming, taking in completions
 * @map: DXPU_MAP_BYTES shared with user space
 * @cq_head: consumer index of the completion ring
 * @greeted: DXPU_IOC_HELLO has succeeded
 * @wakes: DXPU_IOC_WAKE not yet answered
 */
struct dxpu_channel {
	struct dxpu_bus *bus;
	struct dxpu_port *port;
	struct mutex lock; /* claiming, taking in completions */
	void *map;
	u32 cq_head;
	bool greeted;
	atomic_t wakes;
};

static struct dxpu_bus *the_bus;

struct dxpu_control *dxpu_channel_control(struct dxpu_channel *channel)
{
	return channel->map;
}

void *dxpu_channel_sq(struct dxpu_channel *channel)
{
	return channel->map + DXPU_SQ_OFFSET;
}

static int dxpu_open(struct inode *inode, struct file *file)
{
	struct dxpu_channel *channel = kzalloc(sizeof(*channel), GFP_KERNEL_ACCOUNT);

	if (!channel)
		return -ENOMEM;
	channel->bus = the_bus;
	mutex_init(&channel->lock);
	file->private_data = channel;
	return 0;
}

static int dxpu_release(struct inode *inode, struct file *file)
{
	struct dxpu_channel *channel = file->private_data;
	struct dxpu_port *port = channel->port;
	unsigned long flags;

	if (port) {
		dxpu_port_unplug(port);
		raw_spin_lock_irqsave(&port->tx_lock, flags);
		WRITE_ONCE(port->channel, NULL);
		raw_spin_unlock_irqrestore(&port->tx_lock, flags);
		dxpu_port_changed(port);
	}
	vfree(channel->map);
	kfree(channel);
	return 0;
}

static int hello(struct dxpu_channel *channel, void __user *argument)
{
	struct dxpu_hello hello;
	int ret = 0;

	if (copy_from_user(&hello, argument, sizeof(hello)))
		return -EFAULT;
	if (hello.size != sizeof(hello) || hello.major != DXPU_ABI_MAJOR ||
	    hello.request_bytes != sizeof(struct dxpu_request) ||
	    hello.completion_bytes != sizeof(struct dxpu_completion) || hello.plug_bytes != sizeof(struct dxpu_plug) ||
	    hello.port_bytes != sizeof(struct dxpu_port_status) || hello.map_bytes != DXPU_MAP_BYTES)
		ret = -EPROTO;
	hello.major = DXPU_ABI_MAJOR;
	hello.minor = DXPU_ABI_MINOR;
	hello.ports = channel->bus->ports;
	hello.domain = channel->bus->sysdata.domain;
	/* Also on refusal, so that the program can say which version it met. */
	if (copy_to_user(argument, &hello, sizeof(hello)))
		return -EFAULT;
	if (!ret)
		channel->greeted = true;
	return ret;
}

static bool deadline_ok(u32 ms)
{
	return ms && ms <= DXPU_MAX_DEADLINE_MS;
}

static int claim(struct dxpu_channel *channel, void __user *argument)
{
	struct dxpu_claim claim;
	struct dxpu_port *port;
	unsigned long flags;
	void *map;
	int ret = 0;

	if (copy_from_user(&claim, argument, sizeof(claim)))
		return -EFAULT;
	if (claim.size != sizeof(claim) || claim.reserved || claim.port >= channel->bus->ports ||
	    !deadline_ok(claim.read_deadline_ms) || !deadline_ok(claim.write_deadline_ms) ||
	    !deadline_ok(claim.reset_deadline_ms))
		return -EINVAL;
	port = channel->bus->port[claim.port];
	map = vmalloc_user(DXPU_MAP_BYTES);
	if (!map)
		return -ENOMEM;

	mutex_lock(&channel->lock);
	mutex_lock(&port->lock);
	if (channel->port || port->channel) {
		ret = -EBUSY;
		vfree(map);
		goto unlock;
	}
	channel->map = map;
	channel->cq_head = 0;
	WRITE_ONCE(port->read_deadline, msecs_to_jiffies(claim.read_deadline_ms));
	WRITE_ONCE(port->write_deadline, msecs_to_jiffies(claim.write_deadline_ms));
	WRITE_ONCE(port->reset_deadline, msecs_to_jiffies(claim.reset_deadline_ms));
	raw_spin_lock_irqsave(&port->tx_lock, flags);
	port->sq_tail = 0;
	WRITE_ONCE(port->channel, channel);
	raw_spin_unlock_irqrestore(&port->tx_lock, flags);
	/* Last: the other commands look at it without the lock, so what they find behind it must be there. */
	smp_store_release(&channel->port, port);
unlock:
	mutex_unlock(&port->lock);
	mutex_unlock(&channel->lock);
	return ret;
}

static int plug(struct dxpu_port *port, void __user *argument)
{
	struct dxpu_config *config;
	struct dxpu_plug plug;
	int ret = -EFAULT;

	if (copy_from_user(&plug, argument, sizeof(plug)))
		return -EFAULT;
	if (plug.size != sizeof(plug) || plug.reserved)
		return -EINVAL;
	config = kvzalloc(sizeof(*config), GFP_KERNEL_ACCOUNT);
	if (!config)
		return -ENOMEM;
	if (!copy_from_user(config->data, u64_to_user_ptr(plug.image), sizeof(config->data)) &&
	    !copy_from_user(config->mask, u64_to_user_ptr(plug.write_mask), sizeof(config->mask)) &&
	    !copy_from_user(config->w1c, u64_to_user_ptr(plug.w1c_mask), sizeof(config->w1c)))
		ret = dxpu_port_plug(port, config);
	kvfree(config);
	return ret;
}

/* One completion at @at; returns the bytes it takes, or -EPROTO. */
static int take_completion(struct dxpu_channel *channel, u32 available)
{
	u32 at = channel->cq_head & (DXPU_CQ_BYTES - 1);
	const u8 *record = channel->map + DXPU_CQ_OFFSET + at;
	struct dxpu_completion head;

	/* One fetch: what is checked is what is used. */
	memcpy(&head, record, sizeof(head));
	barrier();
	if (head.bytes < sizeof(head) || head.bytes % DXPU_RECORD_ALIGN || head.bytes > available ||
	    head.bytes > DXPU_CQ_BYTES - at)
		return -EPROTO;
	if (head.status == DXPU_STATUS_PAD)
		return head.bytes;
	if (head.length > head.bytes - sizeof(head) || head.length > DXPU_MAX_TRANSFER)
		return -EPROTO;
	dxpu_complete(channel->port, &head, record + sizeof(head));
	return head.bytes;
}

static int take_completions(struct dxpu_channel *channel)
{
	struct dxpu_control *control = channel->map;
	struct dxpu_port *port = channel->port;
	u32 available;
	int ret = 0;

	mutex_lock(&channel->lock);
	/* Pairs with the producer's release: records are whole up to here. */
	available = smp_load_acquire(&control->cq_tail) - channel->cq_head;
	if (available > DXPU_CQ_BYTES || available % DXPU_RECORD_ALIGN || channel->cq_head % DXPU_RECORD_ALIGN)
		ret = -EPROTO;
	while (!ret && available) {
		int bytes = take_completion(channel, available);

		if (bytes < 0) {
			ret = bytes;
			break;
		}
		channel->cq_head += bytes;
		available -= bytes;
	}
	/* The records are read before the index that lets them be overwritten. */
	smp_store_release(&control->cq_head, channel->cq_head);
	mutex_unlock(&channel->lock);

	/* The server was here, so it may have made room. */
	if (waitqueue_active(&port->space_wq))
		wake_up_all(&port->space_wq);
	if (ret) {
		dxpu_count(port, DXPU_COUNT_PROTOCOL);
		dxpu_port_unplug(port);
	}
	return ret;
}

static bool something_to_do(struct dxpu_channel *channel, u32 seen)
{
	struct dxpu_control *control = channel->map;
	struct dxpu_port *port = channel->port;

	return READ_ONCE(port->sq_tail) != READ_ONCE(control->sq_head) || atomic_read(&port->status_seq) != seen ||
	       atomic_read(&channel->wakes);
}

static int wait(struct dxpu_channel *channel, void __user *argument)
{
	struct dxpu_port *port = channel->port;
	struct dxpu_control *control = channel->map;
	struct dxpu_wait wait;
	long left = 0;
	int ret;

	if (copy_from_user(&wait, argument, sizeof(wait)))
		return -EFAULT;
	if (wait.size != sizeof(wait) || wait.timeout_ms > DXPU_MAX_DEADLINE_MS)
		return -EINVAL;
	ret = take_completions(channel);
	if (ret)
		return ret;
	if (wait.timeout_ms)
		left = wait_event_interruptible_timeout(port->server_wq,
							something_to_do(channel, wait.seen_status_seq),
							msecs_to_jiffies(wait.timeout_ms));
	if (left < 0)
		return left;
	atomic_set(&channel->wakes, 0);
	wait.status_seq = atomic_read(&port->status_seq);
	WRITE_ONCE(control->status_seq, wait.status_seq);
	return copy_to_user(argument, &wait, sizeof(wait)) ? -EFAULT : 0;
}

static int dma(struct dxpu_port *port, void __user *argument)
{
	struct dxpu_dma_range __user *ranges;
	struct dxpu_dma dma;
	u32 i;

	if (copy_from_user(&dma, argument, sizeof(dma)))
		return -EFAULT;
	if (dma.size != sizeof(dma) || !dma.count || dma.count > DXPU_DMA_MAX_RANGES)
		return -EINVAL;
	ranges = u64_to_user_ptr(dma.ranges);
	for (i = 0; i < dma.count; i++) {
		struct dxpu_dma_range range;
		s32 status;

		if (copy_from_user(&range, &ranges[i], sizeof(range)))
			return -EFAULT;
		status = dxpu_dma_copy(port, &range);
		if (put_user(status, &ranges[i].status))
			return -EFAULT;
	}
	return 0;
}

static int atomic(struct dxpu_port *port, void __user *argument)
{
	struct dxpu_atomic atomic;
	int ret;

	if (copy_from_user(&atomic, argument, sizeof(atomic)))
		return -EFAULT;
	if (atomic.size != sizeof(atomic) || atomic.reserved)
		return -EINVAL;
	ret = dxpu_dma_atomic(port, &atomic);
	if (ret)
		return ret;
	return copy_to_user(argument, &atomic, sizeof(atomic)) ? -EFAULT : 0;
}

static int config_update(struct dxpu_port *port, void __user *argument)
{
	struct dxpu_config_update update;

	if (copy_from_user(&update, argument, sizeof(update)))
		return -EFAULT;
	if (update.size != sizeof(update) || update.reserved || update.offset < PCI_STD_HEADER_SIZEOF ||
	    update.offset >= DXPU_CONFIG_BYTES || !update.length || update.length > sizeof(update.data) ||
	    update.length > DXPU_CONFIG_BYTES - update.offset)
		return -EINVAL;
	return dxpu_function_update(port, update.offset, update.data, update.length);
}

static int port_status(struct dxpu_channel *channel, void __user *argument)
{
	struct dxpu_port_status status;

	if (copy_from_user(&status, argument, offsetofend(struct dxpu_port_status, port)))
		return -EFAULT;
	if (status.size != sizeof(status) || status.port >= channel->bus->ports)
		return -EINVAL;
	dxpu_port_status(channel->bus->port[array_index_nospec(status.port, channel->bus->ports)], &status);
	return copy_to_user(argument, &status, sizeof(status)) ? -EFAULT : 0;
}

static long dxpu_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct dxpu_channel *channel = file->private_data;
	void __user *pointer = (void __user *)argument;
	struct dxpu_port *port;

	if (command == DXPU_IOC_HELLO)
		return hello(channel, pointer);
	if (!channel->greeted)
		return -EPROTO;
	switch (command) {
	case DXPU_IOC_CLAIM:
		return claim(channel, pointer);
	case DXPU_IOC_PORT_STATUS:
		return port_status(channel, pointer);
	}
	/* Pairs with the release in claim(). */
	port = smp_load_acquire(&channel->port);
	if (!port)
		return -ENOTCONN;
	switch (command) {
	case DXPU_IOC_PLUG:
		return plug(port, pointer);
	case DXPU_IOC_UNPLUG:
		dxpu_port_unplug(port);
		return 0;
	case DXPU_IOC_RELEASE:
		return dxpu_port_release(port);
	case DXPU_IOC_WAIT:
		return wait(channel, pointer);
	case DXPU_IOC_COMPLETE:
		return take_completions(channel);
	case DXPU_IOC_WAKE:
		atomic_inc(&channel->wakes);
		wake_up(&port->server_wq);
		return 0;
	case DXPU_IOC_RAISE_MSIX:
		return argument > U32_MAX ? -EINVAL : dxpu_msix_raise(port, argument);
	case DXPU_IOC_DMA:
		return dma(port, pointer);
	case DXPU_IOC_ATOMIC:
		return atomic(port, pointer);
	case DXPU_IOC_CONFIG_UPDATE:
		return config_update(port, pointer);
	}
	return -ENOTTY;
}

static __poll_t dxpu_poll(struct file *file, poll_table *table)
{
	struct dxpu_channel *channel = file->private_data;
	struct dxpu_control *control;
	struct dxpu_port *port;

	/* Pairs with the release in claim(). */
	port = smp_load_acquire(&channel->port);
	if (!port)
		return EPOLLERR;
	control = channel->map;
	poll_wait(file, &port->server_wq, table);
	return something_to_do(channel, READ_ONCE(control->status_seq)) ? EPOLLIN | EPOLLRDNORM : 0;
}

static int dxpu_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct dxpu_channel *channel = file->private_data;

	/* Pairs with the release in claim(). */
	if (!smp_load_acquire(&channel->port))
		return -ENOTCONN;
	if (vma->vm_pgoff || vma->vm_end - vma->vm_start != DXPU_MAP_BYTES)
		return -EINVAL;
	return remap_vmalloc_range(vma, channel->map, 0);
}

static const struct file_operations dxpu_fops = {
	.owner = THIS_MODULE,
	.open = dxpu_open,
	.release = dxpu_release,
	.unlocked_ioctl = dxpu_ioctl,
	.poll = dxpu_poll,
	.mmap = dxpu_mmap,
	.llseek = noop_llseek,
};

static struct miscdevice dxpu_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "dxpu",
	.fops = &dxpu_fops,
	.mode = 0600,
};

int dxpu_channel_create(struct dxpu_bus *bus)
{
	BUILD_BUG_ON(sizeof(struct dxpu_control) > DXPU_CONTROL_BYTES);
	BUILD_BUG_ON(DXPU_SQ_OFFSET % PAGE_SIZE || DXPU_CQ_OFFSET % PAGE_SIZE);
	the_bus = bus;
	return misc_register(&dxpu_misc);
}

void dxpu_channel_destroy(void)
{
	misc_deregister(&dxpu_misc);
}
