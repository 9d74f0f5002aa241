// SPDX-License-Identifier: GPL-2.0
/* /sys/class/dxpu/portN: what a person or a script wants to know about a port, one value per file. */
#include <linux/device.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "dxpu.h"

static struct class *dxpu_class;

static const char *const counter_names[DXPU_COUNTERS] = {
	[DXPU_COUNT_READS] = "reads",
	[DXPU_COUNT_WRITES] = "writes",
	[DXPU_COUNT_CONFIG_WRITES] = "config_writes",
	[DXPU_COUNT_RESETS] = "resets",
	[DXPU_COUNT_CTO] = "completion_timeouts",
	[DXPU_COUNT_LATE] = "late_completions",
	[DXPU_COUNT_UNEXPECTED] = "unexpected_completions",
	[DXPU_COUNT_BAD_COMPLETION] = "bad_completions",
	[DXPU_COUNT_ERROR_COMPLETION] = "error_completions",
	[DXPU_COUNT_REFUSED_MMIO] = "refused_mmio",
	[DXPU_COUNT_RING_FULL] = "ring_full",
	[DXPU_COUNT_PROTOCOL] = "protocol_errors",
	[DXPU_COUNT_DMA_READS] = "dma_reads",
	[DXPU_COUNT_DMA_WRITES] = "dma_writes",
	[DXPU_COUNT_DMA_READ_BYTES] = "dma_read_bytes",
	[DXPU_COUNT_DMA_WRITE_BYTES] = "dma_write_bytes",
	[DXPU_COUNT_DMA_UR] = "dma_unsupported",
	[DXPU_COUNT_DMA_PINNED] = "dma_pinned_pages",
	[DXPU_COUNT_DMA_UNMAPS] = "dma_unmaps",
	[DXPU_COUNT_DMA_BOUNCED] = "dma_bounced",
	[DXPU_COUNT_MSIX] = "interrupts",
	[DXPU_COUNT_MSIX_PENDED] = "interrupts_pended",
	[DXPU_COUNT_MSIX_DROPPED] = "interrupts_dropped",
};

const char *dxpu_state_name(enum dxpu_port_state state)
{
	switch (state) {
	case DXPU_PORT_EMPTY:
		return "empty";
	case DXPU_PORT_PLUGGING:
		return "plugging";
	case DXPU_PORT_ATTACHED:
		return "attached";
	case DXPU_PORT_GONE:
		return "gone";
	case DXPU_PORT_REMOVING:
		return "removing";
	}
	return "unknown";
}

static struct dxpu_port_status *status_of(struct device *dev)
{
	struct dxpu_port_status *status = kmalloc(sizeof(*status), GFP_KERNEL);

	if (status)
		dxpu_port_status(dev_get_drvdata(dev), status);
	return status;
}

static ssize_t state_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct dxpu_port_status *status = status_of(dev);
	ssize_t length;

	if (!status)
		return -ENOMEM;
	length = sysfs_emit(buf, "%s\n", dxpu_state_name(status->state));
	kfree(status);
	return length;
}
static DEVICE_ATTR_RO(state);

static ssize_t address_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct dxpu_port_status *status = status_of(dev);
	ssize_t length;

	if (!status)
		return -ENOMEM;
	length = status->enumerated ? sysfs_emit(buf, "%04x:%02x:%02x.%u\n", status->domain, status->bus,
						 PCI_SLOT(status->devfn), PCI_FUNC(status->devfn)) :
				      sysfs_emit(buf, "\n");
	kfree(status);
	return length;
}
static DEVICE_ATTR_RO(address);

static ssize_t holder_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct dxpu_port_status *status = status_of(dev);
	ssize_t length;

	if (!status)
		return -ENOMEM;
	length = status->holder_pid ? sysfs_emit(buf, "%u %s\n", status->holder_pid, status->holder) :
				      sysfs_emit(buf, "\n");
	kfree(status);
	return length;
}
static DEVICE_ATTR_RO(holder);

static ssize_t claimed_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct dxpu_port_status *status = status_of(dev);
	ssize_t length;

	if (!status)
		return -ENOMEM;
	length = sysfs_emit(buf, "%u\n", status->claimed);
	kfree(status);
	return length;
}
static DEVICE_ATTR_RO(claimed);

static ssize_t error_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct dxpu_port_status *status = status_of(dev);
	ssize_t length;

	if (!status)
		return -ENOMEM;
	length = sysfs_emit(buf, "%d\n", status->error);
	kfree(status);
	return length;
}
static DEVICE_ATTR_RO(error);

/* "name value" a line: a snapshot of all of them is worth more than one file each. */
static ssize_t counters_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct dxpu_port_status *status = status_of(dev);
	ssize_t length = 0;
	unsigned int i;

	if (!status)
		return -ENOMEM;
	for (i = 0; i < DXPU_COUNTERS; i++)
		length += sysfs_emit_at(buf, length, "%s %llu\n", counter_names[i], status->counters[i]);
	kfree(status);
	return length;
}
static DEVICE_ATTR_RO(counters);

static struct attribute *port_attrs[] = {
	&dev_attr_state.attr,
	&dev_attr_address.attr,
	&dev_attr_holder.attr,
	&dev_attr_claimed.attr,
	&dev_attr_error.attr,
	&dev_attr_counters.attr,
	NULL,
};
ATTRIBUTE_GROUPS(port);

int dxpu_sysfs_create(struct dxpu_bus *bus)
{
	unsigned int i;

	dxpu_class = class_create(THIS_MODULE, "dxpu");
	if (IS_ERR(dxpu_class))
		return PTR_ERR(dxpu_class);
	for (i = 0; i < bus->ports; i++) {
		struct dxpu_port *port = bus->port[i];
		struct device *dev;

		dev = device_create_with_groups(dxpu_class, NULL, MKDEV(0, 0), port, port_groups, "port%u", i);
		if (IS_ERR(dev)) {
			dxpu_sysfs_destroy(bus);
			return PTR_ERR(dev);
		}
		port->dev = dev;
	}
	return 0;
}

void dxpu_sysfs_destroy(struct dxpu_bus *bus)
{
	unsigned int i;

	for (i = 0; i < bus->ports; i++) {
		if (bus->port[i]->dev)
			device_unregister(bus->port[i]->dev);
		bus->port[i]->dev = NULL;
	}
	class_destroy(dxpu_class);
}
