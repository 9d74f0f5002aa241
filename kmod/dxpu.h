/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Inside dxpu.ko: the objects and who calls whom.
 *
 *	main	parameters, load, unload
 *	bus	the private PCI domain: host bridge, windows, pci_ops, bus notifier
 *	port	one virtual root port: its registers, its states, plug and unplug
 *	config	a configuration space that never sleeps: bytes, write masks, checks of an image
 *	irq	MSI domain of the ports, the hot-plug interrupt
 *	ring	requests to user space and their completions
 *	channel	/dev/dxpu
 *	vfio	the function as a VFIO device; msix: its interrupts; dma: its access to memory
 *	sysfs	/sys/class/dxpu
 *
 * Locks, outermost first:
 *	VFIO's group lock and PCI's rescan lock (theirs)
 *	port->lock	mutex: state, plug, unplug, users
 *	port->pin_mutex	mutex: what is pinned; held across vfio_pin_pages()
 *	port->dma_sem	rwsem: read: a copy runs; write: pages leave the cache
 *	port->irq_lock	spinlock: vectors and eventfds
 *	port->cfg_lock	raw spinlock, IRQs off: both configuration spaces
 *	port->tx_lock	raw spinlock, IRQs off: the request ring's producer side
 *	port->req_lock	spinlock: requests waiting for completion
 */
#ifndef _DXPU_H
#define _DXPU_H

#include <linux/atomic.h>
#include <linux/completion.h>
#include <linux/irq_work.h>
#include <linux/msi.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/rwsem.h>
#include <linux/spinlock.h>
#include <linux/vfio.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "uapi/dxpu.h"

#define DXPU_VENDOR_ID		0xd80b
#define DXPU_ROOT_PORT_ID	0x0001

/* Room that only configuration writes made with IRQs off may use: they cannot wait. */
#define DXPU_SQ_RESERVE		(32 * 1024)
/* Reads outstanding per port. A power of two; the id of a request is its slot plus a generation. */
#define DXPU_SLOTS		64
/* Ranges unmapped lately, see dma.c. */
#define DXPU_FENCES		16

struct eventfd_ctx;
struct dxpu_bus;
struct dxpu_channel;

/**
 * struct dxpu_config - a configuration space
 * @data: as it is now
 * @initial: as it was at plug
 * @mask: 1: writable
 * @w1c: 1: writing one clears
 */
struct dxpu_config {
	u8 data[DXPU_CONFIG_BYTES];
	u8 initial[DXPU_CONFIG_BYTES];
	u8 mask[DXPU_CONFIG_BYTES];
	u8 w1c[DXPU_CONFIG_BYTES];
};

/**
 * struct dxpu_bar - a BAR of the plugged function
 * @size: 0 when absent
 * @flags: the low four bits of the register
 */
struct dxpu_bar {
	u64 size;
	u32 flags;
};

/**
 * struct dxpu_facts - what an image says about its function
 * @bar: its BARs
 * @pcie_cap: offset of the PCI Express capability
 * @msix_cap: offset of the MSI-X capability, 0 when absent
 * @vectors: of MSI-X
 * @table_bar: MSI-X table
 * @table_offset: MSI-X table
 * @pba_bar: MSI-X pending bits
 * @pba_offset: MSI-X pending bits
 * @flr: function level reset is offered
 */
struct dxpu_facts {
	struct dxpu_bar bar[DXPU_BARS];
	u16 pcie_cap;
	u16 msix_cap;
	u16 vectors;
	u8 table_bar;
	u32 table_offset;
	u8 pba_bar;
	u32 pba_offset;
	bool flr;
};

/**
 * struct dxpu_vector - one MSI-X vector
 * @entry: its table entry as the user sees it
 * @trigger: signalled on interrupt, or NULL
 * @pending: raised while masked
 */
struct dxpu_vector {
	u32 entry[4];
	struct eventfd_ctx *trigger;
	bool pending;
};

/**
 * struct dxpu_slot - a request that waits for its completion
 * @id: 0 when free
 * @generation: of the next id
 * @data: where the answer goes
 * @length: of the answer
 * @status: enum dxpu_status, valid once @answered
 * @answered: no second answer is taken
 * @done: completed with @answered
 */
struct dxpu_slot {
	u64 id;
	u32 generation;
	void *data;
	u32 length;
	u16 status;
	bool answered;
	struct completion done;
};

/**
 * struct dxpu_fence - a range that was unmapped lately
 * @first: first page
 * @last: last page
 * @until: jiffies up to which nothing there is pinned again
 */
struct dxpu_fence {
	unsigned long first;
	unsigned long last;
	unsigned long until;
};

