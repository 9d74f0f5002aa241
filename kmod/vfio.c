// SPDX-License-Identifier: GPL-2.0
/*
 * The function as a VFIO device with an emulated IOMMU: what QEMU's vfio-pci and any other VFIO program opens.
 *
 * No region can be mapped, so every access is a call that can sleep until the other side has answered. Register
 * accesses keep their size; longer ones are cut at DXPU_MAX_TRANSFER. The MSI-X table and pending bits are served here.
 */
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/vfio.h>

#include "dxpu.h"

#define OFFSET_SHIFT 40
#define OFFSET_MASK ((1ULL << OFFSET_SHIFT) - 1)

/**
 * struct dxpu_vfio - one bound function
 * @vdev: what VFIO knows
 * @port: where it is plugged
 */
struct dxpu_vfio {
	struct vfio_device vdev;
	struct dxpu_port *port;
};

static struct dxpu_port *port_of(struct vfio_device *vdev)
{
	return container_of(vdev, struct dxpu_vfio, vdev)->port;
}

static int dxpu_vfio_init(struct vfio_device *vdev)
{
	struct dxpu_vfio *vfio = container_of(vdev, struct dxpu_vfio, vdev);

	vfio->port = dxpu_port_of(to_pci_dev(vdev->dev));
	return 0;
}

static void dxpu_vfio_release(struct vfio_device *vdev)
{
	vfio_free_device(vdev);
}

/* BAR registers as a VFIO user sees them: it may move them as it likes, the host's stay where they are. */
static void init_vbars(struct dxpu_port *port)
{
	unsigned int i;

	for (i = 0; i < DXPU_BARS; i++)
		if (dxpu_function_read(port, PCI_BASE_ADDRESS_0 + 4 * i, 4, &port->vbar[i]) != PCIBIOS_SUCCESSFUL)
			port->vbar[i] = 0;
}

static int dxpu_vfio_open(struct vfio_device *vdev)
{
	struct dxpu_port *port = port_of(vdev);
	int ret;

	ret = dxpu_port_opened(port);
	if (ret)
		return ret;
	ret = pci_enable_device(to_pci_dev(vdev->dev));
	if (ret) {
		dxpu_port_closed(port);
		return ret;
	}
	init_vbars(port);
	dxpu_dma_start(port, vdev);
	return 0;
}

static void dxpu_vfio_close(struct vfio_device *vdev)
{
	struct dxpu_port *port = port_of(vdev);

	dxpu_dma_stop(port);
	dxpu_msix_release(port);
	pci_disable_device(to_pci_dev(vdev->dev));
	/* Nothing this user set up is left for the next one. */
	dxpu_reset_posted(port);
	dxpu_function_forget(port);
	dxpu_port_closed(port);
}

static void dxpu_vfio_request(struct vfio_device *vdev, unsigned int count)
{
	dxpu_request_release(port_of(vdev));
}

static void dxpu_vfio_dma_unmap(struct vfio_device *vdev, u64 iova, u64 length)
{
	dxpu_dma_unmap(port_of(vdev), iova, length);
}

/* ---- configuration space ---- */

static bool is_vbar(int where)
{
	return where >= PCI_BASE_ADDRESS_0 && where < PCI_CARDBUS_CIS;
}

static u32 config_read_piece(struct dxpu_port *port, int where, int size)
{
	u32 value;

	if (dxpu_function_read(port, where, size, &value) != PCIBIOS_SUCCESSFUL)
		return ~0;
	if (is_vbar(where))
		memcpy(&value, (u8 *)port->vbar + where - PCI_BASE_ADDRESS_0, size);
	return value;
}

