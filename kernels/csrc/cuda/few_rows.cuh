// out[M, N] = x[M, K] W[N, K]^T for few rows (M <= 64), bfloat16, at the speed of memory.
//
// The weight is the operand that streams: 64 of its rows are the M of a warpgroup product, the rows of x are
// its N (8 to 64), so that nothing is padded but x, which is small. One warp copies boxes of W and x to a
// ring in shared memory, one warpgroup multiplies. K may be split over the blocks of a cluster; their partial
// sums meet in shared memory in a fixed order, so results don't depend on timing. The first boxes of W are
// requested before the kernel ahead has finished (dependent launch): they wait for nothing, and keep the
// memory busy while that kernel drains.
#pragma once
#include <cuda_runtime.h>

#include "hopper.cuh"
#include "norm_fold.cuh"

namespace quickturn {
namespace {

constexpr int kSwizzled = 64;  // columns in the width of the swizzle, 128 bytes
constexpr int kProductRows = 64;
constexpr int kConsumers = 128;
constexpr int kThreads = kConsumers + 32;
constexpr int kMinStages = 2;  // a stage is released when the product of the next one has begun
constexpr int kMaxStages = 16;
constexpr int kMaxSplit = 8;

struct Arguments {
  void* out;         // [rows, features], bfloat16 or float32
  const bf16* bias;  // [features], with `gated` [2 features], or null
  int rows;          // of x
  int features;      // columns of out
  int chunks;        // stages that all of K takes
  int split;         // blocks that share one tile's K
  int tiles;
  int tile_rows;  // rows of W in a tile; what the products read beyond them is nowhere used
  int tile_step;  // tiles between two tiles of one block
  int stages;     // of the ring
  int trigger;    // the kernel behind may start when so many stages are still to be requested
  int sums;       // bytes from the ring's start to the partial sums
  bool gated;     // half of a tile's rows are gate and half are up: out = silu(gate) * up
  bool wide;      // out is float32
};

__device__ __forceinline__ void store4(const Arguments& args, int row, int feature, const float (&v)[4]) {
  const long long at = static_cast<long long>(row) * args.features + feature;
  const bool whole = feature + 4 <= args.features && args.features % 4 == 0;
  if (args.wide) {
    float* to = static_cast<float*>(args.out) + at;
    if (whole) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (feature + i < args.features) to[i] = v[i];
    }
  } else {
    bf16* to = static_cast<bf16*>(args.out) + at;
    const uint2 packed = make_uint2(narrow2(v[0], v[1]), narrow2(v[2], v[3]));
    if (whole) {
      *reinterpret_cast<uint2*>(to) = packed;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (feature + i < args.features)
          to[i] = static_cast<bf16>((i < 2 ? packed.x : packed.y) >> (16 * (i & 1)));
    }
  }
}

// Four neighbouring elements of the result, of the share of a tile that a block of a cluster finishes.
struct Place {
  int row, local, feature;  // local: in the tile
};

__device__ __forceinline__ Place place_of(const Arguments& args, int tile, uint32_t rank, int item) {
  const int tile_features = args.gated ? args.tile_rows / 2 : args.tile_rows;
  const int share = tile_features / args.split;
  const int quads = share / 4;
  const int row = item / quads;
  const int local = static_cast<int>(rank) * share + (item - row * quads) * 4;
  return {row, local, tile * tile_features + local};
}

__device__ __forceinline__ int places(const Arguments& args) {
  const int tile_features = args.gated ? args.tile_rows / 2 : args.tile_rows;
  return args.rows * (tile_features / args.split / 4);
}

// Sums the partial tiles of the cluster for this block's share of the features. `store(item, place, value)`.
template <typename Store>
__device__ __forceinline__ void finish(const Arguments& args, int tile, uint32_t rank, uint32_t sums,
                                       Store store) {
  const int pitch = args.tile_rows + 4;
  const int tile_features = args.gated ? args.tile_rows / 2 : args.tile_rows;
  const int count = places(args);
  for (int item = threadIdx.x; item < count; item += kConsumers) {
    const Place place = place_of(args, tile, rank, item);
    const int feature = place.feature;
    if (feature >= args.features) continue;
    float value[2][4] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 1 && !args.gated) break;
      const uint32_t address =
          sums + 4u * static_cast<uint32_t>(place.row * pitch + part * tile_features + place.local);
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
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (feature + i < args.features)
            value[part][i] += widen(args.bias[part * args.features + feature + i]);
      }
    }
    if (args.gated) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[0][i] = gate_value(value[0][i], value[1][i]);
    }
    store(item, place, value[0]);
  }
}

