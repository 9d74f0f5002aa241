// SPDX-License-Identifier: GPL-2.0
/*
 * Requests to user space, and their completions.
 *
 * One ordered stream per port: MMIO reads and writes, configuration writes and resets leave in the order they were
 * made, so a write can not be overtaken by a later read. User space can write to the whole mapping at any time; the
 * kernel takes nothing from it but the two indices and the completion records, each fetched once and checked.
 *
 * Every wait here has a deadline and ends when the function goes or the waiting task is killed.
 */
#include <linux/jiffies.h>
#include <linux/sched.h>
#include <linux/string.h>
#include <linux/wait.h>

#include "dxpu.h"

#define SLOT_BITS 6

void dxpu_ring_init(struct dxpu_port *port)
{
	unsigned int i;

	BUILD_BUG_ON(1 << SLOT_BITS != DXPU_SLOTS);
	raw_spin_lock_init(&port->tx_lock);
	spin_lock_init(&port->req_lock);
	init_waitqueue_head(&port->server_wq);
	init_waitqueue_head(&port->space_wq);
	init_waitqueue_head(&port->slot_wq);
	for (i = 0; i < DXPU_SLOTS; i++) {
		port->slot[i].generation = 1;
		init_completion(&port->slot[i].done);
	}
}

/**
 * dxpu_set_live() - requests are let through, or not any more
 * @port: the port
 * @live: which
 *
 * When it returns after false, whoever saw true has its slot, where dxpu_end_requests() finds it.
 */
void dxpu_set_live(struct dxpu_port *port, bool live)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&port->tx_lock, flags);
	WRITE_ONCE(port->live, live);
	raw_spin_unlock_irqrestore(&port->tx_lock, flags);
}

/**
 * dxpu_post() - puts a record into the request ring, from any context
 * @port: the port
 * @what: its head; @what->bytes and @what->plug are filled in here
 * @data: @what->length bytes that follow it, or NULL
 * @reserve: bytes of the ring to leave free
 *
 * Return: 0, -EAGAIN without room, -ENODEV without a function or a server, -EPROTO when user space broke its index.
 */
int dxpu_post(struct dxpu_port *port, const struct dxpu_request *what, const void *data, u32 reserve)
{
	u32 length = data ? what->length : 0;
	u32 bytes = ALIGN(sizeof(*what) + length, DXPU_RECORD_ALIGN);
	struct dxpu_request head = *what;
	struct dxpu_control *control;
	u32 used, to_end, skip;
	unsigned long flags;
	int ret = 0;
	u8 *ring;

	raw_spin_lock_irqsave(&port->tx_lock, flags);
	if (!port->live || !port->channel) {
		ret = -ENODEV;
		goto unlock;
	}
	control = dxpu_channel_control(port->channel);
	ring = dxpu_channel_sq(port->channel);
	/* Pairs with the release of the consumer: it has copied out what we are about to overwrite. */
	used = port->sq_tail - smp_load_acquire(&control->sq_head);
	if (used > DXPU_SQ_BYTES) {
		dxpu_count(port, DXPU_COUNT_PROTOCOL);
		schedule_work(&port->fail);
		ret = -EPROTO;
		goto unlock;
	}
	to_end = DXPU_SQ_BYTES - (port->sq_tail & (DXPU_SQ_BYTES - 1));
	skip = to_end < bytes ? to_end : 0;
	if (used + skip + bytes + reserve > DXPU_SQ_BYTES) {
		ret = -EAGAIN;
		goto unlock;
	}
	if (skip) {
		struct dxpu_request pad = { .bytes = skip, .kind = DXPU_REQ_PAD };

		memcpy(ring + (port->sq_tail & (DXPU_SQ_BYTES - 1)), &pad, sizeof(pad));
		port->sq_tail += skip;
	}
	head.bytes = bytes;
	head.plug = port->plugs;
	memcpy(ring + (port->sq_tail & (DXPU_SQ_BYTES - 1)), &head, sizeof(head));
	if (length)
		memcpy(ring + (port->sq_tail & (DXPU_SQ_BYTES - 1)) + sizeof(head), data, length);
	port->sq_tail += bytes;
	/* The record before the index that shows it. */
	smp_store_release(&control->sq_tail, port->sq_tail);
unlock:
	raw_spin_unlock_irqrestore(&port->tx_lock, flags);
	/* Callers may hold raw locks with IRQs off, where no wait queue may be touched. */
	if (!ret) {
		/* The index before the look for sleepers; pairs with the barrier in wait_event(). */
		smp_mb();
		/* Ordered by the barrier above. */
		if (waitqueue_active(&port->server_wq)) {
			if (irqs_disabled())
				irq_work_queue(&port->kick);
			else
				wake_up(&port->server_wq);
		}
	}
	return ret;
}

