// The state a DirectAttach and its open device share. Private to proxy/attach/direct.
//
// Locks, never nested except as listed: `mutex` (who is plugged, who holds it), then a ReadWait's; `irq_mutex`
// (eventfds); `setup_mutex` (one configuration sequence at a time; held across calls into the function, which have
// deadlines).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "proxy/attach/direct/direct_attach.h"
#include "proxy/attach/direct/dma_map.h"
#include "proxy/function/blocking_reads.h"

namespace dxpu::attach {

// Somebody who waits for continuations of the function. Continuations may come after everybody has left.
struct ReadWait {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned outstanding = 0;
  bool abandoned = false;  // the buffer is not ours any more
  bool timed_out = false;
  function::Outcome outcome = function::Outcome::kSuccess;  // the first that was none
};

struct DirectAttach::Port {
  // Keeps the function from being unplugged under a call; false when there is none.
  class Use {
   public:
    explicit Use(Port& port);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return function != nullptr; }
    function::Function* function = nullptr;
    function::BlockingReads* blocking = nullptr;

   private:
    Port& port_;
  };

  void notify();
  // All ones and an outcome unless kSuccess.
  function::Outcome read_bar(unsigned bar, uint64_t offset, std::span<std::byte> out);
  function::Outcome read_config(uint32_t offset, std::span<std::byte> out);
  function::Outcome write_config(uint32_t offset, std::span<const std::byte> data);
  uint32_t config_value(uint32_t offset, unsigned size);
  void set_config_value(uint32_t offset, unsigned size, uint32_t value);
  // Resets the function and gives it back its BAR addresses, as a kernel does around a function level reset; the
  // command register gets `command`, MSI-X is left on when `msix` says so.
  absl::Status reset_keeping_bars(uint16_t command, bool msix);
  void set_msix_enable(bool on);
  void forget_interrupts();
  void close();
  // Runs `issue(wait)` and waits for as many continuations as it announced.
  template <typename Issue>
  function::Outcome await(absl::Duration deadline, std::span<std::byte> out, Issue issue);

  DirectOptions options;
  DmaMap dma;

  mutable std::mutex mutex;
  std::condition_variable idle;
  function::Function* function = nullptr;
  function::BlockingReads* blocking = nullptr;
  unsigned users = 0;
  std::set<ReadWait*> waits;
  PortState state = PortState::kEmpty;
  bool is_open = false;
  bool is_gone = false;  // of the open device's life
  std::string holder;
  std::array<uint64_t, pcie::kBarCount> bar_sizes{};
  unsigned vectors = 0;
  uint32_t msix_control = 0;  // config offset of the message control register, 0 without the capability

  std::mutex changed_mutex;
  absl::AnyInvocable<void()> changed;

  std::mutex irq_mutex;
  std::vector<int> eventfds;
  std::vector<bool> pending;
  int removal_eventfd = -1;
  bool removal_wanted = false;

  std::mutex setup_mutex;

  std::atomic<uint64_t> dma_reads{0}, dma_writes{0}, dma_atomics{0}, dma_refused{0}, interrupts{0},
      interrupts_pending{0}, read_timeouts{0}, read_errors{0};
};

}  // namespace dxpu::attach
