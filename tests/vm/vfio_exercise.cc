// dxpu-vfio-exercise: a user-space VFIO program on a GPU function. Ordinary VFIO calls through attach::VfioDevice; what
// it does is proxy/gpu/driver/exercise.h, which also runs without any kernel.
//
// Exit status: 0 all as it should be, 1 something was not (one line says what), 2 usage, 3 the function could not be
// opened.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proxy/attach/vfio/vfio_device.h"
#include "proxy/gpu/driver/exercise.h"

namespace {

int fail(const absl::Status& status) {
  std::printf("FAILED %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  CLI::App app("Opens a GPU function through /dev/vfio, checks it, moves data, measures");
  std::string address, pattern, opened;
  uint64_t megabytes = 64, seed = 1;
  unsigned reads = 1000;
  double hold_seconds = 0, linger_seconds = 0;
  bool push = false;
  app.add_option("--device", address, "PCI address, dddd:bb:dd.f")->required();
  app.add_option("--megabytes", megabytes, "MiB moved each way")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  app.add_option("--reads", reads, "4-byte register reads measured")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_flag("--push", push, "Commands through the BAR aperture instead of a ring in host memory");
  auto* write =
      app.add_option("--pattern", pattern, "write: only leave a pattern in device memory; check: only look for it")
          ->check(CLI::IsMember({"write", "check"}));
  app.add_option("--seed", seed, "Seed of data and pattern")->capture_default_str();
  app.add_option("--hold", hold_seconds, "Only keep it open until it goes away, at most this many seconds")
      ->check(CLI::PositiveNumber)
      ->excludes(write);
  app.add_option("--linger", linger_seconds, "With --hold: keep it open this many seconds longer after it has gone")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--opened", opened, "With --hold: a file that is made when the function is open");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }

  auto device = dxpu::attach::VfioDevice::open(address);
  if (!device.ok()) {
    std::printf("FAILED %s\n", std::string(device.status().message()).c_str());
    return 3;
  }
  std::printf("opened %s, IOMMU group %d, %u MSI-X vectors\n", address.c_str(), (*device)->iommu_group(),
              (*device)->msix_vectors());

  if (pattern == "write") {
    auto written = dxpu::gpu::leave_pattern(**device, seed);
    if (!written.ok()) return fail(written.status());
    std::printf("pattern written: %llu bytes\n", static_cast<unsigned long long>(*written));
    return 0;
  }
  if (pattern == "check") {
    auto found = dxpu::gpu::find_pattern(**device, seed);
    if (!found.ok()) return fail(found.status());
    std::printf("pattern looked for in %llu bytes: %llu bytes of it found, %llu bytes not zero\n",
                static_cast<unsigned long long>(found->bytes_looked),
                static_cast<unsigned long long>(found->bytes_found),
                static_cast<unsigned long long>(found->bytes_nonzero));
    return 0;
  }
  if (hold_seconds > 0) {
    if (!opened.empty()) std::ofstream(opened) << "open\n";
    auto report = dxpu::gpu::hold(**device, {.deadline = absl::Seconds(hold_seconds)},
                                  [](const std::string& event) { std::printf("%s\n", event.c_str()); });
    if (!report.ok()) return fail(report.status());
    std::printf("held: %llu reads, longest %.1f ms, told to close: %s, all ones: %s\n",
                static_cast<unsigned long long>(report->reads), absl::ToDoubleMilliseconds(report->longest_read),
                report->told ? "yes" : "no", report->all_ones ? "yes" : "no");
    if (linger_seconds > 0) absl::SleepFor(absl::Seconds(linger_seconds));
    std::printf("closing\n");
    return report->told && report->all_ones ? 0 : 1;
  }

  dxpu::gpu::ExerciseOptions options;
  options.bytes = megabytes << 20;
  options.reads = reads;
  options.seed = seed;
  options.mode = push ? dxpu::gpu::ChannelMode::kPush : dxpu::gpu::ChannelMode::kRing;
  auto report = dxpu::gpu::exercise(**device, options);
  if (!report.ok()) return fail(report.status());
  std::printf("%s", dxpu::gpu::to_string(*report).c_str());
  return 0;
}
