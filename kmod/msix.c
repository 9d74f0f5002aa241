// SPDX-License-Identifier: GPL-2.0
/*
 * Interrupts of the function towards its VFIO user: MSI-X vectors and the REQ index, all by eventfd. Never ERR: QEMU
 * answers that one by stopping the virtual machine.
 *
 * Table and pending bits are served here; they never cross the network. As with vfio-pci, a vector that gets an eventfd
 * is unmasked and one that loses it is masked; a user that wants more writes the table.
 */
#include <linux/eventfd.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/vfio.h>

#include "dxpu.h"

#define ENTRY_CTRL (PCI_MSIX_ENTRY_VECTOR_CTRL / 4)

static u16 msix_flags(struct dxpu_port *port)
{
	u32 flags;

	if (!port->facts.msix_cap ||
	    dxpu_function_read(port, port->facts.msix_cap + PCI_MSIX_FLAGS, 2, &flags) != PCIBIOS_SUCCESSFUL)
		return 0;
	return flags;
}

/* Delivers what is pending and not masked (any more). */
static void flush_locked(struct dxpu_port *port, unsigned int first, unsigned int count)
{
	u16 flags = msix_flags(port);
	unsigned int i;

	lockdep_assert_held(&port->irq_lock);
	if (!port->vector || !(flags & PCI_MSIX_FLAGS_ENABLE) || flags & PCI_MSIX_FLAGS_MASKALL)
		return;
	for (i = first; i < first + count; i++) {
		struct dxpu_vector *vector = &port->vector[i];

		if (!vector->pending || vector->entry[ENTRY_CTRL] & PCI_MSIX_ENTRY_CTRL_MASKBIT)
			continue;
		vector->pending = false;
		if (vector->trigger)
			eventfd_signal(vector->trigger, 1);
	}
}

void dxpu_msix_flush(struct dxpu_port *port)
{
	spin_lock(&port->irq_lock);
	flush_locked(port, 0, port->facts.vectors);
	spin_unlock(&port->irq_lock);
}

static void flush_work_function(struct work_struct *work)
{
	dxpu_msix_flush(container_of(work, struct dxpu_port, flush_msix));
}

void dxpu_msix_init(struct dxpu_port *port)
{
	spin_lock_init(&port->irq_lock);
	INIT_WORK(&port->flush_msix, flush_work_function);
}

/**
 * dxpu_msix_reset() - table and pending bits as after reset; eventfds stay
 * @port: the port
 */
void dxpu_msix_reset(struct dxpu_port *port)
{
	unsigned int i;

	spin_lock(&port->irq_lock);
	for (i = 0; port->vector && i < port->facts.vectors; i++) {
		memset(port->vector[i].entry, 0, sizeof(port->vector[i].entry));
		port->vector[i].entry[ENTRY_CTRL] = PCI_MSIX_ENTRY_CTRL_MASKBIT;
		port->vector[i].pending = false;
	}
	spin_unlock(&port->irq_lock);
}

static void put_trigger(struct eventfd_ctx *trigger)
{
	if (trigger)
		eventfd_ctx_put(trigger);
}

/**
 * dxpu_msix_release() - the user has closed: every eventfd goes
 * @port: the port
 */
void dxpu_msix_release(struct dxpu_port *port)
{
	struct eventfd_ctx *trigger;
	unsigned int i;

	for (i = 0; port->vector && i < port->facts.vectors; i++) {
		spin_lock(&port->irq_lock);
		trigger = port->vector[i].trigger;
		port->vector[i].trigger = NULL;
		spin_unlock(&port->irq_lock);
		put_trigger(trigger);
	}
	spin_lock(&port->irq_lock);
	trigger = port->req_trigger;
	port->req_trigger = NULL;
	spin_unlock(&port->irq_lock);
	put_trigger(trigger);
	dxpu_msix_reset(port);
}

/**
 * dxpu_msix_drop() - the function is out: its vectors go
 * @port: the port, without user
 */
void dxpu_msix_drop(struct dxpu_port *port)
{
	struct dxpu_vector *vector;

	dxpu_msix_release(port);
	spin_lock(&port->irq_lock);
	vector = port->vector;
	port->vector = NULL;
	spin_unlock(&port->irq_lock);
	kvfree(vector);
}

/**
 * dxpu_msix_raise() - the function interrupts
 * @port: the port
 * @number: of the vector
 */
