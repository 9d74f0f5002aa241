// Host end of a session: a Function whose other end is a box.
#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/fabric/hello.h"
#include "proxy/fabric/link.h"
#include "proxy/fabric/session.h"
#include "proxy/fabric/tlp_io.h"
#include "proxy/function/upstream_slot.h"
#include "proxy/pcie/bar_map.h"

namespace dxpu::fabric {
namespace {

using function::Outcome;

constexpr uint32_t kCommand = 0x04;
constexpr uint32_t kBar0 = 0x10;
constexpr uint32_t kBarsEnd = 0x28;
constexpr uint32_t kRomBar = 0x30;
constexpr uint32_t kHeaderEnd = 0x40;
constexpr uint16_t kMemoryEnable = 0x2;
constexpr uint16_t kBusMaster = 0x4;
constexpr uint16_t kSerialCapability = 0x0003;
constexpr absl::Duration kConfigRetryDelay = absl::Milliseconds(1);
// After a reset a function may answer "retry" for up to a second (PCIe base specification, "Function Level Reset").
constexpr absl::Duration kConfigRetryFor = absl::Seconds(1);

bool access_ok(uint32_t offset, unsigned size) {
  return (size == 1 || size == 2 || size == 4) && offset % size == 0 && offset + size <= pcie::kConfigSpaceBytes;
}
uint8_t enables(uint32_t offset, unsigned size) { return static_cast<uint8_t>(((1u << size) - 1) << (offset & 3)); }

// What an answer to a memory request of the function needs, wherever and whenever the upstream gives it.
struct Reply {
  std::shared_ptr<Link> link;
  pcie::Tlp request;
  uint32_t transaction = 0;
  Buffer buffer;
};

class RemoteFunctionImpl final : public RemoteFunction, public Link::Handler {
 public:
  RemoteFunctionImpl(pcie::ConfigSpace image, HelloAck ack, absl::Duration programming_deadline)
      : image_(std::move(image)),
        ack_(std::move(ack)),
        programming_deadline_(programming_deadline),
        addresses_(pcie::BarMap::assign(image_, kFabricBarBase)) {
    for (unsigned i = 0; i < pcie::kBarCount; ++i) sizes_[i] = image_.bar(i).size;
    identity_.vendor_id = static_cast<uint16_t>(image_.read(0x00, 2));
    identity_.device_id = static_cast<uint16_t>(image_.read(0x02, 2));
    identity_.class_code = image_.read(0x08, 4) >> 8;
    identity_.model = ack_.model;
    if (const auto serial = image_.find_extended_capability(kSerialCapability); serial.has_value()) {
      identity_.serial_number = image_.read(*serial + 4u, 4) | uint64_t{image_.read(*serial + 8u, 4)} << 32;
    }
  }
  ~RemoteFunctionImpl() override { RemoteFunctionImpl::close(); }

  absl::Status start(std::shared_ptr<Link> link) {
    link_ = std::move(link);
    DXPU_RETURN_IF_ERROR(link_->start());
    struct Wait {
      std::mutex mutex;
      std::condition_variable changed;
      bool over = false;
      Outcome outcome = Outcome::kTimeout;
    };
    auto wait = std::make_shared<Wait>();
    program([wait](Outcome outcome) {
      std::lock_guard lock(wait->mutex);
      wait->over = true;
      wait->outcome = outcome;
      wait->changed.notify_all();
    });
    std::unique_lock lock(wait->mutex);
    wait->changed.wait_for(lock, absl::ToChronoNanoseconds(programming_deadline_), [&] { return wait->over; });
    if (wait->over && wait->outcome == Outcome::kSuccess) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat(link_->description(), ": the function's BARs could not be programmed: ",
                                               wait->over ? function::name_of(wait->outcome) : "no answer"));
  }

  // From here on a loss is told to `on_loss`; until then it was the error of connect().
  absl::Status hand_out(absl::AnyInvocable<void(absl::Status)> on_loss) {
    std::lock_guard lock(loss_mutex_);
    if (!ended_.ok()) return ended_;
    on_loss_ = std::move(on_loss);
    return absl::OkStatus();
  }

