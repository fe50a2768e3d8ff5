// The norm of a row that a block holds in registers, for kernels that have just made the row.
#pragma once
#include <cuda_runtime.h>

#include "hopper.cuh"

namespace quickturn {

constexpr int kMaxVectors = 2;  // of 8 elements, a thread

__device__ __forceinline__ void unpack(const uint4& packed, float (&value)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[2 * i] = __uint_as_float(words[i] << 16);
    value[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ uint4 pack(const float (&value)[8]) {
  return make_uint4(narrow2(value[0], value[1]), narrow2(value[2], value[3]), narrow2(value[4], value[5]),
                    narrow2(value[6], value[7]));
}

// Eight elements of the weight as they come: 16 bytes, or 32 with kWide.
template <bool kWide>
struct Factors {
  uint4 parts[kWide ? 2 : 1];

  __device__ __forceinline__ void load(const void* weight, int at) {
#pragma unroll
    for (int i = 0; i < (kWide ? 2 : 1); ++i)
      parts[i] = static_cast<const uint4*>(weight)[at * (kWide ? 2 : 1) + i];
  }

  // The normed values times the weight. A float32 weight multiplies before anything is rounded, one of
  // bfloat16 after.
  __device__ __forceinline__ void apply(float (&value)[8], float scale) const {
    if constexpr (kWide) {
      const uint32_t words[8] = {parts[0].x, parts[0].y, parts[0].z, parts[0].w,
                                 parts[1].x, parts[1].y, parts[1].z, parts[1].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] = value[i] * scale * __uint_as_float(words[i]);
    } else {
      float by[8];
      unpack(parts[0], by);
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] = rounded(value[i] * scale) * by[i];
    }
  }
};

// A row of bfloat16, 8 elements a thread and vector: what is added to the residual stream, and normed.
template <bool kWide>
struct NormedRow {
  Factors<kWide> weight[kMaxVectors];

  __device__ __forceinline__ void load_weight(const void* from, int vectors) {
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v) {
      const int at = threadIdx.x + v * blockDim.x;
      if (at < vectors) weight[v].load(from, at);
    }
  }

  // `read(at, value)` gives 8 elements, rounded to bfloat16. residual null: only the norm of them. Called by
  // all threads; `partial` is shared memory of 32 floats that nobody else uses until the next barrier.
  template <typename Read>
  __device__ __forceinline__ void run(Read read, uint4* residual, uint4* out, float* partial, int vectors,
                                      float width, float eps) const {
    float value[kMaxVectors][8];
    float squares = 0.f;
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v) {
      const int at = threadIdx.x + v * blockDim.x;
      if (at >= vectors) continue;
      read(at, value[v]);
      if (residual != nullptr) {
        uint4* kept = residual + at;
        float before[8];
        unpack(*kept, before);
#pragma unroll
        for (int i = 0; i < 8; ++i) value[v][i] += before[i];
        const uint4 sum = pack(value[v]);
        *kept = sum;
        unpack(sum, value[v]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += value[v][i] * value[v][i];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
    const int warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = threadIdx.x % 32 < warps ? partial[threadIdx.x % 32] : 0.f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
    const float scale = rsqrtf(squares / width + eps);
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v) {
      const int at = threadIdx.x + v * blockDim.x;
      if (at >= vectors) continue;
      weight[v].apply(value[v], scale);
      out[at] = pack(value[v]);
    }
  }
};

// Threads of a block that norms rows of so many vectors.
inline int norm_threads(int vectors) { return ((vectors + kMaxVectors - 1) / kMaxVectors + 31) / 32 * 32; }

}  // namespace quickturn
