// What distance costs in the slice: register reads and DMA through a fabric session over TCP loopback, beside raw TCP
// moving the same frames in the same run. One row per figure: key, value, unit, goal, ok|short, tab-separated.
//
// The box end lives in a forked child, so nothing is shared but the socket. Every figure is the median of several
// rounds, raw and session interleaved, because the machine's mood is part of any single one.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "proxy/fabric/session.h"
#include "proxy/pcie/config_space.h"

namespace dxpu::fabric {
namespace {

using function::Outcome;
using Clock = std::chrono::steady_clock;

constexpr size_t kBulk = 64 << 20;
constexpr uint64_t kIova = 0x100000000;
constexpr int kReads = 3000;
constexpr int kRounds = 7;
// Envelope, 3 DW request; envelope, completion header, 1 DW.
constexpr size_t kRequestBytes = 32 + 12;
constexpr size_t kAnswerBytes = 32 + 12 + 4;

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "bench_slice: %s\n", what.c_str());
  std::exit(1);
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}
double percentile(std::vector<double>& values, double p) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(p * static_cast<double>(values.size() - 1))];
}

// One register, two commands: writing 1 or 2 to it makes the function read or write kBulk bytes of host memory once.
class BenchFunction : public function::Function {
 public:
  BenchFunction() : buffer_(kBulk, std::byte{0x5a}) {
    worker_ = std::thread([this] { work(); });
  }
  ~BenchFunction() override {
    {
      std::lock_guard lock(mutex_);
      command_ = kQuit;
    }
    wake_.notify_all();
    worker_.join();
  }

  static pcie::ConfigSpace make_config() {
    pcie::ConfigDescription d;
    d.vendor_id = 0x1db7;
    d.device_id = 0xbe7c;
    d.class_code = 0xff0000;
    d.bars[0].size = 4096;
    d.msix = {1, 0, 0x800, 0, 0xc00};
    auto config = pcie::ConfigSpace::build(d);
    if (!config.ok()) die(config.status().ToString());
    return *std::move(config);
  }
  function::Identity identity() const override { return {0x1db7, 0xbe7c, 0xff0000, 0, "bench"}; }
  pcie::ConfigSpace config() const override {
    std::lock_guard lock(mutex_);
    return config_;
  }
  void config_write(uint32_t offset, unsigned size, uint32_t value, function::Done done) override {
    {
      std::lock_guard lock(mutex_);
      config_.write(offset, size, value);
    }
    done(Outcome::kSuccess);
  }
  void config_read(uint32_t offset, unsigned size, function::ReadDone done) override {
    uint32_t value = 0;
    {
      std::lock_guard lock(mutex_);
      value = config_.read(offset, size);
    }
    done(Outcome::kSuccess, std::as_bytes(std::span(&value, 1)).first(size));
  }
  void bar_read(unsigned, uint64_t, uint32_t length, function::ReadDone done) override {
    const uint32_t value = register_.load(std::memory_order_acquire);
    done(Outcome::kSuccess, std::as_bytes(std::span(&value, 1)).first(std::min<uint32_t>(length, 4)));
  }
  void bar_write(unsigned, uint64_t, std::span<const std::byte> data) override {
    uint32_t value = 0;
    std::memcpy(&value, data.data(), std::min<size_t>(4, data.size()));
    {
      std::lock_guard lock(mutex_);
      command_ = value;
    }
    wake_.notify_all();
  }
  void connect(function::Upstream* upstream) override { upstream_ = upstream; }
  void reset(function::Done done) override { done(Outcome::kSuccess); }
  absl::Status scrub() override { return absl::OkStatus(); }

 private:
  static constexpr uint32_t kQuit = 0xffffffff;
  void work() {
    while (true) {
      uint32_t command = 0;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return command_ != 0; });
        command = std::exchange(command_, 0);
      }
      if (command == kQuit) return;
      function::Upstream* upstream = upstream_;
      if (upstream == nullptr) continue;
      if (command == 1) {
        std::mutex mutex;
        std::condition_variable over;
        bool done = false;
        upstream->dma_read(kIova, buffer_, [&](Outcome outcome) {
          if (outcome != Outcome::kSuccess) die("dma_read failed in the box");
          std::lock_guard lock(mutex);
          done = true;
          over.notify_all();
        });
        std::unique_lock lock(mutex);
        over.wait(lock, [&] { return done; });
      } else {
        upstream->dma_write(kIova, buffer_);
      }
      upstream->raise_msix(0);
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  pcie::ConfigSpace config_ = make_config();
  std::atomic<uint32_t> register_{0x600d600d};
  uint32_t command_ = 0;
  std::vector<std::byte> buffer_;
  std::atomic<function::Upstream*> upstream_{nullptr};
  std::thread worker_;
};

