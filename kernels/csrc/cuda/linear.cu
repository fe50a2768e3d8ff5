// out[M, N] = x[M, K] W[N, K]^T for few rows (M <= 64), bfloat16, at the speed of memory.
//
// The weight is the operand that streams: 64 of its rows are the M of a warpgroup product, the rows of x are its N (8 to 64),
// so that nothing is padded but x, which is small. One warp copies boxes of W and x to a ring in shared memory, one warpgroup
// multiplies. K may be split over the blocks of a cluster; their partial sums meet in shared memory in a fixed order, so results
// don't depend on timing. The first boxes of W are requested before the kernel ahead has finished (dependent launch):
// they wait for nothing, and keep the memory busy while that kernel drains.
#include <cuda_runtime.h>

#include "hopper.cuh"

namespace quickturn {
namespace {

constexpr int kChunk = 64;  // columns of K in a box: 128 bytes, the swizzle's width
constexpr int kBoxRows = 64;
constexpr int kBoxBytes = kBoxRows * kChunk * 2;
constexpr int kConsumers = 128;
constexpr int kThreads = kConsumers + 32;
constexpr int kMaxStages = 16;
constexpr int kMaxSplit = 8;

struct Arguments {
  void* out;         // [rows, features], bfloat16 or float32
  const bf16* bias;  // [features], with `gated` [2 features], or null
  int rows;          // of x
  int features;      // columns of out
  int chunks;        // of K
  int split;         // blocks that share one tile's K
  int tiles;
  int tile_step;     // tiles between two tiles of one block
  int box_step;      // rows of W between the boxes of one tile
  int stages;        // of the ring
  int prefetch;      // boxes of W asked into L2 beyond the ring before waiting for the kernel ahead
  bool gated;        // the two boxes of a tile are gate and up: out = silu(gate) * up
  bool wide;         // out is float32
};

__device__ __forceinline__ float gate_value(float gate, float up) {
  gate = rounded(gate);
  return rounded(gate / (1.f + __expf(-gate))) * rounded(up);
}

__device__ __forceinline__ void store4(const Arguments& args, int row, int feature, const float (&v)[4]) {
  const long long at = static_cast<long long>(row) * args.features + feature;
  const bool whole = feature + 4 <= args.features && args.features % 4 == 0;
  if (args.wide) {
    float* to = static_cast<float*>(args.out) + at;
    if (whole) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      for (int i = 0; i < 4; ++i)
        if (feature + i < args.features) to[i] = v[i];
    }
  } else {
    bf16* to = static_cast<bf16*>(args.out) + at;
    const uint2 packed = make_uint2(narrow2(v[0], v[1]), narrow2(v[2], v[3]));
    if (whole) {
      *reinterpret_cast<uint2*>(to) = packed;
    } else {
      for (int i = 0; i < 4; ++i)
        if (feature + i < args.features) to[i] = static_cast<bf16>((i < 2 ? packed.x : packed.y) >> (16 * (i & 1)));
    }
  }
}

// Sums the partial tiles of the cluster for this block's share of the features, and stores them.
template <int kTileRows>
__device__ __forceinline__ void finish(const Arguments& args, int tile, uint32_t rank, uint32_t sums) {
  constexpr int kPitch = kTileRows + 4;
  const int tile_features = args.gated ? kTileRows / 2 : kTileRows;
  const int share = tile_features / args.split;
  const int quads = share / 4;
  for (int item = threadIdx.x; item < args.rows * quads; item += kConsumers) {
    const int row = item / quads;
    const int local = static_cast<int>(rank) * share + (item - row * quads) * 4;
    const int feature = tile * tile_features + local;
    if (feature >= args.features) continue;
    float value[2][4] = {};
    const int parts = args.gated ? 2 : 1;
    for (int part = 0; part < parts; ++part) {
      const uint32_t address = sums + 4u * static_cast<uint32_t>(row * kPitch + part * (kTileRows / 2) + local);
      float4 piece[kMaxSplit];
#pragma unroll
      for (int peer = 0; peer < kMaxSplit; ++peer)
        if (peer < args.split) piece[peer] = load_remote(address, peer);
#pragma unroll
      for (int peer = 0; peer < kMaxSplit; ++peer) {
        if (peer < args.split) {
          value[part][0] += piece[peer].x;
          value[part][1] += piece[peer].y;
          value[part][2] += piece[peer].z;
          value[part][3] += piece[peer].w;
        }
      }
      if (args.bias != nullptr) {
        for (int i = 0; i < 4; ++i)
          if (feature + i < args.features) value[part][i] += widen(args.bias[part * args.features + feature + i]);
      }
    }
    if (args.gated) {
      for (int i = 0; i < 4; ++i) value[0][i] = gate_value(value[0][i], value[1][i]);
    }
    store4(args, row, feature, value[0]);
  }
}

// kColumns: rows of x rounded up to 8, 16, 32 or 64. kBoxes: boxes of W in a tile.
template <int kColumns, int kBoxes>
__global__ void __launch_bounds__(kThreads) few_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                                                     const Arguments args) {
  constexpr int kWeightBytes = kBoxes * kBoxBytes;
  constexpr int kStageBytes = kWeightBytes + kColumns * kChunk * 2;
  constexpr int kTileRows = kBoxes * kBoxRows;
  constexpr int kPitch = kTileRows + 4;
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) uint64_t barriers[2 * kMaxStages];

  const uint32_t ring = (shared_address(memory) + 1023u) & ~1023u;
  const uint32_t sums = ring + args.stages * kStageBytes;
  const uint32_t full = shared_address(barriers);
  const uint32_t empty = full + 8 * kMaxStages;
  const uint32_t rank = args.split > 1 ? cluster_rank() : 0;
  const int first_tile = blockIdx.x / args.split;
  const int first_chunk = args.chunks * static_cast<int>(rank) / args.split;
  const int chunks = args.chunks * (static_cast<int>(rank) + 1) / args.split - first_chunk;

  if (threadIdx.x == kConsumers) {
    prefetch_map(&weight);
    prefetch_map(&x);
    for (int stage = 0; stage < args.stages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, kConsumers / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  let_dependents_start();

  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      const int tile_rows = args.gated ? kBoxRows : kTileRows;
      const int own_tiles = (args.tiles - first_tile + args.tile_step - 1) / args.tile_step;
      const int total = own_tiles * chunks;
      const int early = min(args.stages, total);
      int tile = first_tile, chunk = 0;
      auto advance = [&] {
        if (++chunk == chunks) {
          chunk = 0;
          tile += args.tile_step;
        }
      };
      auto load_weight = [&](int stage) {
        barrier_expect(full + 8 * stage, kStageBytes);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
          load_box(ring + stage * kStageBytes + box * kBoxBytes, &weight, (first_chunk + chunk) * kChunk,
                   tile * tile_rows + box * args.box_step, full + 8 * stage, kEvictFirst);
      };
      auto load_x = [&](int stage, int at) {
        load_box(ring + stage * kStageBytes + kWeightBytes, &x, (first_chunk + at) * kChunk, 0, full + 8 * stage, kEvictLast);
      };
      for (int i = 0; i < early; ++i, advance()) load_weight(i);
      const int resume_tile = tile, resume_chunk = chunk;
      for (int i = early; i < min(early + args.prefetch, total); ++i, advance())
        for (int box = 0; box < kBoxes; ++box)
          prefetch_box(&weight, (first_chunk + chunk) * kChunk, tile * tile_rows + box * args.box_step, kEvictFirst);
      tile = resume_tile;
      chunk = resume_chunk;
      wait_for_predecessors();
      for (int i = 0, at = 0; i < early; ++i) {
        load_x(i, at);
        if (++at == chunks) at = 0;
      }
      int stage = 0;
      uint32_t parity = 0;
      for (int i = early; i < total; ++i, advance()) {
        barrier_wait(empty + 8 * stage, parity);
        load_weight(stage);
        load_x(stage, chunk);
        if (++stage == args.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    __syncwarp();
    if (args.split > 1) {
      cluster_sync();
      cluster_sync();
    }
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int stage = 0;
  uint32_t parity = 0;
  for (int tile = first_tile; tile < args.tiles; tile += args.tile_step) {
    float sum[kBoxes][kColumns / 2];
    int previous = -1;
    for (int i = 0; i < chunks; ++i) {
      barrier_wait(full + 8 * stage, parity);
      const uint32_t at = ring + stage * kStageBytes;
      products_begin();
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) {
        const uint64_t b = operand(at + kWeightBytes + step * 32);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
          Product<kColumns>::run(sum[box], operand(at + box * kBoxBytes + step * 32), b, i > 0 || step > 0);
      }
      products_commit();
      if (previous >= 0) {
        products_wait<1>();
        if (lane == 0) barrier_arrive(empty + 8 * previous);
      }
      previous = stage;
      if (++stage == args.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    products_wait<0>();
    if (lane == 0) barrier_arrive(empty + 8 * previous);

    // A thread holds two weight rows (eight apart) of two columns in each group of eight columns.
    float* out = reinterpret_cast<float*>(memory + (sums - shared_address(memory)));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        asm volatile("" : "+f"(sum[box][i])::"memory");
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int row = box * kBoxRows + warp * 16 + lane / 4 + (i / 2 % 2) * 8;
        if (column < args.rows) out[column * kPitch + row] = sum[box][i];
      }
    }
    if (args.split > 1) {
      cluster_sync();
      finish<kTileRows>(args, tile, rank, sums);
      cluster_sync();  // the sums must outlive the reads of the other blocks
    } else {
      asm volatile("bar.sync 1, 128;" ::: "memory");
      finish<kTileRows>(args, tile, 0, sums);
      asm volatile("bar.sync 1, 128;" ::: "memory");
    }
  }
}

using Kernel = void (*)(TensorMap, TensorMap, Arguments);

template <int kColumns>
Kernel pick(int boxes) {
  return boxes == 1 ? few_rows<kColumns, 1> : few_rows<kColumns, 2>;
}

}  // namespace
}  // namespace quickturn

