// The products of a mixture of experts over many tokens, bfloat16: a tile is the rows of one expert's tokens,
// gathered where they lie, times 256 rows of that expert's weights (128 of the gate and the matching 128 of
// up, with the activation, or 256 of down).
//
// Weights are the left operand, so that a tile may have few tokens where experts have few. One warpgroup
// fills a ring in shared memory, weights by the copy engine, tokens by ordinary asynchronous copies, because
// the copy engine can't gather; two warpgroups multiply, half of the weight rows each. One block a
// multiprocessor goes through its tiles, and the ring runs on through the ends of tiles.
#include <cuda_runtime.h>

#include "attention_prefill_products.cuh"
#include "hopper.cuh"
#include "moe_activation.cuh"
#include "tensor_map.h"

namespace quickturn {

struct GroupedArguments {
  const bf16* rows;  // what is multiplied: the row of a pair is pair / pairs_a_row
  bf16* out;         // [pairs, features]
  const bf16* bias;  // [experts, weight_rows] or null
  const int* tile_experts;
  const int* tile_pairs;  // [tiles, rows of a tile], -1 where there is none
  const int* tile_rows;   // how many of them there are
  const int* tiles;       // how many there are
  long long row_pitch;    // elements
  int pairs_a_row, columns, features;
  int gated;  // weights are [2 features], gate first; out = act(gate) * up
  int oss;
};

namespace {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kThreads = 3 * kGroup;
constexpr int kSlice = 64;  // columns in a stage: 128 bytes, the width of the swizzle
constexpr int kPart = 64;   // weight rows of a box and of a product
constexpr int kParts = 4;
constexpr int kNarrow = 32;  // tokens: tiles of more can be multiplied by halves
constexpr int kPartBytes = kPart * kSlice * 2;
constexpr int kMaxStages = 6;
constexpr int kShared = 227 << 10;

__host__ __device__ constexpr int stage_bytes(int tokens) {
  return kParts * kPartBytes + tokens * kSlice * 2;
}
__host__ __device__ constexpr int output_bytes(int tokens) { return 2 * tokens * kPart * 2; }
__host__ __device__ constexpr int stages_for(int tokens) {
  const int fit = (kShared - 2048 - output_bytes(tokens)) / stage_bytes(tokens);
  return fit < kMaxStages ? fit : kMaxStages;
}

template <int kTokens>
__device__ __forceinline__ void product(float (&d)[kTokens / 2], uint64_t a, uint64_t b, int add) {
  if constexpr (kTokens <= 32)
    Product<kTokens>::run(d, a, b, add);
  else
    ScoreProduct<kTokens, false>::run(d, a, b, add);
}

__device__ __forceinline__ void copy16(uint32_t to, const bf16* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0)
               : "memory");
}
// The barrier is told when this thread's copies so far have arrived.
__device__ __forceinline__ void copies_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                 uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
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

__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}

struct Place {
  int stage = 0;
  uint32_t parity;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kTokens>
__device__ __forceinline__ void fill(const TensorMap* weight, const GroupedArguments& args, uint32_t ring,
                                     uint32_t full, uint32_t empty, int items, int blocks) {
  constexpr int kStages = stages_for(kTokens), kStageBytes = stage_bytes(kTokens);
  constexpr int kOwn = kTokens / 16;  // rows of this thread
  const int chunk = threadIdx.x % 8, first_row = threadIdx.x / 8;
  const int slices = (args.columns + kSlice - 1) / kSlice;
  const int weight_rows = args.gated ? 2 * args.features : args.features;
  Place place{0, 1};
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int tile = item / blocks, block = item % blocks;
    const int used = args.tile_rows[tile];
    const bf16* row[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int pair = args.tile_pairs[tile * kTokens + first_row + 16 * i];
      row[i] = pair < 0 ? nullptr : args.rows + pair / args.pairs_a_row * args.row_pitch + chunk * 8;
    }
    int box_row[kParts];
    const int expert_row = args.tile_experts[tile] * weight_rows;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      box_row[part] = expert_row + (args.gated ? (block * 2 + part / 2) * kPart + part % 2 * args.features
                                               : (block * kParts + part) * kPart);
    for (int slice = 0; slice < slices; ++slice) {
      barrier_wait(empty + 8 * place.stage, place.parity);
      const uint32_t at = ring + place.stage * kStageBytes;
      if (threadIdx.x == 0) {
        barrier_expect(full + 8 * place.stage, kParts * kPartBytes);
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          load_box(at + part * kPartBytes, weight, slice * kSlice, box_row[part], full + 8 * place.stage,
                   kEvictLast);
      }
      const bool inside = slice * kSlice + chunk * 8 < args.columns;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int r = first_row + 16 * i;
        if (16 * i >= kTokens / 2 && used <= kTokens / 2) break;
        const bool real = inside && row[i] != nullptr;
        copy16(at + kParts * kPartBytes + r * 128 + ((chunk ^ (r & 7)) << 4),
               real ? row[i] + slice * kSlice : args.rows, real);
      }
      copies_arrive(full + 8 * place.stage);
      place.next(kStages);
    }
  }
}