/**
 * dxpu_post_wait() - the same for callers that can sleep: waits for room
 * @port: the port
 * @what: head
 * @data: data, or NULL
 *
 * A server that leaves no room for the whole write deadline hangs, and loses its function: posted writes can not fail.
 */
int dxpu_post_wait(struct dxpu_port *port, const struct dxpu_request *what, const void *data)
{
	long left;
	int ret;

	ret = dxpu_post(port, what, data, DXPU_SQ_RESERVE);
	if (ret != -EAGAIN)
		return ret;
	dxpu_count(port, DXPU_COUNT_RING_FULL);
	left = wait_event_killable_timeout(port->space_wq,
					   (ret = dxpu_post(port, what, data, DXPU_SQ_RESERVE)) != -EAGAIN,
					   READ_ONCE(port->write_deadline));
	if (left < 0)
		return left;
	if (ret == -EAGAIN) {
		dxpu_count(port, DXPU_COUNT_PROTOCOL);
		schedule_work(&port->fail);
		return -ENODEV;
	}
	return ret;
}

static bool has_room(struct dxpu_port *port)
{
	unsigned long flags;
	bool room = true;

	raw_spin_lock_irqsave(&port->tx_lock, flags);
	if (port->live && port->channel)
		room = port->sq_tail - READ_ONCE(dxpu_channel_control(port->channel)->sq_head) <=
		       DXPU_SQ_BYTES - DXPU_SQ_RESERVE;
	raw_spin_unlock_irqrestore(&port->tx_lock, flags);
	return room;
}

/**
 * dxpu_room_wait() - keeps VFIO users out of the reserve before they write configuration space
 * @port: the port
 */
int dxpu_room_wait(struct dxpu_port *port)
{
	long left;

	if (has_room(port))
		return 0;
	dxpu_count(port, DXPU_COUNT_RING_FULL);
	left = wait_event_killable_timeout(port->space_wq, has_room(port), READ_ONCE(port->write_deadline));
	return left < 0 ? left : 0;
}

static struct dxpu_slot *take_slot(struct dxpu_port *port, void *data, u32 length)
{
	struct dxpu_slot *slot = NULL;
	unsigned int i;

	spin_lock(&port->req_lock);
	for (i = 0; i < DXPU_SLOTS; i++) {
		if (port->slot[i].id)
			continue;
		slot = &port->slot[i];
		slot->id = (u64)slot->generation++ << SLOT_BITS | i;
		slot->data = data;
		slot->length = length;
		slot->answered = false;
		reinit_completion(&slot->done);
		break;
	}
	spin_unlock(&port->req_lock);
	return slot;
}

static void free_slot(struct dxpu_port *port, struct dxpu_slot *slot)
{
	spin_lock(&port->req_lock);
	slot->id = 0;
	slot->data = NULL;
	if (!slot->generation)
		slot->generation = 1;
	spin_unlock(&port->req_lock);
	wake_up(&port->slot_wq);
}

/*
 * Sends a request and waits for its completion. Returns enum dxpu_status, or negative errno when it was not sent or the
 * task was killed.
 */
static int call(struct dxpu_port *port, struct dxpu_request *what, void *data, unsigned long deadline)
{
	struct dxpu_slot *slot = take_slot(port, data, what->length);
	long left;
	int ret;

	if (!slot) {
		left = wait_event_killable_timeout(port->slot_wq,
						   (slot = take_slot(port, data, what->length)) ||
						   !READ_ONCE(port->live), deadline);
		if (!slot)
			return left < 0 ? left : DXPU_STATUS_CTO;
	}
	what->id = slot->id;
	ret = dxpu_post_wait(port, what, NULL);
	if (ret) {
		free_slot(port, slot);
		return ret;
	}
	left = wait_for_completion_killable_timeout(&slot->done, deadline);
	spin_lock(&port->req_lock);
	if (slot->answered)
		ret = slot->status;
	else
		ret = left < 0 ? left : DXPU_STATUS_CTO;
	/* From here on an answer to this id is a late one. */
	slot->answered = true;
	spin_unlock(&port->req_lock);
	free_slot(port, slot);
	return ret;
}

/**
 * dxpu_complete() - an answer from user space
 * @port: the port
 * @completion: fetched once from the ring
 * @data: @completion->length bytes in the ring; may change while they are read
 */
void dxpu_complete(struct dxpu_port *port, const struct dxpu_completion *completion, const void *data)
{
	struct dxpu_slot *slot = &port->slot[completion->id & (DXPU_SLOTS - 1)];
	u16 status = completion->status;

	spin_lock(&port->req_lock);
	if (slot->id != completion->id || slot->answered) {
		dxpu_count(port, completion->id >> SLOT_BITS && completion->id >> SLOT_BITS < slot->generation ?
			   DXPU_COUNT_LATE : DXPU_COUNT_UNEXPECTED);
		goto unlock;
	}
	if (status == DXPU_STATUS_SUCCESS && completion->length != (slot->data ? slot->length : 0)) {
		dxpu_count(port, DXPU_COUNT_BAD_COMPLETION);
		status = DXPU_STATUS_CA;
	} else if (status != DXPU_STATUS_SUCCESS) {
		dxpu_count(port, DXPU_COUNT_ERROR_COMPLETION);
	} else if (slot->data) {
		memcpy(slot->data, data, slot->length);
	}
	slot->status = status;
	slot->answered = true;
	complete(&slot->done);
unlock:
	spin_unlock(&port->req_lock);
}

