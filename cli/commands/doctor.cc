// dxpu doctor: what this machine can do for a pool, and what it lacks.
//
// It only looks: it loads no module, opens no device for writing and changes nothing. What is missing is a finding, not
// a failure: it exits 0 unless it could not look.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cli/format.h"
#include "cli/invocation.h"

namespace dxpu::cli {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kPoolDeadline = absl::Seconds(3);

enum class Result { kOk, kMissing, kNote };  // there; lacking for some role; worth knowing

struct Finding {
  std::string check;
  Result result;
  std::string detail;
  std::string what_to_do;
};

struct Role {
  std::string name;
  bool possible;
  std::string why_not;
};

std::string name_of(Result result) {
  switch (result) {
    case Result::kOk:
      return "ok";
    case Result::kMissing:
      return "missing";
    case Result::kNote:
      return "note";
  }
  return "?";
}

class Doctor {
 public:
  explicit Doctor(const Machine& machine) : machine_(machine), release_(machine.kernel_release()) {}

  void examine(Invocation& invocation) {
    system();
    headers();
    const bool module_loaded = module();
    signing();
    const bool device = device_node();
    const bool vfio = vfio_modules();
    iommu();
    memlock();
    const bool kvm = virtual_machines();
    physical_gpus();
    pool(invocation);
    roles_ = {
        {"pool manager", true, ""},
        {"box, engine copy", true, ""},
        {"box, engine cuda", gpus_ && cuda_, !gpus_ ? "no GPU on the PCI bus" : "no CUDA driver library"},
        {"host, direct attach", true, ""},
        {"host, kernel attach", module_loaded && device,
         !module_loaded ? "dxpu.ko is not loaded" : "no access to /dev/dxpu"},
        {"VMs with attached functions", module_loaded && device && vfio && qemu_,
         !qemu_  ? "no qemu-system-x86_64"
         : !vfio ? "no VFIO modules"
         : kvm   ? "kernel attach is not possible yet"
                 : "kernel attach is not possible yet (and without KVM a VM is slow)"},
    };
  }

  const std::vector<Finding>& findings() const { return findings_; }
  const std::vector<Role>& roles() const { return roles_; }

 private:
  std::string path(absl::string_view absolute) const { return absl::StrCat(machine_.root(), absolute); }
  bool exists(absl::string_view absolute) const {
    std::error_code error;
    return fs::exists(path(absolute), error);
  }
  bool usable(absl::string_view absolute) const { return access(path(absolute).c_str(), R_OK | W_OK) == 0; }
  // Whole small file, without the last newline; empty when it can not be read.
  std::string read(absl::string_view absolute) const {
    std::ifstream file(path(absolute), std::ios::binary);
    std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    return std::string(absl::StripSuffix(text, "\n"));
  }
  void add(std::string check, Result result, std::string detail, std::string what_to_do = "") {
    findings_.push_back({std::move(check), result, std::move(detail), std::move(what_to_do)});
  }

  void system() {
    std::string name = "unknown";
    for (const auto line : absl::StrSplit(read("/etc/os-release"), '\n')) {
      absl::string_view value = line;
      if (absl::ConsumePrefix(&value, "PRETTY_NAME="))
        name = std::string(absl::StripSuffix(absl::StripPrefix(value, "\""), "\""));
    }
    const bool debian = absl::StrContains(name, "Debian") && absl::StrContains(name, "12");
    add("system", debian ? Result::kOk : Result::kNote, absl::StrCat(name, ", Linux ", release_),
        debian ? "" : "dxpu is built and tested on Debian 12");
  }

  void headers() {
    const std::string build = absl::StrCat("/lib/modules/", release_, "/build");
    if (exists(absl::StrCat(build, "/Makefile"))) {
      add("kernel headers", Result::kOk, build);
    } else {
      add("kernel headers", Result::kMissing, absl::StrCat("none for ", release_),
          absl::StrCat("to build dxpu.ko for this kernel: apt-get install linux-headers-", release_));
    }
  }

  // The module, as a file modprobe would find or built in a tree below the working directory.
  bool module() {
    if (exists("/sys/module/dxpu")) {
      const std::string version = read("/sys/module/dxpu/version");
      add("dxpu.ko", Result::kOk, absl::StrCat("loaded", version.empty() ? "" : ", version ", version));
      return true;
    }
    const std::string dep = read(absl::StrCat("/lib/modules/", release_, "/modules.dep"));
    if (absl::StrContains(dep, "/dxpu.ko")) {
      add("dxpu.ko", Result::kMissing, "installed, not loaded", "modprobe dxpu");
    } else {
      add("dxpu.ko", Result::kMissing, absl::StrCat("neither loaded nor installed for ", release_),
          "build kmod/ against the kernel headers and load it with insmod, or install it and run depmod");
    }
    return false;
  }