/**
 * struct dxpu_port - a virtual root port; lives as long as the module
 * @bus: its bus
 * @index: device number on the root bus
 * @lock: state, plug, unplug, users
 * @state: enum dxpu_port_state
 * @error: what keeps the function from being offered
 * @plugs: functions plugged so far
 * @pdev: the function as the kernel sees it, NULL until enumerated
 * @users: 1 while the VFIO device is open
 * @holder_pid: who opened it
 * @holder: its name
 * @resetting: serialises resets
 * @cfg_lock: @root, @fn, @visible, @hotplug_asserted
 * @root: registers of the port
 * @fn: shadow of the function's configuration space
 * @visible: @fn answers
 * @hotplug_asserted: level of the hot-plug event, before its edge is made
 * @facts: of the plugged function; changes only while the port is empty
 * @live: the function takes requests; written under @tx_lock, read without on the way of each
 * @virq: Linux interrupt of the port's MSI, 0 when none
 * @msi_lock: @virq
 * @fire: raises @virq
 * @tx_lock: @channel, producer side of the request ring
 * @channel: the file that serves the port
 * @sq_tail: producer index, not readable by user space
 * @kick: wakes the server from where nothing else may
 * @server_wq: the server sleeps here
 * @space_wq: writers wait here for room
 * @status_seq: changes of status
 * @req_lock: @slot
 * @slot: requests waiting
 * @slot_wq: wait for a free slot
 * @read_deadline: jiffies
 * @write_deadline: jiffies
 * @reset_deadline: jiffies
 * @irq_lock: @vector, @req_trigger
 * @vector: MSI-X, @facts.vectors of them
 * @req_trigger: VFIO's REQ interrupt
 * @flush_msix: delivers what was pending when masks change with IRQs off
 * @fail: takes the function out after misuse of the rings
 * @vbar: BAR registers as the VFIO user wrote them
 * @pin_mutex: @dma_dev, @fence, filling and emptying @pages
 * @dma_dev: the open VFIO device, NULL when DMA is off
 * @dma_sem: see dma.c
 * @pages: pinned pages by IOVA page number
 * @pinned: number of @pages
 * @fence: ranges unmapped lately
 * @fence_next: the one to reuse
 * @counters: enum dxpu_counter
 * @dev: /sys/class/dxpu/portN
 */
struct dxpu_port {
	struct dxpu_bus *bus;
	unsigned int index;

	struct mutex lock; /* state, plug, unplug, users */
	enum dxpu_port_state state;
	int error;
	u64 plugs;
	struct pci_dev *pdev;
	unsigned int users;
	pid_t holder_pid;
	char holder[TASK_COMM_LEN];
	struct mutex resetting; /* one reset at a time */

	raw_spinlock_t cfg_lock;
	struct dxpu_config root;
	struct dxpu_config fn;
	bool visible;
	bool hotplug_asserted;
	struct dxpu_facts facts;
	bool live;

	spinlock_t msi_lock; /* virq */
	unsigned int virq;
	struct irq_work fire;

	raw_spinlock_t tx_lock;
	struct dxpu_channel *channel;
	u32 sq_tail;
	struct irq_work kick;
	wait_queue_head_t server_wq;
	wait_queue_head_t space_wq;
	atomic_t status_seq;

	spinlock_t req_lock; /* slot */
	struct dxpu_slot slot[DXPU_SLOTS];
	wait_queue_head_t slot_wq;
	unsigned long read_deadline;
	unsigned long write_deadline;
	unsigned long reset_deadline;

	spinlock_t irq_lock; /* facts.vectors, vector, req_trigger */
	struct dxpu_vector *vector;
	struct eventfd_ctx *req_trigger;
	struct work_struct flush_msix;
	struct work_struct fail;

	u32 vbar[DXPU_BARS];

	struct mutex pin_mutex; /* dma_dev, fence, pages */
	struct vfio_device *dma_dev;
	struct rw_semaphore dma_sem;
	struct xarray pages;
	unsigned long pinned;
	struct dxpu_fence fence[DXPU_FENCES];
	unsigned int fence_next;

	atomic64_t counters[DXPU_COUNTERS];
	struct device *dev;
};

/**
 * struct dxpu_bus - the private PCI domain
 * @sysdata: what x86 keeps per root bus; first, pci_ops find us through it
 * @bridge: host bridge
 * @root: root bus, NULL until scanned
 * @msi: MSI domain
 * @msi_fwnode: its name
 * @buses: bus numbers
 * @pref: prefetchable window, all ports
 * @mem: non-prefetchable window, all ports; its bus addresses are below 4 GiB
 * @pref_bytes: of one port
 * @mem_bytes: of one port
 * @slot_base: slot number of port 0
 * @ports: number of ports
 * @port: ports
 */
struct dxpu_bus {
	struct pci_sysdata sysdata;
	struct pci_host_bridge *bridge;
	struct pci_bus *root;
	struct irq_domain *msi;
	struct fwnode_handle *msi_fwnode;
	struct resource buses;
	struct resource pref;
	struct resource mem;
	u64 pref_bytes;
	u64 mem_bytes;
	unsigned int slot_base;
	unsigned int ports;
	struct dxpu_port *port[DXPU_MAX_PORTS];
};

static inline void dxpu_count(struct dxpu_port *port, enum dxpu_counter what)
{
	atomic64_inc(&port->counters[what]);
}

/* bus.c */
int dxpu_bus_create(struct dxpu_bus *bus, int domain);
void dxpu_bus_destroy(struct dxpu_bus *bus);
/* Bus address, on the bridge's secondary side, of the non-prefetchable window of port 0. */
#define DXPU_MEM_BUS_BASE	0x40000000UL

