/*
 * The words of the dxpu GPU function: register map, channels, commands. The only vocabulary between a driver and the
 * function, and between the function and its engines. docs/gpu-function.md is the manual of it.
 *
 * C and C++, user space and kernel. All fields are little-endian. No bit fields, no pointers, no padding.
 */
#ifndef DXPU_GPU_COMMAND_SET_H
#define DXPU_GPU_COMMAND_SET_H

#ifdef __KERNEL__
#include <linux/build_bug.h>
#include <linux/types.h>
typedef __u8 dxgpu_u8;
typedef __u16 dxgpu_u16;
typedef __u32 dxgpu_u32;
typedef __u64 dxgpu_u64;
#else
#include <assert.h>
#include <stdint.h>
typedef uint8_t dxgpu_u8;
typedef uint16_t dxgpu_u16;
typedef uint32_t dxgpu_u32;
typedef uint64_t dxgpu_u64;
#endif

/*
 * Identity. The vendor id is not assigned by the PCI-SIG to anybody that the public id list knows, and no driver of a
 * stock Debian 12 kernel binds to it; manual section 2 says how it was chosen and what to do when it is ever assigned.
 */
#define DXGPU_VENDOR_ID 0xd80b
#define DXGPU_DEVICE_ID 0x6701
#define DXGPU_CLASS_CODE 0x030200 /* display controller, 3D controller */
#define DXGPU_SUBSYSTEM_SOFT 0x0001

#define DXGPU_MAGIC 0x31475844u /* "DXG1" */
#define DXGPU_VERSION_MAJOR 1
#define DXGPU_VERSION_MINOR 0
#define DXGPU_VERSION ((DXGPU_VERSION_MAJOR << 16) | DXGPU_VERSION_MINOR)

/* ---- base address registers -------------------------------------------------------------------------------------- */
#define DXGPU_BAR_REGISTERS 0 /* 32-bit, not prefetchable, 1 MiB */
#define DXGPU_BAR_MEMORY 2    /* 64-bit, prefetchable, all of the device memory */
#define DXGPU_REGISTER_BYTES 0x100000u

#define DXGPU_PAGE 0x1000u
#define DXGPU_CHANNELS_MAX 64u
#define DXGPU_VECTORS 65u /* 0: the function; 1 + c: suggested for channel c */

/* BAR0 regions, each on pages of its own. Anything between them reads as zero and ignores writes. */
#define DXGPU_GLOBAL_BASE 0x00000u
#define DXGPU_MSIX_TABLE 0x02000u
#define DXGPU_MSIX_PBA 0x03000u
#define DXGPU_CHANNEL_BASE \
  0x40000u                       /* + c * DXGPU_PAGE: control page of channel c (for the one who owns the function) */
#define DXGPU_USER_BASE 0x80000u /* + c * DXGPU_PAGE: user page of channel c (for the one who owns the channel) */

/* ---- global page ------------------------------------------------------------------------------------------------- */
#define DXGPU_REG_MAGIC 0x000u
#define DXGPU_REG_VERSION 0x004u
#define DXGPU_REG_CAPABILITIES 0x008u
#define DXGPU_CAP_RING 0x1u
#define DXGPU_CAP_PUSH 0x2u
#define DXGPU_CAP_SEGMENTS_IN_MEMORY 0x4u
#define DXGPU_REG_CHANNELS 0x00cu
#define DXGPU_REG_MEMORY_BYTES 0x010u /* 64 bits */
#define DXGPU_REG_ENGINE 0x018u
#define DXGPU_ENGINE_COPY 1u
#define DXGPU_ENGINE_PTX 2u
#define DXGPU_ENGINE_CUDA 3u
#define DXGPU_REG_VECTORS 0x01cu
#define DXGPU_REG_OPCODES 0x020u /* bit n: opcode n is known */
#define DXGPU_REG_SEGMENTS_MAX 0x024u
#define DXGPU_REG_SERIAL 0x028u /* 64 bits */
#define DXGPU_REG_CONTROL 0x040u
#define DXGPU_CONTROL_RESET 0x1u /* write 1; reads as 0 */
#define DXGPU_REG_STATUS 0x044u
#define DXGPU_STATUS_READY 0x1u
#define DXGPU_STATUS_RESETTING 0x2u
#define DXGPU_REG_INTERRUPT_STATUS 0x048u /* write 1 to clear */
#define DXGPU_INTERRUPT_CHANNEL_FAULT 0x1u
#define DXGPU_INTERRUPT_DROPPED_DOORBELL 0x2u
#define DXGPU_REG_INTERRUPT_ENABLE 0x04cu
#define DXGPU_REG_CHANNEL_FAULTS 0x050u /* 64 bits, bit c: channel c is in the error state */
#define DXGPU_REG_SCRATCH 0x058u        /* 64 bits */
#define DXGPU_REG_LAST_FAULT_CHANNEL 0x060u
#define DXGPU_NO_CHANNEL 0xffffffffu
#define DXGPU_REG_LAST_FAULT_CODE 0x064u
#define DXGPU_REG_COUNTERS 0x080u /* 64 bits each, see enum dxgpu_counter */
#define DXGPU_REG_MODEL 0x100u    /* DXGPU_MODEL_BYTES of ASCII, zero padded */
#define DXGPU_MODEL_BYTES 64u

