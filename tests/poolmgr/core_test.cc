#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "poolmgr/core/inventory.h"
#include "poolmgr/core/lifecycle.h"
#include "poolmgr/core/placer.h"
#include "poolmgr/core/types.h"

namespace dxpu::poolmgr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- lifecycle: every pair, against a list written down once more by hand ----

TEST(Lifecycle, EveryPairIsAsWrittenDown) {
  using enum Lifecycle;
  const std::set<std::pair<Lifecycle, Lifecycle>> legal = {
      {kDiscovered, kScrubbing}, {kDiscovered, kValidating}, {kDiscovered, kDetaching}, {kDiscovered, kRetired},
      {kScrubbing, kValidating}, {kScrubbing, kDetaching},   {kScrubbing, kRetired},    {kValidating, kFree},
      {kValidating, kScrubbing}, {kValidating, kDetaching},  {kValidating, kRetired},   {kFree, kReserved},
      {kFree, kScrubbing},       {kFree, kValidating},       {kFree, kDetaching},       {kFree, kRetired},
      {kReserved, kAttaching},   {kReserved, kDetaching},    {kAttaching, kAttached},   {kAttaching, kDetaching},
      {kAttached, kDraining},    {kAttached, kDetaching},    {kDraining, kDetaching},   {kDetaching, kScrubbing},
      {kDetaching, kValidating}, {kDetaching, kRetired},     {kRetired, kDiscovered}};
  for (Lifecycle from : kEveryLifecycle) {
    for (Lifecycle to : kEveryLifecycle) {
      EXPECT_EQ(may_follow(from, to), legal.count({from, to}) != 0) << to_string(from) << " → " << to_string(to);
      FunctionRecord f;
      f.id = "b/0";
      f.lifecycle = from;
      absl::Status status = move_to(f, to, absl::UnixEpoch(), "why");
      EXPECT_EQ(status.ok(), legal.count({from, to}) != 0);
      EXPECT_EQ(f.lifecycle, status.ok() ? to : from);
    }
  }
}

TEST(Lifecycle, FreeComesOnlyAfterValidating) {
  for (Lifecycle from : kEveryLifecycle) EXPECT_EQ(may_follow(from, Lifecycle::kFree), from == Lifecycle::kValidating);
}

TEST(Lifecycle, EveryAttachmentPairIsAsWrittenDown) {
  using enum AttachmentState;
  const std::set<std::pair<AttachmentState, AttachmentState>> legal = {
      {kRequested, kPlaced},    {kPlaced, kLinking},    {kPlaced, kUnlinking},     {kLinking, kPlugging},
      {kLinking, kUnplugging},  {kPlugging, kAttached}, {kPlugging, kUnplugging},  {kAttached, kQuiescing},
      {kAttached, kUnplugging}, {kAttached, kLost},     {kQuiescing, kUnplugging}, {kUnplugging, kUnlinking},
      {kUnplugging, kEnded},    {kUnplugging, kFailed}, {kUnlinking, kEnded},      {kUnlinking, kFailed},
      {kLost, kFailed}};
  for (AttachmentState from : kEveryAttachmentState) {
    for (AttachmentState to : kEveryAttachmentState) {
      EXPECT_EQ(may_follow(from, to), legal.count({from, to}) != 0) << to_string(from) << " → " << to_string(to);
      AttachmentRecord a;
      a.state = from;
      EXPECT_EQ(move_to(a, to, absl::UnixEpoch(), "why").ok(), legal.count({from, to}) != 0);
    }
  }
}

TEST(Ids, AreNamesOfMachines) {
  for (const char* good : {"a", "box-1", "h1.rack2", "0"}) EXPECT_TRUE(valid_id(good)) << good;
  for (const char* bad : {"", "-a", ".a", "A", "a b", "a/b", "ä"}) EXPECT_FALSE(valid_id(bad)) << bad;
  EXPECT_TRUE(valid_id(std::string(63, 'a')));
  EXPECT_FALSE(valid_id(std::string(64, 'a')));
}

// ---- inventory ----

