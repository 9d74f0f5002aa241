// SPDX-License-Identifier: GPL-2.0
/*
 * One virtual root port.
 *
 * Its registers are emulated faithfully enough that the kernel's own pcieport and pciehp drive it: presence and link
 * state change, the hot-plug interrupt fires, pciehp scans or removes. Nothing here adds or removes a PCI device.
 *
 * Removal has two steps. First the function is gone: configuration and BARs read as all ones, waiters end, DMA stops,
 * users are told. Only when no user has it open does the link go down, because pciehp holds the global rescan lock
 * while a driver's remove waits for its users: a holder that never closes must not stop hot-plug of every other port.
 */
#define pr_fmt(fmt) "dxpu: " fmt

#include <linux/pci.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "dxpu.h"

#define CAP_PCIE	0x40
#define CAP_MSI		0x80

#define SLOT_EVENTS	(PCI_EXP_SLTSTA_PDC | PCI_EXP_SLTSTA_DLLSC)

static void put(u8 *bytes, int where, int size, u32 value)
{
	memcpy(bytes + where, &value, size);
}

static void init_registers(struct dxpu_port *port)
{
	struct dxpu_bus *bus = port->bus;
	u8 *data = port->root.data, *mask = port->root.mask, *w1c = port->root.w1c;
	u64 pref = bus->pref.start + port->index * bus->pref_bytes;
	u64 pref_last = pref + bus->pref_bytes - 1;
	u32 mem = DXPU_MEM_BUS_BASE + port->index * bus->mem_bytes;
	u32 mem_last = mem + bus->mem_bytes - 1;
	u8 secondary = port->index + 1;

	put(data, PCI_VENDOR_ID, 2, DXPU_VENDOR_ID);
	put(data, PCI_DEVICE_ID, 2, DXPU_ROOT_PORT_ID);
	put(mask, PCI_COMMAND, 2, PCI_COMMAND_IO | PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER | PCI_COMMAND_PARITY |
	    PCI_COMMAND_SERR | PCI_COMMAND_INTX_DISABLE);
	put(data, PCI_STATUS, 2, PCI_STATUS_CAP_LIST);
	put(w1c, PCI_STATUS, 2, 0xf900);
	put(data, PCI_CLASS_REVISION, 4, (u32)PCI_CLASS_BRIDGE_PCI_NORMAL << 8 | 1);
	put(mask, PCI_CACHE_LINE_SIZE, 1, 0xff);
	put(data, PCI_HEADER_TYPE, 1, PCI_HEADER_TYPE_BRIDGE);
	put(data, PCI_PRIMARY_BUS, 4, secondary << 16 | secondary << 8);
	put(mask, PCI_PRIMARY_BUS, 4, 0x00ffffff);
	put(w1c, PCI_SEC_STATUS, 2, 0xf900);
	/* No I/O window: base and limit read as zero. Memory and prefetchable windows: set before anybody looks. */
	put(data, PCI_MEMORY_BASE, 2, mem >> 16);
	put(data, PCI_MEMORY_LIMIT, 2, mem_last >> 16 & 0xfff0);
	put(mask, PCI_MEMORY_BASE, 4, 0xfff0fff0);
	put(data, PCI_PREF_MEMORY_BASE, 2, (pref >> 16 & 0xfff0) | PCI_PREF_RANGE_TYPE_64);
	put(data, PCI_PREF_MEMORY_LIMIT, 2, (pref_last >> 16 & 0xfff0) | PCI_PREF_RANGE_TYPE_64);
	put(mask, PCI_PREF_MEMORY_BASE, 4, 0xfff0fff0);
	put(data, PCI_PREF_BASE_UPPER32, 4, pref >> 32);
	put(data, PCI_PREF_LIMIT_UPPER32, 4, pref_last >> 32);
	put(mask, PCI_PREF_BASE_UPPER32, 4, ~0);
	put(mask, PCI_PREF_LIMIT_UPPER32, 4, ~0);
	put(data, PCI_CAPABILITY_LIST, 1, CAP_PCIE);
	put(mask, PCI_INTERRUPT_LINE, 1, 0xff);
	put(mask, PCI_BRIDGE_CONTROL, 2, 0x007f);

	put(data, CAP_PCIE, 2, CAP_MSI << 8 | PCI_CAP_ID_EXP);
	put(data, CAP_PCIE + PCI_EXP_FLAGS, 2, 2 | PCI_EXP_TYPE_ROOT_PORT << 4 | PCI_EXP_FLAGS_SLOT);
	put(data, CAP_PCIE + PCI_EXP_DEVCAP, 4, PCI_EXP_DEVCAP_RBER | 5);
	put(mask, CAP_PCIE + PCI_EXP_DEVCTL, 2, 0x7fff);
	put(w1c, CAP_PCIE + PCI_EXP_DEVSTA, 2, 0x000f);
	put(data, CAP_PCIE + PCI_EXP_LNKCAP, 4, PCI_EXP_LNKCAP_SLS_32_0GB | 16 << 4 | PCI_EXP_LNKCAP_DLLLARC |
	    (port->index + 1) << 24);
	/* Without Retrain Link, which is done as soon as asked for and reads as zero. */
	put(mask, CAP_PCIE + PCI_EXP_LNKCTL, 2, 0x0fdf);
	put(data, CAP_PCIE + PCI_EXP_SLTCAP, 4, PCI_EXP_SLTCAP_HPC | PCI_EXP_SLTCAP_HPS | PCI_EXP_SLTCAP_NCCS |
	    (bus->slot_base + port->index) << 19);
	put(mask, CAP_PCIE + PCI_EXP_SLTCTL, 2, 0x1fff);
	put(w1c, CAP_PCIE + PCI_EXP_SLTSTA, 2, PCI_EXP_SLTSTA_ABP | PCI_EXP_SLTSTA_PFD | PCI_EXP_SLTSTA_MRLSC |
	    PCI_EXP_SLTSTA_PDC | PCI_EXP_SLTSTA_CC | PCI_EXP_SLTSTA_DLLSC);
	put(mask, CAP_PCIE + PCI_EXP_RTCTL, 2, 0x001f);
	put(mask, CAP_PCIE + PCI_EXP_DEVCTL2, 2, 0x0000);
	put(data, CAP_PCIE + PCI_EXP_LNKCAP2, 4, 0x3e);
	put(data, CAP_PCIE + PCI_EXP_LNKCTL2, 2, PCI_EXP_LNKCTL2_TLS_32_0GT);
	put(mask, CAP_PCIE + PCI_EXP_LNKCTL2, 2, 0x000f);

	put(data, CAP_MSI, 2, PCI_CAP_ID_MSI);
	put(data, CAP_MSI + PCI_MSI_FLAGS, 2, PCI_MSI_FLAGS_64BIT);
	put(mask, CAP_MSI + PCI_MSI_FLAGS, 2, PCI_MSI_FLAGS_ENABLE);
	put(mask, CAP_MSI + PCI_MSI_ADDRESS_LO, 4, 0xfffffffc);
	put(mask, CAP_MSI + PCI_MSI_ADDRESS_HI, 4, ~0);
	put(mask, CAP_MSI + PCI_MSI_DATA_64, 2, 0xffff);
}

