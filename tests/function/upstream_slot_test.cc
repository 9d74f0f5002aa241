#include "proxy/function/upstream_slot.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

namespace dxpu::function {
namespace {

class NullUpstream : public Upstream {
 public:
  void dma_read(uint64_t, std::span<std::byte>, Done done) override { done(Outcome::kUnsupportedRequest); }
  void dma_write(uint64_t, std::span<const std::byte>) override {}
  void dma_atomic(AtomicOp, uint64_t, unsigned, uint64_t, uint64_t, ReadDone done) override {
    done(Outcome::kUnsupportedRequest, {});
  }
  void raise_msix(unsigned) override {}
};

TEST(UpstreamSlot, IsEmptyUntilConnected) {
  UpstreamSlot slot;
  EXPECT_FALSE(slot.use());
  NullUpstream upstream;
  slot.connect(&upstream);
  EXPECT_TRUE(slot.use());
  slot.connect(nullptr);
  EXPECT_FALSE(slot.use());
}

TEST(UpstreamSlot, ConnectWaitsForUsersOfTheOldOneOnly) {
  UpstreamSlot slot;
  NullUpstream first, second;
  slot.connect(&first);
  std::promise<void> inside, leave;
  std::thread user([&] {
    auto use = slot.use();
    inside.set_value();
    leave.get_future().wait();
  });
  inside.get_future().wait();
  auto connected = std::async(std::launch::async, [&] { slot.connect(&second); });
  // New users get the second one while the first is still in use, so nobody waits behind connect().
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  bool sees_second = false;
  while (!sees_second && std::chrono::steady_clock::now() < deadline) {
    auto use = slot.use();
    sees_second = use.operator->() == &second;
  }
  EXPECT_TRUE(sees_second);
  EXPECT_EQ(connected.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  leave.set_value();
  EXPECT_EQ(connected.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  user.join();
}

TEST(UpstreamSlot, UsesNest) {
  UpstreamSlot slot;
  NullUpstream upstream;
  slot.connect(&upstream);
  {
    auto outer = slot.use();
    auto inner = slot.use();
    EXPECT_TRUE(outer);
    EXPECT_TRUE(inner);
  }
  slot.connect(nullptr);
}

}  // namespace
}  // namespace dxpu::function
