// A mixture of experts over few tokens (up to 64) in one launch at the speed of memory: router, choice, gate
// and up with their activation, down, weighted sum, and the shared expert.
//
// One block a multiprocessor. A warp streams weights through a ring in shared memory, 16 rows at a time (8 of
// the gate and the matching 8 of up, or 16 of down), and never waits for results: when gate and up are
// through, the first weights of down have long been asked for. Eight warps multiply; weights are the left
// operand, so that the tokens of an expert, mostly one or two, cost a padding to 8 columns only. A block has
// rows of down for itself and goes through all experts for them. Each warp takes units of 16 rows of its own
// and waits for nobody: no sum crosses warps or blocks, and every sum has one order, whatever else is in the
// batch.
#pragma once
#include <cuda_runtime.h>

#include "hopper.cuh"
#include "moe_activation.cuh"
#include "moe_route.cuh"
#include "scalars.cuh"
#include "tensor_map.h"
#include "warp_mma.cuh"

namespace quickturn {

constexpr int kWarps = 8;
constexpr int kConsumers = kWarps * 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kHalf = 8;  // weight rows of a box; a stage has two
constexpr int kRows = 2 * kHalf;
constexpr int kSlices = 8;  // of 128 bytes of a row in a stage
constexpr int kHalfBytes = kHalf * kSlices * 128;
constexpr int kStageBytes = 2 * kHalfBytes;
constexpr int kMaxStages = 16;
constexpr int kRouterRows = 4;  // of the router in one block

// How weights are stored: bfloat16, or e4m3 with a factor for each block of 128 x 128. A lane reads two
// pieces of 16 bytes, side by side, of every 128 of a row.
template <bool kFp8>
struct Format {
  static constexpr int kSlice = kFp8 ? 128 : 64;  // columns in 128 bytes
  static constexpr int kColumns = kSlice * kSlices;
  static constexpr int kLane = kSlice / 8;     // columns of a piece
  static constexpr int kVectors = kLane / 8;   // 16-byte pieces of x for them
  static constexpr int kGroup = kFp8 ? 2 : 4;  // slices whose part of x is asked for at once
  static constexpr int kAsked = kGroup * 2 * kVectors;
};
constexpr int kPieces = 2;
constexpr int kScaleBlock = 128;

struct MoeArguments {
  const bf16* x;
  const bf16* router;          // [rules.experts, hidden], or null: chosen and weights are given
  const bf16* router_bias;     // [rules.experts] or null
  const long long* positions;  // [tokens] or null; negative ones are padding
  const int* chosen;           // [tokens, top]
  const float* weights;
  const void* gate_up;  // [experts, 2 inner, hidden]
  const void* down;     // [experts, hidden, inner]
  const bf16* gate_up_bias;
  const bf16* down_bias;
  const void* shared_gate_up;  // [2 shared_inner, hidden] or null
  const void* shared_down;     // [hidden, shared_inner]
  // Factors of 128 x 128 blocks, beside weights of one byte: as many rows and columns as the weights have
  // blocks; those of the shared expert have rows of `shared_*_pitch`.
  const float* gate_up_scale;
  const float* down_scale;
  const float* shared_gate_up_scale;
  const float* shared_down_scale;
  const bf16* shared_gate;  // [hidden] or null
  float* logits;            // [tokens, rules.experts + 1], to write and read
  bf16* between;            // [tokens, top + 1, inner_pitch], to write and read
  bf16* out;                // [tokens, hidden]
  int* counters;            // two zeros, left as zeros
  RoutingRules rules;
  long long x_pitch;
  int tokens, hidden, inner, shared_inner, inner_pitch, stages, oss, shared_gate_up_pitch, shared_down_pitch,
      shared_permuted;
};

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// The next stage of 8 rows, slice by slice; `row` counts rows of the matrix.
__device__ __forceinline__ void load_rows(uint32_t to, const TensorMap* map, int row, int slice,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(row), "r"(slice), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Blocks meet twice at most. What the consumers wrote before `arrive` is seen by all after `wait`.
__device__ __forceinline__ void grid_arrive(int* counter) {
  consumers_sync();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1);
  }
}
__device__ __forceinline__ void grid_wait(const int* counter, int goal) {
  if (threadIdx.x == 0) {
    int seen;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < goal);
    __threadfence();
  }
  consumers_sync();
}

