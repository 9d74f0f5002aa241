/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * /dev/dxpu: how a host daemon lends functions to the virtual root ports of dxpu.ko.
 *
 * One open file serves one port:
 *
 *	open, HELLO, CLAIM(port), mmap, then PLUG, a loop of WAIT, UNPLUG, close
 *
 * The mapping holds one page of indices, the request ring (kernel to user) and the completion ring (user to kernel).
 * Indices are free-running byte counts; an offset in a ring is index & (ring size - 1). Records are DXPU_RECORD_ALIGN
 * aligned and never wrap: a record of kind DXPU_REQ_PAD or DXPU_STATUS_PAD fills the end of a ring that is too short
 * for the next one. The producer stores its tail with release after the record, the consumer its head with release
 * after it has copied the record out.
 *
 * Closing the file is surprise removal of what was plugged; the port stays and can be claimed again.
 * docs/kernel-abi.md is the manual. All numbers are little-endian (x86-64 only).
 */
#ifndef _UAPI_DXPU_H
#define _UAPI_DXPU_H

#include <linux/ioctl.h>
#include <linux/types.h>

#ifdef __cplusplus
#define DXPU_ASSERT(condition) static_assert(condition, #condition)
#else
#define DXPU_ASSERT(condition) _Static_assert(condition, #condition)
#endif

/* The major changes with anything that an old program would misread, the minor with additions. */
#define DXPU_ABI_MAJOR	1
#define DXPU_ABI_MINOR	0

#define DXPU_DEVICE_PATH	"/dev/dxpu"

#define DXPU_CONFIG_BYTES	4096
#define DXPU_BARS		6
#define DXPU_MAX_PORTS		32
/* Longest MMIO read or write in one record: what one TLP can carry. */
#define DXPU_MAX_TRANSFER	4096

/* ---- the mapping ---- */

#define DXPU_CONTROL_BYTES	4096
#define DXPU_SQ_BYTES		(256 * 1024)
#define DXPU_CQ_BYTES		(256 * 1024)
#define DXPU_SQ_OFFSET		DXPU_CONTROL_BYTES
#define DXPU_CQ_OFFSET		(DXPU_SQ_OFFSET + DXPU_SQ_BYTES)
#define DXPU_MAP_BYTES		(DXPU_CQ_OFFSET + DXPU_CQ_BYTES)
#define DXPU_RECORD_ALIGN	32

/**
 * struct dxpu_control - first page of the mapping, one cache line per writer
 * @sq_tail: request ring, written by the kernel
 * @status_seq: changes with each change of the port's status, written by the kernel
 * @cq_head: completion ring, written by the kernel
 * @sq_head: request ring, written by the user; the kernel checks it
 * @cq_tail: completion ring, written by the user; the kernel checks it
 */
struct dxpu_control {
	__u32 sq_tail;
	__u32 status_seq;
	__u32 cq_head;
	__u32 reserved0[13];
	__u32 sq_head;
	__u32 cq_tail;
	__u32 reserved1[14];
};

DXPU_ASSERT(sizeof(struct dxpu_control) == 128);

enum dxpu_request_kind {
	DXPU_REQ_PAD = 0,		/* skip @bytes */
	DXPU_REQ_MMIO_READ = 1,		/* answer with @length bytes */
	DXPU_REQ_MMIO_WRITE = 2,	/* posted; @length bytes follow */
	DXPU_REQ_CONFIG_WRITE = 3,	/* posted; @value, @length 1, 2 or 4, at @offset */
	DXPU_REQ_RESET = 4,		/* function level reset; answer with no data. @id 0: posted, no answer */
};

/**
 * struct dxpu_request - head of a record in the request ring
 * @bytes: the whole record, padding included
 * @kind: enum dxpu_request_kind
 * @bar: 0 to 5, for MMIO
 * @plug: what DXPU_IOC_PLUG returned for the function this is for; of another: to be dropped
 * @id: to be given back in the completion; 0 for posted kinds
 * @offset: in the BAR or in configuration space
 * @length: of what is read or written, 1 to DXPU_MAX_TRANSFER
 * @value: of a configuration write
 */
struct dxpu_request {
	__u32 bytes;
	__u16 kind;
	__u8 bar;
	__u8 plug;
	__u64 id;
	__u64 offset;
	__u32 length;
	__u32 value;
};

DXPU_ASSERT(sizeof(struct dxpu_request) == 32);

