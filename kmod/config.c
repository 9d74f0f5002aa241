// SPDX-License-Identifier: GPL-2.0
/*
 * Configuration space as a local shadow.
 *
 * lspci and sysfs read configuration space with IRQs off, so nothing here waits for anybody: reads come from the
 * shadow, writes change it under a raw spinlock and are sent on to the function as posted requests, in order with
 * everything else. Registers that change on their own are refreshed by the host daemon (DXPU_IOC_CONFIG_UPDATE).
 */
#include <linux/kernel.h>
#include <linux/log2.h>
#include <linux/pci.h>
#include <linux/string.h>

#include "dxpu.h"

static u32 get(const u8 *bytes, int size)
{
	u32 value = 0;

	memcpy(&value, bytes, size);
	return value;
}

u32 dxpu_config_read(const struct dxpu_config *config, int where, int size)
{
	return get(config->data + where, size);
}

void dxpu_config_write(struct dxpu_config *config, int where, int size, u32 value)
{
	int i;

	for (i = 0; i < size; i++) {
		u8 in = value >> (8 * i);
		u8 w1c = config->w1c[where + i];
		u8 mask = config->mask[where + i] & ~w1c;
		u8 old = config->data[where + i];

		config->data[where + i] = (old & ~mask & ~(in & w1c)) | (in & mask);
	}
}

/* Sets bits whatever the write mask says: what hardware does to its own registers. */
void dxpu_config_set(struct dxpu_config *config, int where, int size, u32 value, u32 mask)
{
	u32 now = get(config->data + where, size);

	now = (now & ~mask) | (value & mask);
	memcpy(config->data + where, &now, size);
}

/* Offset of a capability in an image that may be hostile, 0 when absent. */
static u16 find_cap(const struct dxpu_config *config, u8 id)
{
	/* No chain is longer: each takes at least four of the 192 bytes. */
	int left = (256 - 64) / 4;
	u8 at;

	if (!(get(config->data + PCI_STATUS, 2) & PCI_STATUS_CAP_LIST))
		return 0;
	at = config->data[PCI_CAPABILITY_LIST] & ~3;
	while (at >= 0x40 && left--) {
		if (config->data[at] == id)
			return at;
		at = config->data[at + 1] & ~3;
	}
	return 0;
}

static int inspect_bars(const struct dxpu_config *config, struct dxpu_facts *facts)
{
	unsigned int i;

	for (i = 0; i < DXPU_BARS; i++) {
		int at = PCI_BASE_ADDRESS_0 + 4 * i;
		u32 value = get(config->data + at, 4);
		u64 mask = get(config->mask + at, 4);
		struct dxpu_bar *bar = &facts->bar[i];

		bar->flags = value & 0xf;
		switch (value & (PCI_BASE_ADDRESS_SPACE | PCI_BASE_ADDRESS_MEM_TYPE_MASK)) {
		case PCI_BASE_ADDRESS_MEM_TYPE_32:
			if (!mask)
				continue;
			mask |= 0xffffffff00000000ULL;
			break;
		case PCI_BASE_ADDRESS_MEM_TYPE_64:
			if (i == DXPU_BARS - 1)
				return -EINVAL;
			/* 4 GiB and more: nothing of the lower half can be written. */
			mask |= (u64)get(config->mask + at + 4, 4) << 32;
			i++;
			if (!mask)
				continue;
			break;
		default:
			return -EINVAL;
		}
		if (mask & 0xf)
			return -EINVAL;
		bar->size = -mask;
		if (!is_power_of_2(bar->size) || bar->size < 16)
			return -EINVAL;
	}
	return 0;
}

