// SPDX-License-Identifier: GPL-2.0
/*
 * The hot-plug interrupt: an MSI domain without a parent, as no real interrupt controller is involved. The port's own
 * MSI registers keep address and data, but what raises the interrupt is an irq_work on this CPU.
 */
#include <linux/irq.h>
#include <linux/irqdomain.h>
#include <linux/msi.h>
#include <linux/pci.h>

#include "dxpu.h"

static void dxpu_compose(struct irq_data *data, struct msi_msg *msg)
{
	memset(msg, 0, sizeof(*msg));
	/* Nobody ever decodes it; lspci shows it. */
	msg->address_lo = 0xfee00000;
	msg->data = data->irq & 0xffff;
}

static void dxpu_ack(struct irq_data *data)
{
}

static int dxpu_set_affinity(struct irq_data *data, const struct cpumask *mask, bool force)
{
	irq_data_update_effective_affinity(data, mask);
	return IRQ_SET_MASK_OK;
}

static struct irq_chip dxpu_chip = {
	.name = "dxpu-msi",
	.irq_ack = dxpu_ack,
	.irq_mask = pci_msi_mask_irq,
	.irq_unmask = pci_msi_unmask_irq,
	.irq_compose_msi_msg = dxpu_compose,
	.irq_set_affinity = dxpu_set_affinity,
};

static struct dxpu_port *port_of_msi(const struct device *dev)
{
	struct pci_dev *pdev = to_pci_dev(dev);
	struct dxpu_bus *bus = container_of((struct pci_sysdata *)pdev->bus->sysdata, struct dxpu_bus, sysdata);
	unsigned int index = PCI_SLOT(pdev->devfn);

	return pci_is_root_bus(pdev->bus) && index < bus->ports ? bus->port[index] : NULL;
}

static int dxpu_msi_init(struct irq_domain *domain, struct msi_domain_info *info, unsigned int virq,
			 irq_hw_number_t hwirq, msi_alloc_info_t *arg)
{
	struct dxpu_port *port = port_of_msi(arg->desc->dev);
	unsigned long flags;

	/* Functions are reached through VFIO only: a native driver gets no interrupts from us. */
	if (!port)
		return -ENODEV;
	irq_domain_set_info(domain, virq, hwirq, info->chip, port, handle_edge_irq, NULL, "edge");
	spin_lock_irqsave(&port->msi_lock, flags);
	port->virq = virq;
	spin_unlock_irqrestore(&port->msi_lock, flags);
	return 0;
}

static void dxpu_msi_free(struct irq_domain *domain, struct msi_domain_info *info, unsigned int virq)
{
	struct dxpu_port *port = irq_get_chip_data(virq);
	unsigned long flags;

	if (!port)
		return;
	spin_lock_irqsave(&port->msi_lock, flags);
	if (port->virq == virq)
		port->virq = 0;
	spin_unlock_irqrestore(&port->msi_lock, flags);
	irq_work_sync(&port->fire);
}

static struct msi_domain_ops dxpu_msi_ops = {
	.msi_init = dxpu_msi_init,
	.msi_free = dxpu_msi_free,
};

static struct msi_domain_info dxpu_msi_info = {
	.flags = MSI_FLAG_USE_DEF_DOM_OPS | MSI_FLAG_USE_DEF_CHIP_OPS | MSI_FLAG_PCI_MSIX,
	.ops = &dxpu_msi_ops,
	.chip = &dxpu_chip,
};

static void dxpu_fire(struct irq_work *work)
{
	struct dxpu_port *port = container_of(work, struct dxpu_port, fire);
	unsigned int virq;

	spin_lock(&port->msi_lock);
	virq = port->virq;
	spin_unlock(&port->msi_lock);
	if (virq)
		generic_handle_irq(virq);
}

/**
 * dxpu_irq_fire() - raises the port's hot-plug interrupt, from any context
 * @port: the port
 */
void dxpu_irq_fire(struct dxpu_port *port)
{
	irq_work_queue(&port->fire);
}

void dxpu_irq_init(struct dxpu_port *port)
{
	spin_lock_init(&port->msi_lock);
	port->fire = IRQ_WORK_INIT_HARD(dxpu_fire);
}

int dxpu_irq_create(struct dxpu_bus *bus)
{
	bus->msi_fwnode = irq_domain_alloc_named_id_fwnode("DXPU-MSI", bus->sysdata.domain);
	if (!bus->msi_fwnode)
		return -ENOMEM;
	bus->msi = pci_msi_create_irq_domain(bus->msi_fwnode, &dxpu_msi_info, NULL);
	if (!bus->msi) {
		irq_domain_free_fwnode(bus->msi_fwnode);
		return -ENOMEM;
	}
	return 0;
}

void dxpu_irq_destroy(struct dxpu_bus *bus)
{
	irq_domain_remove(bus->msi);
	irq_domain_free_fwnode(bus->msi_fwnode);
}