// One stage of a warpgroup: its two parts times the first kUsed tokens.
template <int kUsed, int kCount>
__device__ __forceinline__ void products(float (&sum)[2][kCount], uint32_t tokens, uint32_t weights,
                                         int add) {
#pragma unroll
  for (int step = 0; step < kSlice / 16; ++step) {
    const uint64_t b = operand(tokens + step * 32);
#pragma unroll
    for (int part = 0; part < 2; ++part)
      product<kUsed>(reinterpret_cast<float(&)[kUsed / 2]>(sum[part]),
                     operand(weights + part * kPartBytes + step * 32), b, add || step > 0);
  }
}

template <int kTokens>
__device__ __forceinline__ void multiply_tiles(const GroupedArguments& args, uint32_t ring, uint32_t full,
                                               uint32_t empty, int items, int blocks) {
  constexpr int kStages = stages_for(kTokens), kStageBytes = stage_bytes(kTokens);
  constexpr int kOwn = kTokens / 16;
  const int group = threadIdx.x / kGroup - 1, thread = threadIdx.x % kGroup;
  const int warp = thread / 32, lane = thread % 32;
  const int slices = (args.columns + kSlice - 1) / kSlice;
  const int chunk = thread % 8, first_row = thread / 8;
  const uint32_t output = ring + kStages * kStageBytes + group * output_bytes(kTokens) / 2;
  Place place{0, 0};
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int tile = item / blocks, block = item % blocks;
    // What a tile lacks in tokens isn't multiplied, by halves.
    const bool whole = args.tile_rows[tile] > kTokens / 2;
    int pair[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) pair[i] = args.tile_pairs[tile * kTokens + first_row + 16 * i];
    float sum[2][kTokens / 2];
    int previous = -1;
    for (int slice = 0; slice < slices; ++slice) {
      barrier_wait(full + 8 * place.stage, place.parity);
      // The products read through another path than the tokens' copies wrote.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      const uint32_t at = ring + place.stage * kStageBytes;
      products_begin();
      if (kTokens <= kNarrow || whole)
        products<kTokens>(sum, at + kParts * kPartBytes, at + group * 2 * kPartBytes, slice > 0);
      else
        products<kTokens / (kTokens <= kNarrow ? 1 : 2)>(sum, at + kParts * kPartBytes,
                                                         at + group * 2 * kPartBytes, slice > 0);
      products_commit();
      if (previous >= 0) {
        products_wait<1>();
        if (lane == 0) barrier_arrive(empty + 8 * previous);
      }
      previous = place.stage;
      place.next(kStages);
    }
    products_wait<0>();
    pin(sum[0]);
    pin(sum[1]);
    if (lane == 0) barrier_arrive(empty + 8 * previous);

    // A thread holds two weight rows (eight apart) of two tokens in each group of eight tokens.
    const int feature = args.gated ? (block * 2 + group) * kPart : (block * 2 + group) * 2 * kPart;
    if (args.bias != nullptr) {
      const long long base =
          static_cast<long long>(args.tile_experts[tile]) * (args.gated ? 2 : 1) * args.features;
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = feature + (args.gated ? 0 : part * kPart) + warp * 16 + half * 8 + lane / 4;
          const float bias = at < args.features
                                 ? widen(args.bias[base + (args.gated ? part * args.features : 0) + at])
                                 : 0.f;
#pragma unroll
          for (int i = 0; i < kTokens / 8; ++i) {
            sum[part][4 * i + 2 * half] += bias;
            sum[part][4 * i + 2 * half + 1] += bias;
          }
        }
    }
    if (args.gated) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sum[0][i] = activated(sum[0][i], sum[1][i], args.oss);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 1 && args.gated) break;
