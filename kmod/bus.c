// SPDX-License-Identifier: GPL-2.0
/*
 * The private PCI domain: a root bus whose devices are virtual root ports, and what lies behind them.
 *
 * Windows come from holes of the physical address space; nothing is behind them, and nothing needs to be: functions are
 * reached through VFIO, whose accesses are calls. Each port gets its share preset in its window registers, so that
 * hot-add never has to look for room.
 */
#define pr_fmt(fmt) "dxpu: " fmt

#include <linux/ioport.h>
#include <linux/kernel.h>
#include <linux/pci.h>
#include <linux/sizes.h>

#include "dxpu.h"

static struct dxpu_bus *dxpu_bus_of(struct pci_bus *bus)
{
	return container_of((struct pci_sysdata *)bus->sysdata, struct dxpu_bus, sysdata);
}

/* The port whose secondary bus @bus is. */
static struct dxpu_port *port_above(struct pci_bus *bus)
{
	struct dxpu_bus *dxpu = dxpu_bus_of(bus);
	unsigned int index;

	if (pci_is_root_bus(bus) || !bus->self || !pci_is_root_bus(bus->self->bus))
		return NULL;
	index = PCI_SLOT(bus->self->devfn);
	return index < dxpu->ports ? dxpu->port[index] : NULL;
}

static int dxpu_pci_read(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	struct dxpu_bus *dxpu = dxpu_bus_of(bus);
	struct dxpu_port *port;

	*value = ~0;
	if (where < 0 || size < 1 || where + size > DXPU_CONFIG_BYTES)
		return PCIBIOS_BAD_REGISTER_NUMBER;
	if (pci_is_root_bus(bus)) {
		if (PCI_FUNC(devfn) || PCI_SLOT(devfn) >= dxpu->ports)
			return PCIBIOS_DEVICE_NOT_FOUND;
		return dxpu_port_config_read(dxpu->port[PCI_SLOT(devfn)], where, size, value);
	}
	port = port_above(bus);
	if (!port || devfn)
		return PCIBIOS_DEVICE_NOT_FOUND;
	return dxpu_function_read(port, where, size, value);
}

static int dxpu_pci_write(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	struct dxpu_bus *dxpu = dxpu_bus_of(bus);
	struct dxpu_port *port;

	if (where < 0 || size < 1 || where + size > DXPU_CONFIG_BYTES)
		return PCIBIOS_BAD_REGISTER_NUMBER;
	if (pci_is_root_bus(bus)) {
		if (PCI_FUNC(devfn) || PCI_SLOT(devfn) >= dxpu->ports)
			return PCIBIOS_DEVICE_NOT_FOUND;
		return dxpu_port_config_write(dxpu->port[PCI_SLOT(devfn)], where, size, value);
	}
	port = port_above(bus);
	if (!port || devfn)
		return PCIBIOS_DEVICE_NOT_FOUND;
	return dxpu_function_write(port, where, size, value);
}

static struct pci_ops dxpu_pci_ops = {
	.read = dxpu_pci_read,
	.write = dxpu_pci_write,
};

/**
 * dxpu_port_of() - the port a function is plugged in
 * @pdev: any PCI device
 *
 * NULL when it is not one of ours.
 */
struct dxpu_port *dxpu_port_of(struct pci_dev *pdev)
{
	if (pdev->bus->ops != &dxpu_pci_ops || pci_is_root_bus(pdev->bus))
		return NULL;
	return port_above(pdev->bus);
}

/*
 * Sees each function before any driver can: device_add() runs long before the PCI core allows a match. No driver but
 * ours may ever bind, since there is no memory behind the BARs.
 */
static int dxpu_bus_event(struct notifier_block *block, unsigned long action, void *data)
{
	struct device *dev = data;
	struct pci_dev *pdev = to_pci_dev(dev);
	struct dxpu_port *port = dxpu_port_of(pdev);

	if (!port)
		return NOTIFY_DONE;
	switch (action) {
	case BUS_NOTIFY_ADD_DEVICE:
		if (driver_set_override(dev, &pdev->driver_override, dxpu_vfio_driver.name,
					strlen(dxpu_vfio_driver.name)))
			pci_err(pdev, "dxpu: no memory for driver_override\n");
		dxpu_port_added(port, pdev);
		break;
	case BUS_NOTIFY_REMOVED_DEVICE:
		dxpu_port_removed(port, pdev);
		break;
	}
	return NOTIFY_OK;
}

static struct notifier_block dxpu_bus_notifier = {
	.notifier_call = dxpu_bus_event,
};

static u64 highest_address(void)
{
	return (1ULL << min_t(unsigned int, boot_cpu_data.x86_phys_bits, 52)) - 1;
}