  // ---- Function
  function::Identity identity() const override { return identity_; }

  pcie::ConfigSpace config() const override {
    std::lock_guard lock(image_mutex_);
    return image_;
  }

  void config_write(uint32_t offset, unsigned size, uint32_t value, function::Done done) override {
    if (!access_ok(offset, size)) {
      done(Outcome::kUnsupportedRequest);
      return;
    }
    bool reset = false;
    {
      std::lock_guard lock(image_mutex_);
      image_.write(offset, size, value);
      reset = image_.take_function_level_reset();
      if (reset) image_.reset();
    }
    const uint32_t dw = offset & ~3u;
    // The local BARs are the local kernel's business; the function's keep the fabric's addresses.
    if ((dw >= kBar0 && dw < kBarsEnd) || dw == kRomBar) {
      done(link_->alive() ? Outcome::kSuccess : Outcome::kLinkDown);
      return;
    }
    uint32_t shifted = value << (8 * (offset & 3));
    // Memory decoding at the far end stays on: whether the host reaches the BARs is decided at the host.
    if (offset == kCommand) shifted |= kMemoryEnable;
    if (!reset) {
      link_->write_config(dw, enables(offset, size), shifted, absl::ZeroDuration(), std::move(done));
      return;
    }
    link_->write_config(
        dw, enables(offset, size), shifted, kConfigRetryFor,
        [this, done = std::move(done)](Outcome outcome) mutable { after_reset(outcome, std::move(done)); });
  }

  void config_read(uint32_t offset, unsigned size, function::ReadDone done) override {
    if (!access_ok(offset, size)) {
      done(Outcome::kUnsupportedRequest, {});
      return;
    }
    const auto give = [size](uint32_t value, function::ReadDone& to) {
      Le<uint32_t> wire;
      wire.set(value);
      to(Outcome::kSuccess, std::as_bytes(std::span(&wire, 1)).first(size));
    };
    if (offset < kHeaderEnd) {
      if (!link_->alive()) {
        done(Outcome::kLinkDown, {});
        return;
      }
      uint32_t value = 0;
      {
        std::lock_guard lock(image_mutex_);
        value = image_.read(offset, size);
      }
      give(value, done);
      return;
    }
    link_->read_config(
        offset, enables(offset, size),
        [offset, size, done = std::move(done)](Outcome outcome, std::span<const std::byte> data) mutable {
          if (outcome != Outcome::kSuccess) {
            done(outcome, {});
          } else {
            done(outcome, data.subspan(offset & 3, size));
          }
        });
  }

  void bar_read(unsigned bar, uint64_t offset, uint32_t length, function::ReadDone done) override {
    if (!in_bar(bar, offset, length) || length > pcie::kMaxPayloadBytes) {
      done(Outcome::kUnsupportedRequest, {});
      return;
    }
    link_->read_memory(addresses_[bar] + offset, length, std::move(done));
  }

  Outcome bar_read_wait(unsigned bar, uint64_t offset, std::span<std::byte> out) override {
    Outcome outcome = Outcome::kUnsupportedRequest;
    if (in_bar(bar, offset, out.size()) && out.size() <= pcie::kMaxPayloadBytes) {
      outcome = link_->read_memory_wait(addresses_[bar] + offset, out);
    }
    if (outcome != Outcome::kSuccess) std::fill(out.begin(), out.end(), std::byte{0xff});
    return outcome;
  }

  void bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) override {
    if (!in_bar(bar, offset, data.size())) {
      link_->count_unsupported();
      return;
    }
    link_->write_memory(addresses_[bar] + offset, data);
  }

  void connect(function::Upstream* upstream) override { upstream_.connect(upstream); }

  void reset(function::Done done) override {
    {
      std::lock_guard lock(image_mutex_);
      image_.reset();
    }
    link_->reset_peer(
        [this, done = std::move(done)](Outcome outcome) mutable { after_reset(outcome, std::move(done)); });
  }

