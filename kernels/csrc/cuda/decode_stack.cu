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

// Byte offsets in dynamic shared memory, behind the ring.
struct Layout {
  int x, residual, sums, squares, angles, head_norms, fresh, zeros, layers, pieces, shares, bytes;
};

__host__ __device__ inline Layout layout_of(const StackArguments& args) {
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
  at.bytes = at.shares + kShares * static_cast<int>(sizeof(Range));
  return at;
}

__global__ void __launch_bounds__(kThreads, 1) decode_stack(const __grid_constant__ StackArguments args) {
  extern __shared__ unsigned char unaligned[];
  __shared__ alignas(8) uint64_t barriers[2 * kMaxStages];
  unsigned char* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const Layout place = layout_of(args);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  StackLayer* layers = reinterpret_cast<StackLayer*>(shared + place.layers);
  Piece* pieces = reinterpret_cast<Piece*>(shared + place.pieces);
  Range* shares = reinterpret_cast<Range*>(shared + place.shares);
  Ring ring{shared_address(shared),
            shared_address(barriers),
            shared_address(barriers) + kMaxStages * 8,
            args.stages,
            0,
            0};

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < args.stages; ++stage) {
      barrier_init(ring.full + stage * 8, 1);
      barrier_init(ring.empty + stage * 8, kWarps);
    }
    barrier_init_fence();
  }
  const int words = args.layer_count * static_cast<int>(sizeof(StackLayer)) / 8;
  for (int i = threadIdx.x; i < words; i += kThreads)
    reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(args.layers)[i];
  for (int i = threadIdx.x; i < (place.layers - place.fresh) / 16; i += kThreads)
    reinterpret_cast<uint4*>(shared + place.fresh)[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < args.rows) pieces[threadIdx.x] = piece_of(args, __ldcg(args.lens + threadIdx.x));
  float* angles = reinterpret_cast<float*>(shared + place.angles);
  for (int i = threadIdx.x; i < args.rows * kDim; i += kThreads) {
    const int position = max(__ldcg(args.lens + i / kDim) - 1, 0);
    angles[i] = __ldg(args.cos_sin + position * args.cos_sin_pitch + i % kDim);
  }
  __syncthreads();
  if (threadIdx.x < kShares) {
    const int index = threadIdx.x == kMatrices ? kMatrices * args.layer_count : threadIdx.x;
    shares[threadIdx.x] = own_share(matrix_of(args, layers, index, 0).granules());
  }
  __syncthreads();

  if (warp == kWarps) {
    ring.parity = 1;
#pragma unroll 1
    for (int index = 0; index <= kMatrices * args.layer_count; ++index) {
      const Matrix matrix = matrix_of(args, layers, index, 0);
      if (matrix.norm != nullptr) request_norms(ring, matrix);
      request(ring, matrix, shares[share_of(args, index)]);
      const int l = index / kMatrices;
      if (index % kMatrices != 0 || l == args.layer_count) continue;
      request_keys(args, ring, args.maps + l * 2, pieces);
      if (lane < 2 && l + 1 < args.layer_count) prefetch_map(args.maps + l * 2 + 2 + lane);
    }
    return;
  }

  unsigned char* x = shared + place.x;
  const uint32_t x_at = shared_address(x), zeros = shared_address(shared + place.zeros);
  bf16* residual = reinterpret_cast<bf16*>(shared + place.residual);
  float* sums = reinterpret_cast<float*>(shared + place.sums);
  float* squares = reinterpret_cast<float*>(shared + place.squares);
  const int rows = args.rows, group = args.heads / args.kv_heads;
  Scratch scratch;
  scratch.query = x;
  scratch.fresh_key = x + kQueryRows * kDim * 2;
  scratch.fresh_value = shared + place.fresh;
  scratch.sums = reinterpret_cast<float*>(x + 2 * kQueryRows * kDim * 2);
  scratch.stats = reinterpret_cast<float2*>(scratch.sums + kWarps * group * kSumPitch);
  scratch.angles = angles;
  scratch.head_norms = shared + place.head_norms;
  const unsigned before = __ldcg(args.epoch);
#pragma unroll 1
  for (int index = 0; index <= kMatrices * args.layer_count; ++index) {
    const Matrix matrix = matrix_of(args, layers, index, before);
    const Range own = shares[share_of(args, index)];
    if (matrix.norm != nullptr) {
      norm_rows(ring, matrix, shared, x, residual, squares, shared + place.head_norms, args.x, args.x_pitch,
                args.eps, rows);
    } else {
      if (own.begin == own.end) continue;
      stage_rows(matrix, x, rows);
    }
    sync_computing();
    product(ring, matrix, own, x_at, zeros, sums, rows, args.logits);
    if (index % kMatrices != 0 || matrix.wide) continue;
    const StackLayer& layer = layers[index / kMatrices];
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      const Piece piece = pieces[row];
#pragma unroll 1
      for (int at = piece.begin; at < piece.end;) {
        const int first = at % piece.tiles, count = min(piece.tiles - first, piece.end - at);
        attend(args, layer, ring, shared, scratch, row, piece, at / piece.tiles, first, count,
               at != piece.begin, matrix.output_flag);
        at += count;
      }
    }
    combine(args, pieces, reinterpret_cast<float4*>(x), matrix.output_flag);
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
  StackArguments args = *given;
  if (args.rows < 1 || args.rows > stack::kMaxRows || args.hidden > 4 * stack::kPackets * stack::kComputing)
    return cudaErrorInvalidValue;
  int shared = 0;
  for (args.stages = stack::kMaxStages; args.stages >= stack::kMinStages; --args.stages) {
    shared = 1024 + stack::layout_of(args).bytes;
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
  return cudaLaunchKernelEx(&config, stack::decode_stack, args);
}