int dxpu_msix_raise(struct dxpu_port *port, u32 number)
{
	struct dxpu_vector *vector;
	u16 flags;
	int ret = 0;

	spin_lock(&port->irq_lock);
	if (!port->vector || number >= port->facts.vectors) {
		dxpu_count(port, DXPU_COUNT_MSIX_DROPPED);
		ret = -EINVAL;
		goto unlock;
	}
	vector = &port->vector[number];
	flags = msix_flags(port);
	if (!READ_ONCE(port->live) || !(flags & PCI_MSIX_FLAGS_ENABLE)) {
		dxpu_count(port, DXPU_COUNT_MSIX_DROPPED);
	} else if (flags & PCI_MSIX_FLAGS_MASKALL || vector->entry[ENTRY_CTRL] & PCI_MSIX_ENTRY_CTRL_MASKBIT) {
		vector->pending = true;
		dxpu_count(port, DXPU_COUNT_MSIX_PENDED);
	} else if (vector->trigger) {
		eventfd_signal(vector->trigger, 1);
		dxpu_count(port, DXPU_COUNT_MSIX);
	} else {
		dxpu_count(port, DXPU_COUNT_MSIX_DROPPED);
	}
unlock:
	spin_unlock(&port->irq_lock);
	return ret;
}

/**
 * dxpu_request_release() - tells the user to close, if it asked to be told
 * @port: the port
 */
void dxpu_request_release(struct dxpu_port *port)
{
	spin_lock(&port->irq_lock);
	if (port->req_trigger)
		eventfd_signal(port->req_trigger, 1);
	spin_unlock(&port->irq_lock);
}

/* The function raises nothing while MSI-X is off, so VFIO's enabling has to reach it. */
static int enable_msix(struct dxpu_port *port, bool enable)
{
	u16 flags = msix_flags(port);
	u16 wanted = enable ? flags | PCI_MSIX_FLAGS_ENABLE : flags & ~PCI_MSIX_FLAGS_ENABLE;
	int ret;

	if (!port->facts.msix_cap || wanted == flags)
		return 0;
	ret = dxpu_room_wait(port);
	if (ret)
		return ret;
	dxpu_function_write(port, port->facts.msix_cap + PCI_MSIX_FLAGS, 2, wanted);
	return 0;
}

static bool any_trigger(struct dxpu_port *port)
{
	bool any = false;
	unsigned int i;

	spin_lock(&port->irq_lock);
	for (i = 0; port->vector && i < port->facts.vectors && !any; i++)
		any = port->vector[i].trigger;
	spin_unlock(&port->irq_lock);
	return any;
}

static int set_vector(struct dxpu_port *port, unsigned int number, s32 fd)
{
	struct eventfd_ctx *trigger = NULL, *old;

	if (fd >= 0) {
		trigger = eventfd_ctx_fdget(fd);
		if (IS_ERR(trigger))
			return PTR_ERR(trigger);
	}
	spin_lock(&port->irq_lock);
	if (!port->vector) {
		spin_unlock(&port->irq_lock);
		put_trigger(trigger);
		return -ENODEV;
	}
	old = port->vector[number].trigger;
	port->vector[number].trigger = trigger;
	if (trigger)
		port->vector[number].entry[ENTRY_CTRL] &= ~PCI_MSIX_ENTRY_CTRL_MASKBIT;
	else
		port->vector[number].entry[ENTRY_CTRL] |= PCI_MSIX_ENTRY_CTRL_MASKBIT;
	flush_locked(port, number, 1);
	spin_unlock(&port->irq_lock);
	put_trigger(old);
	return 0;
}

static void signal_vector(struct dxpu_port *port, unsigned int number)
{
	spin_lock(&port->irq_lock);
	if (port->vector && port->vector[number].trigger)
		eventfd_signal(port->vector[number].trigger, 1);
	spin_unlock(&port->irq_lock);
}