/* One interrupt per rise of (any enabled event and Hot-Plug Interrupt Enable), as the specification has it for MSI. */
static void update_hotplug(struct dxpu_port *port)
{
	u16 control = dxpu_config_read(&port->root, CAP_PCIE + PCI_EXP_SLTCTL, 2);
	u16 status = dxpu_config_read(&port->root, CAP_PCIE + PCI_EXP_SLTSTA, 2);
	u16 flags = dxpu_config_read(&port->root, CAP_MSI + PCI_MSI_FLAGS, 2);
	bool event = (control & PCI_EXP_SLTCTL_PDCE && status & PCI_EXP_SLTSTA_PDC) ||
		     (control & PCI_EXP_SLTCTL_DLLSCE && status & PCI_EXP_SLTSTA_DLLSC);
	bool asserted = event && control & PCI_EXP_SLTCTL_HPIE && flags & PCI_MSI_FLAGS_ENABLE;

	if (asserted && !port->hotplug_asserted)
		dxpu_irq_fire(port);
	port->hotplug_asserted = asserted;
}

/* A card is seated and its link trained, or pulled: what pciehp acts upon. */
static void set_presence(struct dxpu_port *port, bool present)
{
	u16 link = PCI_EXP_LNKSTA_DLLLA | PCI_EXP_LNKSTA_CLS_32_0GB | PCI_EXP_LNKSTA_NLW_X1 << 4;
	unsigned long flags;

	raw_spin_lock_irqsave(&port->cfg_lock, flags);
	dxpu_config_set(&port->root, CAP_PCIE + PCI_EXP_LNKSTA, 2, present ? link : 0, 0xffff);
	dxpu_config_set(&port->root, CAP_PCIE + PCI_EXP_SLTSTA, 2, SLOT_EVENTS | (present ? PCI_EXP_SLTSTA_PDS : 0),
			SLOT_EVENTS | PCI_EXP_SLTSTA_PDS);
	port->visible = present;
	update_hotplug(port);
	raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
}