/* A hole of the physical address space, high up: low ones are where firmware and hot-added memory go. */
static int find_hole(struct resource *res, const char *name, unsigned long flags, u64 size, u64 align)
{
	static const u64 floors[] = { SZ_1T, 512ULL * SZ_1G, 256ULL * SZ_1G, 64ULL * SZ_1G, SZ_4G };
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(floors); i++) {
		memset(res, 0, sizeof(*res));
		res->name = name;
		res->flags = flags;
		if (!allocate_resource(&iomem_resource, res, size, floors[i], highest_address(), align, NULL, NULL))
			return 0;
	}
	pr_err("no hole of %#llx bytes in %u physical address bits for the %s: fewer ports or smaller windows\n",
	       size, boot_cpu_data.x86_phys_bits, name);
	return -EBUSY;
}

static int create_bridge(struct dxpu_bus *bus)
{
	struct pci_host_bridge *bridge = pci_alloc_host_bridge(0);
	struct pci_dev *pdev;
	int ret;

	if (!bridge)
		return -ENOMEM;
	bridge->sysdata = &bus->sysdata;
	bridge->ops = &dxpu_pci_ops;
	bridge->busnr = 0;
	/* Hot-plug is what the ports are for; the rest they do not have. */
	bridge->native_pcie_hotplug = 1;
	bridge->native_shpc_hotplug = 0;
	bridge->native_aer = 0;
	bridge->native_pme = 0;
	bridge->native_ltr = 0;
	bridge->native_dpc = 0;
	pci_add_resource(&bridge->windows, &bus->buses);
	pci_add_resource(&bridge->windows, &bus->pref);
	pci_add_resource_offset(&bridge->windows, &bus->mem, bus->mem.start - DXPU_MEM_BUS_BASE);
	dev_set_msi_domain(&bridge->dev, bus->msi);

	ret = pci_scan_root_bus_bridge(bridge);
	if (ret) {
		pci_free_host_bridge(bridge);
		return ret;
	}
	bus->bridge = bridge;
	bus->root = bridge->bus;
	pci_lock_rescan_remove();
	list_for_each_entry(pdev, &bus->root->devices, bus_list) {
		/* I/O registers that read as zero mean no I/O window, but the core sees one of 4 KiB at zero. */
		pdev->resource[PCI_BRIDGE_IO_WINDOW].flags = 0;
		if (pci_claim_resource(pdev, PCI_BRIDGE_MEM_WINDOW) ||
		    pci_claim_resource(pdev, PCI_BRIDGE_PREF_MEM_WINDOW))
			pci_err(pdev, "dxpu: its windows are not free\n");
	}
	pci_bus_add_devices(bus->root);
	pci_unlock_rescan_remove();
	return 0;
}

/**
 * dxpu_bus_create() - brings up the domain; ports exist already
 * @bus: with ports and sizes filled in
 * @domain: its PCI domain
 */
int dxpu_bus_create(struct dxpu_bus *bus, int domain)
{
	unsigned int i;
	int ret;

	bus->sysdata.domain = domain;
	bus->sysdata.node = NUMA_NO_NODE;
	bus->buses.name = "dxpu buses";
	bus->buses.start = 0;
	bus->buses.end = bus->ports;
	bus->buses.flags = IORESOURCE_BUS;

	ret = find_hole(&bus->pref, "dxpu prefetchable window",
			IORESOURCE_MEM | IORESOURCE_MEM_64 | IORESOURCE_PREFETCH,
			bus->pref_bytes * bus->ports, bus->pref_bytes);
	if (ret)
		return ret;
	ret = find_hole(&bus->mem, "dxpu window", IORESOURCE_MEM, bus->mem_bytes * bus->ports, bus->mem_bytes);
	if (ret)
		goto release_pref;
	ret = dxpu_irq_create(bus);
	if (ret)
		goto release_mem;
	for (i = 0; i < bus->ports; i++) {
		bus->port[i] = dxpu_port_create(bus, i);
		if (!bus->port[i]) {
			ret = -ENOMEM;
			goto destroy_ports;
		}
	}
	ret = bus_register_notifier(&pci_bus_type, &dxpu_bus_notifier);
	if (ret)
		goto destroy_ports;
	ret = create_bridge(bus);
	if (ret)
		goto unregister;
	return 0;

unregister:
	bus_unregister_notifier(&pci_bus_type, &dxpu_bus_notifier);
destroy_ports:
	for (i = 0; i < bus->ports && bus->port[i]; i++)
		dxpu_port_destroy(bus->port[i]);
	dxpu_irq_destroy(bus);
release_mem:
	release_resource(&bus->mem);
release_pref:
	release_resource(&bus->pref);
	return ret;
}

/**
 * dxpu_bus_destroy() - the reverse
 * @bus: every function is out already, see dxpu_port_settled()
 */
void dxpu_bus_destroy(struct dxpu_bus *bus)
{
	unsigned int i;

	pci_lock_rescan_remove();
	pci_stop_root_bus(bus->root);
	pci_remove_root_bus(bus->root);
	pci_unlock_rescan_remove();
	pci_free_host_bridge(bus->bridge);
	bus_unregister_notifier(&pci_bus_type, &dxpu_bus_notifier);
	for (i = 0; i < bus->ports; i++)
		dxpu_port_destroy(bus->port[i]);
	dxpu_irq_destroy(bus);
	release_resource(&bus->mem);
	release_resource(&bus->pref);
}