// How the copy engine sees the weights, as matrices of all experts' rows.
struct MoeMaps {
  TensorMap gate_up, down, shared_gate_up, shared_down;
};

// The first of the granules of 8 gate rows (of all routed experts in turn) that a block takes, so dealt that
// with its rows of down and its part of the shared expert every block has as many bytes as any other.
__device__ __forceinline__ int first_granule(const MoeArguments& args, int active, int block) {
  const int blocks = gridDim.x, busier = args.hidden / kRows % blocks;
  const int granules = active * (args.inner / 8), shared = args.shared_inner / 8;
  if (block == blocks) return granules;
  const double down = static_cast<double>(active) * args.inner + args.shared_inner;
  const double all = static_cast<double>(granules) * args.hidden;
  const double fair = (all + busier * down + static_cast<double>(shared) * args.hidden) / blocks;
  if (fair < down + (shared / blocks + 1.) * args.hidden)
    return static_cast<int>(static_cast<long long>(granules) * block / blocks);
  const double before =
      block * fair - min(block, busier) * down - static_cast<double>(shared * block / blocks) * args.hidden;
  return min(granules, static_cast<int>(before / args.hidden));
}

// ---- The streaming warp

template <bool kFp8>
struct Producer {
  using F = Format<kFp8>;
  uint32_t ring, full, empty;
  volatile int* asked;  // stages that were asked for so far
  int stages, stage = 0;
  uint32_t parity = 1;  // a ring that nobody used yet is empty

