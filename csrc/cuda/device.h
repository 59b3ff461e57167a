// Questions to the CUDA runtime, without its headers, and errors as exceptions.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace commkern::cuda {

// A refused CUDA call: the kernel or question, the error's name, CUDA's own text.
class CudaError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// `status` is a cudaError_t; throws CudaError unless it is cudaSuccess.
void check_cuda(int status, const char* what);

// Of the current device.
int64_t multiprocessors(const char* what);

// What the kernels were compiled for: "sm_90" machine code, "compute_90" PTX.
std::vector<std::string> built_archs();

// Of the linked runtime, such as "13.0". Needs no driver.
std::string runtime_version();

struct Devices {
  std::vector<std::string> archs;  // one a visible device, such as "sm_90"
  std::string reason;              // why there is none; else empty
};
Devices devices();

}  // namespace commkern::cuda