enum dxgpu_counter {
  DXGPU_COUNTER_COMMANDS = 0,
  DXGPU_COUNTER_DMA_READ_BYTES = 1,
  DXGPU_COUNTER_DMA_WRITE_BYTES = 2,
  DXGPU_COUNTER_DMA_READS = 3,
  DXGPU_COUNTER_INTERRUPTS = 4,
  DXGPU_COUNTER_INTERRUPTS_SUPPRESSED = 5, /* MSI-X or bus master off */
  DXGPU_COUNTER_FAULTS = 6,
  DXGPU_COUNTER_DROPPED_WRITES = 7, /* outside a BAR or to a register that can not take them now */
  DXGPU_COUNTER_DOORBELLS = 8,
  DXGPU_COUNTERS = 9
};

/* ---- control page of a channel ----------------------------------------------------------------------------------- */
#define DXGPU_CH_CONTROL 0x00u
#define DXGPU_CH_ENABLE 0x1u
#define DXGPU_CH_RESET 0x2u /* write 1; reads as 0 */
#define DXGPU_CH_MODE 0x04u /* writable while disabled, like the four below */
#define DXGPU_MODE_RING 0u
#define DXGPU_MODE_PUSH 1u
#define DXGPU_CH_RING_BASE 0x08u /* 64 bits, host address, a multiple of DXGPU_COMMAND_BYTES */
#define DXGPU_CH_RING_LOG2 0x10u /* ring entries, as a power of two */
#define DXGPU_RING_LOG2_MIN 1u
#define DXGPU_RING_LOG2_MAX 16u
#define DXGPU_CH_FAULT_VECTOR 0x14u
#define DXGPU_NO_VECTOR 0xffffffffu
#define DXGPU_CH_STATE 0x18u
#define DXGPU_STATE_DISABLED 0u
#define DXGPU_STATE_RUNNING 1u
#define DXGPU_STATE_STOPPING 2u
#define DXGPU_STATE_ERROR 3u
#define DXGPU_CH_PUT 0x1cu
#define DXGPU_CH_GET 0x20u /* commands finished */
#define DXGPU_CH_FAULT_CODE 0x24u
#define DXGPU_CH_FAULT_ADDRESS 0x28u /* 64 bits */
#define DXGPU_CH_FAULT_INDEX 0x30u
#define DXGPU_CH_FAULT_COOKIE 0x34u
#define DXGPU_CH_LAST_FENCE 0x38u /* 64 bits */
#define DXGPU_CH_COMMANDS 0x40u   /* 64 bits */

/* ---- user page of a channel -------------------------------------------------------------------------------------- */
#define DXGPU_USER_DOORBELL 0x000u
#define DXGPU_USER_GET 0x004u
#define DXGPU_USER_STATE 0x008u
#define DXGPU_USER_LAST_FENCE 0x010u /* 64 bits */
#define DXGPU_USER_PUSH 0x800u       /* DXGPU_PUSH_SLOTS commands */
#define DXGPU_PUSH_SLOTS 32u

