// Box end of a session: serves one Function to one host.
#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/fabric/hello.h"
#include "proxy/fabric/link.h"
#include "proxy/fabric/session.h"
#include "proxy/fabric/tlp_io.h"
#include "proxy/pcie/bar_map.h"

namespace dxpu::fabric {
namespace {

using function::Outcome;

// Which address belongs to which BAR, as the function's configuration says now. Outlives the server, because answers of
// the function may come after it; then there is no function to look at any more.
class Decoder {
 public:
  explicit Decoder(function::Function& function) : function_(&function) { refresh(); }

  void refresh() {
    std::lock_guard lock(mutex_);
    if (function_ == nullptr) return;
    const pcie::ConfigSpace config = function_->config();
    bars_ = config.memory_enabled() ? pcie::BarMap(config) : pcie::BarMap();
  }
  std::optional<pcie::BarMap::Hit> find(uint64_t address, uint64_t bytes) const {
    std::lock_guard lock(mutex_);
    return bars_.find(address, bytes);
  }
  void forget() {
    std::lock_guard lock(mutex_);
    function_ = nullptr;
  }

 private:
  mutable std::mutex mutex_;
  function::Function* function_;
  pcie::BarMap bars_;
};

// A BAR read on its way through the function. Reads with holes in their byte enables have several parts.
struct BarReply {
  std::shared_ptr<Link> link;
  pcie::Tlp request;
  uint32_t transaction = 0;
  Buffer buffer;
  std::atomic<unsigned> parts{0};
  std::atomic<Outcome> outcome{Outcome::kSuccess};

  void part_done(Outcome part) {
    if (part != Outcome::kSuccess) outcome = part;
    if (parts.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    if (outcome == Outcome::kSuccess) {
      link->answer_data(request, transaction, std::move(buffer));
    } else {
      link->answer_status(request, transaction, outcome);
    }
  }
};

struct ConfigReply {
  std::shared_ptr<Link> link;
  std::shared_ptr<Decoder> decoder;
  pcie::Tlp request;
  uint32_t transaction = 0;
};

class FunctionServerImpl final : public FunctionServer, public Link::Handler, public function::Upstream {
 public:
  FunctionServerImpl(function::Function& function, Callbacks callbacks)
      : function_(function), decoder_(std::make_shared<Decoder>(function)), callbacks_(std::move(callbacks)) {}
  ~FunctionServerImpl() override { FunctionServerImpl::close(TerminateReason::kShutdown); }

  absl::Status start(std::shared_ptr<Link> link) {
    link_ = std::move(link);
    function_.connect(this);
    const absl::Status status = link_->start();
    if (!status.ok()) function_.connect(nullptr);
    return status;
  }

  // ---- FunctionServer
  bool alive() const override { return link_->alive(); }
  SessionStats stats() const override { return link_->stats(); }
  void close(TerminateReason reason) override {
    if (link_) link_->close(reason);
  }

  // ---- Upstream: what the function does to its host
  void dma_read(uint64_t address, std::span<std::byte> out, function::Done done) override {
    link_->read_memory(address, out, std::move(done));
  }
  void dma_write(uint64_t address, std::span<const std::byte> data) override { link_->write_memory(address, data); }
  void dma_atomic(function::AtomicOp op, uint64_t address, unsigned width, uint64_t operand, uint64_t compare,
                  function::ReadDone done) override {
    link_->atomic(op, address, width, operand, compare, std::move(done));
  }
  void raise_msix(unsigned vector) override {
    Le<uint32_t> data;
    data.set(vector);
    link_->write_memory(kMsiAddress, std::as_bytes(std::span(&data, 1)));
  }

