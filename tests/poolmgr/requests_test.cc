// What operators ask for that can not be done, is asked twice, or is only looked at.
#include <gmock/gmock.h>

#include "fake_pool.h"
#include "proto/grpc_status.h"

namespace dxpu::poolmgr {
namespace {

using ::testing::HasSubstr;

class RequestsTest : public PoolTest {
 protected:
  RequestsTest() {
    pool.add_boxes(2, 2);
    pool.add_host("h1", 4);
    pool.settle();
    request.set_host_id("h1");
    request.set_count(1);
  }
  void expect_refused(absl::StatusCode code, const std::string& says) {
    const int64_t before = pool.store->revision();
    absl::StatusOr<v1::AttachResponse> r = pool.try_attach(request);
    EXPECT_EQ(r.status().code(), code) << r.status();
    EXPECT_THAT(std::string(r.status().message()), HasSubstr(says));
    EXPECT_EQ(pool.store->revision(), before);  // a refusal changes nothing
  }
  v1::AttachRequest request;
};

TEST_F(RequestsTest, UnknownThingsAreNamedWithWhatIsKnown) {
  request.set_host_id("h2");
  expect_refused(absl::StatusCode::kNotFound, "known: h1");
  request.set_host_id("h1");
  request.set_model("H100");
  expect_refused(absl::StatusCode::kNotFound, "it has dxpu-soft");
  request.clear_model();
  request.set_function_id("b7/0");
  expect_refused(absl::StatusCode::kNotFound, "b7/0");
  request.set_function_id("b1/0");
  request.set_count(2);
  expect_refused(absl::StatusCode::kInvalidArgument, "ask for count 1");
  request.clear_function_id();
  request.set_count(0);
  expect_refused(absl::StatusCode::kInvalidArgument, "count is 0");
  request.set_count(4000000000);
  expect_refused(absl::StatusCode::kInvalidArgument, "1 to 256");
  request.set_count(1);
  request.mutable_timeout()->set_seconds(-1);
  expect_refused(absl::StatusCode::kInvalidArgument, "timeout");
  request.clear_timeout();
  request.set_request_id(std::string(1000, 'r'));
  expect_refused(absl::StatusCode::kInvalidArgument, "request_id");
}

TEST_F(RequestsTest, TooManyAreRefusedWithCountsPerReason) {
  pool.attach(1);
  request.set_count(4);
  absl::StatusOr<v1::AttachResponse> r = pool.try_attach(request);
  EXPECT_EQ(r.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(r.status().message()), HasSubstr("1 not-free, 3 too-few-in-the-pool"));
  // The same as data, through gRPC's status and back.
  absl::Status back = to_absl(to_grpc(r.status()));
  v1::RefusalDetails details;
  ASSERT_TRUE(back.GetPayload(kRefusalUrl).has_value());
  ASSERT_TRUE(details.ParseFromString(std::string(*back.GetPayload(kRefusalUrl))));
  ASSERT_EQ(details.counts_size(), 2);
  EXPECT_EQ(details.counts(0).reason(), "not-free");
  request.set_count(2);
  request.set_same_box(true);
  EXPECT_TRUE(pool.try_attach(request).ok());
  request.set_count(1);
  request.set_min_memory_bytes(1ull << 40);
  expect_refused(absl::StatusCode::kResourceExhausted, "4 too-little-memory");
}

TEST_F(RequestsTest, ARepeatedAttachReturnsTheFirstAnswer) {
  request.set_request_id("r1");
  absl::StatusOr<v1::AttachResponse> first = pool.try_attach(request);
  ASSERT_TRUE(first.ok());
  absl::StatusOr<v1::AttachResponse> again = pool.try_attach(request);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->operation().id(), first->operation().id());
  EXPECT_EQ(again->attachments(0).id(), first->attachments(0).id());
  pool.settle();
  pool.restart();
  EXPECT_EQ(pool.try_attach(request)->operation().id(), first->operation().id());
  ASSERT_TRUE(pool.try_detach(first->attachments(0).id(), true).ok());
  pool.settle();
  EXPECT_EQ(pool.try_attach(request)->attachments(0).state(), v1::ATTACHMENT_STATE_ENDED);
  request.set_count(2);
  expect_refused(absl::StatusCode::kAlreadyExists, "r1 was used for another request");
}

TEST_F(RequestsTest, ARepeatedDetachReturnsTheFirstAnswer) {
  const std::string id = pool.attach(1).attachments(0).id();
  pool.settle();
  v1::DetachRequest detach;
  detach.set_attachment_id(id);
  detach.set_request_id("d1");
  absl::StatusOr<v1::DetachResponse> first = pool.reconciler->detach(detach);
  ASSERT_TRUE(first.ok());
  pool.settle();
  absl::StatusOr<v1::DetachResponse> again = pool.reconciler->detach(detach);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->operation().id(), first->operation().id());
  EXPECT_TRUE(again->operation().done());
}