/* ---- commands ---------------------------------------------------------------------------------------------------- */
#define DXGPU_COMMAND_BYTES 64u

enum dxgpu_opcode {
  DXGPU_OP_INVALID = 0, /* zeroed memory is no command */
  DXGPU_OP_NOP = 1,
  DXGPU_OP_COPY_IN = 2,    /* host to device */
  DXGPU_OP_COPY_OUT = 3,   /* device to host */
  DXGPU_OP_COPY_LOCAL = 4, /* device to device */
  DXGPU_OP_FILL = 5,
  DXGPU_OP_FENCE = 6,
  DXGPU_OP_CHECKSUM = 7,
  DXGPU_OPCODES = 8
};

enum dxgpu_fault {
  DXGPU_FAULT_NONE = 0,
  DXGPU_FAULT_INVALID_OPCODE = 1,
  DXGPU_FAULT_INVALID_FLAGS = 2, /* a flag or a reserved field that must be zero is not */
  DXGPU_FAULT_MEMORY_RANGE = 3,  /* leaves the device memory, or wraps */
  DXGPU_FAULT_HOST_RANGE = 4,    /* address + length leaves 64 bits, or misaligned */
  DXGPU_FAULT_SEGMENTS = 5,      /* too many, a loop, wrong total, a zero length, a bad chain */
  DXGPU_FAULT_DMA_READ = 6,      /* the host answered UR, CA, or with poisoned data */
  DXGPU_FAULT_DMA_TIMEOUT = 7,   /* no answer in time, or the link went */
  DXGPU_FAULT_BUS_MASTER_OFF = 8,
  DXGPU_FAULT_VECTOR = 9,    /* no such interrupt vector */
  DXGPU_FAULT_DOORBELL = 10, /* put runs ahead of get by more than the ring holds */
  DXGPU_FAULT_SETUP = 11,    /* enabled with a mode, base or size that is not possible */
  DXGPU_FAULT_ENGINE = 12,   /* the engine failed inside */
  DXGPU_FAULTS = 13
};

/* Every command starts with this. */
struct dxgpu_header {
  dxgpu_u8 opcode;
  dxgpu_u8 flags;
  dxgpu_u16 reserved; /* zero */
  dxgpu_u32 cookie;   /* shown in the fault registers, otherwise free */
};

/* One piece of host memory. */
struct dxgpu_segment {
  dxgpu_u64 address;
  dxgpu_u32 bytes;
  dxgpu_u32 flags;
};
#define DXGPU_SEGMENT_CHAIN \
  0x1u /* `address` is where the list goes on, `bytes` how long it is there; ends this block */
#define DXGPU_SEGMENTS_MAX 65536u      /* pieces in one command */
#define DXGPU_SEGMENT_BLOCKS_MAX 4096u /* chained blocks in one command */
#define DXGPU_INLINE_SEGMENTS 2u

/* COPY_IN, COPY_OUT */
struct dxgpu_copy_host {
  struct dxgpu_header header;
  dxgpu_u64 memory; /* offset in device memory */
  dxgpu_u64 bytes;
  dxgpu_u32 segments; /* how many entries of `segment` count, or with DXGPU_COPY_LIST how many the list has at
                         `segment[0].address` */
  dxgpu_u32 reserved;
  struct dxgpu_segment segment[DXGPU_INLINE_SEGMENTS];
};
#define DXGPU_COPY_LIST 0x1u

/* COPY_LOCAL; overlapping ranges behave as if all was read first */
struct dxgpu_copy_local {
  struct dxgpu_header header;
  dxgpu_u64 destination;
  dxgpu_u64 source;
  dxgpu_u64 bytes;
  dxgpu_u64 reserved[4];
};

/* FILL: the first `pattern_bytes` (1, 2, 4 or 8) of `pattern`, again and again; the last one may be cut */
struct dxgpu_fill {
  struct dxgpu_header header;
  dxgpu_u64 memory;
  dxgpu_u64 bytes;
  dxgpu_u64 pattern;
  dxgpu_u32 pattern_bytes;
  dxgpu_u32 reserved32;
  dxgpu_u64 reserved[3];
};