// The host's memory and the interrupt that ends a transfer.
class BenchHost : public function::Upstream {
 public:
  BenchHost() : memory_(kBulk, std::byte{0xa5}) {}
  void dma_read(uint64_t address, std::span<std::byte> out, function::Done done) override {
    if (address < kIova || address - kIova > kBulk - out.size()) {
      done(Outcome::kUnsupportedRequest);
      return;
    }
    std::memcpy(out.data(), memory_.data() + (address - kIova), out.size());
    done(Outcome::kSuccess);
  }
  void dma_write(uint64_t address, std::span<const std::byte> data) override {
    if (address < kIova || address - kIova > kBulk - data.size()) return;
    std::memcpy(memory_.data() + (address - kIova), data.data(), data.size());
  }
  void dma_atomic(function::AtomicOp, uint64_t, unsigned, uint64_t, uint64_t, function::ReadDone done) override {
    done(Outcome::kUnsupportedRequest, {});
  }
  void raise_msix(unsigned) override {
    std::lock_guard lock(mutex_);
    ++interrupts_;
    changed_.notify_all();
  }
  void wait_interrupts(uint64_t count) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(60), [&] { return interrupts_ >= count; }))
      die("a transfer never ended");
  }
  uint64_t interrupts() {
    std::lock_guard lock(mutex_);
    return interrupts_;
  }

 private:
  std::vector<std::byte> memory_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t interrupts_ = 0;
};