int dxpu_port_config_read(struct dxpu_port *port, int where, int size, u32 *value)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&port->cfg_lock, flags);
	*value = dxpu_config_read(&port->root, where, size);
	raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
	return PCIBIOS_SUCCESSFUL;
}

int dxpu_port_config_write(struct dxpu_port *port, int where, int size, u32 value)
{
	bool was_reset, reset;
	unsigned long flags;

	raw_spin_lock_irqsave(&port->cfg_lock, flags);
	was_reset = dxpu_config_read(&port->root, PCI_BRIDGE_CONTROL, 2) & PCI_BRIDGE_CTL_BUS_RESET;
	dxpu_config_write(&port->root, where, size, value);
	reset = dxpu_config_read(&port->root, PCI_BRIDGE_CONTROL, 2) & PCI_BRIDGE_CTL_BUS_RESET;
	update_hotplug(port);
	raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
	/* A hot reset of the secondary bus. Whoever asked for it restores configuration space afterwards. */
	if (reset && !was_reset) {
		dxpu_reset_posted(port);
		dxpu_function_forget(port);
	}
	return PCIBIOS_SUCCESSFUL;
}

static void wake_server(struct irq_work *work)
{
	struct dxpu_port *port = container_of(work, struct dxpu_port, kick);

	wake_up(&port->server_wq);
}

/**
 * dxpu_port_changed() - tells the server that the port's status is another
 * @port: the port
 */
void dxpu_port_changed(struct dxpu_port *port)
{
	atomic_inc(&port->status_seq);
	irq_work_queue(&port->kick);
}

static void set_state(struct dxpu_port *port, enum dxpu_port_state state)
{
	lockdep_assert_held(&port->lock);
	if (port->state == state)
		return;
	port->state = state;
	dxpu_port_changed(port);
}

/* Nothing is plugged any more: what belonged to the function goes. */
static void become_empty(struct dxpu_port *port)
{
	dxpu_msix_drop(port);
	port->error = 0;
	set_state(port, DXPU_PORT_EMPTY);
}

static void link_down(struct dxpu_port *port)
{
	lockdep_assert_held(&port->lock);
	set_presence(port, false);
	/* With nothing enumerated there is nothing whose removal would be heard of. */
	if (port->pdev)
		set_state(port, DXPU_PORT_REMOVING);
	else
		become_empty(port);
}

/* BARs of one window fit when their sum does: sizes are powers of two, the window is aligned to its own size. */
static int check_fit(struct dxpu_port *port, const struct dxpu_facts *facts)
{
	u64 pref = 0, mem = 0;
	unsigned int i;

	for (i = 0; i < DXPU_BARS; i++) {
		const struct dxpu_bar *bar = &facts->bar[i];
		u32 wide = PCI_BASE_ADDRESS_MEM_PREFETCH | PCI_BASE_ADDRESS_MEM_TYPE_64;
		u64 *sum = (bar->flags & wide) == wide ? &pref : &mem;

		if (!bar->size)
			continue;
		/* The kernel gives every BAR at least a page. */
		if (bar->size > port->bus->pref_bytes)
			return -ENOSPC;
		*sum += max_t(u64, bar->size, PAGE_SIZE);
	}
	return pref > port->bus->pref_bytes || mem > port->bus->mem_bytes ? -ENOSPC : 0;
}

/**
 * dxpu_port_plug() - a function appears
 * @port: where
 * @config: its configuration space; copied
 *
 * Return: what marks its requests, 0 to 255, or negative errno.
 */
