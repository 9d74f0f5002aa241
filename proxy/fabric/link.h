// The engine of a session, the same at both ends: who reads the socket, who watches the clock, how it ends.
//
// Threads of a link: a reader and a service thread. The service thread pings, expires requests, flushes what a full
// socket left behind, and does all of the teardown. The reader sleeps in the kernel until something comes. With
// `waiters_read` a thread that waits for an answer anyway takes the reader's place (read_until), so that no thread
// switch lies between the answer and its user; one leads, others wait and lead after it.
//
// Whoever reads also dispatches: requests go to the handler, completions to the requester. Dispatch never waits: frames
// it produces are queued, flushed once per batch, and left to the service thread when the socket is full.
//
// Fatal errors (the stream can not be trusted) end the link with a Terminate; a request that can not be served is
// answered UR and costs nothing else. The two never mix.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "proxy/base/unique_fd.h"
#include "proxy/fabric/hello.h"
#include "proxy/fabric/requester.h"
#include "proxy/fabric/send_queue.h"
#include "proxy/fabric/session.h"

namespace dxpu::fabric {

class Link : public std::enable_shared_from_this<Link> {
 public:
  // The end that uses the link. Called by whoever reads, one at a time; on_end by the service thread, last of all.
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void on_request(pcie::Tlp& request, std::span<const std::byte> payload, uint32_t transaction) = 0;
    virtual void on_reset(uint32_t transaction) = 0;
    virtual void on_heard() = 0;
    // Every outstanding request has ended. `local`: close() was called here.
    virtual void on_end(const absl::Status& why, bool local) = 0;
  };
  struct Setup {
    pcie::RequesterId id = 0;
    pcie::RequesterId peer = 0;
    bool waiters_read = false;
    Negotiated negotiated;
    SessionOptions options;
  };

  static std::shared_ptr<Link> create(std::unique_ptr<Transport> transport, const Setup& setup, Handler* handler);
  ~Link();
  // Starts the threads. Once.
  absl::Status start();

  // ---- requests of this end. All end exactly once; all may be called from continuations.
  void read_memory(uint64_t address, std::span<std::byte> out, function::Done done);
  // Owns the buffer of the answer.
  void read_memory(uint64_t address, uint32_t bytes, function::ReadDone done);
  // Posted. Returns when `data` is not needed any more; waits for room unless called from a continuation.
  void write_memory(uint64_t address, std::span<const std::byte> data);
  // The whole DW at `offset`; with which bytes enabled.
  void read_config(uint32_t offset, uint8_t byte_enable, function::ReadDone done);
  void write_config(uint32_t offset, uint8_t byte_enable, uint32_t dw, absl::Duration deadline, function::Done done);
  void atomic(function::AtomicOp op, uint64_t address, unsigned width, uint64_t operand, uint64_t compare,
              function::ReadDone done);
  void reset_peer(function::Done done);
  // Reads [address, …) and waits, serving the socket meanwhile.
  function::Outcome read_memory_wait(uint64_t address, std::span<std::byte> out);

  // ---- answers of this end
  // A buffer for the bytes of an MRd: the byte at range.address goes to offset address % 4.
  Buffer buffer() { return pool_.get(); }
  void answer_data(const pcie::Tlp& request, uint32_t transaction, Buffer data);
  void answer_inline(const pcie::Tlp& request, uint32_t transaction, std::span<const std::byte> dws);
  void answer_status(const pcie::Tlp& request, uint32_t transaction, function::Outcome outcome);
  void answer_reset(uint32_t transaction, function::Outcome outcome);
  // False: the peer has too many unanswered requests here.
  bool admit();

  // Runs `task` on the service thread after `delay`, or at the end of the link.
  void run_later(absl::Duration delay, std::function<void()> task);

