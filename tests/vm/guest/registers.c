/*
 * What a guest sees: lists its PCI functions and reads the identity registers of the GPU function among them.
 *
 * Static, so that a guest whose initramfs holds busybox and this can run it. Register reads are ordinary loads from the
 * BAR, mapped through sysfs. Exit status: 0 found and sane, 1 found but something is wrong, 2 no GPU function here.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proxy/gpu/command_set.h"

#define DEVICES "/sys/bus/pci/devices"

static uint64_t attribute(const char *address, const char *name) {
  char path[512], text[64] = "";
  snprintf(path, sizeof path, DEVICES "/%s/%s", address, name);
  int fd = open(path, O_RDONLY);
  if (fd < 0) return ~0ull;
  ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  return got > 0 ? strtoull(text, NULL, 0) : ~0ull;
}

static void print_bars(const char *address) {
  char path[512], line[128];
  snprintf(path, sizeof path, DEVICES "/%s/resource", address);
  FILE *file = fopen(path, "r");
  if (!file) return;
  for (int bar = 0; bar < 6 && fgets(line, sizeof line, file); bar++) {
    uint64_t start, end, flags;
    if (sscanf(line, "%" SCNx64 " %" SCNx64 " %" SCNx64, &start, &end, &flags) != 3 || end <= start) continue;
    printf("  BAR%d at 0x%" PRIx64 ", %" PRIu64 " KiB%s%s\n", bar, start, (end - start + 1) / 1024,
           flags & 0x100000 ? ", 64-bit" : "", flags & 0x2000 ? ", prefetchable" : "");
  }
  fclose(file);
}

static uint32_t reg32(const volatile uint8_t *bar, unsigned offset) { return *(const volatile uint32_t *)(bar + offset); }
static uint64_t reg64(const volatile uint8_t *bar, unsigned offset) {
  return reg32(bar, offset) | (uint64_t)reg32(bar, offset + 4) << 32;
}

static int show_registers(const char *address) {
  char path[512];
  snprintf(path, sizeof path, DEVICES "/%s/enable", address);
  int fd = open(path, O_WRONLY);
  if (fd < 0 || write(fd, "1", 1) != 1) {
    printf("cannot enable %s: %s\n", address, strerror(errno));
    return 1;
  }
  close(fd);
  snprintf(path, sizeof path, DEVICES "/%s/resource0", address);
  fd = open(path, O_RDWR);
  volatile uint8_t *bar = fd < 0 ? MAP_FAILED : mmap(NULL, DXGPU_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (bar == MAP_FAILED) {
    printf("cannot map BAR0 of %s: %s\n", address, strerror(errno));
    return 1;
  }
  uint32_t magic = reg32(bar, DXGPU_REG_MAGIC), version = reg32(bar, DXGPU_REG_VERSION);
  printf("  MAGIC        0x%08x %s\n", magic, magic == DXGPU_MAGIC ? "(a dxpu GPU function)" : "WRONG");
  printf("  VERSION      %u.%u\n", version >> 16, version & 0xffff);
  printf("  CHANNELS     %u\n", reg32(bar, DXGPU_REG_CHANNELS));
  printf("  MEMORY_BYTES %" PRIu64 " MiB\n", reg64(bar, DXGPU_REG_MEMORY_BYTES) >> 20);
  printf("  VECTORS      %u\n", reg32(bar, DXGPU_REG_VECTORS));
  printf("  SERIAL       0x%016" PRIx64 "\n", reg64(bar, DXGPU_REG_SERIAL));
  char model[DXGPU_MODEL_BYTES + 1] = "";
  for (unsigned i = 0; i < DXGPU_MODEL_BYTES; i += 4) {
    uint32_t word = reg32(bar, DXGPU_REG_MODEL + i);
    memcpy(model + i, &word, 4);
  }
  printf("  MODEL        %s\n", model);
  printf("  STATUS       0x%08x\n", reg32(bar, DXGPU_REG_STATUS));
  /* A write must arrive there, not here. */
  const uint32_t mark = 0x5eed0000u | (uint32_t)(getpid() & 0xffff);
  *(volatile uint32_t *)(bar + DXGPU_REG_SCRATCH) = mark;
  uint32_t back = reg32(bar, DXGPU_REG_SCRATCH);
  printf("  SCRATCH      wrote 0x%08x, reads 0x%08x\n", mark, back);
  return magic == DXGPU_MAGIC && back == mark ? 0 : 1;
}

int main(void) {
  struct dirent **entries;
  int count = scandir(DEVICES, &entries, NULL, alphasort), found = 0, bad = 0;
  if (count < 0) {
    printf("no " DEVICES ": %s\n", strerror(errno));
    return 1;
  }
  for (int i = 0; i < count; i++) {
    const char *address = entries[i]->d_name;
    if (address[0] == '.') continue;
    uint64_t vendor = attribute(address, "vendor"), device = attribute(address, "device");
    int ours = vendor == DXGPU_VENDOR_ID && device == DXGPU_DEVICE_ID;
    printf("%s class %06" PRIx64 " %04" PRIx64 ":%04" PRIx64 "%s\n", address, attribute(address, "class"), vendor, device,
           ours ? "  <- the function" : "");
    if (!ours) continue;
    found++;
    print_bars(address);
    bad |= show_registers(address);
  }
  if (!found) printf("no GPU function (%04x:%04x) in this guest\n", DXGPU_VENDOR_ID, DXGPU_DEVICE_ID);
  return !found ? 2 : bad;
}