static int config_write_piece(struct dxpu_port *port, int where, int size, u32 value)
{
	int flr = port->facts.pcie_cap + PCI_EXP_DEVCTL + 1;
	int i, ret;

	if (is_vbar(where)) {
		u8 *vbar = (u8 *)port->vbar + where - PCI_BASE_ADDRESS_0;

		for (i = 0; i < size; i++) {
			u8 mask = port->fn.mask[where + i];

			vbar[i] = (vbar[i] & ~mask) | (value >> (8 * i) & mask);
		}
		return 0;
	}
	/* A reset asked for by register keeps what is configured, as with vfio-pci. */
	if (port->facts.flr && where <= flr && flr < where + size &&
	    value >> (8 * (flr - where)) & (PCI_EXP_DEVCTL_BCR_FLR >> 8)) {
		value &= ~((PCI_EXP_DEVCTL_BCR_FLR >> 8) << (8 * (flr - where)));
		ret = dxpu_reset(port);
		if (ret == -ERESTARTSYS)
			return -EINTR;
	}
	ret = dxpu_room_wait(port);
	if (ret)
		return -EINTR;
	dxpu_function_write(port, where, size, value);
	return 0;
}

/* The largest naturally aligned piece at @where. */
static int piece(u64 where, size_t left)
{
	if (!(where & 3) && left >= 4)
		return 4;
	if (!(where & 1) && left >= 2)
		return 2;
	return 1;
}

static ssize_t config_access(struct dxpu_port *port, char __user *buffer, size_t count, u64 offset, bool write)
{
	size_t done;
	int size, ret;

	if (offset >= DXPU_CONFIG_BYTES)
		return -EINVAL;
	count = min_t(size_t, count, DXPU_CONFIG_BYTES - offset);
	for (done = 0; done < count; done += size) {
		u32 value = 0;

		size = piece(offset + done, count - done);
		if (write) {
			if (copy_from_user(&value, buffer + done, size))
				return -EFAULT;
			ret = config_write_piece(port, offset + done, size, value);
			if (ret)
				return ret;
		} else {
			value = config_read_piece(port, offset + done, size);
			if (copy_to_user(buffer + done, &value, size))
				return -EFAULT;
		}
	}
	return count;
}

/* ---- BARs ---- */

/* How much of [offset, offset + left) is on the same side of [start, start + bytes) as its first byte. */
static u64 clip(u64 offset, u64 left, u64 start, u64 bytes, bool *inside)
{
	*inside = offset >= start && offset < start + bytes;
	if (*inside)
		return min(left, start + bytes - offset);
	return offset < start ? min(left, start - offset) : left;
}

static int bar_piece(struct dxpu_port *port, unsigned int bar, u64 offset, u8 *data, u32 *length, bool write)
{
	const struct dxpu_facts *facts = &port->facts;
	bool table = false, pba = false;
	u64 left = *length;

	if (facts->vectors && bar == facts->table_bar)
		left = clip(offset, left, facts->table_offset, facts->vectors * PCI_MSIX_ENTRY_SIZE, &table);
	if (facts->vectors && bar == facts->pba_bar)
		left = clip(offset, left, facts->pba_offset, DIV_ROUND_UP(facts->vectors, 64) * 8, &pba);
	*length = left;
	if (table || pba) {
		offset -= pba ? facts->pba_offset : facts->table_offset;
		dxpu_msix_table_access(port, pba, offset, data, left, write);
		return 0;
	}
	return write ? dxpu_mmio_write(port, bar, offset, data, left) : dxpu_mmio_read(port, bar, offset, data, left);
}

static ssize_t bar_access(struct dxpu_port *port, unsigned int bar, char __user *buffer, size_t count, u64 offset,
			  bool write)
{
	u64 size = port->facts.bar[bar].size;
	u8 small[64], *data = small;
	size_t done = 0;
	int ret = 0;

	if (offset >= size)
		return -EINVAL;
	count = min_t(u64, count, size - offset);
	if (count > sizeof(small)) {
		data = kmalloc(min_t(size_t, count, DXPU_MAX_TRANSFER), GFP_KERNEL_ACCOUNT);
		if (!data)
			return -ENOMEM;
	}
	while (done < count && !ret) {
		u32 length = min_t(size_t, count - done, DXPU_MAX_TRANSFER);

		if (write && copy_from_user(data, buffer + done, length))
			ret = -EFAULT;
		if (!ret)
			ret = bar_piece(port, bar, offset + done, data, &length, write);
		if (!ret && !write && copy_to_user(buffer + done, data, length))
			ret = -EFAULT;
		if (!ret)
			done += length;
	}
	if (data != small)
		kfree(data);
	return done ? done : ret;
}

