// A mixture of experts over at most eight tokens of one decode step, at the speed of memory, in three
// dependent launches:
//
//   1. the norm ahead of the layer (each block for itself), the router's logits, the shared expert's first
//   half
//   2. the choice (each block for itself), gate and up of the chosen experts
//   3. the choice again, down, the weighted sum and the residual additions
//
// A warp multiplies 16 rows of a weight with all eight tokens, straight from memory to registers: it costs
// the same for one token as for eight, and a weight is read once, however many tokens share it. The choice
// costs each block less than waiting for another one to publish it would; launch 3 makes it, and requests its
// first weights, while launch 2 still runs.
#include <cuda_runtime.h>

#include "hopper.cuh"
#include "moe_activation.cuh"
#include "moe_few.cuh"
#include "moe_route.cuh"
#include "norm.cuh"

namespace quickturn {
namespace {

constexpr int kWarps = 8;  // of a block of the first two launches
constexpr int kDownWarps = 16;
constexpr int kTileRows = 16;

// ---- 1: norm, router, shared gate and up

__device__ __forceinline__ uint4 scaled(const FewArguments& args, const uint4& packed, int v, float scale) {
  float value[8];
  unpack(packed, value);
  if (args.wide) {
    Factors<true> factors;
    factors.load(args.norm, v);
    factors.apply(value, scale);
  } else {
    Factors<false> factors;
    factors.load(args.norm, v);
    factors.apply(value, scale);
  }
  return pack(value);
}

// The tokens' rows to shared memory, with a norm as residual + x, rounded and normed. The first block keeps a
// copy for the second launch. A row's squares are always summed in eight groups of vectors, so that a token
// has the same bits in any company.
template <int kTokens>
__device__ __forceinline__ void read_rows(const FewArguments& args, uint4* rows, int pitch, float* partial) {
  constexpr int kEach = kWarps / kTokens;  // warps of a token, each of which has kTokens groups
  constexpr int kStep = 32 * kWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = warp / kEach, part = warp % kEach, vectors = args.hidden / 8;
  const bool real = token < args.tokens;
  uint4* row = rows + token * pitch;
  const uint4* x = reinterpret_cast<const uint4*>(args.x + token * args.x_pitch);
  const uint4* residual = reinterpret_cast<const uint4*>(args.residual + token * args.residual_pitch);
  float squares[kTokens] = {};
  for (int base = part * 32 + lane; base < vectors; base += kStep) {
    // All groups' vectors on their way before the first is looked at.
    uint4 stream[kTokens], branch[kTokens];
#pragma unroll
    for (int group = 0; group < kTokens; ++group) {
      const int v = base + group * kEach * 32;
      stream[group] = branch[group] = make_uint4(0, 0, 0, 0);
      if (real && v < vectors) {
        if (args.residual != nullptr) stream[group] = residual[v];
        if (args.x != nullptr) branch[group] = x[v];
      }
    }
#pragma unroll
    for (int group = 0; group < kTokens; ++group) {
      const int v = base + group * kEach * 32;
      float value[8], added[8];
      unpack(stream[group], value);
      unpack(branch[group], added);
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] += added[i];
      const uint4 packed = pack(value);
      unpack(packed, value);
#pragma unroll
      for (int i = 0; i < 8; ++i) squares[group] += value[i] * value[i];
      if (v < vectors) row[v] = packed;
    }
  }
#pragma unroll
  for (int group = 0; group < kTokens; ++group) {
    const float sum = warp_sum(squares[group]);
    if (lane == 0) partial[token * kWarps + part + group * kEach] = sum;
  }
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += partial[token * kWarps + i];
  const float scale = rsqrtf(total / static_cast<float>(args.hidden) + args.eps);
  uint4* copy = blockIdx.x == 0 && real ? reinterpret_cast<uint4*>(args.normed) + token * vectors : nullptr;
#pragma unroll
  for (int group = 0; group < kTokens; ++group) {
    for (int v = (part + group * kEach) * 32 + lane; v < vectors; v += kStep) {
      if (args.norm != nullptr) row[v] = scaled(args, row[v], v, scale);
      if (copy != nullptr) copy[v] = row[v];
    }
  }
  __syncthreads();
}

// Whether launches 1 and 2 do with one load of a warp's columns: an eighth of K.
__device__ __forceinline__ int stretch_of(int columns, int step) {
  return (columns + kWarps * step - 1) / (kWarps * step) * step;
}

// Of a tile's 16 rows, the sums over the warps that share K: row `row`, token `token`.
__device__ __forceinline__ float gathered(const float* parts, int row, int token) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[(w * kTileRows + row) * kFewTokens + token];
  return sum;
}

