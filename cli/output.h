// What dxpu prints: aligned text for people, JSON for programs, from the same messages.
//
// JSON is protobuf's own mapping with the field names of the .proto files; one document a command (one a line for
// `events --follow`). Errors go to stderr in the chosen format. Text from the wire is made safe for a terminal.
#pragma once

#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "google/protobuf/message.h"

namespace dxpu::cli {

enum class Format { kTable, kJson };

// Columns as wide as their widest cell, two spaces between; an empty cell is "-", so that awk counts fields right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  bool empty() const { return rows_.empty(); }
  void print(std::ostream& out) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

// "key:  value" lines with the values aligned.
void print_fields(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& fields);

std::string to_json(const google::protobuf::Message& message, bool one_line = false);

// One line "dxpu: NOT_FOUND: …", or {"error": {"code", "exit_code", "message"}}. Why candidates of a placement were
// refused is in the message in words, and in JSON as "refusals", one count a reason, too.
void print_error(std::ostream& err, Format format, const absl::Status& status);

}  // namespace dxpu::cli
