#include "proxy/box/slot_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace dxpu::box {
namespace {

using ::testing::HasSubstr;

SlotRecord record_of(uint32_t slot) {
  SlotRecord record;
  record.slot = slot;
  return record;
}

SlotRecord full() {
  SlotRecord r = record_of(2);
  r.epoch = 9;
  r.served_attachment = "att-1";
  r.served_generation = 4;
  r.lease_expired = true;
  SlotTicket t;
  t.host_id = "h1";
  t.attachment_id = "att-2";
  t.generation = 5;
  t.token.fill(std::byte{0xa5});
  t.expires = absl::FromUnixNanos(1234567890123456789);
  t.used = true;
  r.wanted = t;
  return r;
}

class SlotRecordTest : public ::testing::Test {
 protected:
  SlotRecordTest() : dir_(std::filesystem::path(::testing::TempDir()) / ("dxpu-record-" + std::to_string(::getpid()))) {
    std::filesystem::create_directory(dir_);
    path_ = dir_ / "slot-2.json";
  }
  ~SlotRecordTest() override { std::filesystem::remove_all(dir_); }
  std::filesystem::path dir_;
  std::string path_;
};

TEST_F(SlotRecordTest, SurvivesTheDisk) {
  EXPECT_TRUE(absl::IsNotFound(load(path_, 2).status()));
  ASSERT_TRUE(save(path_, full()).ok());
  auto back = load(path_, 2);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, full());
  SlotRecord bare = record_of(2);
  ASSERT_TRUE(save(path_, bare).ok());
  EXPECT_EQ(*load(path_, 2), bare);
}

TEST_F(SlotRecordTest, OnlyItsOwnerReadsIt) {
  ASSERT_TRUE(save(path_, full()).ok());
  EXPECT_EQ(std::filesystem::status(path_).permissions() & std::filesystem::perms::all,
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

TEST_F(SlotRecordTest, EveryTruncationIsDamage) {
  const std::string text = encode(full());
  for (size_t n = 0; n + 2 < text.size(); ++n) {
    EXPECT_TRUE(absl::IsDataLoss(decode(text.substr(0, n), 2).status())) << n;
  }
}

TEST_F(SlotRecordTest, AnotherSlotsOrForeignFileIsDamageAndNamed) {
  ASSERT_TRUE(save(path_, full()).ok());
  EXPECT_TRUE(absl::IsDataLoss(load(path_, 3).status()));
  std::ofstream(path_) << "[1,2,3]";
  EXPECT_THAT(std::string(load(path_, 2).status().message()), HasSubstr(path_));
  std::string text = encode(full());
  text.replace(text.find("a5a5"), 4, "zz__");
  EXPECT_TRUE(absl::IsDataLoss(decode(text, 2).status()));
  text = encode(full());
  text.replace(text.find("\"epoch\": 9"), 10, "\"epoch\": -");
  EXPECT_TRUE(absl::IsDataLoss(decode(text, 2).status()));
}

TEST_F(SlotRecordTest, ADirectoryThatCannotBeWrittenIsAnErrorWithItsName) {
  absl::Status status = save("/proc/dxpu/slot-2.json", full());
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("/proc/dxpu/slot-2.json"));
}

TEST_F(SlotRecordTest, AFullDiskLeavesTheOldRecord) {
  ASSERT_TRUE(save(path_, full()).ok());
  // The new file can not be made where a directory stands: as good as a full disk, and it works for root too.
  std::filesystem::create_directory(path_ + ".new");
  EXPECT_FALSE(save(path_, record_of(2)).ok());
  EXPECT_EQ(*load(path_, 2), full());
}

}  // namespace
}  // namespace dxpu::box