// A block has 16 rows of the router, or eight of the shared expert's gate and those of its up, or the row
// that weighs the shared expert; its warps share K. `Weight` is that of the experts; the router and the last
// row are bfloat16.
template <typename Weight, int kTokens>
__global__ void __launch_bounds__(32 * kWarps) few_route(const __grid_constant__ FewArguments args) {
  extern __shared__ uint4 rows[];
  __shared__ float partial[kTokens * kWarps];
  __shared__ float parts[kWarps * kTileRows * kFewTokens];
  const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4;
  const int experts = args.rules.experts, router_tiles = (experts + kTileRows - 1) / kTileRows;
  const int first = blockIdx.x < router_tiles ? blockIdx.x * kTileRows : 0;
  const int feature = (static_cast<int>(blockIdx.x) - router_tiles) * kTileRows / 2;  // of the shared expert
  const bool routing = blockIdx.x < router_tiles, weighing = feature >= args.shared_inner;
  const bool plain = routing || weighing;
  const int pitch = args.hidden / 8 + 4;  // so that two tokens lie in different banks
  const auto read = [&](int at) { return rows[row * pitch + at / 8]; };
  float sum[4] = {};
  if (plain) {
    Tile<PlainWeight> tile;
    const void* weight = routing ? args.router : args.shared_gate;
    tile.low = PlainWeight::at(weight, routing ? min(first + row, experts - 1) : 0, args.hidden);
    tile.high = PlainWeight::at(weight, routing ? min(first + 8 + row, experts - 1) : 0, args.hidden);
    const int stretch = stretch_of(args.hidden, tile.kStep);
    const int begin = warp * stretch, end = min(begin + stretch, args.hidden);
    // What doesn't depend on the kernels ahead is requested before they are waited for.
    tile.load_rows(begin, end);
    let_dependents_start();
    wait_for_predecessors();
    read_rows<kTokens>(args, rows, pitch, partial);
    for (int at = begin; at < end; at += tile.kColumns) {
      if (at > begin) tile.load_rows(at, end);
      tile.load_tokens(read, row < args.tokens, at, end);
      tile.multiply_to(sum, at, end, false);
    }
  } else {
    Tile<Weight> tile;
    tile.low = Weight::at(args.shared_gate_up, feature + row, args.hidden, args.shared_gate_up_scale,
                          args.shared_gate_up_pitch);
    tile.high = Weight::at(args.shared_gate_up, feature + row + args.shared_inner, args.hidden,
                           args.shared_gate_up_scale, args.shared_gate_up_pitch);
    const int stretch = stretch_of(args.hidden, tile.kStep);
    const int begin = warp * stretch, end = min(begin + stretch, args.hidden);
    tile.load_rows(begin, end);
    let_dependents_start();
    wait_for_predecessors();
    read_rows<kTokens>(args, rows, pitch, partial);
    for (int at = begin; at < end; at += tile.kColumns) {
      if (at > begin) tile.load_rows(at, end);
      tile.load_tokens(read, row < args.tokens, at, end);
      tile.multiply_to(sum, at, end, args.shared_permuted);
    }
  }
  put_sums(sum, parts + warp * kTileRows * kFewTokens);
  __syncthreads();
  const int mine = threadIdx.x / kFewTokens, token = threadIdx.x % kFewTokens;
  if (mine >= kTileRows || token >= args.tokens) return;
  if (routing) {
    if (first + mine < experts)
      args.logits[token * experts + first + mine] =
          gathered(parts, mine, token) +
          (args.router_bias != nullptr ? widen(args.router_bias[first + mine]) : 0.f);
  } else if (weighing) {
    if (mine == 0) args.gates[token] = 1.f / (1.f + __expf(-rounded(gathered(parts, 0, token))));
  } else if (mine < kTileRows / 2) {
    const float value = activated(gathered(parts, mine, token), gathered(parts, mine + 8, token), 0);
    args.between[(token * (args.rules.top + 1) + args.rules.top) * args.pitch + feature + mine] =
        static_cast<bf16>(narrow2(value, 0.f));
  }
}