static ssize_t access(struct vfio_device *vdev, char __user *buffer, size_t count, loff_t *position, bool write)
{
	struct dxpu_port *port = port_of(vdev);
	unsigned int index = (u64)*position >> OFFSET_SHIFT;
	u64 offset = *position & OFFSET_MASK;
	ssize_t done;

	if (!count)
		return 0;
	if (index == VFIO_PCI_CONFIG_REGION_INDEX)
		done = config_access(port, buffer, count, offset, write);
	else if (index < DXPU_BARS && port->facts.bar[index].size)
		done = bar_access(port, index, buffer, count, offset, write);
	else
		done = -EINVAL;
	if (done > 0)
		*position += done;
	return done;
}

static ssize_t dxpu_vfio_read(struct vfio_device *vdev, char __user *buffer, size_t count, loff_t *position)
{
	return access(vdev, buffer, count, position, false);
}

static ssize_t dxpu_vfio_write(struct vfio_device *vdev, const char __user *buffer, size_t count, loff_t *position)
{
	return access(vdev, (char __user *)buffer, count, position, true);
}

/* ---- commands ---- */

static int device_info(void __user *argument)
{
	size_t minsz = offsetofend(struct vfio_device_info, num_irqs);
	struct vfio_device_info info = {};

	if (copy_from_user(&info, argument, minsz))
		return -EFAULT;
	if (info.argsz < minsz)
		return -EINVAL;
	info.flags = VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET;
	info.num_regions = VFIO_PCI_NUM_REGIONS;
	info.num_irqs = VFIO_PCI_NUM_IRQS;
	info.argsz = minsz;
	return copy_to_user(argument, &info, minsz) ? -EFAULT : 0;
}

static int region_info(struct dxpu_port *port, void __user *argument)
{
	size_t minsz = offsetofend(struct vfio_region_info, offset);
	struct vfio_region_info info;

	if (copy_from_user(&info, argument, minsz))
		return -EFAULT;
	if (info.argsz < minsz || info.index >= VFIO_PCI_NUM_REGIONS)
		return -EINVAL;
	info.flags = 0;
	info.cap_offset = 0;
	info.size = 0;
	info.offset = (u64)info.index << OFFSET_SHIFT;
	switch (info.index) {
	case VFIO_PCI_CONFIG_REGION_INDEX:
		info.size = DXPU_CONFIG_BYTES;
		break;
	case VFIO_PCI_BAR0_REGION_INDEX ... VFIO_PCI_BAR5_REGION_INDEX:
		info.size = port->facts.bar[array_index_nospec(info.index, DXPU_BARS)].size;
		break;
	case VFIO_PCI_ROM_REGION_INDEX:
		break;
	default:
		return -EINVAL;
	}
	if (info.size)
		info.flags = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
	info.argsz = minsz;
	return copy_to_user(argument, &info, minsz) ? -EFAULT : 0;
}

static u32 vectors_of(struct dxpu_port *port, u32 index)
{
	switch (index) {
	case VFIO_PCI_MSIX_IRQ_INDEX:
		return port->facts.vectors;
	case VFIO_PCI_REQ_IRQ_INDEX:
		return 1;
	}
	return 0;
}

static int irq_info(struct dxpu_port *port, void __user *argument)
{
	size_t minsz = offsetofend(struct vfio_irq_info, count);
	struct vfio_irq_info info;

	if (copy_from_user(&info, argument, minsz))
		return -EFAULT;
	if (info.argsz < minsz || info.index >= VFIO_PCI_NUM_IRQS || info.index == VFIO_PCI_ERR_IRQ_INDEX)
		return -EINVAL;
	info.count = vectors_of(port, info.index);
	info.flags = VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_NORESIZE;
	return copy_to_user(argument, &info, minsz) ? -EFAULT : 0;
}

