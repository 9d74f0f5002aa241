#include "proxy/attach/direct/dma_map.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

namespace dxpu::attach {
namespace {

constexpr uint64_t kPage = 4096;

struct Pages {
  explicit Pages(unsigned n) : bytes(static_cast<std::byte*>(std::aligned_alloc(kPage, n * kPage))) {
    std::memset(bytes, 0, n * kPage);
  }
  ~Pages() { std::free(bytes); }
  std::byte* bytes;
};

TEST(DmaMap, ChecksWhatIsMapped) {
  DmaMap map;
  Pages pages(4);
  EXPECT_EQ(map.add(1, pages.bytes, kPage, true, true).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(map.add(0, pages.bytes + 1, kPage, true, true).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(map.add(0, pages.bytes, 0, true, true).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(map.add(0, pages.bytes, 100, true, true).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(map.add(0, nullptr, kPage, true, true).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(map.add(0, pages.bytes, kPage, false, false).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(map.add(~uint64_t{0} - kPage + 1, pages.bytes, kPage, true, true).code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(map.add(kPage, pages.bytes, 2 * kPage, true, true).ok());
  EXPECT_EQ(map.add(2 * kPage, pages.bytes, kPage, true, true).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(map.add(0, pages.bytes, 2 * kPage, true, true).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(map.add(0, pages.bytes, 4 * kPage, true, true).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(map.add(0, pages.bytes, kPage, true, true).ok());
}

TEST(DmaMap, EveryByteAndItsDirectionIsChecked) {
  DmaMap map;
  Pages readable(2), writable(2);
  ASSERT_TRUE(map.add(0x10000, readable.bytes, 2 * kPage, true, false).ok());
  ASSERT_TRUE(map.add(0x20000, writable.bytes, 2 * kPage, false, true).ok());
  std::vector<std::byte> data(3 * kPage, std::byte{7});
  const std::span<std::byte> span(data);
  EXPECT_TRUE(map.read(0x10000, span.first(2 * kPage)));
  EXPECT_FALSE(map.read(0x10000, span.first(2 * kPage + 1)));
  EXPECT_FALSE(map.read(0xffff, span.first(2)));
  EXPECT_FALSE(map.write(0x10000, span.first(1)));
  EXPECT_TRUE(map.write(0x20000, span.first(2 * kPage)));
  EXPECT_FALSE(map.read(0x20000, span.first(1)));
  EXPECT_FALSE(map.write(0x21fff, span.first(2)));
  EXPECT_EQ(writable.bytes[2 * kPage - 1], std::byte{0});  // a refused access touches nothing; reads above were zeros
  EXPECT_FALSE(map.read(~uint64_t{0}, span.first(2)));
  EXPECT_FALSE(map.read(0x10000, span.first(0)));
  EXPECT_FALSE(map.modify(0x20000, 8, [](void*) { FAIL(); }));
}

TEST(DmaMap, AccessesSpanMappingsThatTouch) {
  DmaMap map;
  Pages a(1), b(1);
  ASSERT_TRUE(map.add(0x1000, a.bytes, kPage, true, true).ok());
  ASSERT_TRUE(map.add(0x2000, b.bytes, kPage, true, true).ok());
  const std::vector<std::byte> data(100, std::byte{9});
  EXPECT_TRUE(map.write(0x2000 - 50, data));
  EXPECT_EQ(a.bytes[kPage - 1], std::byte{9});
  EXPECT_EQ(b.bytes[49], std::byte{9});
  EXPECT_EQ(b.bytes[50], std::byte{0});
  std::vector<std::byte> out(100);
  EXPECT_TRUE(map.read(0x2000 - 50, out));
  EXPECT_EQ(out, data);
  // Both at once, or one, but no part of one.
  EXPECT_EQ(map.remove(0x1000, 3 * kPage).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(map.remove(0x1000, 100).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(map.remove(0x1800, kPage).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(map.remove(0x1000, 2 * kPage).ok());
  EXPECT_FALSE(map.read(0x1000, out));
}

TEST(DmaMap, RemoveWaitsForAnAccessInFlight) {
  DmaMap map;
  Pages page(1);
  ASSERT_TRUE(map.add(0x1000, page.bytes, kPage, true, true).ok());
  std::promise<void> inside, leave;
  std::thread user([&] {
    EXPECT_TRUE(map.modify(0x1000, 8, [&](void*) {
      inside.set_value();
      leave.get_future().wait();
    }));
  });
  inside.get_future().wait();
  auto removed = std::async(std::launch::async, [&] { return map.remove(0x1000, kPage); });
  // From the moment the removal began nobody new gets in, and it does not end before the one inside has left.
  std::byte byte;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (map.read(0x1000, {&byte, 1}) && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_FALSE(map.read(0x1000, {&byte, 1}));
  EXPECT_EQ(removed.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  leave.set_value();
  EXPECT_EQ(removed.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  EXPECT_TRUE(removed.get().ok());
  user.join();
}

TEST(DmaMap, AfterRemoveMemoryIsNeverTouched) {
  DmaMap map;
  std::atomic<bool> stop{false};
  std::thread function([&] {
    const std::vector<std::byte> data(kPage, std::byte{1});
    while (!stop) map.write(0x1000, data);
  });
  for (int i = 0; i < 300; ++i) {
    auto page = std::make_unique<Pages>(1);
    ASSERT_TRUE(map.add(0x1000, page->bytes, kPage, true, true).ok());
    std::this_thread::yield();
    ASSERT_TRUE(map.remove(0x1000, kPage).ok());
    std::memset(page->bytes, 0, kPage);  // a late write would be a race (TSan) or a use after free (ASan)
    page.reset();
  }
  stop = true;
  function.join();
}

}  // namespace
}  // namespace dxpu::attach
