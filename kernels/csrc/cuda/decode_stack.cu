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

constexpr int chunk_of(int columns) {
  return columns % 1024 == 0 ? 1024 : columns % 768 == 0 ? 768 : columns % 512 == 0 ? 512 : 256;
}

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
  at.squares = at.sums + 2 * kBatchSlots * 2 * args.rows * kGranule * 4;
  at.angles = at.squares + kMaxRows * kWarps * 4;
  at.head_norms = at.angles + args.rows * kDim * 4;
  at.zeros = at.head_norms + 2 * kHeadBytes;
  at.layers = at.zeros + 16;
  at.segments = at.layers + args.layer_count * static_cast<int>(sizeof(StackLayer));
  at.units = at.segments + kMaxSegments * static_cast<int>(sizeof(Segment));
  at.shares = at.units + kMaxUnits * static_cast<int>(sizeof(Unit));
  at.work = at.shares + (kMatrices + 1) * static_cast<int>(sizeof(Range));
  at.barriers = at.work + static_cast<int>(sizeof(Work));
  at.bytes = at.barriers + 2 * kMaxStages * 8;
  return at;
}

Part make_part(const uint4* input, uint4* output, int columns, int features, bool gated) {
  Part part;
  part.input = input, part.output = output;
  part.columns = columns, part.features = features, part.gated = gated;
  part.granules = features / (gated ? kGranule / 2 : kGranule);
  part.chunk = chunk_of(columns);
  part.chunks = columns / part.chunk;
  part.batch = 1, part.shift = gated ? 2 : 3;
  while (part.batch * 2 * part.chunks <= kBatchSlots) part.batch *= 2, ++part.shift;
  return part;
}

Plan make_plan(const StackArguments& args) {
  Plan plan{args, layout_of(args), {}};
  const int attended = args.heads * kDim;
  plan.parts[0] = make_part(args.mlp, args.qkv, args.hidden, attended + 2 * args.kv_heads * kDim, false);
  plan.parts[1] = make_part(args.attended, args.branch, attended, args.hidden, false);
  plan.parts[2] = make_part(args.branch, args.activated, args.hidden, args.inner, true);
  plan.parts[3] = make_part(args.activated, args.mlp, args.inner, args.hidden, false);
  plan.parts[kMatrices] = make_part(args.mlp, nullptr, args.hidden, args.vocab, false);
  return plan;
}

// What the phases read again and again: barriers, the layers' pointers, cosines and sines, shares of the
// work.
__device__ __forceinline__ void set_up(const Plan& plan, unsigned char* shared, uint32_t barriers) {
  const StackArguments& args = plan.args;
  const int thread = threadIdx.x;
  if (thread == 0) {
    for (int stage = 0; stage < args.stages; ++stage) {
      barrier_init(barriers + stage * 8, 1);
      barrier_init(barriers + (kMaxStages + stage) * 8, 2);
    }
    barrier_init_fence();
  }
  Work* work = reinterpret_cast<Work*>(shared + plan.at.work);
  if (thread == 32) {
    work->segments = list_segments(args, reinterpret_cast<Segment*>(shared + plan.at.segments));
    const int units = args.rows * args.heads * (kDim / kQuarter), blocks = gridDim.x;
    work->units = (units - static_cast<int>(blockIdx.x) + blocks - 1) / blocks;
  }
  if (thread >= 64 && thread < 64 + kMaxUnits)
    reinterpret_cast<Unit*>(shared + plan.at.units)[thread - 64] = unit_of(args, thread - 64);
  if (thread >= 96 && thread <= 96 + kMatrices)
    reinterpret_cast<Range*>(shared + plan.at.shares)[thread - 96] =
        own_share(plan.parts[thread - 96].granules);
  if (thread >= 128 && thread < 132) reinterpret_cast<uint32_t*>(shared + plan.at.zeros)[thread - 128] = 0;
  const int words = args.layer_count * static_cast<int>(sizeof(StackLayer)) / 8;
  for (int i = thread; i < words; i += kThreads)
    reinterpret_cast<uint64_t*>(shared + plan.at.layers)[i] =
        reinterpret_cast<const uint64_t*>(args.layers)[i];
  for (int i = thread; i < args.rows * kDim; i += kThreads) {
    const int position = max(__ldcg(args.lens + i / kDim) - 1, 0);
    reinterpret_cast<float*>(shared + plan.at.angles)[i] =
        __ldg(args.cos_sin + position * args.cos_sin_pitch + i % kDim);
  }
}