  // ---- life
  bool alive() const { return !dead_.load(std::memory_order_acquire); }
  // Ends the link for `why`; the first one counts. Returns at once, from anywhere.
  void fail(absl::Status why);
  // As fail(), after a Terminate frame.
  void terminate(TerminateReason reason, uint32_t offset, const std::string& detail, absl::Status why);
  // Orderly end; returns when the threads are gone and on_end has run. Not from a continuation.
  void close(TerminateReason reason);
  SessionStats stats() const;
  // True on a thread that is dispatching or is the service thread: it must not wait.
  bool in_dispatch() const;
  void count_unsupported() { unsupported_.fetch_add(1, std::memory_order_relaxed); }
  std::string description() const { return transport_->description(); }

 private:
  struct Later {
    absl::Duration at;
    std::function<void()> task;
  };
  // Marks the thread as one that must not wait for this link.
  class Inside {
   public:
    explicit Inside(const Link* link);
    ~Inside();

   private:
    const Link* const before_;
  };
  // One receive takes at most this much: large enough that system calls do not count, small enough to stay in the
  // cache.
  static constexpr size_t kReceiveBytes = 256 * 1024;
  struct PendingReset {
    absl::Duration deadline;
    function::Done done;
  };

  Link(std::unique_ptr<Transport> transport, const Setup& setup, Handler* handler);

  void begin(const Requester::OperationPtr& operation);
  void watch(absl::Duration deadline);
  void kick();
  void flush() {
    if (!in_dispatch()) queue_.flush();
  }

  // ---- reading
  void reader_main();
  void reader_main_epoll();
  // One receive and the dispatch of everything it completed. False: the link is over.
  bool receive_once(absl::Duration wait);
  bool dispatch(const Frame& frame, FrameError& error);
  bool dispatch_tlp(const Frame& frame, FrameError& error);
  bool take_sequence(const Frame& frame, FrameError& error);
  void arm(bool on);
  bool try_lead();
  void stop_leading();

  // ---- service
  void service_main();
  void serve_timers();
  void send_ping();
  void expire_resets(bool all);
  void run_due(bool all);
  void end(absl::Status why, bool last_words);
  void teardown();

  const std::unique_ptr<Transport> transport_;
  const Setup setup_;
  base::Clock& clock_;
  Handler* const handler_;
  BufferPool pool_;
  std::atomic<uint32_t> received_{0};  // highest sequence taken
  SendQueue queue_;
  Requester requester_;
  FrameParser parser_;  // whoever reads

  std::atomic<bool> dead_{false};
  std::atomic<bool> local_close_{false};
  mutable std::mutex end_mutex_;
  absl::Status why_;         // guarded by end_mutex_
  bool last_words_ = false;  // guarded by end_mutex_: a Terminate is on its way out
  std::mutex close_mutex_;

  // Reading. `leading_`: somebody reads; `armed_`: the background reader is woken by the socket.
  std::mutex lead_mutex_;
  std::condition_variable lead_changed_;
  bool leading_ = false;
  bool armed_ = false;
  std::atomic<unsigned> followers_{0};
  base::UniqueFd epoll_, wake_;

  std::mutex service_mutex_;
  std::condition_variable service_wake_;
  bool kicked_ = false;
  std::vector<Later> later_;
  std::map<uint32_t, PendingReset> resets_;
  uint32_t next_reset_ = 0;
  std::atomic<int64_t> planned_ns_{INT64_MAX};  // when the service thread wakes by itself

  std::atomic<int64_t> last_heard_ns_{0};
  std::atomic<int64_t> round_trip_ns_{0};
  std::atomic<uint64_t> frames_heard_{0};
  std::atomic<bool> ping_out_{false};
  // Service thread only.
  absl::Duration next_ping_;
  uint64_t heard_at_timeout_ = 0;
  unsigned timeouts_in_a_row_ = 0;

  std::atomic<uint32_t> inbound_{0};  // peer's non-posted requests not answered yet
  std::atomic<uint64_t> tlps_sent_{0}, tlps_received_{0}, bytes_received_{0}, unsupported_{0}, malformed_{0}, pings_{0},
      pongs_{0};

  std::thread reader_, service_;
};

}  // namespace dxpu::fabric
