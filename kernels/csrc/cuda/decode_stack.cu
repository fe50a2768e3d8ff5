// All decoder layers and the head for few rows of one new token each, as one kernel.
//
// A step of a small batch is a chain of short products: launched one by one, each costs the time from the
// last weight's arrival to the next kernel's first request, and a trip through an empty pipe. Here one block
// a multiprocessor stays for the whole step. One warp requests weights and keys, in the order of their use,
// as far ahead as its ring in shared memory reaches, across all phases and layers; it waits for nobody's
// results. Eight warps compute. Results travel between blocks as packets that carry their own flag: there is
// no barrier, a block waits for the data that it needs and for nothing else. The residual stream is kept by
// every block for itself.
//
// Phases of a layer: norm, q|k|v; attention; its parts added up; output; norm, gate|up, activation; down.
#include <cuda_runtime.h>

#include "decode_stack_attention.cuh"
#include "tensor_map.h"

namespace quickturn {
namespace stack {
namespace {

constexpr int kThreads = kComputing + 32;

Layout layout_of(const StackArguments& args) {
  const int group = args.heads / args.kv_heads;
  int widest = args.hidden;
  if (args.heads * kDim > widest) widest = args.heads * kDim;
  if (args.inner > widest) widest = args.inner;
  const int x = args.rows * row_bytes(widest);
  Layout at;
  at.x = args.stages * kSlotBytes;
  at.residual = at.x + (x > scratch_bytes(group) ? x : scratch_bytes(group));
  at.sums = at.residual + args.rows * args.hidden * 2;
  at.squares = at.sums + 2 * kBatch * kWarps * args.rows * kGranule * 4;
  at.angles = at.squares + kMaxRows * kWarps * 4;
  at.head_norms = at.angles + args.rows * kDim * 4;
  at.fresh = at.head_norms + 2 * kHeadBytes;
  at.zeros = at.fresh + kQueryRows * kDim * 2;
  at.layers = at.zeros + 16;
  at.pieces = at.layers + args.layer_count * static_cast<int>(sizeof(StackLayer));
  at.shares = at.pieces + kMaxRows * static_cast<int>(sizeof(Piece));
  at.barriers = at.shares + kShares * static_cast<int>(sizeof(Range));
  at.bytes = at.barriers + 2 * kMaxStages * 8;
  return at;
}

// What the phases read again and again: barriers, the layers' pointers, cosines and sines, shares of the
// work.
__device__ __forceinline__ void set_up(const Plan& plan, unsigned char* shared, uint32_t barriers) {
  const StackArguments& args = plan.args;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < args.stages; ++stage) {
      barrier_init(barriers + stage * 8, 1);
      barrier_init(barriers + (kMaxStages + stage) * 8, kWarps);
    }
    barrier_init_fence();
  }
  const int words = args.layer_count * static_cast<int>(sizeof(StackLayer)) / 8;
  for (int i = threadIdx.x; i < words; i += kThreads)
    reinterpret_cast<uint64_t*>(shared + plan.at.layers)[i] =
        reinterpret_cast<const uint64_t*>(args.layers)[i];
  for (int i = threadIdx.x; i < (plan.at.layers - plan.at.fresh) / 16; i += kThreads)
    reinterpret_cast<uint4*>(shared + plan.at.fresh)[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < args.rows)
    reinterpret_cast<Piece*>(shared + plan.at.pieces)[threadIdx.x] =
        piece_of(args, __ldcg(args.lens + threadIdx.x));
  if (threadIdx.x < kShares)
    reinterpret_cast<Range*>(shared + plan.at.shares)[threadIdx.x] =
        own_share(granules_of(plan, static_cast<int>(threadIdx.x)));
  for (int i = threadIdx.x; i < args.rows * kDim; i += kThreads) {
    const int position = max(__ldcg(args.lens + i / kDim) - 1, 0);
    reinterpret_cast<float*>(shared + plan.at.angles)[i] =
        __ldg(args.cos_sin + position * args.cos_sin_pitch + i % kDim);
  }
}

__global__ void __launch_bounds__(kThreads, 1) decode_stack(const __grid_constant__ Plan plan) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const StackArguments& args = plan.args;
  const StackLayer* layers = reinterpret_cast<const StackLayer*>(shared + plan.at.layers);
  const Range* shares = reinterpret_cast<const Range*>(shared + plan.at.shares);
  const Piece* pieces = reinterpret_cast<const Piece*>(shared + plan.at.pieces);
  Ring ring{shared_address(shared), shared_address(shared + plan.at.barriers), 0, 0};
  set_up(plan, shared, ring.barriers);
  __syncthreads();
  const int last = kMatrices * args.layer_count;  // the head