  absl::Status scrub() override {
    return absl::FailedPreconditionError(
        "a remote function is scrubbed by its box when the session has ended, not by its host");
  }

  // ---- RemoteFunction
  uint64_t epoch() const override { return ack_.epoch; }
  bool alive() const override { return link_->alive(); }
  SessionStats stats() const override { return link_->stats(); }
  void close() override {
    if (link_) link_->close(TerminateReason::kShutdown);
  }

  // ---- Link::Handler
  void on_request(pcie::Tlp& request, std::span<const std::byte> payload, uint32_t transaction) override {
    switch (request.type) {
      case pcie::TlpType::kMemRead:
        dma_read(request, transaction);
        return;
      case pcie::TlpType::kMemWrite:
        dma_write(request, payload);
        return;
      case pcie::TlpType::kFetchAdd:
      case pcie::TlpType::kSwap:
      case pcie::TlpType::kCompareSwap:
        dma_atomic(request, payload, transaction);
        return;
      default:
        break;
    }
    if (pcie::class_of(request.type) == pcie::TlpClass::kNonPosted) {
      link_->answer_status(request, transaction, Outcome::kUnsupportedRequest);
    } else {
      link_->count_unsupported();
    }
  }
  // A host has nothing to reset.
  void on_reset(uint32_t transaction) override { link_->answer_reset(transaction, Outcome::kUnsupportedRequest); }
  void on_heard() override {}
  void on_end(const absl::Status& why, bool local) override {
    absl::AnyInvocable<void(absl::Status)> on_loss;
    {
      std::lock_guard lock(loss_mutex_);
      ended_ = why;
      on_loss = std::move(on_loss_);
    }
    // The callback may destroy this object: nothing of it is touched afterwards.
    if (!local && on_loss) on_loss(why);
  }

 private:
  bool in_bar(unsigned bar, uint64_t offset, uint64_t bytes) const {
    return bar < pcie::kBarCount && bytes != 0 && bytes <= sizes_[bar] && offset <= sizes_[bar] - bytes;
  }

  void after_reset(Outcome outcome, function::Done done) {
    if (outcome != Outcome::kSuccess) {
      done(outcome);
      return;
    }
    program(std::move(done));
  }

  // Writes fabric addresses to all BARs, then turns memory decoding and bus mastering on, one write after the other.
  struct Programming {
    std::vector<std::pair<uint32_t, uint32_t>> writes;
    size_t next = 0;
    absl::Duration retry_until;
    function::Done done;
  };
  void program(function::Done done) {
    auto job = std::make_shared<Programming>();
    for (unsigned i = 0; i < pcie::kBarCount; ++i) {
      if (sizes_[i] == 0) continue;
      const uint32_t reg = kBar0 + 4 * i;
      job->writes.emplace_back(reg, static_cast<uint32_t>(addresses_[i]));
      if (image_is_64bit(i)) job->writes.emplace_back(reg + 4, static_cast<uint32_t>(addresses_[i] >> 32));
    }
    job->writes.emplace_back(kCommand, kMemoryEnable | kBusMaster);
    job->retry_until = base::Clock::real().monotonic() + std::max(kConfigRetryFor, programming_deadline_);
    job->done = std::move(done);
    program_next(job);
  }
  bool image_is_64bit(unsigned bar) const {
    std::lock_guard lock(image_mutex_);
    return image_.bar(bar).is_64bit;
  }
  void program_next(const std::shared_ptr<Programming>& job) {
    if (job->next == job->writes.size()) {
      job->done(Outcome::kSuccess);
      return;
    }
    const auto [reg, value] = job->writes[job->next];
    const uint8_t be = reg == kCommand ? 0x3 : 0xf;  // the other half of the DW is the status register
    link_->write_config(reg, be, value, kConfigRetryFor, [this, job](Outcome outcome) {
      if (outcome == Outcome::kConfigRetry && base::Clock::real().monotonic() < job->retry_until) {
        link_->run_later(kConfigRetryDelay, [this, job] { program_next(job); });
        return;
      }
      if (outcome != Outcome::kSuccess) {
        job->done(outcome);
        return;
      }
      ++job->next;
      program_next(job);
    });
  }