  void signing() {
    const bool enforced = read("/sys/module/module/parameters/sig_enforce") == "Y";
    add("module signing", enforced ? Result::kMissing : Result::kOk,
        enforced ? "enforced: the kernel refuses a module that is not signed"
                 : "not enforced: an unsigned module loads",
        enforced ? "sign dxpu.ko with a key the kernel trusts, or boot without module.sig_enforce" : "");

    const std::string lockdown = read("/sys/kernel/security/lockdown");
    const size_t open = lockdown.find('[');
    const size_t close = lockdown.find(']');
    const std::string mode = open != std::string::npos && close != std::string::npos && close > open
                                 ? lockdown.substr(open + 1, close - open - 1)
                                 : "";
    if (mode.empty()) {
      add("lockdown", Result::kNote, "unknown: /sys/kernel/security/lockdown can not be read");
    } else {
      add("lockdown", mode == "none" ? Result::kOk : Result::kMissing, mode,
          mode == "none" ? "" : "under lockdown the kernel loads signed modules only: sign dxpu.ko");
    }

    constexpr absl::string_view kSecureBoot =
        "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
    std::ifstream variable(path(kSecureBoot), std::ios::binary);
    char bytes[5] = {};  // four of attributes, one of value
    if (variable.read(bytes, sizeof bytes)) {
      const bool on = bytes[4] == 1;
      add("secure boot", on ? Result::kMissing : Result::kOk, on ? "on: an unsigned module is refused" : "off",
          on ? "enrol a key with mokutil and sign dxpu.ko with it, or switch Secure Boot off" : "");
    } else {
      add("secure boot", Result::kOk, exists("/sys/firmware/efi") ? "no such variable" : "not an EFI boot");
    }
  }

  bool device_node() {
    if (!exists("/dev/dxpu")) {
      add("/dev/dxpu", Result::kMissing, "there is none", "it comes with dxpu.ko");
      return false;
    }
    if (!usable("/dev/dxpu")) {
      add("/dev/dxpu", Result::kMissing, "there, but this user may not open it",
          "run dxpu-hostd as root or widen its mode by a udev rule");
      return false;
    }
    add("/dev/dxpu", Result::kOk, "may be opened");
    return true;
  }

  bool vfio_modules() {
    std::vector<std::string> absent;
    const std::string dep = read(absl::StrCat("/lib/modules/", release_, "/modules.dep"));
    const std::string builtin = read(absl::StrCat("/lib/modules/", release_, "/modules.builtin"));
    std::string loaded;
    for (const char* name : {"vfio", "vfio_iommu_type1"}) {
      const std::string file = absl::StrCat("/", name, ".ko");
      if (exists(absl::StrCat("/sys/module/", name))) {
        absl::StrAppend(&loaded, loaded.empty() ? "" : ", ", name, " loaded");
      } else if (absl::StrContains(dep, file) || absl::StrContains(builtin, file)) {
        absl::StrAppend(&loaded, loaded.empty() ? "" : ", ", name, " to be loaded on demand");
      } else {
        absent.push_back(name);
      }
    }
    if (absent.empty()) {
      add("VFIO", Result::kOk, loaded);
      return true;
    }
    add("VFIO", Result::kMissing, absl::StrCat("no module ", absl::StrJoin(absent, ", "), " for ", release_),
        "install the kernel's full module package (linux-image-amd64); cloud kernels may lack them");
    return false;
  }

  void iommu() {
    std::error_code error;
    const fs::directory_iterator groups(path("/sys/kernel/iommu_groups"), error);
    const auto count = error ? 0 : std::distance(fs::begin(groups), fs::end(groups));
    add("IOMMU", Result::kOk,
        count > 0 ? absl::StrCat(count, " groups; not needed")
                  : "none; not needed: dxpu.ko emulates one for each function");
  }

  void memlock() {
    const uint64_t limit = machine_.memlock_limit();
    const std::string advice =
        "pinned memory of a VFIO user counts against it, for a VM all of its memory: ulimit -l unlimited, or "
        "LimitMEMLOCK=infinity "
        "in the service's unit";
    if (limit == std::numeric_limits<uint64_t>::max()) {
      add("RLIMIT_MEMLOCK", Result::kOk, "unlimited");
    } else if (machine_.is_root()) {
      add("RLIMIT_MEMLOCK", Result::kNote, absl::StrCat(size_text(limit), "; root is not bound by it"), advice);
    } else {
      add("RLIMIT_MEMLOCK", Result::kMissing, size_text(limit), advice);
    }
  }