static int inspect_msix(const struct dxpu_config *config, struct dxpu_facts *facts)
{
	u32 table, pba;

	facts->msix_cap = find_cap(config, PCI_CAP_ID_MSIX);
	if (!facts->msix_cap)
		return 0;
	if (facts->msix_cap > 256 - PCI_CAP_MSIX_SIZEOF)
		return -EINVAL;
	facts->vectors = (get(config->data + facts->msix_cap + PCI_MSIX_FLAGS, 2) & PCI_MSIX_FLAGS_QSIZE) + 1;
	table = get(config->data + facts->msix_cap + PCI_MSIX_TABLE, 4);
	pba = get(config->data + facts->msix_cap + PCI_MSIX_PBA, 4);
	facts->table_bar = table & PCI_MSIX_TABLE_BIR;
	facts->table_offset = table & PCI_MSIX_TABLE_OFFSET;
	facts->pba_bar = pba & PCI_MSIX_PBA_BIR;
	facts->pba_offset = pba & PCI_MSIX_PBA_OFFSET;
	if (facts->table_bar >= DXPU_BARS || facts->pba_bar >= DXPU_BARS)
		return -EINVAL;
	if ((u64)facts->table_offset + facts->vectors * PCI_MSIX_ENTRY_SIZE > facts->bar[facts->table_bar].size)
		return -EINVAL;
	if ((u64)facts->pba_offset + DIV_ROUND_UP(facts->vectors, 64) * 8 > facts->bar[facts->pba_bar].size)
		return -EINVAL;
	if (facts->table_bar == facts->pba_bar &&
	    facts->table_offset < facts->pba_offset + DIV_ROUND_UP(facts->vectors, 64) * 8 &&
	    facts->pba_offset < facts->table_offset + facts->vectors * PCI_MSIX_ENTRY_SIZE)
		return -EINVAL;
	return 0;
}

/**
 * dxpu_config_inspect() - reads an image that came from user space
 * @config: the image
 * @facts: what it says
 *
 * Refuses what the PCI core would take for something else than one endpoint: another header type, more functions, a
 * PCI Express type with a bus behind it.
 */
int dxpu_config_inspect(const struct dxpu_config *config, struct dxpu_facts *facts)
{
	u16 vendor = get(config->data + PCI_VENDOR_ID, 2);
	int type, ret;

	memset(facts, 0, sizeof(*facts));
	/* 0x0001 is what a configuration retry looks like. */
	if (vendor == 0xffff || vendor == 0 || vendor == 1)
		return -EINVAL;
	if (config->data[PCI_HEADER_TYPE] != PCI_HEADER_TYPE_NORMAL)
		return -EINVAL;
	if (get(config->mask + PCI_VENDOR_ID, 4) || config->mask[PCI_HEADER_TYPE] ||
	    get(config->mask + PCI_CLASS_REVISION, 4) || get(config->mask + PCI_ROM_ADDRESS, 4))
		return -EINVAL;
	facts->pcie_cap = find_cap(config, PCI_CAP_ID_EXP);
	if (!facts->pcie_cap || facts->pcie_cap > 256 - PCI_CAP_EXP_ENDPOINT_SIZEOF_V2)
		return -EINVAL;
	type = (get(config->data + facts->pcie_cap + PCI_EXP_FLAGS, 2) & PCI_EXP_FLAGS_TYPE) >> 4;
	if (type != PCI_EXP_TYPE_ENDPOINT)
		return -EINVAL;
	facts->flr = get(config->data + facts->pcie_cap + PCI_EXP_DEVCAP, 4) & PCI_EXP_DEVCAP_FLR;
	ret = inspect_bars(config, facts);
	if (ret)
		return ret;
	return inspect_msix(config, facts);
}

/* BARs and the ROM register: where the host put them is nobody's business on the other side. */
static bool is_bar(int where)
{
	return (where >= PCI_BASE_ADDRESS_0 && where < PCI_CARDBUS_CIS) ||
	       (where >= PCI_ROM_ADDRESS && where < PCI_CAPABILITY_LIST);
}

static void post_write(struct dxpu_port *port, int where, int size, u32 value)
{
	struct dxpu_request request = {
		.kind = DXPU_REQ_CONFIG_WRITE,
		.offset = where,
		.length = size,
		.value = value,
	};

	lockdep_assert_held(&port->cfg_lock);
	/* The reserve is there for us; who overruns it finds a server that hangs. */
	if (dxpu_post(port, &request, NULL, 0) == -EAGAIN) {
		dxpu_count(port, DXPU_COUNT_PROTOCOL);
		schedule_work(&port->fail);
		return;
	}
	dxpu_count(port, DXPU_COUNT_CONFIG_WRITES);
}

/* BARs are the kernel's: after a user's reset they stay where it put them. */
static void reset_shadow(struct dxpu_port *port, bool keep_bars)
{
	struct dxpu_config *fn = &port->fn;
	u8 bars[PCI_CARDBUS_CIS - PCI_BASE_ADDRESS_0];

	memcpy(bars, fn->data + PCI_BASE_ADDRESS_0, sizeof(bars));
	memcpy(fn->data, fn->initial, sizeof(fn->data));
	if (keep_bars)
		memcpy(fn->data + PCI_BASE_ADDRESS_0, bars, sizeof(bars));
}

