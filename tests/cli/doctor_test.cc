// dxpu doctor on machines made of files: a bare one, and one where everything is there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "tests/cli/run_dxpu.h"
#include "tests/cli/sample_pool.h"

namespace dxpu::cli {
namespace {

using testing::HasSubstr;

// The JSON report as {check → result} and {role → possible}.
struct Report {
  std::map<std::string, std::string> checks;
  std::map<std::string, std::string> details;
  std::map<std::string, std::string> advice;
  std::map<std::string, bool> roles;
};

Report examine(FakeMachine& machine, const std::string& pool) {
  const Ran ran = run_dxpu({"doctor", "-o", "json"}, pool, {.machine = &machine});
  EXPECT_EQ(ran.exit, 0) << ran.err;
  const nlohmann::json document = nlohmann::json::parse(ran.out);
  Report report;
  for (const auto& check : document["checks"]) {
    report.checks[check["check"]] = check["result"];
    report.details[check["check"]] = check["detail"];
    report.advice[check["check"]] = check["what_to_do"];
  }
  for (const auto& role : document["roles"]) report.roles[role["role"]] = role["possible"];
  return report;
}

class DoctorTest : public testing::Test {
 protected:
  DoctorTest() { fill_sample(fake_); }
  FakePool fake_;
  FakeMachine machine_;
};

TEST_F(DoctorTest, ABareMachineLacksMostAndIsTold) {
  machine_.root_user = false;
  machine_.memlock = 8 << 20;
  fake_.stop();
  const Report report = examine(machine_, fake_.address());
  for (const char* check : {"kernel headers", "dxpu.ko", "/dev/dxpu", "VFIO", "QEMU", "RLIMIT_MEMLOCK"}) {
    EXPECT_EQ(report.checks.at(check), "missing") << check;
    EXPECT_NE(report.advice.at(check), "") << check;
  }
  EXPECT_EQ(report.checks.at("pool manager"), "note");
  EXPECT_EQ(report.details.at("RLIMIT_MEMLOCK"), "8MiB");
  EXPECT_FALSE(report.roles.at("host, kernel attach"));
  EXPECT_FALSE(report.roles.at("VMs with attached functions"));
  EXPECT_FALSE(report.roles.at("box, engine cuda"));
  EXPECT_TRUE(report.roles.at("box, engine copy"));
}

TEST_F(DoctorTest, AMachineWithEverythingCanBeEverything) {
  const std::string modules = "/lib/modules/6.1.0-57-amd64/";
  machine_.write("/etc/os-release", "NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n");
  machine_.write(modules + "build/Makefile", "");
  machine_.write(modules + "modules.dep", "kernel/drivers/vfio/vfio.ko:\nkernel/drivers/vfio/vfio_iommu_type1.ko: x\n");
  machine_.write("/sys/module/dxpu/version", "0.1.0\n");
  machine_.write("/sys/module/module/parameters/sig_enforce", "N\n");
  machine_.write("/sys/kernel/security/lockdown", "[none] integrity confidentiality\n");
  machine_.write("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
                 std::string("\6\0\0\0\0", 5));
  machine_.write("/dev/dxpu", "");
  machine_.write("/dev/kvm", "");
  machine_.programs.insert("qemu-system-x86_64");
  machine_.displays.push_back({"0000:17:00.0", 0x10de, 0x2330, "NVIDIA H100"});
  machine_.libraries.insert("libcuda.so.1");
  const Report report = examine(machine_, fake_.address());
  for (const auto& [check, result] : report.checks)
    EXPECT_EQ(result, "ok") << check << ": " << report.details.at(check);
  for (const auto& [role, possible] : report.roles) EXPECT_TRUE(possible) << role;
  EXPECT_THAT(report.details.at("GPU"), HasSubstr("10de:2330 NVIDIA H100"));
}

TEST_F(DoctorTest, WhatRefusesAnUnsignedModuleIsSaid) {
  machine_.write("/sys/module/module/parameters/sig_enforce", "Y\n");
  machine_.write("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
  machine_.write("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
                 std::string("\6\0\0\0\1", 5));
  const Report report = examine(machine_, fake_.address());
  EXPECT_EQ(report.checks.at("module signing"), "missing");
  EXPECT_EQ(report.checks.at("lockdown"), "missing");
  EXPECT_EQ(report.details.at("lockdown"), "integrity");
  EXPECT_EQ(report.checks.at("secure boot"), "missing");
}

TEST_F(DoctorTest, BrokenFilesAreNoReasonToFail) {
  machine_.write("/sys/kernel/security/lockdown", "]garbage[");
  machine_.write("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", "x");
  machine_.write("/etc/os-release", "PRETTY_NAME=\xff\"\n=\n");
  const Report report = examine(machine_, fake_.address());
  EXPECT_EQ(report.checks.at("lockdown"), "note");
}

TEST_F(DoctorTest, AnInstalledModuleOnlyNeedsLoading) {
  machine_.write("/lib/modules/6.1.0-57-amd64/modules.dep", "updates/dxpu.ko: kernel/drivers/vfio/vfio.ko\n");
  EXPECT_EQ(examine(machine_, fake_.address()).advice.at("dxpu.ko"), "modprobe dxpu");
}

TEST_F(DoctorTest, TheTextNamesEachFindingRoleAndRemedy) {
  const Ran ran = run_dxpu({"doctor"}, fake_.address(), {.machine = &machine_});
  EXPECT_EQ(ran.exit, 0);
  EXPECT_THAT(ran.out, HasSubstr("CHECK"));
  EXPECT_THAT(ran.out, HasSubstr("no   host, kernel attach: dxpu.ko is not loaded"));
  EXPECT_THAT(ran.out, HasSubstr("What to do:"));
}

}  // namespace
}  // namespace dxpu::cli