/* The first four are completion statuses of the PCI Express specification. Anything but success reads as all ones. */
enum dxpu_status {
	DXPU_STATUS_SUCCESS = 0,
	DXPU_STATUS_UR = 1,
	DXPU_STATUS_CRS = 2,
	DXPU_STATUS_CA = 4,
	DXPU_STATUS_CTO = 0x80,
	DXPU_STATUS_POISONED = 0x81,
	DXPU_STATUS_LINK_DOWN = 0x82,
	DXPU_STATUS_PAD = 0xffff,	/* not a completion: skip @bytes */
};

/**
 * struct dxpu_completion - head of a record in the completion ring
 * @bytes: the whole record, padding included
 * @status: enum dxpu_status
 * @reserved0: 0
 * @id: of the request
 * @length: data bytes that follow: the request's length on success, else 0
 * @reserved1: 0
 */
struct dxpu_completion {
	__u32 bytes;
	__u16 status;
	__u16 reserved0;
	__u64 id;
	__u32 length;
	__u32 reserved1[3];
};

DXPU_ASSERT(sizeof(struct dxpu_completion) == 32);

/* ---- commands ---- */

/**
 * struct dxpu_hello - DXPU_IOC_HELLO, first of all on a file
 * @size: sizeof(struct dxpu_hello)
 * @major: in: DXPU_ABI_MAJOR; out: the module's
 * @minor: in: DXPU_ABI_MINOR; out: the module's
 * @request_bytes: in: sizeof(struct dxpu_request)
 * @completion_bytes: in: sizeof(struct dxpu_completion)
 * @plug_bytes: in: sizeof(struct dxpu_plug)
 * @port_bytes: in: sizeof(struct dxpu_port_status)
 * @map_bytes: in: DXPU_MAP_BYTES
 * @ports: out: number of ports
 * @domain: out: PCI domain of the ports
 *
 * -EPROTO: another major version, or a structure of another size.
 */
struct dxpu_hello {
	__u32 size;
	__u32 major;
	__u32 minor;
	__u32 request_bytes;
	__u32 completion_bytes;
	__u32 plug_bytes;
	__u32 port_bytes;
	__u32 map_bytes;
	__u32 ports;
	__u32 domain;
};

DXPU_ASSERT(sizeof(struct dxpu_hello) == 40);

/**
 * struct dxpu_claim - DXPU_IOC_CLAIM: this file serves @port from now on
 * @size: sizeof(struct dxpu_claim)
 * @port: 0 up
 * @read_deadline_ms: a read without an answer ends as all ones after it; 1 to DXPU_MAX_DEADLINE_MS
 * @write_deadline_ms: a posted write without room in the ring ends the function after it
 * @reset_deadline_ms: a reset without an answer fails after it
 * @reserved: 0
 *
 * -EBUSY: another file serves it, or this file serves another port.
 */
struct dxpu_claim {
	__u32 size;
	__u32 port;
	__u32 read_deadline_ms;
	__u32 write_deadline_ms;
	__u32 reset_deadline_ms;
	__u32 reserved;
};

DXPU_ASSERT(sizeof(struct dxpu_claim) == 24);
#define DXPU_MAX_DEADLINE_MS	600000

/**
 * struct dxpu_plug - DXPU_IOC_PLUG: a function appears on the port
 * @size: sizeof(struct dxpu_plug)
 * @reserved: 0
 * @image: address of DXPU_CONFIG_BYTES bytes of configuration space
 * @write_mask: the same length; 1: writable. BAR sizes are read from it
 * @w1c_mask: the same length; 1: writing one clears
 *
 * Returns when the port has raised its hot-plug interrupt; DXPU_PORT_ATTACHED follows. The value returned, 0 to 255,
 * marks the requests of this function.
 * -EBUSY: the port is not empty. -ENOSPC: the BARs do not fit the port's windows. -EINVAL: not a type 0 header of a
 * single PCI Express endpoint, an I/O BAR, a BAR whose size is no power of two, or MSI-X outside its BAR.
 */
struct dxpu_plug {
	__u32 size;
	__u32 reserved;
	__u64 image;
	__u64 write_mask;
	__u64 w1c_mask;
};

DXPU_ASSERT(sizeof(struct dxpu_plug) == 32);

/**
 * struct dxpu_wait - DXPU_IOC_WAIT: takes in completions, then sleeps until there is something to do
 * @size: sizeof(struct dxpu_wait)
 * @timeout_ms: 0: do not sleep
 * @seen_status_seq: returns as soon as status_seq is another
 * @status_seq: out
 *
 * Returns 0 with a request in the ring, another status_seq, after DXPU_IOC_WAKE, or after @timeout_ms.
 * -EPROTO: the rings were misused; the function is gone.
 */
struct dxpu_wait {
	__u32 size;
	__u32 timeout_ms;
	__u32 seen_status_seq;
	__u32 status_seq;
};