// How one product is spread over the machine. Mirrored by a ctypes structure.
struct LinearPlan {
  int boxes;     // 64-row boxes of W in a tile: 1 or 2
  int split;     // blocks that share K: 1, 2, 4 or 8
  int blocks;    // at most this many blocks if split is 1: then each takes several tiles
  int stages;    // of the ring
  int prefetch;  // stages asked into L2 beyond the ring ahead of the dependency
  int early;     // 0: an ordinary launch, after everything ahead has finished
};

extern "C" int quickturn_linear_few_rows(const void* weight_map, const void* x_map, void* out, const void* bias, int rows,
                                         int features, int columns, int gated, int wide, const LinearPlan* plan, void* stream) {
  using namespace quickturn;
  const int boxes = gated ? 2 : plan->boxes;
  const int padded = rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
  const int tile_features = gated ? kBoxRows : boxes * kBoxRows;
  const int tiles = (features + tile_features - 1) / tile_features;
  const int split = plan->split;
  const int slots = split > 1 ? tiles : (tiles < plan->blocks ? tiles : plan->blocks);
  Arguments args{};
  args.out = out;
  args.bias = static_cast<const bf16*>(bias);
  args.rows = rows;
  args.features = features;
  args.chunks = (columns + kChunk - 1) / kChunk;
  args.split = split;
  args.tiles = tiles;
  args.tile_step = slots;
  args.box_step = gated ? features : kBoxRows;
  args.stages = plan->stages;
  args.prefetch = plan->prefetch;
  args.gated = gated != 0;
  args.wide = wide != 0;
  if (rows < 1 || rows > 64 || boxes < 1 || boxes > 2 || split < 1 || split > kMaxSplit || split > args.chunks ||
      tile_features / split % 4 != 0 || plan->stages < 1 || plan->stages > kMaxStages)
    return cudaErrorInvalidValue;
  Kernel kernel = padded == 8 ? pick<8>(boxes) : padded == 16 ? pick<16>(boxes) : padded == 32 ? pick<32>(boxes) : pick<64>(boxes);
  const int shared = 1024 + plan->stages * (boxes * kBoxBytes + padded * kChunk * 2) + rows * (boxes * kBoxRows + 4) * 4;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (plan->early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (split > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = split;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(slots * split);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, *static_cast<const TensorMap*>(weight_map), *static_cast<const TensorMap*>(x_map),
                            args);
}
