// How kernels are launched that may begin before the ones ahead have finished, and wait for them themselves.
#pragma once
#include <cuda_runtime.h>

namespace quickturn {

// Room for `shared` bytes of dynamic shared memory, and the division of a multiprocessor's memory that all
// have which are to overlap: it must be idle to change it.
template <class... Types>
cudaError_t divide_memory(void (*kernel)(Types...), int shared = 0) {
  cudaError_t error = cudaSuccess;
  if (shared > 0) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  return error;
}

struct LaunchShape {
  dim3 blocks;
  int threads;
  int shared = 0;  // bytes of dynamic shared memory
};

// Unless `early`, it begins when the launch ahead has finished.
template <class... Types, class... Values>
cudaError_t launch_dependent(void (*kernel)(Types...), const LaunchShape& shape, bool early, void* stream,
                             const Values&... values) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Types(values)...);
}

}  // namespace quickturn