int dxpu_port_plug(struct dxpu_port *port, struct dxpu_config *config)
{
	struct dxpu_vector *vector = NULL;
	struct dxpu_facts facts;
	int at, ret;

	ret = dxpu_config_inspect(config, &facts);
	if (!ret)
		ret = check_fit(port, &facts);
	if (ret)
		return ret;

	/* The host decides where BARs are. */
	for (at = PCI_BASE_ADDRESS_0; at < PCI_CARDBUS_CIS; at++)
		config->data[at] &= ~config->mask[at];
	memcpy(config->initial, config->data, sizeof(config->initial));

	mutex_lock(&port->lock);
	if (port->state != DXPU_PORT_EMPTY) {
		ret = -EBUSY;
		goto unlock;
	}
	if (facts.vectors) {
		vector = kvcalloc(facts.vectors, sizeof(*vector), GFP_KERNEL);
		if (!vector) {
			ret = -ENOMEM;
			goto unlock;
		}
	}
	/* Together: who raises an interrupt meanwhile trusts the number that goes with the array. */
	spin_lock(&port->irq_lock);
	port->facts = facts;
	port->vector = vector;
	spin_unlock(&port->irq_lock);
	memcpy(&port->fn, config, sizeof(port->fn));
	dxpu_msix_reset(port);
	memset(port->vbar, 0, sizeof(port->vbar));
	port->plugs++;
	port->error = 0;
	dxpu_set_live(port, true);
	ret = port->plugs & 0xff;
	set_state(port, DXPU_PORT_PLUGGING);
	set_presence(port, true);
unlock:
	mutex_unlock(&port->lock);
	return ret;
}

/**
 * dxpu_port_unplug() - surprise removal, step one; step two follows as soon as nobody has the function open
 * @port: where
 *
 * On return no request of the function waits, no DMA runs, and none will start.
 */
void dxpu_port_unplug(struct dxpu_port *port)
{
	unsigned long flags;

	mutex_lock(&port->lock);
	if (port->state != DXPU_PORT_PLUGGING && port->state != DXPU_PORT_ATTACHED) {
		mutex_unlock(&port->lock);
		return;
	}
	dxpu_set_live(port, false);
	raw_spin_lock_irqsave(&port->cfg_lock, flags);
	port->visible = false;
	raw_spin_unlock_irqrestore(&port->cfg_lock, flags);
	if (port->pdev)
		port->pdev->error_state = pci_channel_io_perm_failure;
	dxpu_end_requests(port);
	set_state(port, DXPU_PORT_GONE);
	dxpu_request_release(port);
	mutex_unlock(&port->lock);

	/* Not under the lock: a page fault of the user may be in the way, and status must not wait for that. */
	dxpu_dma_stop(port);

	mutex_lock(&port->lock);
	/* Its user may have closed meanwhile, which took the link down. */
	if (port->state == DXPU_PORT_GONE && !port->users)
		link_down(port);
	mutex_unlock(&port->lock);
}

/**
 * dxpu_port_release() - asks the user to close the function, which works on
 * @port: where
 */
int dxpu_port_release(struct dxpu_port *port)
{
	int ret = 0;

	mutex_lock(&port->lock);
	if (port->state == DXPU_PORT_EMPTY)
		ret = -ENODEV;
	else
		dxpu_request_release(port);
	mutex_unlock(&port->lock);
	return ret;
}

/* The kernel has made a PCI device of it; no driver has seen it yet. Under PCI's rescan lock. */
void dxpu_port_added(struct dxpu_port *port, struct pci_dev *pdev)
{
	mutex_lock(&port->lock);
	port->pdev = pdev;
	/* Unplugged while pciehp was scanning: the event that takes it out is on its way. */
	if (port->state == DXPU_PORT_EMPTY)
		set_state(port, DXPU_PORT_REMOVING);
	if (port->state == DXPU_PORT_REMOVING)
		pdev->error_state = pci_channel_io_perm_failure;
	mutex_unlock(&port->lock);
	dxpu_port_changed(port);
}

void dxpu_port_removed(struct dxpu_port *port, struct pci_dev *pdev)
{
	mutex_lock(&port->lock);
	if (port->pdev == pdev) {
		port->pdev = NULL;
		if (port->state == DXPU_PORT_REMOVING)
			become_empty(port);
		else
			dxpu_port_changed(port);
	}
	mutex_unlock(&port->lock);
}

/**
 * dxpu_port_offered() - the VFIO driver has bound, or failed to
 * @port: where
 * @error: 0, or why not
 */
