#include "proxy/gpu/driver/exercise.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/gpu/crc32c.h"

namespace dxpu::gpu {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void fill_random(std::span<std::byte> out, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t at = 0; at < out.size(); at += 8) {
    const uint64_t word = random();
    std::memcpy(out.data() + at, &word, std::min<size_t>(8, out.size() - at));
  }
}

absl::Status check_registers(Driver& driver) {
  for (const uint64_t value : {uint64_t{0}, ~uint64_t{0}, uint64_t{0x0123456789abcdef}, uint64_t{0}}) {
    DXPU_RETURN_IF_ERROR(driver.write64(DXGPU_REG_SCRATCH, value));
    DXPU_ASSIGN_OR_RETURN(const uint64_t back, driver.read64(DXGPU_REG_SCRATCH));
    if (back != value) {
      return absl::InternalError(
          absl::StrCat("SCRATCH was given 0x", absl::Hex(value), " and reads 0x", absl::Hex(back)));
    }
  }
  DXPU_RETURN_IF_ERROR(driver.write32(DXGPU_REG_MAGIC, 0));
  DXPU_ASSIGN_OR_RETURN(const uint32_t magic, driver.read32(DXGPU_REG_MAGIC));
  if (magic != DXGPU_MAGIC) return absl::InternalError("the read-only MAGIC register could be written");
  DXPU_ASSIGN_OR_RETURN(const uint64_t aperture, driver.device().bar_size(DXGPU_BAR_MEMORY));
  if (aperture != driver.info().memory_bytes) {
    return absl::InternalError(absl::StrCat("BAR", DXGPU_BAR_MEMORY, " has ", aperture, " bytes, MEMORY_BYTES says ",
                                            driver.info().memory_bytes));
  }
  return absl::OkStatus();
}

absl::Status measure_reads(Driver& driver, unsigned reads, ExerciseReport& report) {
  std::vector<Clock::duration> took;
  took.reserve(reads);
  for (unsigned i = 0; i < reads; ++i) {
    const auto start = Clock::now();
    DXPU_ASSIGN_OR_RETURN(const uint32_t magic, driver.read32(DXGPU_REG_MAGIC));
    took.push_back(Clock::now() - start);
    if (magic != DXGPU_MAGIC) return absl::InternalError(absl::StrCat("MAGIC reads 0x", absl::Hex(magic)));
  }
  if (took.empty()) return absl::OkStatus();
  std::sort(took.begin(), took.end());
  report.reads = reads;
  report.read_p50 = absl::FromChrono(took[took.size() / 2]);
  report.read_p99 = absl::FromChrono(took[std::min(took.size() - 1, took.size() * 99 / 100)]);
  return absl::OkStatus();
}

constexpr unsigned kPatternPlaces = 16;
constexpr uint64_t kPatternBytes = 4096;

// Never a zero byte, so that a wiped byte is no match by chance.
std::vector<std::byte> pattern_at(uint64_t seed, unsigned place) {
  std::vector<std::byte> bytes(kPatternBytes);
  fill_random(bytes, seed * kPatternPlaces + place);
  for (std::byte& byte : bytes) byte |= std::byte{1};
  return bytes;
}

absl::StatusOr<uint64_t> pattern_offset(function::LocalDevice& device, unsigned place) {
  DXPU_ASSIGN_OR_RETURN(const uint64_t memory, device.bar_size(DXGPU_BAR_MEMORY));
  if (memory < kPatternPlaces * kPatternBytes)
    return absl::FailedPreconditionError("the device has no memory aperture");
  return (memory - kPatternBytes) / (kPatternPlaces - 1) / kPatternBytes * kPatternBytes * place +
         (place == kPatternPlaces - 1 ? (memory - kPatternBytes) / kPatternBytes % (kPatternPlaces - 1) * kPatternBytes
                                      : 0);
}

}  // namespace