TEST(Inventory, IndexesFollowAnAttachmentThatLetsGoOneByOne) {
  Inventory inventory;
  AttachmentRecord a;
  a.id = "att-1";
  a.host_id = "h1";
  a.port = 2;
  a.box_id = "b1";
  a.slot = 3;
  a.state = AttachmentState::kUnplugging;
  inventory.put(a);
  EXPECT_EQ(inventory.holder_of_port("h1", 2)->id, "att-1");
  EXPECT_EQ(inventory.holder_of_function("b1/3")->id, "att-1");
  a.box_released = true;
  inventory.put(a);
  EXPECT_EQ(inventory.holder_of_function("b1/3"), nullptr);
  EXPECT_EQ(inventory.holder_of_port("h1", 2)->id, "att-1");
  EXPECT_EQ(inventory.attachments_of_host("h1").size(), 1u);
  a.host_released = true;
  a.state = AttachmentState::kEnded;
  inventory.put(a);
  EXPECT_EQ(inventory.holder_of_port("h1", 2), nullptr);
  EXPECT_TRUE(inventory.attachments().empty());
  EXPECT_TRUE(inventory.attachments_of_box("b1").empty());
}

// ---- placer ----

void add_box(Inventory& inventory, const std::string& id, uint32_t slots, const std::string& model, uint64_t memory) {
  BoxRecord box;
  box.id = id;
  box.slot_count = slots;
  inventory.put(box);
  for (uint32_t slot = 0; slot < slots; ++slot) {
    FunctionRecord f;
    f.id = function_id(id, slot);
    f.box_id = id;
    f.slot = slot;
    f.model = model;
    f.memory_bytes = memory;
    f.lifecycle = Lifecycle::kFree;
    inventory.put(f);
  }
}

void take(Inventory& inventory, const std::string& id) {
  FunctionRecord f = *inventory.function(id);
  f.lifecycle = Lifecycle::kAttached;
  f.attachment_id = "att-x";
  inventory.put(f);
}

const Placer::BoxAvailable kAll = [](absl::string_view) { return true; };

PlacementRequest request_for(uint32_t count, bool same_box = false, const std::string& model = "") {
  PlacementRequest r;
  r.count = count;
  r.same_box = same_box;
  r.model = model;
  return r;
}

TEST(Placer, FillsPartlyUsedBoxesFirst) {
  Inventory inventory;
  add_box(inventory, "a", 4, "m", 1);
  add_box(inventory, "b", 4, "m", 1);
  take(inventory, "b/1");
  Placement p = Placer::place(inventory, kAll, request_for(1));
  EXPECT_THAT(p.function_ids, ElementsAre("b/0"));
  // Four in one box still fit into the whole one.
  EXPECT_THAT(Placer::place(inventory, kAll, request_for(4, true)).function_ids,
              ElementsAre("a/0", "a/1", "a/2", "a/3"));
  // Three go where just three are left.
  EXPECT_THAT(Placer::place(inventory, kAll, request_for(3)).function_ids, ElementsAre("b/0", "b/2", "b/3"));
}

TEST(Placer, SpreadsOverBoxesOnlyWhenItMayAndMust) {
  Inventory inventory;
  add_box(inventory, "a", 2, "m", 1);
  add_box(inventory, "b", 3, "m", 1);
  EXPECT_THAT(Placer::place(inventory, kAll, request_for(4)).function_ids, ElementsAre("b/0", "b/1", "b/2", "a/0"));
  Placement refused = Placer::place(inventory, kAll, request_for(4, true));
  EXPECT_FALSE(refused.ok());
  EXPECT_EQ(refused.counts(), (std::map<std::string, uint32_t>{{"too-few-in-its-box", 5}}));
}

TEST(Placer, RefusalNamesEachCandidateOnceWithItsFirstReason) {
  Inventory inventory;
  add_box(inventory, "a", 3, "big", 100);
  add_box(inventory, "b", 2, "small", 10);
  take(inventory, "a/0");
  FunctionRecord sick = *inventory.function("a/1");
  sick.conditions.set(Condition::kUnhealthy, true);
  inventory.put(sick);
  PlacementRequest r = request_for(2, false, "big");
  r.min_memory_bytes = 50;
  Placement p = Placer::place(inventory, kAll, r);
  EXPECT_FALSE(p.ok());
  EXPECT_EQ(p.refusals.size(), 5u);
  EXPECT_EQ(p.counts(), (std::map<std::string, uint32_t>{
                            {"not-free", 1}, {"too-few-in-the-pool", 1}, {"unhealthy", 1}, {"wrong-model", 2}}));
  EXPECT_THAT(p.describe(), HasSubstr("2 wrong-model"));
  r.model = "";
  r.min_memory_bytes = 1000;
  EXPECT_EQ(Placer::place(inventory, kAll, r).counts(), (std::map<std::string, uint32_t>{{"too-little-memory", 5}}));
}