  // ---- Link::Handler
  void on_request(pcie::Tlp& request, std::span<const std::byte> payload, uint32_t transaction) override {
    switch (request.type) {
      case pcie::TlpType::kMemRead:
        bar_read(request, transaction);
        return;
      case pcie::TlpType::kMemWrite:
        bar_write(request, payload);
        return;
      case pcie::TlpType::kCfgRead0:
      case pcie::TlpType::kCfgWrite0:
        config_access(request, payload, transaction);
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

  void on_reset(uint32_t transaction) override {
    function_.reset([link = link_, decoder = decoder_, transaction](Outcome outcome) {
      decoder->refresh();
      link->answer_reset(transaction, outcome);
    });
  }

  void on_heard() override {
    if (callbacks_.on_heard) callbacks_.on_heard();
  }

  void on_end(const absl::Status& why, bool) override {
    function_.connect(nullptr);
    decoder_->forget();
    // The callback may destroy this object: nothing of it is touched afterwards.
    auto on_end = std::move(callbacks_.on_end);
    if (on_end) on_end(why);
  }

 private:
  void bar_read(pcie::Tlp& request, uint32_t transaction) {
    const pcie::ByteRange range = pcie::range_of(request);
    const auto hit = decoder_->find(range.address, range.bytes);
    if (!hit.has_value()) {
      link_->answer_status(request, transaction, Outcome::kUnsupportedRequest);
      return;
    }
    if (request.first_be == 0) {  // zero-length: a flush; what came before has been given to the function
      const std::array<std::byte, 4> nothing{};
      link_->answer_inline(request, transaction, nothing);
      return;
    }
    const bool plain = pcie::contiguous(request);
    if (plain && request.length_dw <= 2) {
      small_bar_read(request, transaction, *hit, range);
      return;
    }
    auto reply = std::make_shared<BarReply>();
    reply->link = link_;
    reply->transaction = transaction;
    reply->buffer = link_->buffer();
    std::memset(reply->buffer.get(), 0, 4);
    std::memset(reply->buffer.get() + request.length_dw * 4 - 4, 0, 4);
    if (!plain) std::memset(reply->buffer.get(), 0, request.length_dw * 4);
    unsigned parts = 0;
    for_each_run(request, [&](uint64_t, uint32_t, uint32_t) { ++parts; });
    reply->parts = parts;
    reply->request = request;
    // Side effects of reads: exactly the enabled bytes, in order.
    for_each_run(request, [&](uint64_t address, uint32_t offset, uint32_t bytes) {
      function_.bar_read(hit->bar, hit->offset + (address - range.address), bytes,
                         [reply, offset, bytes](Outcome outcome, std::span<const std::byte> data) {
                           if (outcome == Outcome::kSuccess && data.size() != bytes) outcome = Outcome::kCompleterAbort;
                           if (outcome == Outcome::kSuccess)
                             std::memcpy(reply->buffer.get() + offset, data.data(), bytes);
                           reply->part_done(outcome);
                         });
    });
  }

  // Registers: no buffer, one allocation.
  void small_bar_read(pcie::Tlp& request, uint32_t transaction, const pcie::BarMap::Hit& hit,
                      const pcie::ByteRange& range) {
    struct Small {
      std::shared_ptr<Link> link;
      pcie::Tlp request;
      uint32_t transaction;
    };
    auto reply = std::make_unique<Small>(Small{link_, std::move(request), transaction});
    const uint32_t pad = range.address & 3;
    function_.bar_read(
        hit.bar, hit.offset, range.bytes,
        [reply = std::move(reply), pad, bytes = range.bytes](Outcome outcome, std::span<const std::byte> data) {
          if (outcome == Outcome::kSuccess && data.size() != bytes) outcome = Outcome::kCompleterAbort;
          if (outcome != Outcome::kSuccess) {
            reply->link->answer_status(reply->request, reply->transaction, outcome);
            return;
          }
          std::array<std::byte, 8> dws{};
          std::memcpy(dws.data() + pad, data.data(), bytes);
          reply->link->answer_inline(reply->request, reply->transaction,
                                     std::span(dws).first(reply->request.length_dw * 4u));
        });
  }

  void bar_write(const pcie::Tlp& request, std::span<const std::byte> payload) {
    if (request.poisoned) {
      link_->count_unsupported();
      return;
    }
    for_each_run(request, [&](uint64_t address, uint32_t offset, uint32_t bytes) {
      const auto hit = decoder_->find(address, bytes);
      if (!hit.has_value()) {
        link_->count_unsupported();
        return;
      }
      function_.bar_write(hit->bar, hit->offset, payload.subspan(offset, bytes));
    });
  }

  void config_access(pcie::Tlp& request, std::span<const std::byte> payload, uint32_t transaction) {
    if (request.poisoned) {
      link_->answer_status(request, transaction, Outcome::kUnsupportedRequest);
      return;
    }
    auto reply = std::make_shared<ConfigReply>();
    reply->link = link_;
    reply->decoder = decoder_;
    reply->transaction = transaction;
    const uint32_t reg = request.config_register;
    const uint8_t be = request.first_be;
    const bool write = request.type == pcie::TlpType::kCfgWrite0;
    uint32_t value = 0;
    if (write) {
      Le<uint32_t> wire;
      std::memcpy(&wire, payload.data(), 4);
      value = wire.get();
    }
    reply->request = std::move(request);
    // Byte enables of a driver's accesses are one aligned run of 1, 2 or 4 bytes; a read of anything else reads the DW
    // (configuration reads have no side effects), a write of anything else is made of bytes.
    struct Access {
      uint32_t offset;
      unsigned size;
    };
    std::vector<Access> accesses;
    switch (be) {
      case 0x1:
      case 0x2:
      case 0x4:
      case 0x8:
        accesses.push_back({static_cast<uint32_t>(std::countr_zero(be)), 1});
        break;
      case 0x3:
        accesses.push_back({0, 2});
        break;
      case 0xc:
        accesses.push_back({2, 2});
        break;
      case 0xf:
        accesses.push_back({0, 4});
        break;
      default:
        if (!write) {
          accesses.push_back({0, 4});
        } else {
          for (uint32_t i = 0; i < 4; ++i) {
            if ((be >> i & 1) != 0) accesses.push_back({i, 1});
          }
        }
    }
    if (accesses.empty()) {  // a write of nothing
      link_->answer_status(reply->request, transaction, Outcome::kSuccess);
      return;
    }
    if (!write) {
      const Access a = accesses.front();
      function_.config_read(reg + a.offset, a.size, [reply, a](Outcome outcome, std::span<const std::byte> data) {
        if (outcome == Outcome::kSuccess && data.size() != a.size) outcome = Outcome::kCompleterAbort;
        if (outcome != Outcome::kSuccess) {
          reply->link->answer_status(reply->request, reply->transaction, outcome);
          return;
        }
        std::array<std::byte, 4> dw{};
        std::memcpy(dw.data() + a.offset, data.data(), a.size);
        reply->link->answer_inline(reply->request, reply->transaction, dw);
      });
      return;
    }
    // Of several parts only the last one answers; a failure of an earlier one shows in its outcome as well or not at
    // all.
    for (size_t i = 0; i < accesses.size(); ++i) {
      const Access a = accesses[i];
      const uint32_t part = a.size == 4 ? value : value >> (8 * a.offset) & ((1u << (8 * a.size)) - 1);
      const bool last = i + 1 == accesses.size();
      function_.config_write(reg + a.offset, a.size, part, [reply, last](Outcome outcome) {
        // BARs and command move addresses, device control can reset the function: rare enough to look every time.
        reply->decoder->refresh();
        if (last) reply->link->answer_status(reply->request, reply->transaction, outcome);
      });
    }
  }

  function::Function& function_;
  const std::shared_ptr<Decoder> decoder_;
  Callbacks callbacks_;
  std::shared_ptr<Link> link_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<FunctionServer>> FunctionServer::serve(function::Function& function,
                                                                      std::unique_ptr<Transport> transport,
                                                                      const Hello& hello, uint64_t epoch,
                                                                      const SessionOptions& options,
                                                                      Callbacks callbacks) {
  DXPU_RETURN_IF_ERROR(check(options));
  if (epoch == 0) return absl::InvalidArgumentError("epoch 0 means none; epochs count from 1");
  HelloAck ack = answer_hello(hello, options, epoch);
  ack.model = function.identity().model;
  std::vector<std::byte> frame = encode_hello_ack_frame(ack, function.config());
  const iovec part{frame.data(), frame.size()};
  DXPU_RETURN_IF_ERROR(transport->send({&part, 1}, options.deadlines.fast_io_fail));

  Link::Setup setup;
  setup.id = kFunctionId;
  setup.peer = kHostId;
  setup.options = options;
  setup.negotiated = negotiate(hello, options);
  auto out = std::make_unique<FunctionServerImpl>(function, std::move(callbacks));
  std::shared_ptr<Link> link = Link::create(std::move(transport), setup, out.get());
  DXPU_RETURN_IF_ERROR(out->start(std::move(link)));
  return out;
}

}  // namespace dxpu::fabric
