// The RMS norm of very few rows by the warps that will multiply them, into the right operand of their product
// in shared memory.
#pragma once
#include <cuda_runtime.h>

#include "hopper.cuh"
#include "norm.cuh"
#include "operand_layout.h"
#include "scalars.cuh"

namespace quickturn {

constexpr int kNormWarps = 4;
constexpr int kNormRows = 4;   // of x, at most: a thread holds its part of all of them
constexpr int kHeldWarps = 2;  // virtual warps that a warp takes
constexpr int kVirtualWarps = kNormWarps * kHeldWarps;
constexpr int kNormColumns = kVirtualWarps * 64 * kChunkColumns;  // at most

// x = rms_norm(rows).
struct NormSource {
  const uint4* rows;   // [rows, vectors]
  const void* weight;  // bfloat16, or float32 with `wide`
  long long pitch;     // of rows, in vectors
  int vectors;         // of a row
  int bytes;           // of shared memory for what is normed
  float eps;
  bool wide;
};

// Barrier of the 128 threads that norm and multiply.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// Eight elements of the row times `scale` and eight of the weight, as Factors::apply makes them: a float32
// weight in two parts, one of bfloat16 in the first.
__device__ __forceinline__ uint4 scaled(const uint4& row, float scale, const uint4 (&weight)[2], bool wide) {
  float value[8];
  unpack(row, value);
  if (wide) {
    const Factors<true> factors{{weight[0], weight[1]}};
    factors.apply(value, scale);
    return pack(value);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] *= scale;
  const uint4 narrow = pack(value);
  return make_uint4(Bfloat::multiply2(narrow.x, weight[0].x), Bfloat::multiply2(narrow.y, weight[0].y),
                    Bfloat::multiply2(narrow.z, weight[0].z), Bfloat::multiply2(narrow.w, weight[0].w));
}

// What one of the 128 consumers does of it. A row is cut among the warps as norm.cu cuts it among its own,
// and summed in the same tree, so that it gets the same bits; a block that needs a part of K still sums whole
// rows. Vectors that aren't there count as zeros: threads never part.
class RowNorm {
 public:
  // Asks for the weight of vectors `first` to `first + room`, which no kernel makes: before the memory is
  // busy.
  __device__ __forceinline__ void begin(const NormSource& from, int first, int room) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warps = virtual_warps(from.vectors);
    const int end = min(first + room, from.vectors);
#pragma unroll
    for (int held = 0; held < kHeldWarps; ++held) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = vector_of(held * kNormWarps + warp, lane, half, warps);
        const uint4* parts = static_cast<const uint4*>(from.weight) + (from.wide ? 2 * at : at);
        at_[held][half] = at;
        there_[held][half] = held * kNormWarps + warp < warps && at < from.vectors;
        mine_[held][half] = there_[held][half] && at >= first && at < end;
        weight_[held][half][0] = mine_[held][half] ? parts[0] : make_uint4(0, 0, 0, 0);
        weight_[held][half][1] = mine_[held][half] && from.wide ? parts[1] : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Writes those vectors of every normed row to `x` (a shared address), zeros where the rows end. The kernels
  // ahead have finished; behind it products may read. `partial`: kNormRows * kVirtualWarps floats, 16-byte
  // aligned.
  __device__ __forceinline__ void run(const NormSource& from, int rows, uint32_t x, int first, int room,
                                      float* partial) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int pitch = chunk_pitch(rows);
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    uint4 value[kNormRows][kHeldWarps][2];
#pragma unroll
    for (int row = 0; row < kNormRows; ++row) {
      if (row >= rows) break;
#pragma unroll
      for (int held = 0; held < kHeldWarps; ++held)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          value[row][held][half] =
              there_[held][half] ? __ldcg(from.rows + row * from.pitch + at_[held][half]) : zeros;
    }
#pragma unroll
    for (int row = 0; row < kNormRows; ++row) {
      if (row >= rows) break;
      float squares[kHeldWarps] = {};
#pragma unroll
      for (int held = 0; held < kHeldWarps; ++held) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float wide[8];
          unpack(value[row][held][half], wide);
#pragma unroll
          for (int i = 0; i < 8; ++i) squares[held] += wide[i] * wide[i];
        }
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
#pragma unroll
        for (int held = 0; held < kHeldWarps; ++held)
          squares[held] += __shfl_xor_sync(0xFFFFFFFFu, squares[held], step);
      if (lane < kHeldWarps)
        partial[row * kVirtualWarps + lane * kNormWarps + warp] = lane == 0 ? squares[0] : squares[1];
    }
    consumers_sync();
#pragma unroll
    for (int row = 0; row < kNormRows; ++row) {
      if (row >= rows) break;
      const float4* parts = reinterpret_cast<const float4*>(partial + row * kVirtualWarps);
      const float4 low = parts[0], high = parts[1];
      const float sum = ((low.x + high.x) + (low.z + high.z)) + ((low.y + high.y) + (low.w + high.w));
      const float scale = rsqrtf(sum / static_cast<float>(from.vectors * kChunkColumns) + from.eps);
#pragma unroll
      for (int held = 0; held < kHeldWarps; ++held)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (mine_[held][half])
            store_shared(x + chunk_place(pitch, row, at_[held][half] - first),
                         scaled(value[row][held][half], scale, weight_[held][half], from.wide));
    }
    const int beyond = first + room - from.vectors;
    for (int i = threadIdx.x; i < rows * beyond; i += kNormWarps * 32)
      store_shared(x + chunk_place(pitch, i % rows, from.vectors - first + i / rows), zeros);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the products read through another path
    consumers_sync();
  }

 private:
  int at_[kHeldWarps][2];
  bool there_[kHeldWarps][2], mine_[kHeldWarps][2];
  uint4 weight_[kHeldWarps][2][2];
};

}  // namespace quickturn
