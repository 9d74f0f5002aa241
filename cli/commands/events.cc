// dxpu events: what has happened, and what happens.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

// Between tries to reach a pool manager that went away under --follow: longer each time, up to the last.
constexpr absl::Duration kFirstRetry = absl::Milliseconds(500);
constexpr absl::Duration kLastRetry = absl::Seconds(10);

struct EventsOptions {
  bool follow = false;
  int64_t since = 0;
  std::string attachment;
};

// One line as it comes: a live stream can not wait to learn its column widths.
void print_event(const v1::Event& event, Invocation& invocation) {
  if (invocation.json()) {
    invocation.out() << to_json(event, /*one_line=*/true) << std::endl;
    return;
  }
  invocation.out() << absl::StrFormat("%-8d %s  %-20s %-17s %s", event.revision(), time_text(event.time()),
                                      printable(event.type()), printable(event.subject()), printable(event.message()))
                   << std::endl;
}

absl::Status follow(v1::ListEventsResponse past, Invocation& invocation, v1::WatchRequest request) {
  for (const v1::Event& event : past.events()) print_event(event, invocation);
  request.set_since_revision(past.revision());
  absl::Duration delay = kFirstRetry;
  for (;;) {
    const absl::Status status = invocation.pool().watch(request, [&](const v1::WatchResponse& response) {
      delay = kFirstRetry;
      int64_t seen = std::max(request.since_revision(), response.progress_revision());
      for (const v1::Event& event : response.events()) {
        print_event(event, invocation);
        seen = std::max(seen, event.revision());
      }
      request.set_since_revision(seen);
      return static_cast<bool>(invocation.out());  // until nobody reads any more
    });
    if (!absl::IsUnavailable(status)) return status;
    // Events are durable: nothing is missed by asking again from the last one seen.
    invocation.env.err << "dxpu: the pool manager went away; trying again in " << absl::FormatDuration(delay)
                       << std::endl;
    absl::SleepFor(delay);
    delay = std::min(delay * 2, kLastRetry);
  }
}

absl::Status events(const EventsOptions& options, Invocation& invocation) {
  v1::ListEventsRequest request;
  request.set_since_revision(options.since);
  request.set_attachment_id(options.attachment);
  request.set_page_size(1000);
  DXPU_ASSIGN_OR_RETURN(
      v1::ListEventsResponse list,
      invocation.pool().all_pages(&PoolClient::list_events, request, &v1::ListEventsResponse::mutable_events));
  if (options.follow) {
    v1::WatchRequest watch;
    watch.set_attachment_id(options.attachment);
    return follow(std::move(list), invocation, watch);
  }
  if (invocation.print_json(list)) return absl::OkStatus();
  Table table({"REVISION", "TIME", "TYPE", "SUBJECT", "MESSAGE"});
  for (const v1::Event& event : list.events()) {
    table.add(
        {absl::StrCat(event.revision()), time_text(event.time()), event.type(), event.subject(), event.message()});
  }
  table.print(invocation.out());
  return absl::OkStatus();
}

}  // namespace

void add_events(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand("events", "What has happened in the pool");
  const auto options = std::make_shared<EventsOptions>();
  command->add_flag("--follow", options->follow, "Go on with what happens now (with -o json: one document a line)");
  command->add_option("--since", options->since, "Only what came after this revision")
      ->check(CLI::NonNegativeNumber)
      ->type_name("REV");
  command->add_option("--attachment", options->attachment, "Only what is about this attachment")->type_name("ID");
  command->callback(
      [&invocation, options] { invocation.action = [&invocation, options] { return events(*options, invocation); }; });
}

}  // namespace dxpu::cli
