// Host side of the copy engine: describes a row-major bfloat16 matrix to it.
#pragma once
#include <cuda.h>
#include <dlfcn.h>

#include <cstring>

#include "hopper.cuh"

namespace quickturn {

// Boxes of `box_rows` x `box_columns`, written with the 128-byte swizzle; what a box has beyond the matrix is
// read as zero. `pitch`: elements from row to row, a multiple of 8; `base` is 16-byte aligned. False if the
// driver refuses or isn't there.
inline bool encode_map(TensorMap& map, const void* base, long long rows, long long columns, long long pitch,
                       int box_rows, int box_columns) {
  static const auto encode = [] {
    // Looked up at run time, so that the library loads, and can be tested for, where there is no driver.
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
        driver ? dlsym(driver, "cuTensorMapEncodeTiled") : nullptr);
  }();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitches[1] = {static_cast<cuuint64_t>(pitch) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap made;
  const CUresult result =
      encode(&made, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), sizes, pitches, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  static_assert(sizeof(made) == sizeof(map));
  std::memcpy(&map, &made, sizeof(map));
  return result == CUDA_SUCCESS;
}

}  // namespace quickturn
