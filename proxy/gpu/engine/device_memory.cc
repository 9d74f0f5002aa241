#include "proxy/gpu/engine/device_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/function/single_access.h"

namespace dxpu::gpu {
namespace {

absl::StatusOr<base::UniqueFd> open_file(const std::string& path, uint64_t bytes) {
  base::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return base::errno_status(absl::StrCat("device memory file ", path));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return base::errno_status(absl::StrCat("device memory file ", path));
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("device memory file ", path, " is not a regular file"));
  }
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("device memory file ", path, " is in use by another process: end that worker first"));
  }
  const uint64_t size = static_cast<uint64_t>(info.st_size);
  if (size != 0 && size != bytes) {
    return absl::InvalidArgumentError(absl::StrCat("device memory file ", path, " has ", size, " bytes, the slot says ",
                                                   bytes, ": remove the file or correct the slot's memory size"));
  }
  // Writing to a hole of a full file system would kill the process (SIGBUS); refuse while there is somebody to tell.
  struct statvfs room {};
  if (::fstatvfs(fd.get(), &room) == 0) {
    const uint64_t free_bytes = uint64_t{room.f_bavail} * room.f_frsize;
    const uint64_t held_bytes = static_cast<uint64_t>(info.st_blocks) * 512;
    if (held_bytes < bytes && free_bytes < bytes - held_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat("device memory file ", path, " needs ", bytes - held_bytes,
                                                       " bytes, its file system has ", free_bytes,
                                                       ": free some or use another"));
    }
  }
  return fd;
}

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceMemory>> DeviceMemory::open(const std::string& path, uint64_t bytes) {
  if (!std::has_single_bit(bytes) || bytes < kMinBytes || bytes > kMaxBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("device memory of ", bytes, " bytes: must be a power of two from ", kMinBytes, " to ", kMaxBytes));
  }
  base::UniqueFd fd;
  if (path.empty()) {
    fd.reset(::memfd_create("dxpu-gpu-memory", MFD_CLOEXEC));
    if (!fd.valid()) return base::errno_status("anonymous device memory");
  } else {
    DXPU_ASSIGN_OR_RETURN(fd, open_file(path, bytes));
  }
  const std::string name = path.empty() ? "anonymous device memory" : absl::StrCat("device memory file ", path);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return base::errno_status(name);
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return base::errno_status(absl::StrCat(name, ": map ", bytes, " bytes"));
  return std::shared_ptr<DeviceMemory>(new DeviceMemory(std::move(fd), static_cast<std::byte*>(base), bytes, name));
}

DeviceMemory::DeviceMemory(base::UniqueFd fd, std::byte* base, uint64_t size, std::string name)
    : fd_(std::move(fd)), base_(base), size_(size), name_(std::move(name)) {}

DeviceMemory::~DeviceMemory() { ::munmap(base_, size_); }

void DeviceMemory::read(uint64_t offset, std::span<std::byte> out) const {
  function::single_load(base_ + offset, out.data(), out.size());
}

void DeviceMemory::write(uint64_t offset, std::span<const std::byte> data) {
  function::single_store(base_ + offset, data.data(), data.size());
}

void DeviceMemory::move(uint64_t destination, uint64_t source, uint64_t bytes) {
  std::memmove(base_ + destination, base_ + source, bytes);
}

void DeviceMemory::fill(uint64_t offset, uint64_t bytes, uint64_t pattern, uint32_t pattern_bytes) {
  std::byte unit[8];
  std::memcpy(unit, &pattern, sizeof unit);
  std::byte* at = base_ + offset;
  if (pattern_bytes == 1) {
    std::memset(at, static_cast<int>(unit[0]), bytes);
    return;
  }
  // One unit, then double what is there: a few memcpy calls whatever the length.
  uint64_t have = std::min<uint64_t>(bytes, pattern_bytes);
  std::memcpy(at, unit, have);
  while (have < bytes) {
    const uint64_t step = std::min(have, bytes - have);
    std::memcpy(at + have, at, step);
    have += step;
  }
}

absl::Status DeviceMemory::wipe() {
  if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size_)) == 0) {
    return absl::OkStatus();
  }
  if (errno != EOPNOTSUPP && errno != ENOSYS) return base::errno_status(absl::StrCat(name_, ": wipe"));
  std::memset(base_, 0, size_);
  return absl::OkStatus();
}

absl::Status DeviceMemory::check_zero() const {
  // Holes are zeros by definition, and reading them through the mapping would fill them with pages.
  off_t at = 0;
  const off_t end = static_cast<off_t>(size_);
  while (at < end) {
    off_t data = ::lseek(fd_.get(), at, SEEK_DATA);
    if (data < 0 && errno == ENXIO) return absl::OkStatus();
    off_t hole = data < 0 ? end : ::lseek(fd_.get(), data, SEEK_HOLE);
    if (data < 0) data = at;  // no SEEK_DATA here: look at every byte
    if (hole < 0) hole = end;
    for (off_t i = data; i < hole;) {
      const off_t step = std::min<off_t>(hole - i, 4096);
      uint64_t any = 0;
      for (off_t k = 0; k + 8 <= step; k += 8) {
        uint64_t word;
        std::memcpy(&word, base_ + i + k, sizeof word);
        any |= word;
      }
      if (any != 0) {
        off_t k = i;
        while (base_[k] == std::byte{0}) ++k;
        return absl::DataLossError(absl::StrCat(name_, " is not wiped: byte at offset ", k, " is not zero"));
      }
      i += step;
    }
    at = hole;
  }
  return absl::OkStatus();
}

}  // namespace dxpu::gpu