// ---- 2: gate and up of the chosen experts

// A block has eight rows of an expert's gate and those of its up at a time; its warps share K.
template <typename Weight, bool kOnce>
__global__ void __launch_bounds__(32 * kWarps, 2) few_gate_up(const __grid_constant__ FewArguments args) {
  __shared__ FewChoice choice;
  __shared__ float parts[2][kWarps * kTileRows * kFewTokens];
  wait_for_predecessors();
  // Not before: who starts behind this may count on the first launch having finished.
  let_dependents_start();
  const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4;
  const int slots = args.rules.top + 1, per = args.inner / 8;
  Tile<Weight> tile;
  const int stretch = stretch_of(args.hidden, tile.kStep);
  const int begin = warp * stretch, end = min(begin + stretch, args.hidden);
  const bf16* normed = args.normed + static_cast<long long>(min(row, args.tokens - 1)) * args.hidden;
  const auto read = [&](int at) { return __ldcg(reinterpret_cast<const uint4*>(normed + at)); };
  if (kOnce) tile.load_tokens(read, row < args.tokens, begin, end);
  choice.choose(args);
  choice.list(args);

  const int tasks = choice.active * per;
  const auto aim = [&](int task) {
    const int member = task / per;
    const long long first = 2ll * choice.member[member] * args.inner + (task - member * per) * 8 + row;
    tile.low = Weight::at(args.gate_up, first, args.hidden, args.gate_up_scale, args.gate_up_pitch);
    tile.high =
        Weight::at(args.gate_up, first + args.inner, args.hidden, args.gate_up_scale, args.gate_up_pitch);
  };
  int task = blockIdx.x, buffer = 0;
  if (task < tasks) {
    aim(task);
    tile.load_rows(begin, end);
  }
  for (; task < tasks; task += gridDim.x, buffer ^= 1) {
    float sum[4] = {};
    if constexpr (kOnce) {
      tile.multiply_to(sum, begin, end, false);
    } else {
      for (int at = begin; at < end; at += tile.kColumns) {
        if (at > begin) tile.load_rows(at, end);
        tile.load_tokens(read, row < args.tokens, at, end);
        tile.multiply_to(sum, at, end, false);
      }
    }
    const int next = task + gridDim.x;
    if (next < tasks) {
      // On their way while the sums meet.
      aim(next);
      tile.load_rows(begin, end);
    }
    put_sums(sum, parts[buffer] + warp * kTileRows * kFewTokens);
    __syncthreads();
    const int mine = threadIdx.x / kFewTokens, token = threadIdx.x % kFewTokens, member = task / per;
    if (mine < 8 && choice.takers[member] >> token & 1) {
      const int feature = (task - member * per) * 8 + mine;
      float gate = gathered(parts[buffer], mine, token), up = gathered(parts[buffer], mine + 8, token);
      if (args.gate_up_bias != nullptr) {
        const long long at = 2ll * choice.member[member] * args.inner + feature;
        gate += widen(args.gate_up_bias[at]);
        up += widen(args.gate_up_bias[at + args.inner]);
      }
      args.between[(token * slots + choice.slot(member, token)) * args.pitch + feature] =
          static_cast<bf16>(narrow2(activated(gate, up, args.oss), 0.f));
    }
  }
}