static int set_irqs(struct dxpu_port *port, void __user *argument)
{
	size_t minsz = offsetofend(struct vfio_irq_set, count), bytes = 0;
	struct vfio_irq_set set;
	void *data = NULL;
	int ret;

	if (copy_from_user(&set, argument, minsz))
		return -EFAULT;
	ret = vfio_set_irqs_validate_and_prepare(&set, vectors_of(port, set.index), VFIO_PCI_NUM_IRQS, &bytes);
	if (ret)
		return ret;
	if (bytes) {
		data = memdup_user(argument + minsz, bytes);
		if (IS_ERR(data))
			return PTR_ERR(data);
	}
	ret = dxpu_msix_set_irqs(port, &set, data);
	kfree(data);
	return ret;
}

static long dxpu_vfio_ioctl(struct vfio_device *vdev, unsigned int command, unsigned long argument)
{
	struct dxpu_port *port = port_of(vdev);
	void __user *pointer = (void __user *)argument;

	switch (command) {
	case VFIO_DEVICE_GET_INFO:
		return device_info(pointer);
	case VFIO_DEVICE_GET_REGION_INFO:
		return region_info(port, pointer);
	case VFIO_DEVICE_GET_IRQ_INFO:
		return irq_info(port, pointer);
	case VFIO_DEVICE_SET_IRQS:
		return set_irqs(port, pointer);
	case VFIO_DEVICE_RESET:
		return dxpu_reset(port);
	}
	return -ENOTTY;
}

static const struct vfio_device_ops dxpu_vfio_ops = {
	.name = "dxpu-vfio",
	.init = dxpu_vfio_init,
	.release = dxpu_vfio_release,
	.open_device = dxpu_vfio_open,
	.close_device = dxpu_vfio_close,
	.read = dxpu_vfio_read,
	.write = dxpu_vfio_write,
	.ioctl = dxpu_vfio_ioctl,
	.request = dxpu_vfio_request,
	.dma_unmap = dxpu_vfio_dma_unmap,
};

/* ---- the driver ---- */

static int dxpu_vfio_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct dxpu_port *port = dxpu_port_of(pdev);
	struct dxpu_vfio *vfio;
	unsigned int i;
	int ret;

	/* driver_override can be written for any device; only functions of our ports are ours. */
	if (!port)
		return -ENODEV;
	for (i = 0; i < DXPU_BARS; i++) {
		/* Another length: what pciehp scanned was replaced while it scanned, and it will do so again. */
		if (port->facts.bar[i].size && (pci_resource_len(pdev, i) != port->facts.bar[i].size ||
						pdev->resource[i].flags & IORESOURCE_UNSET)) {
			pci_err(pdev, "BAR %u has no address\n", i);
			dxpu_port_offered(port, -ENOSPC);
			return -ENOSPC;
		}
	}
	vfio = vfio_alloc_device(dxpu_vfio, vdev, &pdev->dev, &dxpu_vfio_ops);
	if (IS_ERR(vfio)) {
		dxpu_port_offered(port, PTR_ERR(vfio));
		return PTR_ERR(vfio);
	}
	dev_set_drvdata(&pdev->dev, vfio);
	ret = vfio_register_emulated_iommu_dev(&vfio->vdev);
	if (ret)
		vfio_put_device(&vfio->vdev);
	dxpu_port_offered(port, ret);
	return ret;
}

static void dxpu_vfio_remove(struct pci_dev *pdev)
{
	struct dxpu_vfio *vfio = dev_get_drvdata(&pdev->dev);

	/* Waits for users; pciehp comes here only when there are none, an administrator's sysfs remove may. */
	vfio_unregister_group_dev(&vfio->vdev);
	dxpu_port_withdrawn(vfio->port);
	vfio_put_device(&vfio->vdev);
}

static const struct pci_device_id dxpu_vfio_ids[] = {
	{ PCI_DRIVER_OVERRIDE_DEVICE_VFIO(PCI_ANY_ID, PCI_ANY_ID) },
	{}
};

struct pci_driver dxpu_vfio_driver = {
	.name = "dxpu-vfio",
	.id_table = dxpu_vfio_ids,
	.probe = dxpu_vfio_probe,
	.remove = dxpu_vfio_remove,
	.driver_managed_dma = true,
};