TEST_F(RequestsTest, CordonedBoxesAndFunctionsGetNothingNew) {
  v1::SetCordonRequest cordon;
  EXPECT_EQ(pool.reconciler->set_cordon(cordon).status().code(), absl::StatusCode::kInvalidArgument);
  cordon.set_box_id("b9");
  EXPECT_EQ(pool.reconciler->set_cordon(cordon).status().code(), absl::StatusCode::kNotFound);
  cordon.set_box_id("b1");
  cordon.set_cordoned(true);
  ASSERT_TRUE(pool.reconciler->set_cordon(cordon).ok());
  cordon.clear_box_id();
  cordon.set_function_id("b2/0");
  ASSERT_TRUE(pool.reconciler->set_cordon(cordon).ok());
  v1::AttachResponse r = pool.attach(1);
  EXPECT_EQ(r.attachments(0).box_id(), "b2");
  EXPECT_EQ(r.attachments(0).slot(), 1u);
  expect_refused(absl::StatusCode::kResourceExhausted, "3 cordoned, 1 not-free");
  pool.restart();
  pool.settle();
  expect_refused(absl::StatusCode::kResourceExhausted, "3 cordoned");
  cordon.set_cordoned(false);
  ASSERT_TRUE(pool.reconciler->set_cordon(cordon).ok());
  EXPECT_TRUE(pool.try_attach(request).ok());
}

TEST_F(RequestsTest, ExactlyThatFunction) {
  request.set_function_id("b2/1");
  absl::StatusOr<v1::AttachResponse> r = pool.try_attach(request);
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->attachments(0).box_id(), "b2");
  EXPECT_EQ(r->attachments(0).slot(), 1u);
  expect_refused(absl::StatusCode::kResourceExhausted, "1 not-free");
}

TEST_F(RequestsTest, AHostThatIsNotThereGetsNothing) {
  pool.host("h1").disconnect();
  expect_refused(absl::StatusCode::kUnavailable, "h1 is not connected");
}

TEST_F(RequestsTest, ListsComeInPages) {
  v1::ListFunctionsRequest list;
  list.set_page_size(3);
  absl::StatusOr<v1::ListFunctionsResponse> first = pool.reconciler->functions(list);
  ASSERT_EQ(first->functions_size(), 3);
  ASSERT_FALSE(first->next_page_token().empty());
  list.set_page_token(first->next_page_token());
  absl::StatusOr<v1::ListFunctionsResponse> second = pool.reconciler->functions(list);
  ASSERT_EQ(second->functions_size(), 1);
  EXPECT_EQ(second->functions(0).id(), "b2/1");
  EXPECT_TRUE(second->next_page_token().empty());
  v1::ListFunctionsRequest filtered;
  filtered.set_box_id("b2");
  filtered.set_lifecycle(v1::LIFECYCLE_FREE);
  EXPECT_EQ(pool.reconciler->functions(filtered)->functions_size(), 2);
  filtered.set_lifecycle(v1::LIFECYCLE_ATTACHED);
  EXPECT_EQ(pool.reconciler->functions(filtered)->functions_size(), 0);
}

TEST_F(RequestsTest, TablesAndThePoolAtALook) {
  const std::string id = pool.attach(1).attachments(0).id();
  pool.settle();
  absl::StatusOr<v1::GetTablesResponse> tables = pool.reconciler->tables({});
  ASSERT_TRUE(tables.ok());
  ASSERT_EQ(tables->host_rows_size(), 1);
  EXPECT_EQ(tables->host_rows(0).box_id(), "b1");
  EXPECT_EQ(tables->host_rows(0).phase(), "attached");
  EXPECT_EQ(tables->host_rows(0).paths(0), "127.0.0.1:7000");
  ASSERT_EQ(tables->box_rows_size(), 4);
  EXPECT_EQ(tables->box_rows(0).host_id(), "h1");
  EXPECT_EQ(tables->box_rows(0).phase(), "serving");
  EXPECT_EQ(tables->box_rows(0).attachment_id(), id);
  EXPECT_EQ(tables->box_rows(1).phase(), "idle");
  absl::StatusOr<v1::GetPoolResponse> pool_now = pool.reconciler->pool();
  EXPECT_EQ(pool_now->functions_by_lifecycle().at("FREE"), 3u);
  EXPECT_EQ(pool_now->attachments(), 1u);
  EXPECT_EQ(pool_now->boxes_connected(), 2u);
}

}  // namespace
}  // namespace dxpu::poolmgr