DXPU_ASSERT(sizeof(struct dxpu_wait) == 16);

enum dxpu_dma_direction {
	DXPU_DMA_READ_HOST = 0,		/* host memory to @buffer: the function reads */
	DXPU_DMA_WRITE_HOST = 1,	/* @buffer to host memory: the function writes */
};

/**
 * struct dxpu_dma_range - one copy between the caller's memory and the memory mapped for the function
 * @iova: as the function sees it
 * @buffer: address in the caller
 * @bytes: 1 to DXPU_DMA_MAX_BYTES
 * @direction: enum dxpu_dma_direction
 * @status: out: 0 or negative errno. -ENXIO: not mapped, in part or whole, or not in that direction, or bus master off:
 *	    an unsupported request, and nothing was copied. -ENOMEM: RLIMIT_MEMLOCK of the program that mapped it.
 *	    -EFAULT: @buffer
 * @reserved: 0
 */
struct dxpu_dma_range {
	__u64 iova;
	__u64 buffer;
	__u32 bytes;
	__u32 direction;
	__s32 status;
	__u32 reserved;
};

DXPU_ASSERT(sizeof(struct dxpu_dma_range) == 32);
#define DXPU_DMA_MAX_BYTES	(2 * 1024 * 1024)
#define DXPU_DMA_MAX_RANGES	64

/**
 * struct dxpu_dma - DXPU_IOC_DMA: ranges in order; one that fails does not stop the next
 * @size: sizeof(struct dxpu_dma)
 * @count: 1 to DXPU_DMA_MAX_RANGES
 * @ranges: address of struct dxpu_dma_range[@count]
 */
struct dxpu_dma {
	__u32 size;
	__u32 count;
	__u64 ranges;
};

DXPU_ASSERT(sizeof(struct dxpu_dma) == 16);

enum dxpu_atomic_op {
	DXPU_ATOMIC_FETCH_ADD = 0,
	DXPU_ATOMIC_SWAP = 1,
	DXPU_ATOMIC_COMPARE_SWAP = 2,
};

/**
 * struct dxpu_atomic - DXPU_IOC_ATOMIC
 * @size: sizeof(struct dxpu_atomic)
 * @op: enum dxpu_atomic_op
 * @iova: naturally aligned
 * @width: 4 or 8
 * @reserved: 0
 * @operand: added, stored, or stored if equal
 * @compare: for DXPU_ATOMIC_COMPARE_SWAP
 * @old: out: the value before
 *
 * -ENXIO as for DMA; the mapping must be readable and writable.
 */
struct dxpu_atomic {
	__u32 size;
	__u32 op;
	__u64 iova;
	__u32 width;
	__u32 reserved;
	__u64 operand;
	__u64 compare;
	__u64 old;
};

DXPU_ASSERT(sizeof(struct dxpu_atomic) == 48);

/**
 * struct dxpu_config_update - DXPU_IOC_CONFIG_UPDATE: registers of the function changed on their own
 * @size: sizeof(struct dxpu_config_update)
 * @offset: in configuration space, at least 0x40
 * @length: 1 to 8
 * @reserved: 0
 * @data: the bytes
 */
struct dxpu_config_update {
	__u32 size;
	__u32 offset;
	__u32 length;
	__u32 reserved;
	__u8 data[8];
};

DXPU_ASSERT(sizeof(struct dxpu_config_update) == 24);

enum dxpu_port_state {
	DXPU_PORT_EMPTY = 0,
	DXPU_PORT_PLUGGING = 1,		/* plugged, not (or no longer) offered through VFIO */
	DXPU_PORT_ATTACHED = 2,		/* enumerated and offered through VFIO */
	DXPU_PORT_GONE = 3,		/* all ones; a user has it open still */
	DXPU_PORT_REMOVING = 4,		/* the kernel is taking it out */
};