absl::StatusOr<ExerciseReport> exercise(function::LocalDevice& device, const ExerciseOptions& options) {
  ExerciseReport report;
  DXPU_ASSIGN_OR_RETURN(const std::unique_ptr<Driver> driver, Driver::probe(device, options.driver));
  report.info = driver->info();
  if (options.bytes == 0 || options.bytes > report.info.memory_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.bytes, " bytes to move: must be 1 to the device memory, ", report.info.memory_bytes));
  }
  report.bytes = options.bytes;
  DXPU_RETURN_IF_ERROR(check_registers(*driver));

  DXPU_ASSIGN_OR_RETURN(const std::unique_ptr<HostBuffer> out, driver->allocate(options.bytes));
  DXPU_ASSIGN_OR_RETURN(const std::unique_ptr<HostBuffer> back, driver->allocate(options.bytes));
  const std::span<std::byte> sent = out->bytes().first(options.bytes);
  const std::span<std::byte> returned = back->bytes().first(options.bytes);
  fill_random(sent, options.seed);
  report.host_crc32c = crc32c(sent);
  DXPU_ASSIGN_OR_RETURN(const std::unique_ptr<Channel> channel, driver->open_channel(0, {.mode = options.mode}));

  // The bytes must come from this run: make sure that they are not there yet.
  DXPU_RETURN_IF_ERROR(channel->fill(0, options.bytes, 0));
  DXPU_ASSIGN_OR_RETURN(const uint64_t cleared, channel->fence());
  DXPU_RETURN_IF_ERROR(channel->wait(cleared, WaitBy::kInterrupt));

  auto start = Clock::now();
  DXPU_RETURN_IF_ERROR(channel->copy_to_device(0, *out, 0, options.bytes));
  DXPU_ASSIGN_OR_RETURN(const uint64_t up, channel->fence());
  DXPU_RETURN_IF_ERROR(channel->wait(up, WaitBy::kInterrupt));
  report.to_device_mb_s = static_cast<double>(options.bytes) / 1e6 / seconds_since(start);

  DXPU_ASSIGN_OR_RETURN(report.device_crc32c, channel->checksum(0, options.bytes, WaitBy::kInterrupt));
  if (report.device_crc32c != report.host_crc32c) {
    return absl::DataLossError(fmt::format("the device has CRC32C {:08x} of what was sent with {:08x}",
                                           report.device_crc32c, report.host_crc32c));
  }

  start = Clock::now();
  DXPU_RETURN_IF_ERROR(channel->copy_from_device(*back, 0, 0, options.bytes));
  DXPU_ASSIGN_OR_RETURN(const uint64_t down, channel->fence());
  DXPU_RETURN_IF_ERROR(channel->wait(down, WaitBy::kInterrupt));
  report.from_device_mb_s = static_cast<double>(options.bytes) / 1e6 / seconds_since(start);

  report.returned_crc32c = crc32c(returned);
  if (report.returned_crc32c != report.host_crc32c || !std::equal(sent.begin(), sent.end(), returned.begin())) {
    return absl::DataLossError(fmt::format("CRC32C {:08x} came back of what was sent with {:08x}",
                                           report.returned_crc32c, report.host_crc32c));
  }

  start = Clock::now();
  DXPU_ASSIGN_OR_RETURN(const uint64_t lone, channel->fence());
  DXPU_RETURN_IF_ERROR(channel->wait(lone, WaitBy::kInterrupt));
  report.interrupt_latency = absl::FromChrono(Clock::now() - start);
  report.interrupts = channel->interrupts();
  if (report.interrupts == 0)
    return absl::InternalError("fences came, but no interrupt was ever signalled on the eventfd");

  DXPU_RETURN_IF_ERROR(measure_reads(*driver, options.reads, report));
  return report;
}

std::string to_string(const ExerciseReport& r) {
  std::string text;
  auto line = [&](const char* key, const std::string& value) { text += fmt::format("  {:<22} {}\n", key, value); };
  line("function", fmt::format("{:04x}:{:04x} {} version {}.{} serial {:016x}", r.info.vendor_id, r.info.device_id,
                               r.info.model, r.info.version >> 16, r.info.version & 0xffff, r.info.serial));
  line("device memory", fmt::format("{} MiB", r.info.memory_bytes >> 20));
  line("channels, vectors", fmt::format("{}, {}", r.info.channels, r.info.vectors));
  line("moved each way", fmt::format("{:.1f} MiB", static_cast<double>(r.bytes) / (1 << 20)));
  line("to device", fmt::format("{:.1f} MB/s", r.to_device_mb_s));
  line("from device", fmt::format("{:.1f} MB/s", r.from_device_mb_s));
  line("CRC32C host", fmt::format("{:08x}", r.host_crc32c));
  line("CRC32C device", fmt::format("{:08x}", r.device_crc32c));
  line("CRC32C returned", fmt::format("{:08x}", r.returned_crc32c));
  line("MSI-X interrupts",
       fmt::format("{} (fence to eventfd {:.1f} us)", r.interrupts, absl::ToDoubleMicroseconds(r.interrupt_latency)));
  line("4-byte BAR read", fmt::format("p50 {:.1f} us, p99 {:.1f} us ({} reads)", absl::ToDoubleMicroseconds(r.read_p50),
                                      absl::ToDoubleMicroseconds(r.read_p99), r.reads));
  return text;
}

absl::StatusOr<uint64_t> leave_pattern(function::LocalDevice& device, uint64_t seed) {
  for (unsigned place = 0; place < kPatternPlaces; ++place) {
    DXPU_ASSIGN_OR_RETURN(const uint64_t offset, pattern_offset(device, place));
    DXPU_RETURN_IF_ERROR(device.bar_write(DXGPU_BAR_MEMORY, offset, pattern_at(seed, place)));
  }
  return kPatternPlaces * kPatternBytes;
}

absl::StatusOr<PatternReport> find_pattern(function::LocalDevice& device, uint64_t seed) {
  PatternReport report;
  // A function that is gone must not be mistaken for a wiped or a dirty one.
  uint32_t magic = 0;
  DXPU_RETURN_IF_ERROR(
      device.bar_read(DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC, std::as_writable_bytes(std::span(&magic, 1))));
  if (magic != DXGPU_MAGIC)
    return absl::UnavailableError(absl::StrCat("no GPU function answers: MAGIC reads 0x", absl::Hex(magic)));
  for (unsigned place = 0; place < kPatternPlaces; ++place) {
    DXPU_ASSIGN_OR_RETURN(const uint64_t offset, pattern_offset(device, place));
    const std::vector<std::byte> expected = pattern_at(seed, place);
    std::vector<std::byte> found(expected.size());
    DXPU_RETURN_IF_ERROR(device.bar_read(DXGPU_BAR_MEMORY, offset, found));
    for (size_t i = 0; i < found.size(); ++i) {
      report.bytes_found += found[i] == expected[i] ? 1 : 0;
      report.bytes_nonzero += found[i] != std::byte{0} ? 1 : 0;
    }
    report.bytes_looked += found.size();
  }
  return report;
}

}  // namespace dxpu::gpu
