// One kernel step: an Args struct whose buffers and registers are filled in at each
// run.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/types.h"
#include "kernels/kernel_table.h"
#include "runtime/plan.h"

namespace commkern {

// What a run is given: the plan's buffers and registers, in its order.
struct Frame {
  std::span<const MutableBytes> buffers;
  std::span<const uint64_t> registers;

  MutableBytes at(const Slice& slice) const {
    const auto& buffer = buffers[size_t(slice.buffer)];
    return {buffer.data + slice.offset, slice.nbytes};
  }
};

class KernelCall {
 public:
  virtual ~KernelCall() = default;

  virtual const std::string& name() const = 0;
  virtual void bind(const Frame& frame) = 0;
  // Throws std::invalid_argument: the kernel's own check, or no such kernel in `table`.
  virtual void check(const KernelTable& table) const = 0;
  virtual void run(const KernelTable& table) const = 0;
};

// Checks a buffer or register that a plan names; throws std::invalid_argument.
class PlanNames {
 public:
  PlanNames(const std::vector<std::string>& buffers,
            const std::vector<std::string>& registers)
      : buffers_(buffers), registers_(registers), required_nbytes_(buffers.size()) {}

  const Slice& use(const Slice& slice);  // also notes how large the buffer must be
  const Register& use(const Register& given) const;
  const std::vector<int64_t>& required_nbytes() const { return required_nbytes_; }

 private:
  const std::vector<std::string>& buffers_;
  const std::vector<std::string>& registers_;
  std::vector<int64_t> required_nbytes_;
};

std::unique_ptr<KernelCall> make_kernel_call(const KernelSpec& spec, PlanNames& names);

}  // namespace commkern
