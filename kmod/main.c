// SPDX-License-Identifier: GPL-2.0
/*
 * dxpu: functions of other machines as PCI devices of this one.
 *
 * What this is: a PCI domain of its own with virtual root ports, behind which the kernel's own hot-plug driver shows
 * the functions that a host daemon plugs through /dev/dxpu; a VFIO driver that offers each of them to programs and
 * virtual machines. What it is not: it never sees a network, and no native driver can bind to what it shows.
 *
 * Exported symbols only; stock Debian 12 kernel (6.1). docs/kernel-abi.md is the manual.
 */
#define pr_fmt(fmt) "dxpu: " fmt

#include <linux/delay.h>
#include <linux/log2.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/sizes.h>

#include "dxpu.h"

static unsigned int ports = 4;
module_param(ports, uint, 0444);
MODULE_PARM_DESC(ports, "virtual root ports, 1 to 32 (default 4)");

static unsigned int domain;
module_param(domain, uint, 0444);
MODULE_PARM_DESC(domain, "PCI domain, 1 to 0xffff (default 0: the first free one from 0xd0 up)");

static unsigned int pref_mib = 1024;
module_param(pref_mib, uint, 0444);
MODULE_PARM_DESC(pref_mib, "prefetchable window of each port in MiB, a power of two (default 1024)");

static unsigned int mem_mib = 32;
module_param(mem_mib, uint, 0444);
MODULE_PARM_DESC(mem_mib, "non-prefetchable window of each port in MiB, a power of two up to 64 (default 32)");

static unsigned int slot_base = 100;
module_param(slot_base, uint, 0444);
MODULE_PARM_DESC(slot_base, "slot number of port 0 in /sys/bus/pci/slots (default 100)");

static struct dxpu_bus dxpu;

static int check_parameters(void)
{
	if (ports < 1 || ports > DXPU_MAX_PORTS) {
		pr_err("ports=%u: 1 to %u\n", ports, DXPU_MAX_PORTS);
		return -EINVAL;
	}
	if (domain > 0xffff) {
		pr_err("domain=%#x: 1 to 0xffff, QEMU takes no other\n", domain);
		return -EINVAL;
	}
	if (!is_power_of_2(pref_mib)) {
		pr_err("pref_mib=%u: a power of two\n", pref_mib);
		return -EINVAL;
	}
	if (!is_power_of_2(mem_mib) || mem_mib > 64) {
		pr_err("mem_mib=%u: a power of two up to 64\n", mem_mib);
		return -EINVAL;
	}
	if (slot_base + ports > 0x2000 || slot_base + ports < slot_base) {
		pr_err("slot_base=%u: slot numbers end at 8191\n", slot_base);
		return -EINVAL;
	}
	return 0;
}

/* The first domain without a root bus; the one asked for if it is free. */
static int find_domain(unsigned int wanted)
{
	unsigned int candidate;

	if (wanted)
		return pci_find_bus(wanted, 0) ? -EBUSY : wanted;
	for (candidate = 0xd0; candidate <= 0xffff; candidate++)
		if (!pci_find_bus(candidate, 0))
			return candidate;
	return -EBUSY;
}

static int __init dxpu_init(void)
{
	int found, ret;

	ret = check_parameters();
	if (ret)
		return ret;
	found = find_domain(domain);
	if (found < 0) {
		pr_err("PCI domain %#x is taken\n", domain);
		return found;
	}
	domain = found;
	dxpu.ports = ports;
	dxpu.pref_bytes = (u64)pref_mib * SZ_1M;
	dxpu.mem_bytes = (u64)mem_mib * SZ_1M;
	dxpu.slot_base = slot_base;

	/* Before the bus: a function that appears finds its driver. */
	ret = pci_register_driver(&dxpu_vfio_driver);
	if (ret)
		return ret;
	ret = dxpu_bus_create(&dxpu, domain);
	if (ret)
		goto unregister_driver;
	ret = dxpu_sysfs_create(&dxpu);
	if (ret)
		goto destroy_bus;
	ret = dxpu_channel_create(&dxpu);
	if (ret)
		goto destroy_sysfs;
	pr_info("%u ports in PCI domain %04x, windows of %u and %u MiB each\n", ports, domain, pref_mib, mem_mib);
	return 0;

destroy_sysfs:
	dxpu_sysfs_destroy(&dxpu);
destroy_bus:
	dxpu_bus_destroy(&dxpu);
unregister_driver:
	pci_unregister_driver(&dxpu_vfio_driver);
	return ret;
}

/*
 * No file of /dev/dxpu and no VFIO device is open, or we would not be here: every function is unplugged. What may
 * remain is pciehp on its way to remove one. It takes the rescan lock for that, and removing a port under that lock
 * waits for pciehp, so it has to be done before the ports go.
 */
static void __exit dxpu_exit(void)
{
	unsigned int i, tries;

	dxpu_channel_destroy();
	for (i = 0; i < dxpu.ports; i++) {
		dxpu_port_unplug(dxpu.port[i]);
		for (tries = 0; !dxpu_port_settled(dxpu.port[i]) && tries < 300; tries++)
			msleep(100);
		if (!dxpu_port_settled(dxpu.port[i]))
			pr_err("port %u: pciehp has not removed its function in 30 s\n", i);
	}
	/* Its last step, after our notifier has run. */
	pci_lock_rescan_remove();
	pci_unlock_rescan_remove();
	dxpu_sysfs_destroy(&dxpu);
	dxpu_bus_destroy(&dxpu);
	pci_unregister_driver(&dxpu_vfio_driver);
}

module_init(dxpu_init);
module_exit(dxpu_exit);
MODULE_LICENSE("GPL");
MODULE_AUTHOR("dxpu");
MODULE_DESCRIPTION("Functions of other machines behind virtual PCI Express root ports");
MODULE_VERSION("1.0");