/**
 * dxpu_end_requests() - the function is gone: nobody waits any more
 * @port: the port, not live any more
 */
void dxpu_end_requests(struct dxpu_port *port)
{
	unsigned int i;

	spin_lock(&port->req_lock);
	for (i = 0; i < DXPU_SLOTS; i++) {
		struct dxpu_slot *slot = &port->slot[i];

		if (!slot->id || slot->answered)
			continue;
		slot->status = DXPU_STATUS_LINK_DOWN;
		slot->answered = true;
		complete(&slot->done);
	}
	spin_unlock(&port->req_lock);
	wake_up_all(&port->space_wq);
	wake_up_all(&port->slot_wq);
}

static bool decoding(struct dxpu_port *port)
{
	if (dxpu_function_command(port) & PCI_COMMAND_MEMORY)
		return true;
	if (READ_ONCE(port->live))
		dxpu_count(port, DXPU_COUNT_REFUSED_MMIO);
	return false;
}

/**
 * dxpu_mmio_read() - a read of a BAR; sleeps
 * @port: the port
 * @bar: 0 to 5
 * @offset: in it; the caller has checked the range
 * @data: all ones when there is no answer
 * @length: 1 to DXPU_MAX_TRANSFER
 *
 * Return: 0, or -EINTR when the task was killed. A read that fails is not an error, as on a bus.
 */
int dxpu_mmio_read(struct dxpu_port *port, unsigned int bar, u64 offset, void *data, u32 length)
{
	struct dxpu_request request = {
		.kind = DXPU_REQ_MMIO_READ,
		.bar = bar,
		.offset = offset,
		.length = length,
	};
	int ret;

	if (!decoding(port)) {
		memset(data, 0xff, length);
		return 0;
	}
	dxpu_count(port, DXPU_COUNT_READS);
	ret = call(port, &request, data, READ_ONCE(port->read_deadline));
	if (ret == DXPU_STATUS_SUCCESS)
		return 0;
	if (ret == DXPU_STATUS_CTO)
		dxpu_count(port, DXPU_COUNT_CTO);
	memset(data, 0xff, length);
	return ret == -ERESTARTSYS ? -EINTR : 0;
}

/**
 * dxpu_mmio_write() - a write of a BAR, posted; sleeps while there is no room
 * @port: the port
 * @bar: 0 to 5
 * @offset: in it; the caller has checked the range
 * @data: bytes
 * @length: 1 to DXPU_MAX_TRANSFER
 */
int dxpu_mmio_write(struct dxpu_port *port, unsigned int bar, u64 offset, const void *data, u32 length)
{
	struct dxpu_request request = {
		.kind = DXPU_REQ_MMIO_WRITE,
		.bar = bar,
		.offset = offset,
		.length = length,
	};

	if (!decoding(port))
		return 0;
	dxpu_count(port, DXPU_COUNT_WRITES);
	return dxpu_post_wait(port, &request, data) == -ERESTARTSYS ? -EINTR : 0;
}

/**
 * dxpu_reset() - function level reset that keeps the configuration, as VFIO has it; sleeps
 * @port: the port
 */
int dxpu_reset(struct dxpu_port *port)
{
	struct dxpu_request request = { .kind = DXPU_REQ_RESET };
	int ret;

	ret = mutex_lock_killable(&port->resetting);
	if (ret)
		return ret;
	dxpu_count(port, DXPU_COUNT_RESETS);
	ret = call(port, &request, NULL, READ_ONCE(port->reset_deadline));
	if (ret == DXPU_STATUS_SUCCESS) {
		dxpu_function_restore(port);
	} else if (ret == DXPU_STATUS_CTO) {
		dxpu_count(port, DXPU_COUNT_CTO);
		ret = -ETIMEDOUT;
	} else if (ret > 0) {
		ret = -EIO;
	}
	mutex_unlock(&port->resetting);
	return ret;
}

/**
 * dxpu_reset_posted() - a reset nobody waits for: of the secondary bus, or after a user; from any context
 * @port: the port
 */
void dxpu_reset_posted(struct dxpu_port *port)
{
	struct dxpu_request request = { .kind = DXPU_REQ_RESET };

	dxpu_count(port, DXPU_COUNT_RESETS);
	if (dxpu_post(port, &request, NULL, 0) == -EAGAIN)
		schedule_work(&port->fail);
}
