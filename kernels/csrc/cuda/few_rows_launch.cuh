// Host side of few_rows: what a plan means, and the launch.
#pragma once
#include <cuda_runtime.h>

#include "dependent_launch.cuh"
#include "few_rows.cuh"
#include "tensor_map.h"

// How one product is spread over the machine. Mirrored by a ctypes structure.
struct LinearPlan {
  int tile_rows;  // rows of W in a tile: a multiple of 8 up to 192
  int split;      // blocks that share K: 1, 2, 4 or 8
  int blocks;     // at most this many blocks if split is 1: then each takes several tiles
  int stages;     // of the ring
  int trigger;    // stages still to be requested when the kernel behind may start
  int early;      // 0: an ordinary launch, after everything ahead has finished
};

namespace quickturn {
namespace {

template <Fold kFold>
using Kernel = void (*)(TensorMap, Source<kFold>, Arguments);

template <Fold kFold, int kColumns>
Kernel<kFold> pick(int tile_rows) {
  if (tile_rows <= kProductRows) return few_rows<kFold, kColumns, 1, 2>;
  return tile_rows <= 2 * kProductRows ? few_rows<kFold, kColumns, 2, 1> : few_rows<kFold, kColumns, 3, 1>;
}

// One product as its caller describes it: x [rows, columns], W [features (with `gated` 2 features), columns].
struct Product2d {
  const void* weight;
  const void* bias;
  void* out;
  int rows, features, columns;
  bool gated, wide;
};

// All that a launch needs but x.
struct Launch {
  Arguments args;
  TensorMap weight;
  int blocks, shared;
  int slices;  // of K in a block, at most
};

inline int padded_rows(int rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }

// `x_rows`: rows of x in a stage of the ring. False for a plan that can't be.
inline bool arrange(Launch& launch, const Product2d& what, const LinearPlan& plan, int x_rows) {
  const int tile_features = what.gated ? plan.tile_rows / 2 : plan.tile_rows;
  const int split = plan.split;
  if (what.rows < 1 || what.rows > 64 || plan.tile_rows < 8 || plan.tile_rows > 3 * kProductRows ||
      plan.tile_rows % (what.gated ? 16 : 8) || split < 1 || split > kMaxSplit ||
      tile_features / split % 4 != 0 || plan.stages < kMinStages || plan.stages > kMaxStages)
    return false;
  const int slices = plan.tile_rows <= kProductRows ? 2 : 1;
  const int tiles = (what.features + tile_features - 1) / tile_features;
  const int slots = split > 1 ? tiles : (tiles < plan.blocks ? tiles : plan.blocks);
  const int ring_bytes = plan.stages * slices * (plan.tile_rows + x_rows) * kSwizzled * 2;
  // The last product of a stage may read beyond the tile, into whatever follows.
  const int overread = (kProductRows - plan.tile_rows % kProductRows) % kProductRows * kSwizzled * 2;
  const int sums_bytes = what.rows * (plan.tile_rows + 4) * 4;
  const bool one_tile = slots == tiles;
  Arguments& args = launch.args;
  args = {};
  args.out = what.out;
  args.bias = static_cast<const bf16*>(what.bias);
  args.rows = what.rows;
  args.features = what.features;
  args.chunks = (what.columns + slices * kSwizzled - 1) / (slices * kSwizzled);
  args.split = split;
  args.tiles = tiles;
  args.tile_rows = plan.tile_rows;
  args.tile_step = slots;
  args.stages = plan.stages;
  args.trigger = plan.trigger;
  args.sums = one_tile ? 0 : ring_bytes;
  args.gated = what.gated;
  args.wide = what.wide;
  const int behind = one_tile ? sums_bytes - ring_bytes : sums_bytes;
  launch.shared = 1024 + ring_bytes + (behind > overread ? behind : overread);
  launch.blocks = slots * split;
  launch.slices = (args.chunks + split - 1) / split * slices;
  return split <= args.chunks &&
         encode_map(launch.weight, what.weight, what.gated ? 2ll * what.features : what.features,
                    what.columns, what.columns, what.gated ? tile_features : plan.tile_rows, kSwizzled);
}

template <Fold kFold>
cudaError_t start(const Launch& launch, const Source<kFold>& source, Kernel<kFold> kernel,
                  const LinearPlan& plan, void* stream) {
  const cudaError_t error = divide_memory(kernel, launch.shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (plan.early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (plan.split > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = plan.split;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = launch.shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, launch.weight, source, launch.args);
}

}  // namespace
}  // namespace quickturn