  // 16 rows of `columns`: 8 from `first` and 8 from `second`, in stages. One thread calls this.
  __device__ __forceinline__ void push(const TensorMap* weights, int first, int second, int columns) {
    for (int at = 0; at < columns; at += F::kColumns) {
      const uint32_t to = ring + stage * kStageBytes, barrier = full + 8 * stage;
      barrier_wait(empty + 8 * stage, parity);
      barrier_expect(barrier, kStageBytes);
      *asked = *asked + 1;
      load_rows(to, weights, first, at / F::kSlice, barrier);
      load_rows(to + kHalfBytes, weights, second, at / F::kSlice, barrier);
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
};

// ---- The multiplying warps

// 16 weight rows and the tokens they multiply, which are this lane's columns: rows of x, or of what lies
// between the products.
struct Unit {
  const bf16* base;
  long long pitch;   // elements between tokens
  int choice_pitch;  // elements between a token's choices; 0 for x
  int columns;
  const short* pairs;
  int count;
  const float* low_scale;  // of the first and the last 8 rows, block after block of the columns
  const float* high_scale;
  bool permuted;  // one-byte weights in the column order of linear_fp8.cu

  __device__ __forceinline__ const bf16* row(int column) const {
    if (column >= count) return nullptr;
    const int pair = pairs[column];
    return base + (pair & 255) * pitch + (pair >> 8) * choice_pitch;
  }
};

template <bool kFp8>
struct Consumer {
  using F = Format<kFp8>;
  uint32_t ring, full, empty;
  const volatile int* asked;
  int stages;
  // Of the group of slices to come: this lane's part of its first eight tokens, and factors.
  uint4 next[F::kGroup][kPieces][F::kVectors];
  float low_next[F::kGroup], high_next[F::kGroup];

  __device__ __forceinline__ static uint4 load(const bf16* row, int column, int columns) {
    return row != nullptr && column < columns ? *reinterpret_cast<const uint4*>(row + column)
                                              : make_uint4(0, 0, 0, 0);
  }
  // The first column of a lane's piece, from the slice's first.
  __device__ __forceinline__ static int column_of(int piece) {
    return (threadIdx.x % 4 * kPieces + piece) * F::kLane;
  }
  __device__ __forceinline__ static void load(uint4 (&to)[F::kGroup][kPieces][F::kVectors], const bf16* row,
                                              int at, int columns) {
#pragma unroll
    for (int slice = 0; slice < F::kGroup; ++slice)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
        for (int v = 0; v < F::kVectors; ++v)
          to[slice][piece][v] = load(row, at + slice * F::kSlice + column_of(piece) + v * 8, columns);
  }
  __device__ __forceinline__ void ask(const Unit& unit, const bf16* row, int at) {
    load(next, row, at, unit.columns);
    if constexpr (kFp8) {
#pragma unroll
      for (int slice = 0; slice < F::kGroup; ++slice) {
        const int column = at + slice * F::kSlice;
        if (unit.count == 0 || column >= unit.columns) break;
        low_next[slice] = __ldg(unit.low_scale + column / kScaleBlock);
        high_next[slice] = __ldg(unit.high_scale + column / kScaleBlock);
      }
    }
  }
  __device__ __forceinline__ void ask(const Unit& unit) { ask(unit, unit.row(threadIdx.x % 32 / 4), 0); }

  // Products of one piece with eight tokens. Which column of K is which doesn't matter, as long as both
  // operands agree.
  __device__ __forceinline__ static void multiply_piece(float (&sum)[4], const uint4& low, const uint4& high,
                                                        const uint4 (&b)[F::kVectors], float low_scale,
                                                        float high_scale, bool permuted) {
    if constexpr (kFp8) {
      const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
      const uint32_t x[8] = {b[0].x, b[0].y, b[0].z, b[0].w, b[1].x, b[1].y, b[1].z, b[1].w};
      float part[4] = {};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const uint32_t a[4] = {even_bytes<Bfloat>(lows[word]), even_bytes<Bfloat>(highs[word]),
                               odd_bytes<Bfloat>(lows[word]), odd_bytes<Bfloat>(highs[word])};
        const uint32_t even = permuted ? x[word] : __byte_perm(x[2 * word], x[2 * word + 1], 0x5410);
        const uint32_t odd = permuted ? x[word + 4] : __byte_perm(x[2 * word], x[2 * word + 1], 0x7632);
        multiply(part, a, even, odd);
      }
      sum[0] += part[0] * low_scale;
      sum[1] += part[1] * low_scale;
      sum[2] += part[2] * high_scale;
      sum[3] += part[3] * high_scale;
    } else {
      const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
      multiply(sum, a[0], b[0].x, b[0].y);
      multiply(sum, a[1], b[0].z, b[0].w);
    }
  }

  // 8 rows of a stage's half for this lane: as the copy engine swizzled it, every other piece of a row, and
  // of the next row the pieces between.
  __device__ __forceinline__ static uint32_t place(int piece) {
    const int lane = threadIdx.x % 32;
    return lane / 4 * 128 + (((lane % 4 * kPieces + piece) ^ (lane / 4)) << 4);
  }

  // A stage times up to 8 tokens, which were asked for. It asks for what comes next.
  template <int kTiles>
  __device__ __forceinline__ void multiply_stage(const Unit& unit, const bf16* const (&row)[kTiles],
                                                 int start, uint32_t stage, const Unit& after,
                                                 float (&sum)[kTiles][kPieces][4]) {
#pragma unroll
    for (int first = 0; first < kSlices; first += F::kGroup) {
      const int at = start + first * F::kSlice;
      if (at >= unit.columns) break;
      uint4 b[F::kGroup][kPieces][F::kVectors];
      float low_scale[F::kGroup], high_scale[F::kGroup];
#pragma unroll
      for (int slice = 0; slice < F::kGroup; ++slice) {
        low_scale[slice] = low_next[slice];
        high_scale[slice] = high_next[slice];
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
          for (int v = 0; v < F::kVectors; ++v) b[slice][piece][v] = next[slice][piece][v];
      }
      if (at + F::kGroup * F::kSlice < unit.columns)
        ask(unit, row[0], at + F::kGroup * F::kSlice);
      else
        ask(after);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int slice = 0; slice < F::kGroup; ++slice) {
          if (at + slice * F::kSlice >= unit.columns) break;
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) {
            const uint32_t from = stage + (first + slice) * kHalf * 128 + place(piece);
            const uint4 low = load_shared(from), high = load_shared(from + kHalfBytes);
            multiply_piece(sum[tile][piece], low, high, b[slice][piece], low_scale[slice], high_scale[slice],
                           unit.permuted);
          }
        }
      }
    }
  }

  // The same in the same order for more tokens, all of which are loaded when they're needed.
  template <int kTiles>
  __device__ __forceinline__ void multiply_wide(const Unit& unit, const bf16* const (&row)[kTiles], int start,
                                                uint32_t stage, const Unit& after,
                                                float (&sum)[kTiles][kPieces][4]) {
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const int at = start + slice * F::kSlice;
      if (at >= unit.columns) break;
      float low_scale = 1.f, high_scale = 1.f;
      if constexpr (kFp8) {
        low_scale = __ldg(unit.low_scale + at / kScaleBlock);
        high_scale = __ldg(unit.high_scale + at / kScaleBlock);
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        uint4 b[kTiles][F::kVectors];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int v = 0; v < F::kVectors; ++v)
            b[tile][v] = load(row[tile], at + column_of(piece) + v * 8, unit.columns);
        const uint32_t from = stage + slice * kHalf * 128 + place(piece);
        const uint4 low = load_shared(from), high = load_shared(from + kHalfBytes);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          multiply_piece(sum[tile][piece], low, high, b[tile], low_scale, high_scale, unit.permuted);
      }
    }
    if (start + F::kColumns >= unit.columns) ask(after);
  }

  // One unit, whose stages begin with the ring's `index`-th. `after`: this warp's unit to come, to be asked
  // for early. finish(column, sums of this lane's fragment) runs for each eight tokens.
  template <int kTiles, class Finish>
  __device__ __forceinline__ void run(const Unit& unit, int index, const Unit& after, const Finish& finish) {
    const int lane = threadIdx.x % 32;
    const bf16* row[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) row[tile] = unit.row(tile * 8 + lane / 4);
    float sum[kTiles][kPieces][4] = {};
    int stage = index % stages;
    uint32_t parity = index / stages & 1;
    for (int start = 0; start < unit.columns; start += F::kColumns) {
      // A warp may be rounds of the ring ahead, and the barrier tells only odd rounds from even ones.
      while (*asked <= index) continue;
      ++index;
      barrier_wait(full + 8 * stage, parity);
      if constexpr (kTiles == 1)
        multiply_stage(unit, row, start, ring + stage * kStageBytes, after, sum);
      else
        multiply_wide(unit, row, start, ring + stage * kStageBytes, after, sum);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * stage);
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile * 8 >= unit.count) break;
      const float(&a)[4] = sum[tile][0], (&b)[4] = sum[tile][1];
      finish(tile * 8 + lane % 4 * 2, make_float4(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]));
    }
  }

  template <class Finish>
  __device__ __forceinline__ void run(const Unit& unit, int index, const Unit& after, const Finish& finish) {
    if (unit.count <= 8)
      run<1>(unit, index, after, finish);
    else
      run<kMaxTokens / 8>(unit, index, after, finish);
  }
};