// ---- 3: down and the sum

// A block has 16 rows of down of all experts, a warp those of one expert at a time.
template <typename Weight>
__global__ void __launch_bounds__(32 * kDownWarps, 1) few_down(const __grid_constant__ FewArguments args) {
  __shared__ FewChoice choice;
  // Of each choice of a token, so that a token's sum has one order in any company.
  __shared__ float results[(kMaxTop + 1) * kTileRows * kFewTokens];
  const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, feature = blockIdx.x * kTileRows;
  const int top = args.rules.top, slots = top + 1;
  for (int i = threadIdx.x; i < slots * kTileRows * kFewTokens; i += 32 * kDownWarps) results[i] = 0.f;
  // The launch before lets this one start when it has seen the first one's end.
  choice.choose(args);
  choice.list(args);
  const int entries = choice.active + (args.shared_inner > 0);
  Tile<Weight> tile;
  const auto aim = [&](int entry) {
    if (entry < choice.active) {
      const long long first = static_cast<long long>(choice.member[entry]) * args.hidden + feature + row;
      tile.low = Weight::at(args.down, first, args.inner, args.down_scale, args.down_pitch);
      tile.high = Weight::at(args.down, first + 8, args.inner, args.down_scale, args.down_pitch);
    } else {
      tile.low = Weight::at(args.shared_down, feature + row, args.shared_inner, args.shared_down_scale,
                            args.shared_down_pitch);
      tile.high = Weight::at(args.shared_down, feature + row + 8, args.shared_inner, args.shared_down_scale,
                             args.shared_down_pitch);
    }
  };
  const auto width_of = [&](int entry) { return entry < choice.active ? args.inner : args.shared_inner; };
  // The columns behind those that a warp loads first.
  const auto ask_for_rest = [&](int entry) {
    const int lane = threadIdx.x % 32, rest = width_of(entry) - tile.kColumns;
    if (rest <= 0 || lane >= kTileRows) return;
    const void* from = entry < choice.active ? args.down : args.shared_down;
    const long long at = (entry < choice.active ? choice.member[entry] : 0ll) * args.hidden + feature + lane;
    prefetch_to_l2(static_cast<const char*>(from) + (at * width_of(entry) + tile.kColumns) * Weight::kBytes,
                   rest * Weight::kBytes);
  };
  if (warp < entries) {
    aim(warp);
    tile.load_rows(0, width_of(warp));
    ask_for_rest(warp);
  }
  let_dependents_start();
  wait_for_predecessors();
  for (int entry = warp; entry < entries; entry += kDownWarps) {
    const bool routed = entry < choice.active;
    const int width = width_of(entry), takers = routed ? choice.takers[entry] : (1 << args.tokens) - 1;
    const auto slot_of = [&](int token) { return routed ? choice.slot(entry, token) : top; };
    const bool real = takers >> row & 1;
    const bf16* x = args.between + (real ? (row * slots + slot_of(row)) * args.pitch : 0);
    const auto read = [&](int at) { return __ldcg(reinterpret_cast<const uint4*>(x + at)); };
    float sum[4] = {};
    for (int at = 0; at < width; at += tile.kColumns) {
      if (at > 0) tile.load_rows(at, width);
      tile.load_tokens(read, real, at, width);
      tile.multiply_to(sum, at, width, !routed && args.shared_permuted);
    }
    const int next = entry + kDownWarps;
    if (next < entries) {
      aim(next);
      tile.load_rows(0, width_of(next));
      ask_for_rest(next);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = threadIdx.x % 4 * 2 + i % 2;
      if (!(takers >> token & 1)) continue;
      const int slot = slot_of(token);
      const float by = routed                        ? choice.weight[token][slot]
                       : args.shared_gate != nullptr ? __ldcg(args.gates + token)
                                                     : 1.f;
      results[(slot * kTileRows + row + i / 2 * 8) * kFewTokens + token] = sum[i] * by;
    }
  }
  __syncthreads();
  const int mine = threadIdx.x / kFewTokens, token = threadIdx.x % kFewTokens;
  if (mine >= kTileRows || token >= args.tokens) return;
  float total = 0.f;
  for (int slot = 0; slot < slots; ++slot) {
    total += results[(slot * kTileRows + mine) * kFewTokens + token];
    if (args.down_bias != nullptr && slot < top && choice.expert[token][slot] >= 0)
      total += choice.weight[token][slot] *
               widen(args.down_bias[static_cast<long long>(choice.expert[token][slot]) * args.hidden +
                                    feature + mine]);
  }
  if (args.residual != nullptr) {
    bf16* to = args.residual + token * args.residual_pitch + feature + mine;
    float before = widen(*to);
    if (args.x != nullptr) before = rounded(before + widen(args.x[token * args.x_pitch + feature + mine]));
    *to = static_cast<bf16>(narrow2(before + rounded(total), 0.f));
  } else {
    args.out[static_cast<long long>(token) * args.hidden + feature + mine] =
        static_cast<bf16>(narrow2(total, 0.f));
  }
}