  void dma_read(pcie::Tlp& request, uint32_t transaction) {
    const pcie::ByteRange range = pcie::range_of(request);
    if (request.first_be == 0) {  // zero-length: a flush, and everything before it has been delivered
      const std::array<std::byte, 4> nothing{};
      link_->answer_inline(request, transaction, nothing);
      return;
    }
    const function::UpstreamSlot::Use upstream = upstream_.use();
    if (!upstream || in_msi_window(range.address)) {
      link_->answer_status(request, transaction, Outcome::kUnsupportedRequest);
      return;
    }
    auto reply = std::make_unique<Reply>();
    reply->link = link_;
    reply->buffer = link_->buffer();
    const uint32_t pad = range.address & 3;
    std::byte* const bytes = reply->buffer.get();
    // Padding DWs belong to whoever had the buffer before: never let them out.
    std::memset(bytes, 0, 4);
    std::memset(bytes + ((pad + range.bytes - 1) & ~3u), 0, 4);
    reply->request = std::move(request);
    reply->transaction = transaction;
    const std::span<std::byte> out(bytes + pad, range.bytes);
    upstream->dma_read(range.address, out, [reply = std::move(reply)](Outcome outcome) {
      if (outcome == Outcome::kSuccess) {
        reply->link->answer_data(reply->request, reply->transaction, std::move(reply->buffer));
      } else {
        reply->link->answer_status(reply->request, reply->transaction, outcome);
      }
    });
  }

  void dma_write(const pcie::Tlp& request, std::span<const std::byte> payload) {
    const function::UpstreamSlot::Use upstream = upstream_.use();
    if (!upstream || request.poisoned) {
      link_->count_unsupported();
      return;
    }
    if (in_msi_window(request.address)) {
      if (request.length_dw != 1 || request.first_be != 0xf) {
        link_->count_unsupported();
        return;
      }
      Le<uint32_t> vector;
      std::memcpy(&vector, payload.data(), 4);
      upstream->raise_msix(vector.get());
      return;
    }
    for_each_run(request, [&](uint64_t address, uint32_t offset, uint32_t bytes) {
      upstream->dma_write(address, payload.subspan(offset, bytes));
    });
  }

  void dma_atomic(pcie::Tlp& request, std::span<const std::byte> payload, uint32_t transaction) {
    const bool cas = request.type == pcie::TlpType::kCompareSwap;
    const size_t width = cas ? payload.size() / 2 : payload.size();
    const function::UpstreamSlot::Use upstream = upstream_.use();
    if (!upstream || (width != 4 && width != 8) || request.poisoned) {
      link_->answer_status(request, transaction, Outcome::kUnsupportedRequest);
      return;
    }
    Le<uint64_t> first, second;
    first.set(0);
    second.set(0);
    std::memcpy(&first, payload.data(), width);
    if (cas) std::memcpy(&second, payload.data() + width, width);
    const function::AtomicOp op = cas                                        ? function::AtomicOp::kCompareSwap
                                  : request.type == pcie::TlpType::kFetchAdd ? function::AtomicOp::kFetchAdd
                                                                             : function::AtomicOp::kSwap;
    auto reply = std::make_unique<Reply>();
    reply->link = link_;
    reply->request = std::move(request);
    reply->transaction = transaction;
    const uint64_t address = reply->request.address;
    upstream->dma_atomic(
        op, address, static_cast<unsigned>(width), cas ? second.get() : first.get(), cas ? first.get() : 0,
        [reply = std::move(reply), width](Outcome outcome, std::span<const std::byte> old) {
          if (outcome == Outcome::kSuccess && old.size() == width) {
            reply->link->answer_inline(reply->request, reply->transaction, old);
          } else {
            reply->link->answer_status(reply->request, reply->transaction,
                                       outcome == Outcome::kSuccess ? Outcome::kCompleterAbort : outcome);
          }
        });
  }

  static bool in_msi_window(uint64_t address) { return address >= kMsiAddress && address < kMsiWindowEnd; }

