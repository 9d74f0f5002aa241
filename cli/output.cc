#include "cli/output.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "cli/exit_code.h"
#include "cli/format.h"
#include "dxpu/v1/pool.pb.h"
#include "google/protobuf/util/json_util.h"
#include "proto/grpc_status.h"

namespace dxpu::cli {
namespace {

// Columns a UTF-8 string takes, as far as our own words go (no combining or wide characters).
size_t width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string cell(const std::string& text) { return text.empty() ? "-" : printable(text); }

}  // namespace

void Table::print(std::ostream& out) const {
  std::vector<std::vector<std::string>> lines = {header_};
  for (const auto& row : rows_) {
    auto& line = lines.emplace_back();
    for (const auto& text : row) line.push_back(cell(text));
  }
  std::vector<size_t> widths(header_.size(), 0);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size() && i < widths.size(); ++i) widths[i] = std::max(widths[i], width(line[i]));
  }
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      out << line[i];
      if (i + 1 < line.size()) out << std::string(widths[i] - width(line[i]) + 2, ' ');
    }
    out << '\n';
  }
}

void print_fields(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& fields) {
  size_t widest = 0;
  for (const auto& [key, value] : fields) widest = std::max(widest, width(key));
  for (const auto& [key, value] : fields) {
    out << key << ':' << std::string(widest - width(key) + 2, ' ') << cell(value) << '\n';
  }
}

std::string to_json(const google::protobuf::Message& message, bool one_line) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = !one_line;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  // Our messages hold nothing that can fail here: no Any, times and durations in range or refused by the printer.
  if (auto status = google::protobuf::util::MessageToJsonString(message, &text, options); !status.ok()) {
    return nlohmann::json{{"error", {{"code", "INTERNAL"}, {"message", std::string(status.message())}}}}.dump();
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

void print_error(std::ostream& err, Format format, const absl::Status& status) {
  const std::string code = absl::StatusCodeToString(status.code());
  const std::string message(status.message());
  v1::RefusalDetails refusals;
  if (const auto payload = status.GetPayload(kRefusalUrl);
      payload && !refusals.ParseFromString(std::string(*payload))) {
    refusals.Clear();  // of a newer pool manager; the message says it in words, too
  }
  if (format == Format::kJson) {
    nlohmann::ordered_json error = {{"code", code}, {"exit_code", exit_code(status.code())}, {"message", message}};
    for (const v1::RefusalCount& refusal : refusals.counts()) {
      error["refusals"].push_back({{"reason", refusal.reason()}, {"count", refusal.count()}});
    }
    const nlohmann::ordered_json document = {{"error", error}};
    // Bytes that are no UTF-8 must not turn an error into an exception.
    err << document.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
    return;
  }
  err << "dxpu: " << code << ": " << printable(message) << '\n';
}

}  // namespace dxpu::cli