  bool virtual_machines() {
    const bool kvm = exists("/dev/kvm") && usable("/dev/kvm");
    add("KVM", kvm ? Result::kOk : Result::kNote,
        kvm                  ? "may be used"
        : exists("/dev/kvm") ? "there, but this user may not open it"
                             : "no /dev/kvm: VMs are emulated, and slow",
        kvm                  ? ""
        : exists("/dev/kvm") ? "add the user to group kvm"
                             : "switch virtualisation on in the firmware, or nesting on in the hypervisor below");
    const std::string qemu = machine_.find_program("qemu-system-x86_64");
    qemu_ = !qemu.empty();
    add("QEMU", qemu_ ? Result::kOk : Result::kMissing, qemu_ ? qemu : "no qemu-system-x86_64 in PATH",
        qemu_ ? "" : "apt-get install qemu-system-x86");
    return kvm;
  }

  void physical_gpus() {
    const std::vector<PciDisplay> displays = machine_.display_controllers();
    gpus_ = !displays.empty();
    for (const PciDisplay& display : displays) {
      add("GPU", Result::kOk,
          absl::StrFormat("%s %04x:%04x %s", display.address, display.vendor_id, display.device_id, display.name));
    }
    if (!gpus_) add("GPU", Result::kNote, "none on the PCI bus; boxes lend functions of engine copy");
    cuda_ = machine_.has_library("libcuda.so.1");
    add("CUDA driver", cuda_ ? Result::kOk : Result::kNote, cuda_ ? "libcuda.so.1 loads" : "no libcuda.so.1",
        cuda_ || !gpus_ ? "" : "install the NVIDIA driver to lend the GPU itself");
  }

  void pool(Invocation& invocation) {
    PoolClient client(invocation.pool_address, kPoolDeadline);
    const absl::StatusOr<v1::GetPoolResponse> answer = client.get_pool({});
    if (answer.ok()) {
      add("pool manager", Result::kOk, absl::StrCat(invocation.pool_address, ", version ", answer->software_version()));
    } else {
      add("pool manager", Result::kNote, absl::StrCat(invocation.pool_address, " does not answer"),
          "start dxpu-poolmgr, or name another with --pool or DXPU_POOL");
    }
  }

  const Machine& machine_;
  const std::string release_;
  std::vector<Finding> findings_;
  std::vector<Role> roles_;
  bool qemu_ = false;
  bool gpus_ = false;
  bool cuda_ = false;
};

absl::Status doctor(Invocation& invocation) {
  Doctor doctor(invocation.env.machine);
  doctor.examine(invocation);
  if (invocation.json()) {
    nlohmann::ordered_json document = {{"checks", nlohmann::json::array()}, {"roles", nlohmann::json::array()}};
    for (const Finding& finding : doctor.findings()) {
      document["checks"].push_back({{"check", finding.check},
                                    {"result", name_of(finding.result)},
                                    {"detail", finding.detail},
                                    {"what_to_do", finding.what_to_do}});
    }
    for (const Role& role : doctor.roles()) {
      document["roles"].push_back(
          {{"role", role.name}, {"possible", role.possible}, {"why_not", role.possible ? "" : role.why_not}});
    }
    invocation.out() << document.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
    return absl::OkStatus();
  }
  Table table({"CHECK", "RESULT", "DETAIL"});
  for (const Finding& finding : doctor.findings()) table.add({finding.check, name_of(finding.result), finding.detail});
  table.print(invocation.out());
  invocation.out() << "\nThis machine can be:\n";
  for (const Role& role : doctor.roles()) {
    invocation.out() << "  " << (role.possible ? "yes" : "no ") << "  " << role.name
                     << (role.possible ? "" : absl::StrCat(": ", role.why_not)) << '\n';
  }
  bool titled = false;
  for (const Finding& finding : doctor.findings()) {
    if (finding.what_to_do.empty()) continue;
    if (!std::exchange(titled, true)) invocation.out() << "\nWhat to do:\n";
    invocation.out() << "  " << finding.check << ": " << printable(finding.what_to_do) << '\n';
  }
  return absl::OkStatus();
}

}  // namespace

void add_doctor(CLI::App& app, Invocation& invocation) {
  app.add_subcommand("doctor", "What this machine can do for a pool, and what it lacks")->callback([&invocation] {
    invocation.action = [&invocation] { return doctor(invocation); };
  });
}

}  // namespace dxpu::cli
