// What VfioDevice says when a function cannot be opened. Opening a real one is tests/vm/test_vfio.sh's: it takes a
// kernel.
#include "proxy/attach/vfio/vfio_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace dxpu::attach {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class VfioOpen : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("dxpu-vfio-test." + std::to_string(::getpid()));
    fs::remove_all(root_);
    fs::create_directories(root_ / "sys/bus/pci/devices");
    fs::create_directories(root_ / "vfio");
  }
  void TearDown() override { fs::remove_all(root_); }

  void add_function(const std::string& address) { fs::create_directories(root_ / "sys/bus/pci/devices" / address); }
  void link(const std::string& address, const std::string& name, const std::string& target) {
    fs::create_symlink(target, root_ / "sys/bus/pci/devices" / address / name);
  }
  absl::Status open(const std::string& address) {
    return VfioDevice::open(address, {.sysfs = root_ / "sys", .vfio = root_ / "vfio"}).status();
  }

  fs::path root_;
};

TEST_F(VfioOpen, RefusesWhatIsNoAddress) {
  for (const char* bad :
       {"", "1", "00d0:01:00", "00d0:01:00.0.0", "00d0-01-00.0", "zzzz:01:00.0", "../../../etc", "00d0:01:00.0/"}) {
    absl::Status status = open(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("dddd:bb:dd.f")) << bad;
  }
}

TEST_F(VfioOpen, NamesAFunctionThatIsNotThere) {
  absl::Status status = open("00d0:01:00.0");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("00d0:01:00.0"));
}

TEST_F(VfioOpen, SaysHowToBindAFunctionWithoutGroup) {
  add_function("00d0:01:00.0");
  link("00d0:01:00.0", "driver", "../../../bus/pci/drivers/dxgpu");
  absl::Status status = open("00D0:01:00.0");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("driver dxgpu"), HasSubstr("driver_override"), HasSubstr("drivers_probe")));
}

TEST_F(VfioOpen, SaysWhichModuleIsMissing) {
  add_function("0000:01:00.0");
  link("0000:01:00.0", "iommu_group", "../../../kernel/iommu_groups/7");
  absl::Status status = open("01:00.0");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("modprobe vfio_iommu_type1"));
}

TEST_F(VfioOpen, RefusesAContainerThatIsNotVfio) {
  add_function("00d0:01:00.0");
  link("00d0:01:00.0", "iommu_group", "../../../kernel/iommu_groups/7");
  std::ofstream(root_ / "vfio/vfio") << "no device";
  absl::Status status = open("00d0:01:00.0");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("VFIO version"));
}

TEST_F(VfioOpen, RefusesAGroupThatIsNoNumber) {
  add_function("00d0:01:00.0");
  link("00d0:01:00.0", "iommu_group", "../../../kernel/iommu_groups/seven");
  EXPECT_EQ(open("00d0:01:00.0").code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace dxpu::attach
