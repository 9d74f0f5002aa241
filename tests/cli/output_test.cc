// What each command prints, as text and as JSON, against golden files; and that lists are read to their last page.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/golden.h"
#include "tests/cli/run_dxpu.h"
#include "tests/cli/sample_pool.h"

namespace dxpu::cli {
namespace {

struct Case {
  std::string name;  // of the golden files
  std::vector<std::string> arguments;
};

class Output : public testing::TestWithParam<Case> {
 protected:
  Output() { fill_sample(fake_); }

  // A fake's port is another one in each run.
  std::string with_fixed_address(std::string text) const {
    for (size_t at; (at = text.find(fake_.address())) != std::string::npos;) {
      text.replace(at, fake_.address().size(), "127.0.0.1:7400");
    }
    return text;
  }

  FakePool fake_;
};

TEST_P(Output, TableIsAsRecorded) {
  const Ran ran = run_dxpu(GetParam().arguments, fake_.address());
  EXPECT_EQ(ran.exit, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  expect_golden(GetParam().name + ".txt", with_fixed_address(ran.out));
}

TEST_P(Output, JsonIsOneDocumentAsRecorded) {
  std::vector<std::string> arguments = GetParam().arguments;
  arguments.insert(arguments.end(), {"-o", "json"});
  const Ran ran = run_dxpu(arguments, fake_.address());
  EXPECT_EQ(ran.exit, 0) << ran.err;
  EXPECT_TRUE(nlohmann::json::accept(ran.out)) << ran.out;
  expect_golden(GetParam().name + ".json", with_fixed_address(ran.out));
}

TEST_P(Output, APagedListPrintsTheSame) {
  const Ran whole = run_dxpu(GetParam().arguments, fake_.address());
  fake_.page_size = 1;
  const Ran paged = run_dxpu(GetParam().arguments, fake_.address());
  EXPECT_EQ(paged.exit, 0) << paged.err;
  EXPECT_EQ(paged.out, whole.out);
}

INSTANTIATE_TEST_SUITE_P(
    Commands, Output,
    testing::Values(Case{"pool_show", {"pool", "show"}}, Case{"gpu_list", {"gpu", "list"}},
                    Case{"gpu_show", {"gpu", "show", "b1/1"}}, Case{"host_list", {"host", "list"}},
                    Case{"host_show", {"host", "show", "vm1"}}, Case{"box_list", {"box", "list"}},
                    Case{"box_show", {"box", "show", "b1"}}, Case{"box_cordon", {"box", "cordon", "b1"}},
                    Case{"box_uncordon", {"box", "uncordon", "b1/2"}}, Case{"box_remove", {"box", "remove", "b2"}},
                    Case{"host_remove", {"host", "remove", "vm1"}},
                    Case{"attachment_list", {"attachment", "list", "--all"}},
                    Case{"attachment_show", {"attachment", "show", "a-1"}}, Case{"attach", {"attach", "--host", "vm1"}},
                    Case{"detach", {"detach", "a-1"}}, Case{"operation_show", {"operation", "show", "op-1"}},
                    Case{"events", {"events"}}, Case{"table", {"table"}}, Case{"table_host", {"table", "--host"}},
                    Case{"table_box", {"table", "--box", "b1"}}),
    [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

TEST(OutputTest, ControlCharactersFromTheWireNeverReachATerminal) {
  FakePool fake;
  fill_sample(fake);
  const Ran ran = run_dxpu({"events"}, fake.address());
  EXPECT_EQ(ran.out.find('\x1b'), std::string::npos);
  EXPECT_NE(ran.out.find("signal 9 ?[31m"), std::string::npos);
}

TEST(OutputTest, FiltersReachThePoolManager) {
  FakePool fake;
  fill_sample(fake);
  EXPECT_EQ(run_dxpu({"gpu", "list", "--box", "b1", "--model", "H100", "--state", "free"}, fake.address()).exit, 0);
  EXPECT_EQ(fake.functions_request.box_id(), "b1");
  EXPECT_EQ(fake.functions_request.model(), "H100");
  EXPECT_EQ(fake.functions_request.lifecycle(), v1::LIFECYCLE_FREE);
  EXPECT_EQ(run_dxpu({"events", "--since", "7", "--attachment", "a-1"}, fake.address()).exit, 0);
  EXPECT_EQ(fake.events_request.since_revision(), 7);
  EXPECT_EQ(fake.events_request.attachment_id(), "a-1");
  EXPECT_EQ(run_dxpu({"table", "--box", "b1"}, fake.address()).exit, 0);
  EXPECT_EQ(fake.tables_request.box_id(), "b1");
}

TEST(OutputTest, CordonTellsABoxFromAFunction) {
  FakePool fake;
  EXPECT_EQ(run_dxpu({"box", "cordon", "b1"}, fake.address()).exit, 0);
  EXPECT_EQ(fake.cordon_request.box_id(), "b1");
  EXPECT_TRUE(fake.cordon_request.cordoned());
  EXPECT_EQ(run_dxpu({"box", "uncordon", "b1/3"}, fake.address()).exit, 0);
  EXPECT_EQ(fake.cordon_request.box_id(), "");
  EXPECT_EQ(fake.cordon_request.function_id(), "b1/3");
  EXPECT_FALSE(fake.cordon_request.cordoned());
}

TEST(OutputTest, AListThatNeverEndsIsAnError) {
  FakePool fake;
  fill_sample(fake);
  fake.functions.set_next_page_token("0");
  fake.page_size = 100;
  const Ran ran = run_dxpu({"gpu", "list"}, fake.address());
  EXPECT_EQ(ran.exit, 1);
  EXPECT_NE(ran.err.find("repeats a page"), std::string::npos) << ran.err;
}

}  // namespace
}  // namespace dxpu::cli