/* What can be counted, in struct dxpu_port_status and in /sys/class/dxpu/portN/counters. */
enum dxpu_counter {
	DXPU_COUNT_READS = 0,
	DXPU_COUNT_WRITES,
	DXPU_COUNT_CONFIG_WRITES,	/* sent on to the function */
	DXPU_COUNT_RESETS,
	DXPU_COUNT_CTO,			/* reads without an answer in time */
	DXPU_COUNT_LATE,		/* completions of a request that had ended */
	DXPU_COUNT_UNEXPECTED,		/* completions nobody asked for */
	DXPU_COUNT_BAD_COMPLETION,	/* of another length than asked for */
	DXPU_COUNT_ERROR_COMPLETION,	/* UR, CA and the like: read as all ones */
	DXPU_COUNT_REFUSED_MMIO,	/* memory decode off: all ones, or dropped */
	DXPU_COUNT_RING_FULL,		/* waits for room */
	DXPU_COUNT_PROTOCOL,		/* rings misused: the function was removed */
	DXPU_COUNT_DMA_READS,
	DXPU_COUNT_DMA_WRITES,
	DXPU_COUNT_DMA_READ_BYTES,
	DXPU_COUNT_DMA_WRITE_BYTES,
	DXPU_COUNT_DMA_UR,
	DXPU_COUNT_DMA_PINNED,		/* pages pinned, ever */
	DXPU_COUNT_DMA_UNMAPS,		/* unmaps that reached pinned pages */
	DXPU_COUNT_DMA_BOUNCED,		/* ranges served without pinning, right after an unmap */
	DXPU_COUNT_MSIX,
	DXPU_COUNT_MSIX_PENDED,		/* masked when raised */
	DXPU_COUNT_MSIX_DROPPED,	/* MSI-X off, no such vector, or nobody listens */
	DXPU_COUNTERS,
};

/**
 * struct dxpu_port_status - DXPU_IOC_PORT_STATUS, of any port, claimed or not
 * @size: sizeof(struct dxpu_port_status)
 * @port: in
 * @state: enum dxpu_port_state
 * @claimed: 1 when some file serves the port
 * @error: negative errno that keeps the function from being offered, 0 when nothing does
 * @domain: of the function
 * @bus: of the function
 * @devfn: of the function
 * @enumerated: 1 when the kernel has a PCI device for it, else the three above say where it would be
 * @holder_pid: who opened the function first, 0 when nobody has it open
 * @holder: its name, NUL terminated
 * @status_seq: see struct dxpu_control
 * @outstanding: requests waiting for their completion now
 * @plugs: functions plugged so far
 * @counters: by enum dxpu_counter, since the module was loaded
 */
struct dxpu_port_status {
	__u32 size;
	__u32 port;
	__u32 state;
	__u32 claimed;
	__s32 error;
	__u32 domain;
	__u32 bus;
	__u32 devfn;
	__u32 enumerated;
	__u32 holder_pid;
	char holder[16];
	__u32 status_seq;
	__u32 outstanding;
	__u64 plugs;
	__u64 counters[32];
};

DXPU_ASSERT(sizeof(struct dxpu_port_status) == 328);
DXPU_ASSERT(DXPU_COUNTERS <= 32);

#define DXPU_IOC_MAGIC		0xd8
#define DXPU_IOC_HELLO		_IOWR(DXPU_IOC_MAGIC, 0x00, struct dxpu_hello)
#define DXPU_IOC_CLAIM		_IOW(DXPU_IOC_MAGIC, 0x01, struct dxpu_claim)
#define DXPU_IOC_PLUG		_IOW(DXPU_IOC_MAGIC, 0x02, struct dxpu_plug)
/* Surprise removal: on return no request waits, no DMA runs, nothing new is sent. Idempotent. */
#define DXPU_IOC_UNPLUG		_IO(DXPU_IOC_MAGIC, 0x03)
/* Asks the user of the function to close it (VFIO's REQ interrupt); the function works on. */
#define DXPU_IOC_RELEASE	_IO(DXPU_IOC_MAGIC, 0x04)
#define DXPU_IOC_WAIT		_IOWR(DXPU_IOC_MAGIC, 0x05, struct dxpu_wait)
/* Takes in completions without sleeping. */
#define DXPU_IOC_COMPLETE	_IO(DXPU_IOC_MAGIC, 0x06)
/* Ends one DXPU_IOC_WAIT of this file, now or the next. */
#define DXPU_IOC_WAKE		_IO(DXPU_IOC_MAGIC, 0x07)
/* Argument: the vector. -EINVAL: the function has no such vector. */
#define DXPU_IOC_RAISE_MSIX	_IO(DXPU_IOC_MAGIC, 0x08)
#define DXPU_IOC_DMA		_IOW(DXPU_IOC_MAGIC, 0x09, struct dxpu_dma)
#define DXPU_IOC_ATOMIC		_IOWR(DXPU_IOC_MAGIC, 0x0a, struct dxpu_atomic)
#define DXPU_IOC_CONFIG_UPDATE	_IOW(DXPU_IOC_MAGIC, 0x0b, struct dxpu_config_update)
#define DXPU_IOC_PORT_STATUS	_IOWR(DXPU_IOC_MAGIC, 0x0c, struct dxpu_port_status)

#endif /* _UAPI_DXPU_H */