TEST(Placer, LeavesCordonedMissingAndDisconnectedAlone) {
  Inventory inventory;
  add_box(inventory, "a", 1, "m", 1);
  add_box(inventory, "b", 1, "m", 1);
  add_box(inventory, "c", 1, "m", 1);
  BoxRecord a = *inventory.box("a");
  a.cordoned = true;
  inventory.put(a);
  FunctionRecord f = *inventory.function("c/0");
  f.conditions.set(Condition::kMissing, true);
  inventory.put(f);
  Placement p = Placer::place(
      inventory, [](absl::string_view id) { return id != "b"; }, request_for(1));
  EXPECT_EQ(p.counts(), (std::map<std::string, uint32_t>{{"box-not-connected", 1}, {"cordoned", 1}, {"missing", 1}}));
}

TEST(Placer, ExactFunction) {
  Inventory inventory;
  add_box(inventory, "a", 4, "m", 1);
  PlacementRequest r = request_for(1);
  r.function_id = "a/2";
  EXPECT_THAT(Placer::place(inventory, kAll, r).function_ids, ElementsAre("a/2"));
  take(inventory, "a/2");
  EXPECT_EQ(Placer::place(inventory, kAll, r).counts(),
            (std::map<std::string, uint32_t>{{"not-free", 1}, {"not-that-function", 3}}));
}

TEST(Placer, PropertyNeverOverAllocatesAlwaysWholeAlwaysTheSame) {
  std::mt19937 random(20260101);
  auto up_to = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  for (int round = 0; round < 300; ++round) {
    Inventory inventory;
    const uint32_t boxes = 1 + up_to(6);
    for (uint32_t b = 0; b < boxes; ++b) {
      add_box(inventory, absl::StrCat("b", b), 1 + up_to(8), absl::StrCat("m", up_to(2)), 1 + up_to(3));
    }
    std::set<std::string> held;
    for (int i = 0; i < 30; ++i) {
      PlacementRequest r = request_for(1 + up_to(6), up_to(2) == 0, up_to(2) == 0 ? "" : absl::StrCat("m", up_to(2)));
      r.min_memory_bytes = up_to(4);
      const std::string gone = absl::StrCat("b", up_to(boxes + 2));
      auto available = [&](absl::string_view id) { return id != gone; };
      Placement p = Placer::place(inventory, available, r);
      Placement again = Placer::place(inventory, available, r);
      ASSERT_EQ(p.function_ids, again.function_ids);
      ASSERT_EQ(p.refusals.size() + p.function_ids.size(), inventory.functions().size());
      std::set<std::string> named(p.function_ids.begin(), p.function_ids.end());
      for (const Refusal& refusal : p.refusals) ASSERT_TRUE(named.insert(refusal.function_id).second);
      // Counted by hand: does it fit?
      std::map<std::string, uint32_t> fitting;
      uint32_t total = 0;
      for (const auto& [id, f] : inventory.functions()) {
        if (held.count(id) != 0 || f.box_id == gone || (!r.model.empty() && f.model != r.model) ||
            f.memory_bytes < r.min_memory_bytes) {
          continue;
        }
        ++fitting[f.box_id];
        ++total;
      }
      bool fits = total >= r.count;
      if (r.same_box)
        fits = std::any_of(fitting.begin(), fitting.end(), [&](const auto& e) { return e.second >= r.count; });
      ASSERT_EQ(p.ok(), fits);
      if (!p.ok()) continue;
      ASSERT_EQ(p.function_ids.size(), r.count);
      std::set<std::string> used_boxes;
      for (const std::string& id : p.function_ids) {
        ASSERT_TRUE(held.insert(id).second) << id << " is held already";
        used_boxes.insert(inventory.function(id)->box_id);
        take(inventory, id);
      }
      if (r.same_box) {
        ASSERT_EQ(used_boxes.size(), 1u);
      }
    }
  }
}

}  // namespace
}  // namespace dxpu::poolmgr