static int set_msix(struct dxpu_port *port, const struct vfio_irq_set *set, const void *data)
{
	unsigned int i;
	int ret = 0;

	/* Start and count zero with no data: everything off. */
	if (!set->count && set->flags & VFIO_IRQ_SET_DATA_NONE) {
		for (i = 0; i < port->facts.vectors; i++)
			set_vector(port, i, -1);
		return enable_msix(port, false);
	}
	for (i = 0; i < set->count && !ret; i++) {
		unsigned int number = set->start + i;

		switch (set->flags & VFIO_IRQ_SET_DATA_TYPE_MASK) {
		case VFIO_IRQ_SET_DATA_NONE:
			signal_vector(port, number);
			break;
		case VFIO_IRQ_SET_DATA_BOOL:
			if (((const u8 *)data)[i])
				signal_vector(port, number);
			break;
		case VFIO_IRQ_SET_DATA_EVENTFD:
			ret = set_vector(port, number, ((const s32 *)data)[i]);
			break;
		}
	}
	if (ret || !(set->flags & VFIO_IRQ_SET_DATA_EVENTFD))
		return ret;
	return enable_msix(port, any_trigger(port));
}

static int set_req(struct dxpu_port *port, const struct vfio_irq_set *set, const void *data)
{
	struct eventfd_ctx *trigger = NULL, *old;
	s32 fd = -1;

	switch (set->flags & VFIO_IRQ_SET_DATA_TYPE_MASK) {
	case VFIO_IRQ_SET_DATA_NONE:
		if (set->count) {
			dxpu_request_release(port);
			return 0;
		}
		break;
	case VFIO_IRQ_SET_DATA_BOOL:
		if (set->count && *(const u8 *)data)
			dxpu_request_release(port);
		return 0;
	case VFIO_IRQ_SET_DATA_EVENTFD:
		if (!set->count)
			return -EINVAL;
		fd = *(const s32 *)data;
		break;
	}
	if (fd >= 0) {
		trigger = eventfd_ctx_fdget(fd);
		if (IS_ERR(trigger))
			return PTR_ERR(trigger);
	}
	spin_lock(&port->irq_lock);
	old = port->req_trigger;
	port->req_trigger = trigger;
	/* Who asks to be told after the function has gone is told at once. */
	if (trigger && !READ_ONCE(port->live))
		eventfd_signal(trigger, 1);
	spin_unlock(&port->irq_lock);
	put_trigger(old);
	return 0;
}

/**
 * dxpu_msix_set_irqs() - VFIO_DEVICE_SET_IRQS
 * @port: the port
 * @set: checked by vfio_set_irqs_validate_and_prepare()
 * @data: what follows it
 */
int dxpu_msix_set_irqs(struct dxpu_port *port, const struct vfio_irq_set *set, const void *data)
{
	if ((set->flags & VFIO_IRQ_SET_ACTION_TYPE_MASK) != VFIO_IRQ_SET_ACTION_TRIGGER)
		return -ENOTTY;
	switch (set->index) {
	case VFIO_PCI_MSIX_IRQ_INDEX:
		return set_msix(port, set, data);
	case VFIO_PCI_REQ_IRQ_INDEX:
		return set_req(port, set, data);
	}
	return -ENOTTY;
}

static u64 pending_bits(struct dxpu_port *port, unsigned int word)
{
	u64 bits = 0;
	unsigned int i;

	for (i = 0; i < 64 && word * 64 + i < port->facts.vectors; i++)
		if (port->vector[word * 64 + i].pending)
			bits |= 1ULL << i;
	return bits;
}

/**
 * dxpu_msix_table_access() - an access to the MSI-X table or the pending bits
 * @port: the port
 * @pba: which
 * @offset: in it
 * @data: bytes to write, or where to read to
 * @length: within it
 * @write: which
 */
void dxpu_msix_table_access(struct dxpu_port *port, bool pba, u32 offset, u8 *data, u32 length, bool write)
{
	u32 i;

	spin_lock(&port->irq_lock);
	if (!port->vector || !READ_ONCE(port->live)) {
		if (!write)
			memset(data, 0xff, length);
		goto unlock;
	}
	for (i = 0; i < length; i++) {
		u32 at = offset + i;

		if (pba) {
			/* Read only. */
			if (!write)
				data[i] = pending_bits(port, at / 8) >> (8 * (at % 8));
		} else {
			u8 *entry = (u8 *)port->vector[at / PCI_MSIX_ENTRY_SIZE].entry;

			if (write)
				entry[at % PCI_MSIX_ENTRY_SIZE] = data[i];
			else
				data[i] = entry[at % PCI_MSIX_ENTRY_SIZE];
		}
	}
	if (write && !pba)
		flush_locked(port, 0, port->facts.vectors);
unlock:
	spin_unlock(&port->irq_lock);
}
