// The RMS norm of few rows by the warps that will multiply them: from the residual stream to the right
// operand of a product in shared memory.
#pragma once
#include <cuda_runtime.h>

#include "hopper.cuh"
#include "norm.cuh"
#include "operand_layout.h"
#include "scalars.cuh"

namespace quickturn {

constexpr int kNormWarps = 4;
constexpr int kNormRows = 8;
constexpr int kMaxVirtualWarps = 16;  // rows of up to 8,192 columns
constexpr int kHeldWarps = 2;         // virtual warps that a warp takes at once: the vectors of a piece

// out = rms_norm(residual + branch); the residual stream itself is not changed.
struct NormSource {
  const uint4* residual;                   // [rows, vectors]
  const uint4* branch;                     // or null
  const void* weight;                      // bfloat16, or float32 with `wide`
  long long residual_pitch, branch_pitch;  // in vectors
  int vectors;                             // of a row
  int pitch;                               // see operand_layout.h
  int bytes;                               // of shared memory for the rows, a multiple of 1,024
  float eps;
  bool wide;
};

// Barrier of the 128 threads that norm and multiply.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void prefetch_near(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
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

// Writes vectors `first` to `first + room` of every normed row to `x` (a shared address), zeros where the
// rows end, and waits for the kernels ahead in between. All 128 consumers call it; behind it products may
// read.
//
// A row is cut among the warps as norm.cu cuts it among its own, so that the sums have its bits; a block that
// needs a part of K still sums whole rows. The rows wait in `x`, unnormed, for the sum: no thread holds them.
// `partial`: kNormRows * kMaxVirtualWarps floats.
__device__ __forceinline__ void norm_to_shared(const NormSource& from, int rows, uint32_t x, int first,
                                               int room, float* partial) {
  constexpr int kRequests =
      4;  // pieces requested at once: as many of rows, or half as many of rows and branch
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = virtual_warps(from.vectors);
  const int pieces = (warps + kNormWarps * kHeldWarps - 1) / (kNormWarps * kHeldWarps);  // of a row: 1 or 2
  const int total = rows * pieces;
  const int own = min(room, from.vectors - first);
  const bool adds = from.branch != nullptr;
  auto warp_of = [&](int piece, int held) { return (piece * kHeldWarps + held) * kNormWarps + warp; };
  auto each = [&](int piece, auto&& visit) {
#pragma unroll
    for (int held = 0; held < kHeldWarps; ++held) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = vector_of(warp_of(piece, held), lane, half, warps);
        if (warp_of(piece, held) < warps && at < from.vectors) visit(held, half, at);
      }
    }
  };
  auto mine = [&](int at) { return static_cast<unsigned>(at - first) < static_cast<unsigned>(own); };
  auto place = [&](int row, int at) {
    return x + row_place(from.pitch, chunk_place(from.pitch, at - first), row);
  };

  // The weight of a row's first piece waits in registers. In float32 there is no room for it beside the rows:
  // then it is near, at least. That of a second piece is fetched where it's needed.
  uint4 weight[kHeldWarps][2][2];
  auto fetch = [&](uint4(&to)[2], int at) {
    const uint4* parts = static_cast<const uint4*>(from.weight) + (from.wide ? 2 * at : at);
    to[0] = parts[0];
    if (from.wide) to[1] = parts[1];
  };
  each(0, [&](int held, int half, int at) {
    if (!mine(at)) return;
    if (from.wide)
      prefetch_near(static_cast<const uint4*>(from.weight) + 2 * at);
    else
      fetch(weight[held][half], at);
  });
  wait_for_predecessors();

  const int at_once = adds ? kRequests / 2 : kRequests;
  for (int base = 0; base < total; base += at_once) {
    uint4 request[kRequests][kHeldWarps][2];
#pragma unroll
    for (int r = 0; r < kRequests; ++r) {
      const bool added = adds && r >= kRequests / 2;
      const int index = base + (added ? r - kRequests / 2 : r);
      if (index >= total) continue;
      const int row = pieces == 1 ? index : index / 2;
      const uint4* from_row =
          added ? from.branch + row * from.branch_pitch : from.residual + row * from.residual_pitch;
      each(index - row * pieces,
           [&](int held, int half, int at) { request[r][held][half] = __ldcg(from_row + at); });
    }
#pragma unroll
    for (int r = 0; r < kRequests; ++r) {
      const int index = base + r;
      if (r >= at_once || index >= total) break;
      const int row = pieces == 1 ? index : index / 2;
      const int piece = index - row * pieces;
      float squares[kHeldWarps] = {};
      each(piece, [&](int held, int half, int at) {
        float value[8];
        uint4 sum = request[r][held][half];
        unpack(sum, value);
        if (r < kRequests / 2 && adds) {
          float more[8];
          unpack(request[(r + kRequests / 2) % kRequests][held][half], more);
#pragma unroll
          for (int i = 0; i < 8; ++i) value[i] += more[i];
          sum = pack(value);
          unpack(sum, value);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) squares[held] += value[i] * value[i];
        if (mine(at)) store_shared(place(row, at), sum);
      });
#pragma unroll
      for (int held = 0; held < kHeldWarps; ++held) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
          squares[held] += __shfl_xor_sync(0xFFFFFFFFu, squares[held], step);
        if (lane == 0 && warp_of(piece, held) < warps)
          partial[row * kMaxVirtualWarps + warp_of(piece, held)] = squares[held];
      }
    }
  }
  if (from.wide) {
    each(0, [&](int held, int half, int at) {
      if (mine(at)) fetch(weight[held][half], at);
    });
  }
  consumers_sync();

  // Half a warp sums a row, as the first half of a warp of norm.cu does.
  float scale[kNormRows / 2];
#pragma unroll
  for (int pair = 0; pair < kNormRows / 2; ++pair) {
    if (2 * pair >= rows) break;
    const int row = 2 * pair + lane / 16;
    float squares = row < rows && lane % 16 < warps ? partial[row * kMaxVirtualWarps + lane % 16] : 0.f;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
    scale[pair] = rsqrtf(squares / static_cast<float>(from.vectors * kChunkColumns) + from.eps);
  }
#pragma unroll 1
  for (int index = 0; index < total; ++index) {
    const int row = pieces == 1 ? index : index / 2;
    const int piece = index - row * pieces;
    const float pair = row < 4 ? (row < 2 ? scale[0] : scale[1]) : (row < 6 ? scale[2] : scale[3]);
    const float by = __shfl_sync(0xFFFFFFFFu, pair, row % 2 * 16);
    each(piece, [&](int held, int half, int at) {
      if (!mine(at)) return;
      uint4 factors[2] = {weight[held][half][0], weight[held][half][1]};
      if (piece > 0) fetch(factors, at);
      const uint32_t there = place(row, at);
      store_shared(there, scaled(load_shared(there), by, factors, from.wide));
    });
  }
  const int beyond = room - own;
  for (int i = threadIdx.x; i < rows * beyond; i += kNormWarps * 32)
    store_shared(place(i / beyond, first + own + i % beyond), make_uint4(0, 0, 0, 0));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the products read through another path
  consumers_sync();
}

}  // namespace quickturn
