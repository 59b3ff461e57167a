// Runs a compiled plan: kernels and header steps in order, exchanges through a
// transport.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/kernel_table.h"
#include "runtime/kernel_call.h"
#include "runtime/plan.h"
#include "runtime/transport.h"

namespace commkern {

struct Timing {
  std::array<int64_t, kPurposes.size()> purpose_ns{};  // kernels and headers
  int64_t exchange_ns = 0;                             // post and complete
};

class Runner {
 public:
  explicit Runner(Plan plan);

  const Plan& plan() const { return plan_; }

  // One run. Throws std::invalid_argument before anything is written (buffers too
  // small, a kernel's check), Failure for what peers did, and whatever the transport
  // throws; peers learn of each through the transport's abort. A second run at the same
  // time is refused with std::invalid_argument and disturbs nothing.
  Timing run(std::span<const MutableBytes> buffers, std::span<const uint64_t> registers,
             Transport& transport, const KernelTable& table);

 private:
  using KernelPointer = std::unique_ptr<KernelCall>;

  struct BoundRound {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    std::vector<ConstBytes> sent;  // the pieces of all sends
    std::vector<MutableBytes> received;
  };

  void check_arguments(const Frame& frame) const;
  void bind(const Frame& frame);
  void bind_round(const Frame& frame, int32_t number);
  void check_kernels(const Frame& frame, const KernelTable& table);
  void write_preambles();
  Timing execute(const Frame& frame, Transport& transport, const KernelTable& table);
  Exchange exchange(int32_t round) const;

  Plan plan_;
  std::mutex running_;  // guards everything below
  std::vector<BoundRound> rounds_;
  uint64_t step_ = 0;
  const KernelTable* checked_table_ = nullptr;  // whose checks passed for these sizes
  std::vector<int64_t> sizes_;                  // of the buffers; -1 for none
};

}  // namespace commkern