/* port.c */
struct dxpu_port *dxpu_port_create(struct dxpu_bus *bus, unsigned int index);
void dxpu_port_destroy(struct dxpu_port *port);
int dxpu_port_config_read(struct dxpu_port *port, int where, int size, u32 *value);
int dxpu_port_config_write(struct dxpu_port *port, int where, int size, u32 value);
int dxpu_port_plug(struct dxpu_port *port, struct dxpu_config *config);
void dxpu_port_unplug(struct dxpu_port *port);
int dxpu_port_release(struct dxpu_port *port);
void dxpu_port_added(struct dxpu_port *port, struct pci_dev *pdev);
void dxpu_port_removed(struct dxpu_port *port, struct pci_dev *pdev);
void dxpu_port_offered(struct dxpu_port *port, int error);
void dxpu_port_withdrawn(struct dxpu_port *port);
int dxpu_port_opened(struct dxpu_port *port);
void dxpu_port_closed(struct dxpu_port *port);
void dxpu_port_changed(struct dxpu_port *port);
void dxpu_port_status(struct dxpu_port *port, struct dxpu_port_status *status);
bool dxpu_port_settled(struct dxpu_port *port);

/* config.c */
u32 dxpu_config_read(const struct dxpu_config *config, int where, int size);
void dxpu_config_write(struct dxpu_config *config, int where, int size, u32 value);
void dxpu_config_set(struct dxpu_config *config, int where, int size, u32 value, u32 mask);
int dxpu_config_inspect(const struct dxpu_config *config, struct dxpu_facts *facts);
int dxpu_function_read(struct dxpu_port *port, int where, int size, u32 *value);
int dxpu_function_write(struct dxpu_port *port, int where, int size, u32 value);
int dxpu_function_update(struct dxpu_port *port, int where, const u8 *data, int length);
u16 dxpu_function_command(struct dxpu_port *port);
void dxpu_function_restore(struct dxpu_port *port);
void dxpu_function_forget(struct dxpu_port *port);

/* irq.c */
int dxpu_irq_create(struct dxpu_bus *bus);
void dxpu_irq_destroy(struct dxpu_bus *bus);
void dxpu_irq_init(struct dxpu_port *port);
void dxpu_irq_fire(struct dxpu_port *port);

/* ring.c */
void dxpu_ring_init(struct dxpu_port *port);
int dxpu_post(struct dxpu_port *port, const struct dxpu_request *what, const void *data, u32 reserve);
int dxpu_post_wait(struct dxpu_port *port, const struct dxpu_request *what, const void *data);
int dxpu_room_wait(struct dxpu_port *port);
void dxpu_set_live(struct dxpu_port *port, bool live);
void dxpu_end_requests(struct dxpu_port *port);
void dxpu_complete(struct dxpu_port *port, const struct dxpu_completion *completion, const void *data);
int dxpu_mmio_read(struct dxpu_port *port, unsigned int bar, u64 offset, void *data, u32 length);
int dxpu_mmio_write(struct dxpu_port *port, unsigned int bar, u64 offset, const void *data, u32 length);
int dxpu_reset(struct dxpu_port *port);
void dxpu_reset_posted(struct dxpu_port *port);

/* channel.c */
int dxpu_channel_create(struct dxpu_bus *bus);
void dxpu_channel_destroy(void);
struct dxpu_control *dxpu_channel_control(struct dxpu_channel *channel);
void *dxpu_channel_sq(struct dxpu_channel *channel);

/* vfio.c */
extern struct pci_driver dxpu_vfio_driver;
struct dxpu_port *dxpu_port_of(struct pci_dev *pdev);

/* msix.c */
void dxpu_msix_init(struct dxpu_port *port);
void dxpu_msix_drop(struct dxpu_port *port);
int dxpu_msix_raise(struct dxpu_port *port, u32 vector);
void dxpu_msix_flush(struct dxpu_port *port);
void dxpu_msix_reset(struct dxpu_port *port);
void dxpu_msix_release(struct dxpu_port *port);
void dxpu_request_release(struct dxpu_port *port);
int dxpu_msix_set_irqs(struct dxpu_port *port, const struct vfio_irq_set *set, const void *data);
void dxpu_msix_table_access(struct dxpu_port *port, bool pba, u32 offset, u8 *data, u32 length, bool write);

/* dma.c */
void dxpu_dma_init(struct dxpu_port *port);
void dxpu_dma_start(struct dxpu_port *port, struct vfio_device *vdev);
void dxpu_dma_stop(struct dxpu_port *port);
void dxpu_dma_unmap(struct dxpu_port *port, u64 iova, u64 length);
int dxpu_dma_copy(struct dxpu_port *port, const struct dxpu_dma_range *range);
int dxpu_dma_atomic(struct dxpu_port *port, struct dxpu_atomic *atomic);

/* sysfs.c */
int dxpu_sysfs_create(struct dxpu_bus *bus);
void dxpu_sysfs_destroy(struct dxpu_bus *bus);
const char *dxpu_state_name(enum dxpu_port_state state);

#endif /* _DXPU_H */