__device__ __forceinline__ void request_step(const Plan& plan, unsigned char* shared, Ring ring) {
  const StackArguments& args = plan.args;
  const StackLayer* layers = reinterpret_cast<const StackLayer*>(shared + plan.at.layers);
  const Range* shares = reinterpret_cast<const Range*>(shared + plan.at.shares);
  const Segment* segments = reinterpret_cast<const Segment*>(shared + plan.at.segments);
  const int count = reinterpret_cast<const Work*>(shared + plan.at.work)->segments;
  const int lane = threadIdx.x % 32;
  ring.parity = 1;
#pragma unroll 1
  for (int index = 0; index <= kMatrices * args.layer_count; ++index) {
    const int l = index / kMatrices, part = part_of(plan, index);
    const TensorMap* maps = args.maps + l * kMaps;
    const Range own = shares[part];
    if (lane == 0) {
      Ring ahead = ring;
      if (has_norm(part)) request_norms(plan, ahead, layers[l], part);
      request(plan, ahead, maps + (part == kMatrices ? 0 : part), plan.parts[part], own);
    }
    __syncwarp();
    ring.skip((own.end - own.begin) * plan.parts[part].chunks + has_norm(part), args.stages);
    if (part != 0) continue;
    request_keys(plan, ring, maps + kMatrices, segments, count);
    if (lane < kMaps && l + 1 < args.layer_count) prefetch_map(maps + kMaps + lane);
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads, 1) decode_stack(const __grid_constant__ Plan plan) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const StackArguments& args = plan.args;
  Ring ring{shared_address(shared), shared_address(shared + plan.at.barriers), 0, 0};
  set_up(plan, shared, ring.barriers);
  __syncthreads();
  if (threadIdx.x >= kComputing) {
    request_step(plan, shared, ring);
    return;
  }

  const unsigned before = __ldcg(args.epoch);
#pragma unroll 1
  for (int index = 0; index <= kMatrices * args.layer_count; ++index) {
    const int l = index / kMatrices, at = part_of(plan, index);
    const unsigned flag = before + l + 1;
    const StackLayer& layer = reinterpret_cast<const StackLayer*>(shared + plan.at.layers)[l];
    const Range& own = reinterpret_cast<const Range*>(shared + plan.at.shares)[at];
    if (has_norm(at)) {
      norm_rows(plan, ring, shared, at, index == 0, at == 2 ? flag : flag - 1);
      sync_computing();
      if (this_thread() % 32 == 0 && this_thread() < 64) barrier_arrive(ring.empty());
      ring.advance(1, args.stages);
    } else {
      if (own.begin == own.end) continue;
      if (args.rows * plan.parts[at].columns > 16 * kComputing)
        stage_rows<8>(plan, shared, plan.parts[at], flag);
      else
        stage_rows<4>(plan, shared, plan.parts[at], flag);
      sync_computing();
    }
    product(plan, ring, shared, layer, at, own, flag);
    if (at != 0) continue;
    const Work work = *reinterpret_cast<const Work*>(shared + plan.at.work);
#pragma unroll 1
    for (int i = 0; i < work.segments; ++i)
      attend(plan, layer, ring, shared, reinterpret_cast<const Segment*>(shared + plan.at.segments)[i], flag);
#pragma unroll 1
    for (int i = 0; i < work.units; ++i) {
      const Unit& unit = reinterpret_cast<const Unit*>(shared + plan.at.units)[i];
      if (unit.parts > 1) combine(plan, shared, unit, flag);
    }
  }
  // Everybody has read it: what block 0 has received depends on every block.
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.epoch = before + args.layer_count;
}

}  // namespace
}  // namespace stack
}  // namespace quickturn

// Descriptions for the copy engine, written to host memory. False where the driver refuses.
// A matrix [rows, columns], `gated` with the gate's rows first, in boxes of one granule and chunk.
extern "C" int quickturn_decode_stack_matrix(void* map, const void* weight, long long rows, long long columns,
                                             int gated) {
  using namespace quickturn;
  const long long halves = gated ? 2 : 1;
  const long long sizes[4] = {kSliceColumns, rows / halves, halves, columns / kSliceColumns};
  const long long pitches[3] = {columns, rows / halves * columns, kSliceColumns};
  const int box[4] = {kSliceColumns, static_cast<int>(stack::kGranule / halves), static_cast<int>(halves),
                      stack::chunk_of(static_cast<int>(columns)) / kSliceColumns};
  return encode_boxes<4>(*static_cast<TensorMap*>(map), weight, sizes, pitches, box);
}

// One layer's keys or values, in boxes of a tile. Pitches in elements.
extern "C" int quickturn_decode_stack_cache(void* map, const void* cache, int kv_heads, int block_tokens,
                                            long long blocks, long long row_pitch, long long block_pitch) {
  using namespace quickturn;
  const long long sizes[5] = {kSliceColumns, block_tokens, stack::kDim / kSliceColumns, kv_heads, blocks};
  const long long pitches[4] = {row_pitch, kSliceColumns, stack::kDim, block_pitch};
  const int box[5] = {kSliceColumns, stack::kKeys, stack::kDim / kSliceColumns, 1, 1};
  return encode_boxes<5>(*static_cast<TensorMap*>(map), cache, sizes, pitches, box);
}

// See StackArguments; sizes as `decode_stack` in Python checks them. `blocks`: at most the multiprocessors
// and the granules of q|k|v and of gate|up, so that every block takes part in both. Returns a cudaError_t.
extern "C" int quickturn_decode_stack(const quickturn::StackArguments* given, int blocks, int shared_limit,
                                      void* stream) {
  using namespace quickturn;
  StackArguments args = *given;
  if (args.rows < 1 || args.rows > stack::kMaxRows ||
      args.hidden * 2 + 2 * stack::kHeadBytes > stack::kSlotBytes ||
      args.heads / args.kv_heads > stack::kMaxGroup ||
      args.rows * args.heads * (stack::kDim / stack::kQuarter) > stack::kMaxUnits * blocks ||
      args.kv_heads > blocks || args.block_tokens % stack::kKeys)
    return cudaErrorInvalidValue;
  int shared = 0;
  for (args.stages = stack::kMaxStages; args.stages >= stack::kMinStages; args.stages -= stack::kPairs) {
    shared = 1024 + stack::layout_of(args).bytes;
    if (shared <= shared_limit) break;
  }
  if (args.stages < stack::kMinStages) return cudaErrorInvalidValue;
  const stack::Plan plan = stack::make_plan(args);
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
