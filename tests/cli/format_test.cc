// Values as people write and read them.
#include "cli/format.h"

#include <gtest/gtest.h>

#include <limits>
#include <sstream>

#include "cli/output.h"

namespace dxpu::cli {
namespace {

TEST(Format, Durations) {
  EXPECT_EQ(*parse_duration("60s"), absl::Seconds(60));
  EXPECT_EQ(*parse_duration("2m"), absl::Minutes(2));
  EXPECT_EQ(*parse_duration("1h30m"), absl::Minutes(90));
  EXPECT_EQ(*parse_duration("500ms"), absl::Milliseconds(500));
  for (const char* bad : {"", "60", "s", "-1s", "0s", "inf", "25h", "1d", "60 s", "1e99h"}) {
    EXPECT_FALSE(parse_duration(bad).ok()) << bad;
  }
}

TEST(Format, Sizes) {
  EXPECT_EQ(*parse_size("256MiB"), 256ull << 20);
  EXPECT_EQ(*parse_size("80GB"), 80000000000ull);
  EXPECT_EQ(*parse_size("4096"), 4096u);
  EXPECT_EQ(*parse_size("1 GiB"), 1ull << 30);
  EXPECT_EQ(*parse_size("18446744073709551615"), std::numeric_limits<uint64_t>::max());
  for (const char* bad :
       {"", "MiB", "-1MiB", "+1", "1.5GiB", "0x10", "18446744073709551616", "16777216TiB", "1PiB", "1mib"}) {
    EXPECT_FALSE(parse_size(bad).ok()) << bad;
  }
}

TEST(Format, SizesRoundTrip) {
  for (const uint64_t bytes :
       {1ull, 1023ull, 1024ull, 1025ull, 256ull << 20, (256ull << 20) + 1, 80ull << 30, 3ull << 40}) {
    EXPECT_EQ(*parse_size(size_text(bytes)), bytes) << size_text(bytes);
  }
  EXPECT_EQ(size_text(256ull << 20), "256MiB");
  EXPECT_EQ(size_text(80ull << 30), "80GiB");
}

TEST(Format, FunctionNames) {
  const absl::StatusOr<FunctionName> name = parse_function_name("rack1.b1/12");
  ASSERT_TRUE(name.ok());
  EXPECT_EQ(name->box, "rack1.b1");
  EXPECT_EQ(name->slot, 12u);
  for (const char* bad : {"", "/", "b1", "b1/", "/1", "b1/x", "b1/-1", "b1/4294967296", "b1/1 "}) {
    EXPECT_FALSE(parse_function_name(bad).ok()) << bad;
  }
}

TEST(Format, AnEnumOfANewerPoolManagerIsShownByNumber) {
  EXPECT_EQ(name_of(v1::LIFECYCLE_FREE), "FREE");
  EXPECT_EQ(name_of(static_cast<v1::Lifecycle>(77)), "77");
}

TEST(Format, PrintableKeepsTextAndDropsControls) {
  EXPECT_EQ(printable("plain – ünïcode"), "plain – ünïcode");
  EXPECT_EQ(printable("a\nb\x1b[2J\x7f"), "a?b?[2J?");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "?31m");
}

TEST(Format, TablesAlignAndNameEmptyCells) {
  Table table({"A", "LONG"});
  table.add({"wide-ü", ""});
  table.add({"x", "y"});
  std::ostringstream out;
  table.print(out);
  EXPECT_EQ(out.str(), "A       LONG\nwide-ü  -\nx       y\n");
}

}  // namespace
}  // namespace dxpu::cli