void dxpu_port_offered(struct dxpu_port *port, int error)
{
	mutex_lock(&port->lock);
	port->error = error;
	if (port->state == DXPU_PORT_PLUGGING && !error)
		set_state(port, DXPU_PORT_ATTACHED);
	else
		dxpu_port_changed(port);
	mutex_unlock(&port->lock);
}

/* The VFIO driver was unbound: on removal, or because an administrator did it. */
void dxpu_port_withdrawn(struct dxpu_port *port)
{
	mutex_lock(&port->lock);
	if (port->state == DXPU_PORT_ATTACHED)
		set_state(port, DXPU_PORT_PLUGGING);
	mutex_unlock(&port->lock);
}

int dxpu_port_opened(struct dxpu_port *port)
{
	int ret = -ENODEV;

	mutex_lock(&port->lock);
	if (port->state == DXPU_PORT_ATTACHED) {
		port->users = 1;
		port->holder_pid = task_tgid_nr(current);
		get_task_comm(port->holder, current->group_leader);
		dxpu_port_changed(port);
		ret = 0;
	}
	mutex_unlock(&port->lock);
	return ret;
}

void dxpu_port_closed(struct dxpu_port *port)
{
	mutex_lock(&port->lock);
	port->users = 0;
	port->holder_pid = 0;
	memset(port->holder, 0, sizeof(port->holder));
	if (port->state == DXPU_PORT_GONE)
		link_down(port);
	dxpu_port_changed(port);
	mutex_unlock(&port->lock);
}

/**
 * dxpu_port_settled() - nothing is plugged, and pciehp has nothing to remove
 * @port: the port
 */
bool dxpu_port_settled(struct dxpu_port *port)
{
	bool settled;

	mutex_lock(&port->lock);
	settled = port->state == DXPU_PORT_EMPTY && !port->pdev;
	mutex_unlock(&port->lock);
	return settled;
}

void dxpu_port_status(struct dxpu_port *port, struct dxpu_port_status *status)
{
	unsigned int i;

	BUILD_BUG_ON(ARRAY_SIZE(status->counters) < DXPU_COUNTERS);
	memset(status, 0, sizeof(*status));
	status->size = sizeof(*status);
	status->port = port->index;
	/* Before the rest: who sees a later change than it sees here looks again. */
	status->status_seq = atomic_read(&port->status_seq);
	mutex_lock(&port->lock);
	status->state = port->state;
	status->error = port->error;
	status->domain = port->bus->sysdata.domain;
	status->bus = port->index + 1;
	if (port->pdev) {
		status->enumerated = 1;
		status->bus = port->pdev->bus->number;
		status->devfn = port->pdev->devfn;
	}
	status->holder_pid = port->holder_pid;
	memcpy(status->holder, port->holder, sizeof(status->holder));
	status->plugs = port->plugs;
	mutex_unlock(&port->lock);
	status->claimed = !!READ_ONCE(port->channel);
	spin_lock(&port->req_lock);
	for (i = 0; i < DXPU_SLOTS; i++)
		status->outstanding += !!port->slot[i].id;
	spin_unlock(&port->req_lock);
	for (i = 0; i < DXPU_COUNTERS; i++)
		status->counters[i] = atomic64_read(&port->counters[i]);
}

static void fail(struct work_struct *work)
{
	struct dxpu_port *port = container_of(work, struct dxpu_port, fail);

	pr_warn("port %u: its server does not keep to the protocol or hangs; its function is taken out\n", port->index);
	dxpu_port_unplug(port);
}

struct dxpu_port *dxpu_port_create(struct dxpu_bus *bus, unsigned int index)
{
	struct dxpu_port *port = vzalloc(sizeof(*port));

	if (!port)
		return NULL;
	port->bus = bus;
	port->index = index;
	mutex_init(&port->lock);
	mutex_init(&port->resetting);
	raw_spin_lock_init(&port->cfg_lock);
	INIT_WORK(&port->fail, fail);
	port->kick = IRQ_WORK_INIT(wake_server);
	init_registers(port);
	dxpu_irq_init(port);
	dxpu_ring_init(port);
	dxpu_msix_init(port);
	dxpu_dma_init(port);
	return port;
}

void dxpu_port_destroy(struct dxpu_port *port)
{
	flush_work(&port->fail);
	flush_work(&port->flush_msix);
	irq_work_sync(&port->kick);
	irq_work_sync(&port->fire);
	dxpu_msix_drop(port);
	xa_destroy(&port->pages);
	vfree(port);
}