// What a product does beside multiplying: nothing; norm x itself, ahead; add its result to the residual
// stream, in place.
enum class Fold { kNone, kNorm, kAdd };

template <Fold kFold>
struct Source;

template <>
struct Source<Fold::kNone> {
  TensorMap x;
};

template <>
struct Source<Fold::kNorm> {
  NormSource x;
};

template <>
struct Source<Fold::kAdd> {
  TensorMap x;
  bf16* residual;
  long long residual_pitch;
};

__device__ __forceinline__ uint2* stream_at(const Source<Fold::kAdd>& source, const Place& place) {
  return reinterpret_cast<uint2*>(source.residual + place.row * source.residual_pitch + place.feature);
}

// The rounded result is added to four elements of the stream, and the sum rounded, as the ops in turn would.
__device__ __forceinline__ uint2 added4(const uint2& before, const float (&v)[4]) {
  const uint32_t words[2] = {before.x, before.y};
  uint32_t sum[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    sum[i] = narrow2(__uint_as_float(words[i] << 16) + rounded(v[2 * i]),
                     __uint_as_float(words[i] & 0xFFFF0000u) + rounded(v[2 * i + 1]));
  return make_uint2(sum[0], sum[1]);
}

// kColumns: rows of x rounded up to 8, 16, 32 or 64. kProducts: products of 64 rows that cover a tile.
// kSlices: 64-column slices of K in a stage.
// The bounds are above the threads of a block to keep its registers few: while one kernel drains, a block of
// the next has to fit beside it.
template <Fold kFold, int kColumns, int kProducts, int kSlices>
__global__ void __launch_bounds__(kColumns* kProducts >= 128 ? 320 : 512)
    few_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ Source<kFold> source,
             const Arguments args) {
  constexpr bool kNorms = kFold == Fold::kNorm;
  constexpr int kXBytes = kNorms ? 0 : kColumns * kSwizzled * 2;  // of a slice in the ring
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) uint64_t barriers[2 * kMaxStages];

  const int weight_bytes = args.tile_rows * kSwizzled * 2;
  const int slice_bytes = weight_bytes + kXBytes;
  const int stage_bytes = kSlices * slice_bytes;
  uint32_t ring = (shared_address(memory) + 1023u) & ~1023u;
  if constexpr (kNorms) ring += source.x.bytes;
  const uint32_t full = shared_address(barriers);
  const uint32_t empty = full + 8 * kMaxStages;
  const uint32_t rank = args.split > 1 ? cluster_rank() : 0;
  const int first_tile = blockIdx.x / args.split;
  const int first_chunk = args.chunks * static_cast<int>(rank) / args.split;
  const int chunks = args.chunks * (static_cast<int>(rank) + 1) / args.split - first_chunk;

  constexpr int kStageChunks = kSlices * kSliceChunks;
  RowNorm norm;
  if constexpr (kNorms) {
    if (threadIdx.x < kConsumers) norm.begin(source.x, first_chunk * kStageChunks, chunks * kStageChunks);
  }

  const int boxes = args.gated ? 2 : 1;
  const int box_rows = args.tile_rows / boxes;
  const int own_tiles = (args.tiles - first_tile + args.tile_step - 1) / args.tile_step;
  const int total = own_tiles * chunks;
  const int early = min(args.stages, total);
  int next_tile = first_tile, next_chunk = 0;  // of the producer
  auto advance = [&] {
    if (++next_chunk == chunks) {
      next_chunk = 0;
      next_tile += args.tile_step;
    }
  };
  auto load_weight = [&](int stage) {
    barrier_expect(full + 8 * stage, stage_bytes);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
      for (int box = 0; box < boxes; ++box)
        load_box(ring + stage * stage_bytes + slice * slice_bytes + box * box_rows * kSwizzled * 2, &weight,
                 ((first_chunk + next_chunk) * kSlices + slice) * kSwizzled,
                 next_tile * box_rows + box * args.features, full + 8 * stage, kEvictFirst);
  };
  auto load_x = [&](int stage, int chunk) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
      if constexpr (!kNorms)
        load_box(ring + stage * stage_bytes + slice * slice_bytes + weight_bytes, &source.x,
                 ((first_chunk + chunk) * kSlices + slice) * kSwizzled, 0, full + 8 * stage, kEvictLast);
  };
  if (threadIdx.x == kConsumers) {
    for (int stage = 0; stage < args.stages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, kConsumers / 32);
    }
    barrier_init_fence();
    for (int i = 0; i < early; ++i, advance()) load_weight(i);
    if constexpr (!kNorms) prefetch_map(&source.x);
  }
  __syncthreads();

  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      // Not at once: the memory is busy with our own weights anyway. What the kernel behind requests is to
      // fill the pause between our last request and its first use of our result.
      bool triggered = total - early <= args.trigger;
      if (triggered) let_dependents_start();
      // The weights are nobody's result: only who reads x waits, and here the consumers do that themselves.
      if constexpr (!kNorms) {
        wait_for_predecessors();
        for (int i = 0, chunk = 0; i < early; ++i) {
          load_x(i, chunk);
          if (++chunk == chunks) chunk = 0;
        }
      }
      int stage = 0;
      uint32_t parity = 0;
      for (int i = early; i < total; ++i, advance()) {
        barrier_wait(empty + 8 * stage, parity);
        load_weight(stage);
        load_x(stage, next_chunk);
        if (!triggered && total - i - 1 <= args.trigger) {
          triggered = true;
          let_dependents_start();
        }
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
  const int pitch = args.tile_rows + 4;
  float* sums = reinterpret_cast<float*>(memory + (ring - shared_address(memory)) + args.sums);
  uint32_t normed = 0;  // where x lies, and how far on that of the next product
  int x_pitch = 0, x_step = 0;
  if constexpr (kNorms) {
    __shared__ alignas(16) float partial[kNormRows * kVirtualWarps];
    normed = ring - source.x.bytes;
    wait_for_predecessors();
    norm.run(source.x, args.rows, normed, first_chunk * kStageChunks, chunks * kStageChunks, partial);
    x_pitch = chunk_pitch(args.rows);
    x_step = 2 * chunk_place(x_pitch, 0, 1);
  } else if constexpr (kFold == Fold::kAdd) {
    // Whoever reads the residual stream ahead of us has finished then, too: each kernel in between waits for
    // all before it, and so is complete only after them.
    wait_for_predecessors();
  }
  int stage = 0;
  uint32_t parity = 0;
  for (int tile = first_tile; tile < args.tiles; tile += args.tile_step) {
    // Requested now, needed last. A thread rarely has more than one place.
    uint2 ahead{};
    if constexpr (kFold == Fold::kAdd) {
      const Place place = place_of(args, tile, rank, threadIdx.x);
      if (static_cast<int>(threadIdx.x) < places(args) && place.feature < args.features)
        ahead = __ldcg(stream_at(source, place));
    }
    auto store = [&](int item, const Place& place, const float(&value)[4]) {
      if constexpr (kFold == Fold::kAdd) {
        uint2* to = stream_at(source, place);
        *to = added4(item == static_cast<int>(threadIdx.x) ? ahead : __ldcg(to), value);
      } else {
        store4(args, place.row, place.feature, value);
      }
    };
    float sum[kProducts][kColumns / 2];
    int previous = -1;
    for (int i = 0; i < chunks; ++i) {
      barrier_wait(full + 8 * stage, parity);
      products_begin();
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const uint32_t at = ring + stage * stage_bytes + slice * slice_bytes;
#pragma unroll
        for (int step = 0; step < kSwizzled / 16; ++step) {
          const int product = (i * kSlices + slice) * (kSwizzled / 16) + step;
          const uint64_t b = kNorms ? chunks_operand(normed + product * x_step, x_pitch)
                                    : operand(at + weight_bytes + step * 32);
#pragma unroll
          for (int part = 0; part < kProducts; ++part)
            Product<kColumns>::run(sum[part], operand(at + part * kProductRows * kSwizzled * 2 + step * 32),
                                   b, i > 0 || slice > 0 || step > 0);
        }
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

    // The sums may lie where the ring was: every warp has to be done with it.
    consumers_sync();
    // A thread holds two weight rows (eight apart) of two columns in each group of eight columns.
#pragma unroll
    for (int part = 0; part < kProducts; ++part) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        asm volatile("" : "+f"(sum[part][i])::"memory");
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int row = part * kProductRows + warp * 16 + lane / 4 + (i / 2 % 2) * 8;
        if (column < args.rows && row < args.tile_rows) sums[column * pitch + row] = sum[part][i];
      }
    }
    if (args.split > 1) {
      cluster_sync();
      finish(args, tile, rank, ring + args.sums, store);
      cluster_sync();  // the sums must outlive the reads of the other blocks
    } else {
      consumers_sync();
      finish(args, tile, 0, ring + args.sums, store);
    }
  }
}

}  // namespace
}  // namespace quickturn