  mutable std::mutex image_mutex_;
  pcie::ConfigSpace image_;
  const HelloAck ack_;
  const absl::Duration programming_deadline_;
  const std::array<uint64_t, pcie::kBarCount> addresses_;
  std::array<uint64_t, pcie::kBarCount> sizes_{};
  function::Identity identity_;
  std::mutex loss_mutex_;
  absl::Status ended_;
  absl::AnyInvocable<void(absl::Status)> on_loss_;
  function::UpstreamSlot upstream_;
  std::shared_ptr<Link> link_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteFunction>> RemoteFunction::connect(
    std::unique_ptr<Transport> transport, const Ticket& ticket, const SessionOptions& options,
    absl::Duration hello_deadline, absl::AnyInvocable<void(absl::Status)> on_loss) {
  DXPU_RETURN_IF_ERROR(check(options));
  for (const auto& [name, id] :
       {std::pair{"host", &ticket.host_id}, {"box", &ticket.box_id}, {"attachment", &ticket.attachment_id}}) {
    if (id->size() > kMaxIdBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("ticket: ", name, " id of ", id->size(), " bytes, at most ", kMaxIdBytes));
    }
  }
  const absl::Time until = absl::Now() + hello_deadline;
  std::vector<std::byte> hello = encode_hello_frame(ticket, options);
  const iovec part{hello.data(), hello.size()};
  DXPU_RETURN_IF_ERROR(transport->send({&part, 1}, hello_deadline));

  std::vector<std::byte> bytes;
  Frame frame;
  FrameError error;
  HelloAck ack;
  absl::Status status = receive_hello_frame(*transport, until - absl::Now(), bytes, frame, error);
  if (status.ok() && frame.envelope.type == FrameType::kTerminate) {
    return to_status(decode_terminate(frame.header, frame.payload));
  }
  if (status.ok() && frame.envelope.type != FrameType::kHelloAck) {
    error = {TerminateReason::kProtocolError, 0, absl::StrCat("expected HelloAck, got ", name_of(frame.envelope.type))};
    status = absl::InvalidArgumentError(absl::StrCat(transport->description(), ": ", error.detail));
  }
  if (status.ok() && !decode_hello_ack(frame.header, frame.payload, options, ack, error)) {
    status =
        absl::InvalidArgumentError(absl::StrCat(transport->description(), ": hello answer refused: ", error.detail));
  }
  absl::StatusOr<pcie::ConfigSpace> image = absl::UnknownError("no configuration image");
  if (status.ok()) {
    image = pcie::ConfigSpace::from_image(ack.image[0], ack.image[1], ack.image[2]);
    if (!image.ok()) {
      error = {TerminateReason::kProtocolError, kEnvelopeBytes + sizeof(HelloAckWire),
               std::string(image.status().message())};
      status = absl::InvalidArgumentError(
          absl::StrCat(transport->description(), ": configuration image refused: ", image.status().message()));
    }
  }
  if (!status.ok()) {
    if (!error.detail.empty()) send_terminate(*transport, error.reason, error.offset, error.detail).IgnoreError();
    transport->shutdown();
    return status;
  }

  Link::Setup setup;
  setup.id = kHostId;
  setup.peer = kFunctionId;
  setup.waiters_read = true;
  setup.options = options;
  setup.negotiated = {ack.version,
                      ack.features,
                      ack.max_payload,
                      ack.max_read_request,
                      ack.read_completion_boundary,
                      options.max_outstanding,
                      ack.max_outstanding};
  const absl::Duration left = std::max(until - absl::Now(), absl::Milliseconds(1));
  auto out = std::make_unique<RemoteFunctionImpl>(*std::move(image), std::move(ack), left);
  std::shared_ptr<Link> link = Link::create(std::move(transport), setup, out.get());
  DXPU_RETURN_IF_ERROR(out->start(std::move(link)));
  DXPU_RETURN_IF_ERROR(out->hand_out(std::move(on_loss)));
  return out;
}

}  // namespace dxpu::fabric