void send_all(int fd, const std::byte* data, size_t bytes) {
  while (bytes != 0) {
    const ssize_t n = ::send(fd, data, bytes, MSG_NOSIGNAL);
    if (n <= 0) die("raw send failed");
    data += n;
    bytes -= static_cast<size_t>(n);
  }
}
bool receive_all(int fd, std::byte* data, size_t bytes) {
  while (bytes != 0) {
    const ssize_t n = ::recv(fd, data, bytes, 0);
    if (n <= 0) return false;
    data += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

// The raw peer: first byte says what to do. 'p': answer requests of ping-pong size. 's': send kBulk. 'r': take kBulk,
// say so.
void raw_peer(int fd) {
  std::vector<std::byte> buffer(kBulk, std::byte{1});
  std::byte request[kRequestBytes];
  while (receive_all(fd, request, sizeof(request))) {
    switch (static_cast<char>(request[0])) {
      case 's':
        send_all(fd, buffer.data(), kBulk);
        break;
      case 'r':
        if (!receive_all(fd, buffer.data(), kBulk)) return;
        [[fallthrough]];
      default:
        send_all(fd, buffer.data(), kAnswerBytes);
    }
  }
}

int connect_to(const std::string& endpoint) {
  auto transport = tcp_connect(endpoint, absl::Seconds(10));
  if (!transport.ok()) die(transport.status().ToString());
  return (*transport)->release_fd();
}

struct Child {
  pid_t pid = -1;
  std::string endpoint;
};

// Forks a box that serves exactly one connection.
Child fork_peer(const std::function<void(std::unique_ptr<Transport>)>& serve) {
  auto listener = TcpListener::listen("127.0.0.1:0");
  if (!listener.ok()) die(listener.status().ToString());
  Child out;
  out.endpoint = (*listener)->endpoint();
  out.pid = fork();
  if (out.pid < 0) die("fork");
  if (out.pid == 0) {
    auto transport = (*listener)->accept(absl::Seconds(30));
    if (transport.ok() && *transport != nullptr) serve(*std::move(transport));
    _exit(0);
  }
  return out;
}

void row(const char* key, double value, const char* unit, const char* goal, bool ok) {
  std::printf("%s\t%.2f\t%s\t%s\t%s\n", key, value, unit, goal, ok ? "ok" : "short");
}

int run() {
  const Child box = fork_peer([](std::unique_ptr<Transport> transport) {
    auto hello = read_hello(*transport, absl::Seconds(10));
    if (!hello.ok()) die(hello.status().ToString());
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    BenchFunction function;
    SessionOptions options;
    options.deadlines.read = absl::Seconds(1);
    FunctionServer::Callbacks callbacks;
    callbacks.on_end = [&](absl::Status) {
      std::lock_guard lock(mutex);
      ended = true;
      changed.notify_all();
    };
    auto server = FunctionServer::serve(function, std::move(transport), *hello, 1, options, std::move(callbacks));
    if (!server.ok()) die(server.status().ToString());
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ended; });
    lock.unlock();
    (*server)->close(TerminateReason::kShutdown);
  });
  const Child raw = fork_peer([](std::unique_ptr<Transport> transport) { raw_peer(transport->release_fd()); });

  const int fd = connect_to(raw.endpoint);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  auto transport = tcp_connect(box.endpoint, absl::Seconds(10));
  if (!transport.ok()) die(transport.status().ToString());
  Ticket ticket;
  ticket.host_id = "bench-host";
  ticket.box_id = "bench-box";
  ticket.attachment_id = "bench";
  SessionOptions options;
  options.deadlines.read = absl::Seconds(1);
  auto remote = RemoteFunction::connect(*std::move(transport), ticket, options, absl::Seconds(10), nullptr);
  if (!remote.ok()) die(remote.status().ToString());
  BenchHost host;
  (*remote)->connect(&host);

  std::vector<double> raw_p50, raw_p99, read_p50, read_p99, ratio;
  std::byte request[kRequestBytes]{};
  std::byte answer[kAnswerBytes];
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> raw_us, read_us;
    for (int i = 0; i < kReads; ++i) {
      request[0] = std::byte{'p'};
      const auto start = Clock::now();
      send_all(fd, request, sizeof(request));
      if (!receive_all(fd, answer, sizeof(answer))) die("raw peer gone");
      raw_us.push_back(seconds_since(start) * 1e6);
    }
    for (int i = 0; i < kReads; ++i) {
      uint32_t value = 0;
      const auto start = Clock::now();
      const Outcome outcome = (*remote)->bar_read_wait(0, 0, std::as_writable_bytes(std::span(&value, 1)));
      read_us.push_back(seconds_since(start) * 1e6);
      if (outcome != Outcome::kSuccess || value != 0x600d600d) die("a register read went wrong");
    }
    raw_p50.push_back(percentile(raw_us, 0.5));
    raw_p99.push_back(percentile(raw_us, 0.99));
    read_p50.push_back(percentile(read_us, 0.5));
    read_p99.push_back(percentile(read_us, 0.99));
    ratio.push_back(read_p50.back() / raw_p50.back());
  }
  row("raw4_p50_us", median(raw_p50), "us", "-", true);
  row("raw4_p99_us", median(raw_p99), "us", "-", true);
  row("read4_p50_us", median(read_p50), "us", "-", true);
  row("read4_p99_us", median(read_p99), "us", "-", true);
  row("read4_p50_ratio", median(ratio), "x raw", "<=1.3", median(ratio) <= 1.3);

  // Device reads: bytes flow host to box; raw: this process sends. Device writes: the other way round.
  std::vector<std::byte> buffer(kBulk, std::byte{2});
  std::vector<double> raw_send, raw_receive, dma_read, dma_write, read_ratio, write_ratio;
  const auto transfer = [&](uint32_t command) {
    const uint64_t before = host.interrupts();
    const auto start = Clock::now();
    (*remote)->bar_write(0, 0, std::as_bytes(std::span(&command, 1)));
    host.wait_interrupts(before + 1);
    return kBulk / seconds_since(start) / 1e9;
  };
  for (int round = -1; round < kRounds; ++round) {
    auto start = Clock::now();
    request[0] = std::byte{'r'};
    send_all(fd, request, sizeof(request));
    send_all(fd, buffer.data(), kBulk);
    if (!receive_all(fd, answer, sizeof(answer))) die("raw peer gone");
    const double sent = kBulk / seconds_since(start) / 1e9;
    const double read = transfer(1);
    start = Clock::now();
    request[0] = std::byte{'s'};
    send_all(fd, request, sizeof(request));
    if (!receive_all(fd, buffer.data(), kBulk)) die("raw peer gone");
    const double received = kBulk / seconds_since(start) / 1e9;
    const double written = transfer(2);
    if (round < 0) continue;  // pages touched, windows open
    raw_send.push_back(sent);
    dma_read.push_back(read);
    raw_receive.push_back(received);
    dma_write.push_back(written);
    read_ratio.push_back(read / sent);
    write_ratio.push_back(written / received);
  }
  row("raw_to_box_64MiB", median(raw_send), "GB/s", "-", true);
  row("dma_read_64MiB", median(dma_read), "GB/s", "-", true);
  row("dma_read_ratio", median(read_ratio), "x raw", ">=0.6", median(read_ratio) >= 0.6);
  row("raw_from_box_64MiB", median(raw_receive), "GB/s", "-", true);
  row("dma_write_64MiB", median(dma_write), "GB/s", "-", true);
  row("dma_write_ratio", median(write_ratio), "x raw", ">=0.6", median(write_ratio) >= 0.6);

  (*remote)->close();
  ::close(fd);
  int status = 0;
  bool fine = true;
  for (const pid_t pid : {box.pid, raw.pid}) fine = waitpid(pid, &status, 0) == pid && status == 0 && fine;
  return fine ? 0 : 1;
}

}  // namespace
}  // namespace dxpu::fabric

int main() { return dxpu::fabric::run(); }