// The logits of this block's rows of the router for every token; row `rules.experts` is the shared gate.
// `early` holds the first columns of those rows.
__device__ __forceinline__ void write_logits(const MoeArguments& args, const bf16* const (&rows)[kRouterRows],
                                             const uint4 (&early)[kRouterRows], float* partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kAtOnce = 4;
  for (int start = 0; start < args.tokens; start += kAtOnce) {
    float sum[kAtOnce][kRouterRows] = {};
    for (int at = threadIdx.x * 8; at < args.hidden; at += kConsumers * 8) {
      uint4 value[kAtOnce];
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t)
        if (start + t < args.tokens)
          value[t] = __ldcg(reinterpret_cast<const uint4*>(args.x + (start + t) * args.x_pitch + at));
#pragma unroll
      for (int r = 0; r < kRouterRows; ++r) {
        if (rows[r] == nullptr) break;
        const uint4 weight =
            at < kConsumers * 8 ? early[r] : __ldg(reinterpret_cast<const uint4*>(rows[r] + at));
        const uint32_t w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
        for (int t = 0; t < kAtOnce; ++t) {
          if (start + t >= args.tokens) break;
          const uint32_t v[4] = {value[t].x, value[t].y, value[t].z, value[t].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[t][r] += __uint_as_float(w[i] << 16) * __uint_as_float(v[i] << 16);
            sum[t][r] += __uint_as_float(w[i] & 0xFFFF0000u) * __uint_as_float(v[i] & 0xFFFF0000u);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kAtOnce; ++t)
#pragma unroll
      for (int r = 0; r < kRouterRows; ++r) {
        if (rows[r] == nullptr || start + t >= args.tokens) break;
        const float whole = warp_sum(sum[t][r]);
        if (lane == 0) partial[(warp * kMaxTokens + start + t) * kRouterRows + r] = whole;
      }
  }
  consumers_sync();
  for (int i = threadIdx.x; i < args.tokens * kRouterRows; i += kConsumers) {
    const int row = blockIdx.x + i % kRouterRows * gridDim.x, token = i / kRouterRows;
    if (rows[i % kRouterRows] == nullptr) continue;
    float whole = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      whole += partial[(w * kMaxTokens + token) * kRouterRows + i % kRouterRows];
    const int column = args.router != nullptr ? row : args.rules.experts;
    if (args.router_bias != nullptr && column < args.rules.experts) whole += widen(args.router_bias[column]);
    args.logits[token * (args.rules.experts + 1) + column] = whole;
  }
}

template <bool kFp8>
__global__ void __launch_bounds__(kThreads, 1)
    moe_few_tokens(const __grid_constant__ MoeArguments args, const __grid_constant__ MoeMaps maps) {
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) uint64_t barriers[2 * kMaxStages];
  __shared__ float partial[kWarps * kMaxTokens * kRouterRows];
  __shared__ Choice choice;
  __shared__ int asked;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, blocks = gridDim.x;
  const int top = args.rules.top, slots = top + 1;
  const uint32_t ring = (shared_address(memory) + 1023u) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kMaxStages;
  // [tokens, slots, kRows]
  float* results =
      reinterpret_cast<float*>(memory + (ring - shared_address(memory)) + args.stages * kStageBytes);
  const int shared_granules = args.shared_inner / 8;
  const int shared_begin = shared_granules * block / blocks;
  const int shared_end = shared_granules * (block + 1) / blocks;
  const int row_granules = args.hidden / kRows;

  if (threadIdx.x == kConsumers) {
    for (int stage = 0; stage < args.stages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, 1);
    }
    asked = 0;
    barrier_init_fence();
  }
  __syncthreads();
  // Every block of this grid is there when the first of the next comes: none can take another's place.
  let_dependents_start();

  if (warp == kWarps) {
    Producer<kFp8> producer{ring, full, empty, &asked, args.stages};
    if (lane == 0) {
      prefetch_map(&maps.gate_up);
      prefetch_map(&maps.down);
      for (int g = shared_begin; g < shared_end; ++g)
        producer.push(&maps.shared_gate_up, g * kHalf, args.shared_inner + g * kHalf, args.hidden);
    }
    __syncwarp();
    asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");  // the choice is made
    if (lane == 0) {
      const int end = first_granule(args, choice.count, block + 1);
      const int of_expert = args.inner / kHalf;
      for (int g = first_granule(args, choice.count, block); g < end; ++g) {
        const int row = choice.active[g / of_expert] * 2 * args.inner + g % of_expert * kHalf;
        producer.push(&maps.gate_up, row, row + args.inner, args.hidden);
      }
      for (int r = block; r < row_granules; r += blocks) {
        for (int i = 0; i < choice.count; ++i) {
          const int row = choice.active[i] * args.hidden + r * kRows;
          producer.push(&maps.down, row, row + kHalf, args.inner);
        }
        if (args.shared_inner > 0)
          producer.push(&maps.shared_down, r * kRows, r * kRows + kHalf, args.shared_inner);
      }
    }
    return;
  }

  // ---- Router
  const int router_rows = (args.router != nullptr ? args.rules.experts : 0) + (args.shared_gate != nullptr);
  const bf16* rows[kRouterRows];
  uint4 early[kRouterRows];
#pragma unroll
  for (int r = 0; r < kRouterRows; ++r) {
    const int row = block + r * blocks;
    rows[r] = row >= router_rows ? nullptr
              : args.router != nullptr && row < args.rules.experts
                  ? args.router + static_cast<long long>(row) * args.hidden
                  : args.shared_gate;
    if (rows[r] != nullptr && threadIdx.x * 8 < args.hidden)
      early[r] = __ldg(reinterpret_cast<const uint4*>(rows[r] + threadIdx.x * 8));
  }
  wait_for_predecessors();
  int goal = 0;
  if (router_rows > 0) write_logits(args, rows, early, partial);
  if (args.router != nullptr) {
    grid_arrive(args.counters);
    goal += blocks;
    grid_wait(args.counters, goal);
  }

  // ---- Choice
  unsigned long long real = args.tokens == 64 ? ~0ull : (1ull << args.tokens) - 1;
  if (args.router != nullptr) {
    if (args.positions != nullptr) {
      unsigned padding[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        padding[i] =
            __ballot_sync(0xFFFFFFFFu, i * 32 + lane < args.tokens && args.positions[i * 32 + lane] < 0);
      real &= ~(static_cast<unsigned long long>(padding[1]) << 32 | padding[0]);
    }
    for (int t = warp; t < args.tokens; t += kWarps) {
      float weight = 0.f;
      int expert = -1;
      if (real >> t & 1)
        choose_experts(args.rules, args.logits + t * (args.rules.experts + 1), weight, expert);
      if (lane < top) {
        choice.weight[t][lane] = weight;
        choice.chosen[t][lane] = static_cast<short>(expert);
      }
    }
  } else {
    for (int i = threadIdx.x; i < args.tokens * top; i += kConsumers) {
      const int expert = args.chosen[i];
      const bool inside = expert >= 0 && expert < args.rules.experts;
      choice.chosen[i / top][i % top] = static_cast<short>(inside ? expert : -1);
      choice.weight[i / top][i % top] = args.weights[i];
    }
  }
  make_lists<kConsumers>(choice, args.tokens, top, args.rules.experts, args.shared_inner > 0 ? real : 0);
  asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory");

  // ---- Gate and up
  Consumer<kFp8> consumer{ring, full, empty, &asked, args.stages};
  const int active = choice.count;
  // Units of the first product: granule g of all routed experts in turn, or of the shared expert; `some` is
  // false for none at all.
  const int of_expert = args.inner / 8;
  const int hidden_blocks = (args.hidden + kScaleBlock - 1) / kScaleBlock;
  const auto input = [&](int g, bool shared, bool some) {
    const int i = shared ? active : g / of_expert;
    const float *low = nullptr, *high = nullptr;
    if (kFp8 && some && shared) {
      low = args.shared_gate_up_scale + g * 8 / kScaleBlock * args.shared_gate_up_pitch;
      high = low + args.shared_inner / kScaleBlock * args.shared_gate_up_pitch;
    } else if (kFp8 && some) {
      const int half = args.inner / kScaleBlock;
      low = args.gate_up_scale +
            (choice.active[i] * 2ll * half + g % of_expert * 8 / kScaleBlock) * hidden_blocks;
      high = low + half * hidden_blocks;
    }
    return Unit{args.x,
                args.x_pitch,
                0,
                args.hidden,
                choice.pairs + choice.first[i],
                some ? choice.first[i + 1] - choice.first[i] : 0,
                low,
                high,
                shared && args.shared_permuted};
  };
  const long long between_pitch = static_cast<long long>(slots) * args.inner_pitch;
  const auto gate_up_done = [&](const Unit& unit, int expert, int inner, int feature) {
    return [&args, unit, expert, inner, feature, between_pitch, lane](int column, const float4& total) {
      const float sums[2][2] = {{total.x, total.z}, {total.y, total.w}};
      const int at = feature + lane / 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i >= unit.count) break;
        float gate = sums[i][0], up = sums[i][1];
        if (args.gate_up_bias != nullptr && expert >= 0) {
          gate += widen(args.gate_up_bias[expert * 2ll * inner + at]);
          up += widen(args.gate_up_bias[(expert * 2ll + 1) * inner + at]);
        }
        const int pair = unit.pairs[column + i];
        const float value = activated(gate, up, args.oss && expert >= 0);
        args.between[(pair & 255) * between_pitch + (pair >> 8) * args.inner_pitch + at] =
            static_cast<bf16>(narrow2(value, 0.f) & 0xFFFFu);
      }
    };
  };
  const int begin = first_granule(args, active, block), end = first_granule(args, active, block + 1);
  const int shared_units = shared_end - shared_begin, units_before = shared_units + end - begin;
  const int hidden_stages = (args.hidden + Format<kFp8>::kColumns - 1) / Format<kFp8>::kColumns;
  const auto nth = [&](int u) {
    const bool shared = u < shared_units;
    return input(shared ? shared_begin + u : min(begin + u - shared_units, max(end - 1, 0)), shared,
                 u < units_before);
  };
  consumer.ask(nth(warp));
  for (int u = warp; u < units_before; u += kWarps) {
    const bool shared = u < shared_units;
    const int g = begin + u - shared_units;
    const Unit unit = nth(u);
    consumer.run(unit, u * hidden_stages, nth(u + kWarps),
                 gate_up_done(unit, shared ? -1 : choice.active[g / of_expert],
                              shared ? args.shared_inner : args.inner,
                              (shared ? shared_begin + u : g % of_expert) * kHalf));
  }
  grid_arrive(args.counters);
  goal += blocks;
  if (args.shared_gate != nullptr && args.router != nullptr) {
    // Seen since the first meeting.
    for (int t = threadIdx.x; t < args.tokens; t += kConsumers)
      choice.weight[t][top] =
          1.f / (1.f + __expf(-__ldcg(args.logits + t * (args.rules.experts + 1) + args.rules.experts)));
  }
  grid_wait(args.counters, goal);
  if (threadIdx.x == 0 && atomicAdd(args.counters + 1, 1) == blocks - 1) {
    args.counters[0] = 0;
    args.counters[1] = 0;
  }
  if (args.shared_gate == nullptr || args.router == nullptr) {
    for (int t = threadIdx.x; t < args.tokens; t += kConsumers)
      choice.weight[t][top] =
          args.shared_gate == nullptr
              ? 1.f
              : 1.f /
                    (1.f + __expf(-__ldcg(args.logits + t * (args.rules.experts + 1) + args.rules.experts)));
  }
  consumers_sync();

  // ---- Down
  const int units = active + (args.shared_inner > 0);
  const auto halfway = [&](int i, int r) {
    const bool shared = i == active;
    const int inner = shared ? args.shared_inner : args.inner;
    const float* scale = nullptr;
    if (kFp8 && i >= units)
      scale = nullptr;
    else if (kFp8 && shared)
      scale = args.shared_down_scale + r * kRows / kScaleBlock * args.shared_down_pitch;
    else if (kFp8)
      scale = args.down_scale +
              (static_cast<long long>(choice.active[i]) * hidden_blocks + r * kRows / kScaleBlock) *
                  ((args.inner + kScaleBlock - 1) / kScaleBlock);
    return Unit{args.between,
                between_pitch,
                args.inner_pitch,
                inner,
                choice.pairs + choice.first[i],
                i < units ? choice.first[i + 1] - choice.first[i] : 0,
                scale,
                scale,
                shared && args.shared_permuted};
  };
  const int inner_stages = (args.inner + Format<kFp8>::kColumns - 1) / Format<kFp8>::kColumns;
  const int shared_stages = (args.shared_inner + Format<kFp8>::kColumns - 1) / Format<kFp8>::kColumns;
  int stages_before = units_before * hidden_stages;
  for (int r = block; r < row_granules; r += blocks) {
    if (warp < units) consumer.ask(halfway(warp, r));
    for (int i = warp; i < units; i += kWarps) {
      const Unit unit = halfway(i, r);
      const int expert = i < active ? choice.active[i] : -1;
      const auto finish = [&](int column, const float4& total) {
        const float sums[2][2] = {{total.x, total.z}, {total.y, total.w}};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (column + c >= unit.count) break;
          const int pair = unit.pairs[column + c], token = pair & 255, slot = pair >> 8;
          float* to = results + (token * slots + slot) * kRows + lane / 4;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float value = sums[c][half];
            if (args.down_bias != nullptr && expert >= 0)
              value += widen(args.down_bias[static_cast<long long>(expert) * args.hidden + r * kRows +
                                            half * 8 + lane / 4]);
            to[half * 8] = value * choice.weight[token][slot];
          }
        }
      };
      consumer.run(unit, stages_before + i * inner_stages, halfway(min(i + kWarps, units), r), finish);
    }
    stages_before += active * inner_stages + (args.shared_inner > 0 ? shared_stages : 0);
    consumers_sync();
    for (int item = threadIdx.x; item < args.tokens * kRows; item += kConsumers) {
      const int token = item / kRows, row = item % kRows;
      float total = 0.f;
      for (int slot = 0; slot < top; ++slot)
        if (choice.chosen[token][slot] >= 0) total += results[(token * slots + slot) * kRows + row];
      if (args.shared_inner > 0 && real >> token & 1) total += results[(token * slots + top) * kRows + row];
      args.out[static_cast<long long>(token) * args.hidden + r * kRows + row] =
          static_cast<bf16>(narrow2(total, 0.f) & 0xFFFFu);
    }
    consumers_sync();
  }
}