  if (threadIdx.x >= kComputing) {
    ring.parity = 1;
#pragma unroll 1
    for (int index = 0; index <= last; ++index) {
      const int l = index / kMatrices, share = share_of(plan, index);
      if (has_norm(share)) request_norms(plan, ring, layers[l], share);
      request(plan, ring, layers[l], share, shares[share]);
      if (share != 0) continue;
      request_keys(plan, ring, args.maps + l * 2, pieces);
      const int lane = threadIdx.x % 32;
      if (lane < 2 && l + 1 < args.layer_count) prefetch_map(args.maps + l * 2 + 2 + lane);
    }
    return;
  }

  const unsigned before = __ldcg(args.epoch);
#pragma unroll 1
  for (int index = 0; index <= last; ++index) {
    const int l = index / kMatrices, share = share_of(plan, index);
    const unsigned flag = before + l + 1;
    const StackLayer& layer = layers[l];
    const Range& own = shares[share];
    if (has_norm(share)) {
      norm_rows(plan, ring, shared, share, index == 0, share == 2 ? flag : flag - 1);
    } else {
      if (own.begin == own.end) continue;
      if (args.rows * columns_of(plan, share) > 16 * kComputing)
        stage_rows<8>(plan, shared, share, flag);
      else
        stage_rows<4>(plan, shared, share, flag);
    }
    sync_computing();
    product(plan, ring, shared, layer, share, own, flag);
    if (share != 0) continue;
#pragma unroll 1
    for (int row = 0; row < args.rows; ++row) {
      const Piece& piece = pieces[row];
#pragma unroll 1
      for (int at = piece.begin; at < piece.end;) {
        const int first = at % piece.tiles, count = min(piece.tiles - first, piece.end - at);
        attend(plan, layer, ring, shared, row, piece, at / piece.tiles, first, count, at != piece.begin,
               flag);
        at += count;
      }
    }
    combine(plan, shared, flag);
  }
  // Everybody has read it: what block 0 has received depends on every block.
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.epoch = before + args.layer_count;
}

}  // namespace
}  // namespace stack
}  // namespace quickturn

// Describes one layer's keys or values to the copy engine: writes a TensorMap to host memory. Pitches in
// elements. False where the driver refuses.
extern "C" int quickturn_decode_stack_map(void* map, const void* cache, int kv_heads, int block_tokens,
                                          long long blocks, long long row_pitch, long long block_pitch) {
  using namespace quickturn;
  const long long sizes[4] = {stack::kDim, kv_heads, block_tokens, blocks};
  const long long pitches[3] = {stack::kDim, row_pitch, block_pitch};
  const int box[4] = {kSliceColumns, 1, block_tokens < stack::kKeys ? block_tokens : stack::kKeys, 1};
  return encode_boxes<4>(*static_cast<TensorMap*>(map), cache, sizes, pitches, box);
}

// See StackArguments; sizes as `decode_stack` in Python checks them. `blocks`: at most the multiprocessors
// and the granules of q|k|v and of gate|up, so that every block takes part in both. Returns a cudaError_t.
extern "C" int quickturn_decode_stack(const quickturn::StackArguments* given, int blocks, int shared_limit,
                                      void* stream) {
  using namespace quickturn;
  stack::Plan plan{*given, {}};
  StackArguments& args = plan.args;
  if (args.rows < 1 || args.rows > stack::kMaxRows ||
      args.hidden * 2 + 2 * stack::kHeadBytes > stack::kSlotBytes)
    return cudaErrorInvalidValue;
  int shared = 0;
  for (args.stages = stack::kMaxStages; args.stages >= stack::kMinStages; --args.stages) {
    plan.at = stack::layout_of(args);
    shared = 1024 + plan.at.bytes;
    if (shared <= shared_limit) break;
  }
  if (args.stages < stack::kMinStages) return cudaErrorInvalidValue;
  const cudaError_t error =
      cudaFuncSetAttribute(stack::decode_stack, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;  // all blocks at once, or none: they wait for each other
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(stack::kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, stack::decode_stack, plan);
}