#pragma unroll
      for (int i = 0; i < kTokens / 8; i += 2) {
        const int token = (i + lane / 16) * 8 + lane % 8, to = warp * 2 + lane / 8 % 2;
        const float* d = sum[part] + 4 * i;
        store_transposed(output + token * 128 + ((to ^ (token & 7)) << 4), narrow2(d[0], d[1]),
                         narrow2(d[2], d[3]), narrow2(d[4], d[5]), narrow2(d[6], d[7]));
      }
      group_sync(group);
      const int column = feature + part * kPart + chunk * 8;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int token = first_row + 16 * i;
        if (pair[i] >= 0 && column < args.features)
          *reinterpret_cast<uint4*>(args.out + static_cast<long long>(pair[i]) * args.features + column) =
              load_shared(output + token * 128 + ((chunk ^ (token & 7)) << 4));
      }
      group_sync(group);
    }
  }
}

template <int kTokens>
__global__ void __launch_bounds__(kThreads, 1)
    grouped(const __grid_constant__ TensorMap weight, const __grid_constant__ GroupedArguments args) {
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) uint64_t barriers[2 * kMaxStages];
  constexpr int kStages = stages_for(kTokens);
  const uint32_t ring = (shared_address(memory) + 1023u) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kMaxStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full + 8 * stage, 1 + kGroup);
      barrier_init(empty + 8 * stage, 2 * kGroup / 32);
    }
    barrier_init_fence();
    prefetch_map(&weight);
  }
  __syncthreads();
  const int block_features = (args.gated ? 2 : kParts) * kPart;
  const int blocks = (args.features + block_features - 1) / block_features;
  const int items = *args.tiles * blocks;
  if (threadIdx.x < kGroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    fill<kTokens>(&weight, args, ring, full, empty, items, blocks);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    multiply_tiles<kTokens>(args, ring, full, empty, items, blocks);
  }
}

template <int kTokens>
int run(const TensorMap& weight, const GroupedArguments& args, int blocks, cudaStream_t stream) {
  const int shared = 1024 + stages_for(kTokens) * stage_bytes(kTokens) + output_bytes(kTokens);
  const cudaError_t error =
      cudaFuncSetAttribute(grouped<kTokens>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  grouped<kTokens><<<blocks, kThreads, shared, stream>>>(weight, args);
  return cudaGetLastError();
}

}  // namespace
}  // namespace quickturn

// See GroupedArguments; tiles have `tile_rows` (16, 32, 64, 128) rows. weight: [experts, features (gated: 2
// features), columns], adjoining. Columns and features are multiples of 8 (gated: features of 64), rows are
// 16-byte aligned. `blocks`: at most so many are launched. Returns a cudaError_t; doesn't wait.
extern "C" int quickturn_moe_grouped(const quickturn::GroupedArguments* arguments, const void* weight,
                                     int experts, int tile_rows, int blocks, void* stream) {
  using namespace quickturn;
  const GroupedArguments& args = *arguments;
  if (args.columns % 8 || args.features % (args.gated ? kPart : 8) || args.row_pitch % 8)
    return cudaErrorInvalidValue;
  TensorMap map;
  const long long rows = static_cast<long long>(experts) * args.features * (args.gated ? 2 : 1);
  if (!encode_map(map, weight, rows, args.columns, args.columns, kPart, kSlice)) return cudaErrorInvalidValue;
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (tile_rows) {
    case 16:
      return run<16>(map, args, blocks, queue);
    case 32:
      return run<32>(map, args, blocks, queue);
    case 64:
      return run<64>(map, args, blocks, queue);
    case 128:
      return run<128>(map, args, blocks, queue);
    default:
      return cudaErrorInvalidValue;
  }
}