struct Launch {
  int blocks, threads, shared;
};

cudaError_t launch(void (*kernel)(FewArguments), const Launch& shape, const FewArguments& args, int early,
                   cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared);
  // As in linear.cu: a different division of the multiprocessor's memory would keep neighbours apart.
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <typename Weight>
cudaError_t run(const FewArguments& args, int units, int early, cudaStream_t stream) {
  const int padded = args.tokens <= 1 ? 1 : args.tokens <= 2 ? 2 : args.tokens <= 4 ? 4 : 8;
  const auto route = padded == 1   ? few_route<Weight, 1>
                     : padded == 2 ? few_route<Weight, 2>
                     : padded == 4 ? few_route<Weight, 4>
                                   : few_route<Weight, 8>;
  const int route_blocks = (args.rules.experts + kTileRows - 1) / kTileRows + args.shared_inner / 8 +
                           (args.shared_gate != nullptr);
  cudaError_t error =
      launch(route, {route_blocks, 32 * kWarps, padded * (2 * args.hidden + 64)}, args, early, stream);
  if (error != cudaSuccess) return error;
  const int blocks = min(2 * units, args.tokens * args.rules.top * args.inner / 8);
  const auto gate_up =
      args.hidden <= kWarps * Tile<Weight>::kColumns ? few_gate_up<Weight, true> : few_gate_up<Weight, false>;
  error = launch(gate_up, {blocks, 32 * kWarps, 0}, args, early, stream);
  if (error != cudaSuccess) return error;
  return launch(few_down<Weight>, {args.hidden / kTileRows, 32 * kDownWarps, 0}, args, early, stream);
}

}  // namespace
}  // namespace quickturn

// See FewArguments. fp8: the experts, the shared one too, are e4m3 with block scales. Returns a cudaError_t;
// launches on `stream` and does not wait. Unless `early`, each launch begins when the one ahead has finished.
extern "C" int quickturn_moe_few(const quickturn::FewArguments* args, int fp8, int units, int early,
                                 void* stream) {
  using namespace quickturn;
  if (args->tokens < 1 || args->tokens > kFewTokens || args->hidden % (fp8 ? 128 : 16) || args->inner % 16 ||
      args->shared_inner % 16 || args->pitch % 16 || args->rules.top > kMaxTop ||
      args->rules.experts > kMaxExperts)
    return cudaErrorInvalidValue;
  const auto s = static_cast<cudaStream_t>(stream);
  return fp8 ? run<ScaledWeight>(*args, units, early, s) : run<PlainWeight>(*args, units, early, s);
}
