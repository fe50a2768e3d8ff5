// Host side of the copy engine: describes tensors of 16-bit floats or of bytes to it.
#pragma once
#include <cuda.h>
#include <dlfcn.h>

#include <cstring>

#include "hopper.cuh"

namespace quickturn {

// Boxes `box` of a tensor of kRank dims, the innermost first, of elements of `size` bytes (2: a 16-bit float,
// of any kind; 1), swizzled: rows of a box are 128 bytes or 64, whose mode permutes 16-byte units within 128
// bytes or 64. (In the mode of 128 bytes shorter rows would still lie 128 bytes apart.) What a box has beyond
// the tensor is read as zero.
// `pitches`: elements from one index to the next of each dim but the innermost, multiples of 16 bytes; `base`
// is 16-byte aligned. False if the driver refuses or isn't there.
template <int kRank>
bool encode_boxes(TensorMap& map, const void* base, const long long (&sizes)[kRank],
                  const long long (&pitches)[kRank - 1], const int (&box)[kRank], int size = 2) {
  static const auto encode = [] {
    // Looked up at run time, so that the library loads, and can be tested for, where there is no driver.
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
        driver ? dlsym(driver, "cuTensorMapEncodeTiled") : nullptr);
  }();
  if (encode == nullptr) return false;
  cuuint64_t counts[kRank], bytes[kRank - 1];
  cuuint32_t boxes[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    counts[i] = static_cast<cuuint64_t>(sizes[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    if (i > 0) bytes[i - 1] = static_cast<cuuint64_t>(pitches[i - 1]) * size;
  }
  const auto swizzle = box[0] * size == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMap made;
  const CUresult result =
      encode(&made, size == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank,
             const_cast<void*>(base), counts, bytes, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  static_assert(sizeof(made) == sizeof(map));
  std::memcpy(&map, &made, sizeof(map));
  return result == CUDA_SUCCESS;
}

// A row-major matrix in boxes of `box_rows` x `box_columns`; `pitch`: elements from row to row.
inline bool encode_map(TensorMap& map, const void* base, long long rows, long long columns, long long pitch,
                       int box_rows, int box_columns, int size = 2) {
  return encode_boxes<2>(map, base, {columns, rows}, {pitch}, {box_columns, box_rows}, size);
}

}  // namespace quickturn
