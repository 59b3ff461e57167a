# The CUDA module, built where nvcc is found and wanted. Static cudart, no torch.
if(COMMKERN_CUDA STREQUAL "OFF")
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(COMMKERN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "COMMKERN_CUDA=ON but no nvcc was found; set CUDACXX")
  endif()
  return()
endif()
# TODO: the _cuda module
