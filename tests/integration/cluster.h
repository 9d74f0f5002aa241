// A whole pool of real processes on loopback: one pool manager, boxes, hosts. For tests/integration and tests/fault.
//
// Every process can be given DXPU_SYNC_POINT, be killed, and be started again on the same state and the same port. The
// directory of a cluster is in the command line of each of its processes, so leftovers are found by looking for it.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dxpu/v1/pool.grpc.pb.h"

namespace dxpu::test {

// A child of this test, killed with it.
class Process {
 public:
  Process() = default;
  Process(Process&&) noexcept;
  Process& operator=(Process&&) noexcept;
  ~Process();  // SIGKILL and wait
  static Process start(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                       const std::string& log);
  pid_t pid() const { return pid_; }
  bool running();
  void signal(int number);
  // False when it still runs after the deadline.
  bool wait(absl::Duration deadline);
  void kill_and_wait();

 private:
  pid_t pid_ = 0;
};

// Arms and disarms one DXPU_SYNC_POINT: it kills its process only while armed, and once.
class SyncPoint {
 public:
  SyncPoint(std::string name, std::string marker, std::string action = "kill");
  std::string environment() const;  // "DXPU_SYNC_POINT=…"
  void arm();
  void disarm();
  bool reached() const;  // since arm()

 private:
  std::string name_, marker_, action_;
};

class Cluster {
 public:
  struct Shape {
    int boxes = 2;
    int slots = 2;
    int ports = 2;             // of host h1
    bool host_process = true;  // false: the test runs a HostAgent of its own
  };
  explicit Cluster(const Shape& shape);
  ~Cluster();

  const std::string& dir() const { return dir_; }
  std::string pool_address() const;
  std::string runtime_dir(int box) const;

  // `name`: "pool", "box1", …, "host". Starts it (again) with the environment.
  void start(const std::string& name, const std::vector<std::string>& environment = {});
  Process& process(const std::string& name) { return processes_[name]; }
  void start_all();
  // Every box and host connected, every function FREE.
  testing::AssertionResult wait_ready(absl::Duration deadline = absl::Seconds(60));

  // Operators' calls, repeated (same request id) while the pool manager is away, at most for `deadline`.
  absl::StatusOr<v1::Operation> attach(const std::string& function = "", absl::Duration deadline = absl::Seconds(60));
  // The last attach() once more, with its request id.
  absl::StatusOr<v1::Operation> attach_again(absl::Duration deadline = absl::Seconds(60));
  absl::StatusOr<v1::Operation> detach(const std::string& attachment, bool force,
                                       absl::Duration deadline = absl::Seconds(60));
  // While the operation runs `meanwhile` is called now and then.
  absl::StatusOr<v1::Operation> wait(
      const v1::Operation& operation, const std::function<void()>& meanwhile = [] {},
      absl::Duration deadline = absl::Seconds(90));
  // Nothing when it does not exist or the pool manager is away.
  absl::StatusOr<v1::Attachment> attachment(const std::string& id);
  std::vector<v1::Function> functions();
  std::vector<v1::Event> events();
  v1::GetTablesResponse tables();
  // Who has the port of h1 open, as the pool manager heard it last.
  std::string holder(uint32_t port);
  bool eventually(const std::function<bool()>& good, absl::Duration deadline = absl::Seconds(60));

  // Workers that serve (pid → command line), whoever their parent is.
  std::map<pid_t, std::string> workers() const;
  // Nothing is held anywhere: functions FREE, attachments ended, operations done, ports empty, no worker, database
  // intact.
  testing::AssertionResult wait_clean(absl::Duration deadline = absl::Seconds(60));
  // The ends of all logs, for the message of a failed test.
  std::string logs() const;

  const Shape shape;
  // What every daemon is started with. Seconds, since these tests run on loaded machines.
  static std::vector<std::string> deadlines();

 private:
  void refresh();

  std::string dir_;
  int pool_port_ = 0;
  std::vector<int> box_ports_;
  std::map<std::string, Process> processes_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::PoolService::Stub> stub_;
  int requests_ = 0;
  v1::AttachRequest last_attach_;
};

// Free at the moment of asking.
int free_port();

}  // namespace dxpu::test
