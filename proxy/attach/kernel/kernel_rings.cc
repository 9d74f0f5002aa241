#include "proxy/attach/kernel/kernel_rings.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"

namespace dxpu::attach {
namespace {

uint32_t load(const uint32_t& index) { return __atomic_load_n(&index, __ATOMIC_ACQUIRE); }
void store(uint32_t& index, uint32_t value) { __atomic_store_n(&index, value, __ATOMIC_RELEASE); }
uint32_t aligned(size_t bytes) {
  return static_cast<uint32_t>((bytes + DXPU_RECORD_ALIGN - 1) / DXPU_RECORD_ALIGN * DXPU_RECORD_ALIGN);
}

}  // namespace

absl::StatusOr<std::shared_ptr<KernelRings>> KernelRings::open(const std::string& device) {
  std::shared_ptr<KernelRings> rings(new KernelRings);
  rings->fd_.reset(::open(device.c_str(), O_RDWR | O_CLOEXEC));
  if (!rings->fd_.valid()) {
    if (errno == ENOENT || errno == ENODEV || errno == ENXIO) {
      return absl::NotFoundError(absl::StrCat(device, ": not there; load the kernel module (insmod kmod/dxpu.ko)"));
    }
    if (errno == EACCES || errno == EPERM) {
      return absl::PermissionDeniedError(absl::StrCat(device, ": permission denied; run as root or change its group"));
    }
    return base::errno_status(absl::StrCat("open ", device));
  }
  dxpu_hello& hello = rings->hello_;
  hello = {.size = sizeof(dxpu_hello),
           .major = DXPU_ABI_MAJOR,
           .minor = DXPU_ABI_MINOR,
           .request_bytes = sizeof(dxpu_request),
           .completion_bytes = sizeof(dxpu_completion),
           .plug_bytes = sizeof(dxpu_plug),
           .port_bytes = sizeof(dxpu_port_status),
           .map_bytes = DXPU_MAP_BYTES,
           .ports = 0,
           .domain = 0};
  if (const int error = rings->run(DXPU_IOC_HELLO, &hello); error < 0) {
    if (error == -EPROTO) {
      return absl::FailedPreconditionError(absl::StrCat(device, ": the loaded module speaks version ", hello.major, ".",
                                                        hello.minor, ", this program ", DXPU_ABI_MAJOR, ".",
                                                        DXPU_ABI_MINOR, ": load the module that was built with it"));
    }
    return base::errno_status(absl::StrCat(device, ": hello"), -error);
  }
  return rings;
}

absl::Status KernelRings::claim(const dxpu_claim& claim) {
  if (claim.port >= hello_.ports) {
    return absl::OutOfRangeError(absl::StrCat("port ", claim.port, ": the loaded module has ports 0 to ",
                                              hello_.ports - 1, " (module parameter ports)"));
  }
  dxpu_claim argument = claim;
  if (const int error = run(DXPU_IOC_CLAIM, &argument); error < 0) {
    if (error == -EBUSY) {
      return absl::FailedPreconditionError(absl::StrCat("port ", claim.port, ": another process serves it"));
    }
    return base::errno_status(absl::StrCat("port ", claim.port, ": claim"), -error);
  }
  map_ = ::mmap(nullptr, DXPU_MAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (map_ == MAP_FAILED) {
    map_ = nullptr;
    return base::errno_status(absl::StrCat("port ", claim.port, ": mmap of the rings"));
  }
  return absl::OkStatus();
}

KernelRings::~KernelRings() { close(); }

void KernelRings::close() {
  std::unique_lock life(life_);
  std::lock_guard lock(mutex_);
  closed_ = true;
  if (map_ != nullptr) ::munmap(map_, DXPU_MAP_BYTES);
  map_ = nullptr;
  fd_.reset();
}

bool KernelRings::empty() const { return closed_ || load(control()->sq_tail) == sq_head_; }

std::optional<KernelRings::Request> KernelRings::peek() {
  while (!empty()) {
    const size_t offset = sq_head_ % DXPU_SQ_BYTES;
    const std::byte* record = at(DXPU_SQ_OFFSET + offset);
    Request request;
    std::memcpy(&request.head, record, sizeof request.head);
    if (request.head.kind == DXPU_REQ_PAD) {
      consume(request);
      continue;
    }
    if (request.head.kind == DXPU_REQ_MMIO_WRITE) request.data = {record + sizeof request.head, request.head.length};
    return request;
  }
  return std::nullopt;
}

void KernelRings::consume(const Request& request) {
  sq_head_ += request.head.bytes;
  store(control()->sq_head, sq_head_);
}

void KernelRings::complete(uint64_t id, uint16_t status, std::span<const std::byte> data) {
  const uint32_t bytes = aligned(sizeof(dxpu_completion) + data.size());
  std::shared_lock life(life_);
  std::lock_guard lock(mutex_);
  if (closed_) return;
  const uint32_t to_end = DXPU_CQ_BYTES - cq_tail_ % DXPU_CQ_BYTES;
  const uint32_t skip = to_end < bytes ? to_end : 0;
  // 64 requests of 4 KiB may be outstanding, a little more than the ring holds: then the kernel takes in what is there.
  if (cq_tail_ + skip + bytes - load(control()->cq_head) > DXPU_CQ_BYTES) {
    (void)run_alive(DXPU_IOC_COMPLETE, 0);
    if (cq_tail_ + skip + bytes - load(control()->cq_head) > DXPU_CQ_BYTES) return;
  }
  if (skip != 0) {
    const dxpu_completion pad = {
        .bytes = skip, .status = DXPU_STATUS_PAD, .reserved0 = 0, .id = 0, .length = 0, .reserved1 = {}};
    std::memcpy(at(DXPU_CQ_OFFSET + cq_tail_ % DXPU_CQ_BYTES), &pad, sizeof pad);
    cq_tail_ += skip;
  }
  const dxpu_completion head = {.bytes = bytes,
                                .status = status,
                                .reserved0 = 0,
                                .id = id,
                                .length = static_cast<uint32_t>(data.size()),
                                .reserved1 = {}};
  std::byte* record = at(DXPU_CQ_OFFSET + cq_tail_ % DXPU_CQ_BYTES);
  std::memcpy(record, &head, sizeof head);
  if (!data.empty()) std::memcpy(record + sizeof head, data.data(), data.size());
  cq_tail_ += bytes;
  store(control()->cq_tail, cq_tail_);
}

int KernelRings::run(unsigned long command, void* argument) const {
  return run(command, reinterpret_cast<unsigned long>(argument));
}

int KernelRings::run(unsigned long command, unsigned long argument) const {
  std::shared_lock life(life_);
  return run_alive(command, argument);
}

int KernelRings::run_alive(unsigned long command, unsigned long argument) const {
  if (!fd_.valid()) return -EBADF;
  int result;
  do {
    result = ::ioctl(fd_.get(), command, argument);
  } while (result < 0 && errno == EINTR);
  return result < 0 ? -errno : result;
}

}  // namespace dxpu::attach