/* FENCE: when everything before it on this channel is done and visible */
struct dxgpu_fence {
  struct dxgpu_header header;
  dxgpu_u64 value;
  dxgpu_u64 host_address;   /* 8-byte aligned */
  dxgpu_u64 memory_address; /* 8-byte aligned */
  dxgpu_u32 vector;
  dxgpu_u32 reserved32;
  dxgpu_u64 reserved[3];
};
#define DXGPU_FENCE_HOST 0x1u      /* write `value` at host_address */
#define DXGPU_FENCE_MEMORY 0x2u    /* write `value` at memory_address */
#define DXGPU_FENCE_INTERRUPT 0x4u /* then raise `vector` */

/* CHECKSUM: CRC32C (Castagnoli, reflected, as iSCSI has it) of device memory, as struct dxgpu_checksum_result */
struct dxgpu_checksum {
  struct dxgpu_header header;
  dxgpu_u64 memory;
  dxgpu_u64 bytes;
  dxgpu_u64 host_address;   /* 8-byte aligned */
  dxgpu_u64 memory_address; /* 8-byte aligned */
  dxgpu_u32 seed;           /* the CRC of what comes before the range, 0 at the start */
  dxgpu_u32 reserved32;
  dxgpu_u64 reserved[2];
};
#define DXGPU_CHECKSUM_HOST 0x1u
#define DXGPU_CHECKSUM_MEMORY 0x2u

struct dxgpu_checksum_result {
  dxgpu_u32 crc32c;
  dxgpu_u32 cookie; /* of the command */
};

union dxgpu_command {
  struct dxgpu_header header;
  struct dxgpu_copy_host copy_host;
  struct dxgpu_copy_local copy_local;
  struct dxgpu_fill fill;
  struct dxgpu_fence fence;
  struct dxgpu_checksum checksum;
  dxgpu_u8 bytes[DXGPU_COMMAND_BYTES];
};

#ifdef __cplusplus
#define DXGPU_ASSERT(what) static_assert(what, #what)
#else
#define DXGPU_ASSERT(what) _Static_assert(what, #what)
#endif
DXGPU_ASSERT(sizeof(struct dxgpu_header) == 8);
DXGPU_ASSERT(sizeof(struct dxgpu_segment) == 16);
DXGPU_ASSERT(sizeof(struct dxgpu_copy_host) == DXGPU_COMMAND_BYTES);
DXGPU_ASSERT(sizeof(struct dxgpu_copy_local) == DXGPU_COMMAND_BYTES);
DXGPU_ASSERT(sizeof(struct dxgpu_fill) == DXGPU_COMMAND_BYTES);
DXGPU_ASSERT(sizeof(struct dxgpu_fence) == DXGPU_COMMAND_BYTES);
DXGPU_ASSERT(sizeof(struct dxgpu_checksum) == DXGPU_COMMAND_BYTES);
DXGPU_ASSERT(sizeof(union dxgpu_command) == DXGPU_COMMAND_BYTES);
DXGPU_ASSERT(sizeof(struct dxgpu_checksum_result) == 8);
DXGPU_ASSERT(DXGPU_USER_PUSH + DXGPU_PUSH_SLOTS * DXGPU_COMMAND_BYTES == DXGPU_PAGE);
DXGPU_ASSERT(DXGPU_CHANNEL_BASE + DXGPU_CHANNELS_MAX * DXGPU_PAGE <= DXGPU_USER_BASE);
DXGPU_ASSERT(DXGPU_USER_BASE + DXGPU_CHANNELS_MAX * DXGPU_PAGE <= DXGPU_REGISTER_BYTES);
DXGPU_ASSERT(DXGPU_MSIX_TABLE + DXGPU_VECTORS * 16 <= DXGPU_MSIX_PBA);
DXGPU_ASSERT(DXGPU_REG_COUNTERS + DXGPU_COUNTERS * 8 <= DXGPU_REG_MODEL);

#endif /* DXPU_GPU_COMMAND_SET_H */