// Stages that fit into shared memory beside the results of so many tokens.
template <bool kFp8>
int moe_stages(int tokens, int top) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, moe_few_tokens<kFp8>) != cudaSuccess) return 0;
  const int limit = (227 << 10) - 1024 - static_cast<int>(attributes.sharedSizeBytes);
  const int stages = (limit - tokens * (top + 1) * kRows * 4) / kStageBytes;
  return stages < kMaxStages ? stages : kMaxStages;
}

// `rows` x `columns` weights as boxes of a stage's half: 128-byte slices of 8 rows.
template <bool kFp8>
bool encode_rows(TensorMap& map, const void* weights, long long rows, int columns) {
  using F = Format<kFp8>;
  return encode_boxes<3>(map, weights, {F::kSlice, rows, columns / F::kSlice}, {columns, F::kSlice},
                         {F::kSlice, kHalf, kSlices}, kFp8 ? 1 : 2);
}

// See MoeArguments. hidden and inner sizes are multiples of 64 (one-byte weights: of 128), rows 16-byte
// aligned, 1 to 64 tokens, at most 512 experts and 16 choices. `blocks` must fit on the device at once.
// Returns a cudaError_t; launches on `stream` and does not wait.
template <bool kFp8>
int launch_moe(const MoeArguments& args, int blocks, int early, void* stream) {
  const int router_rows = (args.router != nullptr ? args.rules.experts : 0) + (args.shared_gate != nullptr);
  constexpr int kMultiple = Format<kFp8>::kSlice;
  if (args.tokens < 1 || args.tokens > kMaxTokens || args.hidden % kMultiple || args.inner % kMultiple ||
      args.shared_inner % kMultiple || args.rules.experts > kMaxExperts || args.rules.top > kMaxTop ||
      args.rules.top < 1 || router_rows > kRouterRows * blocks || args.stages < 2 || args.stages > kMaxStages)
    return cudaErrorInvalidValue;
  MoeMaps maps{};
  const long long experts = args.rules.experts;
  if (!encode_rows<kFp8>(maps.gate_up, args.gate_up, experts * 2 * args.inner, args.hidden) ||
      !encode_rows<kFp8>(maps.down, args.down, experts * args.hidden, args.inner))
    return cudaErrorInvalidValue;
  if (args.shared_inner > 0 &&
      (!encode_rows<kFp8>(maps.shared_gate_up, args.shared_gate_up, 2ll * args.shared_inner, args.hidden) ||
       !encode_rows<kFp8>(maps.shared_down, args.shared_down, args.hidden, args.shared_inner)))
    return cudaErrorInvalidValue;
  const auto kernel = moe_few_tokens<kFp8>;
  const int shared = 1024 + args.stages * kStageBytes + args.tokens * (args.rules.top + 1) * kRows * 4;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args, maps);
}

}  // namespace quickturn