/**
 * dxpu_function_read() - a read of the function's configuration space, from any context
 * @port: port it is plugged in
 * @where: offset
 * @size: 1, 2 or 4
 * @value: all ones when there is no function
 */
int dxpu_function_read(struct dxpu_port *port, int where, int size, u32 *value)
{
	unsigned long flags;
	int ret = PCIBIOS_DEVICE_NOT_FOUND;

	*value = ~0;
	raw_spin_lock_irqsave(&port->cfg_lock, flags);
	if (port->visible) {
		*value = dxpu_config_read(&port->fn, where, size);
		ret = PCIBIOS_SUCCESSFUL;
	}
	raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
	return ret;
}

/**
 * dxpu_function_write() - a write of the function's configuration space, from any context
 * @port: port it is plugged in
 * @where: offset
 * @size: 1, 2 or 4, aligned
 * @value: as written
 */
int dxpu_function_write(struct dxpu_port *port, int where, int size, u32 value)
{
	bool masks_changed, reset = false;
	unsigned long flags;
	u32 mask;
	int at;

	raw_spin_lock_irqsave(&port->cfg_lock, flags);
	if (!port->visible) {
		raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
		return PCIBIOS_DEVICE_NOT_FOUND;
	}
	mask = get(port->fn.mask + where, size) | get(port->fn.w1c + where, size);
	dxpu_config_write(&port->fn, where, size, value);

	/* Initiate Function Level Reset reads as zero, whether the mask has it or not. */
	at = port->facts.pcie_cap + PCI_EXP_DEVCTL;
	if (port->facts.flr && where <= at + 1 && at + 1 < where + size &&
	    (value >> (8 * (at + 1 - where))) & (PCI_EXP_DEVCTL_BCR_FLR >> 8)) {
		reset_shadow(port, false);
		reset = true;
	}
	if ((mask && !is_bar(where)) || reset)
		post_write(port, where, size, value);

	at = port->facts.msix_cap;
	masks_changed = at && where < at + 4 && where + size > at + 2;
	raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
	if (masks_changed)
		schedule_work(&port->flush_msix);
	return PCIBIOS_SUCCESSFUL;
}

/**
 * dxpu_function_update() - registers that the function changed on its own
 * @port: port it is plugged in
 * @where: offset; the header is not the function's to change
 * @data: new bytes
 * @length: of @data
 */
int dxpu_function_update(struct dxpu_port *port, int where, const u8 *data, int length)
{
	unsigned long flags;
	int ret = -ENODEV;

	raw_spin_lock_irqsave(&port->cfg_lock, flags);
	if (port->visible) {
		memcpy(port->fn.data + where, data, length);
		ret = 0;
	}
	raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
	return ret;
}

u16 dxpu_function_command(struct dxpu_port *port)
{
	u32 command;

	if (dxpu_function_read(port, PCI_COMMAND, 2, &command) != PCIBIOS_SUCCESSFUL)
		return 0;
	return command;
}

/**
 * dxpu_function_restore() - after a reset: what was configured is written again
 * @port: port it is plugged in
 *
 * As pci_restore_state() does for a driver. The shadow still says what was configured; the function is at its reset
 * values.
 */
void dxpu_function_restore(struct dxpu_port *port)
{
	struct dxpu_config *fn = &port->fn;
	unsigned long flags;
	int where;

	raw_spin_lock_irqsave(&port->cfg_lock, flags);
	/* From the end: the command register last, when everything else is in place. */
	for (where = DXPU_CONFIG_BYTES - 4; port->visible && where >= 0; where -= 4) {
		u32 mask = get(fn->mask + where, 4) & ~get(fn->w1c + where, 4);
		u32 now = get(fn->data + where, 4);

		if (!is_bar(where) && ((now ^ get(fn->initial + where, 4)) & mask))
			post_write(port, where, 4, now & ~get(fn->w1c + where, 4));
	}
	raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
}

/**
 * dxpu_function_forget() - a user has closed the function: nothing it configured stays
 * @port: port it is plugged in
 */
void dxpu_function_forget(struct dxpu_port *port)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&port->cfg_lock, flags);
	if (port->visible)
		reset_shadow(port, true);
	raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
}
