# The CUDA module: built where nvcc is found and wanted. Static cudart, no torch.
if(NOT COMMKERN_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "COMMKERN_CUDA: expected AUTO, ON or OFF, got ${COMMKERN_CUDA}")
endif()
if(COMMKERN_CUDA STREQUAL "OFF")
  return()
endif()
foreach(arch IN LISTS COMMKERN_CUDA_ARCHITECTURES)
  if(NOT arch MATCHES "^[0-9]+[af]?(-real|-virtual)?$")
    message(FATAL_ERROR "COMMKERN_CUDA_ARCHITECTURES: expected numbers such as "
      "80-real, 90-virtual or 90 (both), got ${arch}")
  endif()
endforeach()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  set(why "no nvcc that works was found (looked at CUDACXX, then PATH)")
  if(COMMKERN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "COMMKERN_CUDA=ON, but ${why}")
  endif()
  message(STATUS "commkern: no CUDA module, ${why}")
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES ${COMMKERN_CUDA_ARCHITECTURES})
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
list(JOIN COMMKERN_CUDA_ARCHITECTURES " " listed)
message(STATUS "commkern: CUDA module with nvcc ${CMAKE_CUDA_COMPILER_VERSION} "
  "for ${listed}")

# As the module states them: "90-real" is sm_90, "90-virtual" compute_90, "90" both.
string(REGEX REPLACE "([0-9]+[af]?)-real" "sm_\\1" archs "${listed}")
string(REGEX REPLACE "([0-9]+[af]?)-virtual" "compute_\\1" archs "${archs}")
string(REGEX REPLACE "(^| )([0-9]+[af]?)" "\\1sm_\\2 compute_\\2" archs "${archs}")

# A fused multiply-add or a flushed denormal would change bits (docs: bit-exactness).
# Relaxed: device code calls the constexpr functions of core/format.h.
file(GLOB cuda_kernels CONFIGURE_DEPENDS csrc/cuda/*.cu)
add_library(commkern_cuda_kernels OBJECT ${cuda_kernels})
target_include_directories(commkern_cuda_kernels PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
set_target_properties(commkern_cuda_kernels PROPERTIES
  CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_compile_features(commkern_cuda_kernels PRIVATE cuda_std_20)
target_compile_options(commkern_cuda_kernels PRIVATE
  --fmad=false -ftz=false -prec-div=true -prec-sqrt=true
  --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra
  $<$<BOOL:${COMMKERN_WERROR}>:-Werror=all-warnings>)

file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/cuda/*.cpp)
pybind11_add_module(_cuda MODULE ${cuda_sources} csrc/bindings/cuda_module.cpp
  $<TARGET_OBJECTS:commkern_cuda_kernels>)
target_link_libraries(_cuda PRIVATE commkern_flags CUDA::cudart_static)
# Another library in the process may hold a cudart of another version.
target_link_options(_cuda PRIVATE -Wl,--exclude-libs,ALL)
set_target_properties(_cuda PROPERTIES LINKER_LANGUAGE CXX)
target_compile_definitions(_cuda PRIVATE COMMKERN_CUDA_ARCHS="${archs}")
list(APPEND modules _cuda)
