#include "cuda/device.h"

#include <cuda_runtime.h>

#include <sstream>

namespace commkern::cuda {
namespace {

std::string arch_of(int device) {
  int major = 0;
  int minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "compute capability");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "compute capability");
  return "sm_" + std::to_string(major) + std::to_string(minor);
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// What to add where the machine code does not fit the device.
std::string arch_mismatch() {
  std::string text = "; built for";
  for (const std::string& arch : built_archs()) text += " " + arch;
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) text += ", device is " + arch_of(device);
  return text;
}

// CUDA says that of a missing driver, too.
std::string driver_mismatch() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) {
    return "no driver is installed";
  }
  return "the driver serves CUDA " + version_text(version) + ", this build is for " +
         runtime_version();
}

std::string text_of(cudaError_t status) {
  cudaGetLastError();  // else the next launch would report this error again
  std::string text =
      std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorNoKernelImageForDevice) text += arch_mismatch();
  if (status == cudaErrorInsufficientDriver) text += "; " + driver_mismatch();
  return text;
}

}  // namespace

void check_cuda(int status, const char* what) {
  const auto error = static_cast<cudaError_t>(status);
  if (error != cudaSuccess) throw CudaError(std::string(what) + ": " + text_of(error));
}

int64_t multiprocessors(const char* what) {
  int device = 0;
  int count = 0;
  check_cuda(cudaGetDevice(&device), what);
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             what);
  return count;
}

std::vector<std::string> built_archs() {
  std::istringstream words(COMMKERN_CUDA_ARCHS);
  std::vector<std::string> archs;
  for (std::string word; words >> word;) archs.push_back(word);
  return archs;
}

std::string runtime_version() { return version_text(CUDART_VERSION); }

Devices devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver) return {{}, driver_mismatch()};
  if (status != cudaSuccess) return {{}, text_of(status)};
  Devices found;
  for (int device = 0; device < count; ++device) {
    found.archs.push_back(arch_of(device));
  }
  if (count == 0) found.reason = "no device is visible";
  return found;
}

}  // namespace commkern::cuda
