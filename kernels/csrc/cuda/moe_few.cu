// A mixture of experts over one or two tokens of a decode step, at the speed of memory, in three
// dependent launches:
//
//   1. the norm ahead of the layer (each block for itself), the router's logits, the shared expert's first
//   half
//   2. the choice (each block for itself), gate and up of the chosen experts
//   3. the choice again, down, the weighted sum and the residual additions
//
// A warp multiplies one or two rows of a weight with all tokens that want them, so that a weight is read
// once, however many tokens share it. The choice costs each block less than waiting for another one to
// publish it would; launch 3 makes it, and requests its first weights, while launch 2 still runs.
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
constexpr int kPrefetched = 4096;  // bytes of a weight that one request brings to L2

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
__device__ __forceinline__ void read_rows(const FewArguments& args, uint4* rows, float* partial) {
  constexpr int kEach = kWarps / kTokens;  // warps of a token, each of which has kTokens groups
  constexpr int kStep = 32 * kWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = warp / kEach, part = warp % kEach, vectors = args.hidden / 8;
  const bool real = token < args.tokens;
  uint4* row = rows + token * vectors;
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

// A warp has one row of the router, or a row of the shared expert's gate and one of its up, or the row that
// weighs the shared expert. `Weight` is that of the experts; the router and the last row are bfloat16.
template <typename Weight, int kTokens>
__global__ void __launch_bounds__(32 * kWarps) few_route(const __grid_constant__ FewArguments args) {
  extern __shared__ uint4 rows[];
  __shared__ float partial[kTokens * kWarps];
  const int task = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int experts = args.rules.experts, feature = task - experts;
  const bool weighing = feature == args.shared_inner && args.shared_gate != nullptr;
  const bool plain = task < experts || weighing;
  const bool shared = feature >= 0 && feature < args.shared_inner;
  using Plain = Rows<PlainWeight, 1>;
  using Pair = Rows<Weight, 2>;
  Plain one;
  Pair two;
  // What doesn't depend on the kernels ahead is requested before they are waited for.
  if (plain) {
    one.row[0] = PlainWeight::at(task < experts ? args.router : args.shared_gate, task < experts ? task : 0,
                                 args.hidden);
    one.load(0, lane, args.hidden);
  } else if (shared) {
    two.row[0] = Weight::at(args.shared_gate_up, feature, args.hidden, args.shared_gate_up_scale,
                            args.shared_gate_up_pitch);
    two.row[1] = Weight::at(args.shared_gate_up, feature + args.shared_inner, args.hidden,
                            args.shared_gate_up_scale, args.shared_gate_up_pitch);
    two.load(0, lane, args.hidden);
  }
  let_dependents_start();
  wait_for_predecessors();
  read_rows<kTokens>(args, rows, partial);
  const int vectors = args.hidden / 8;
  if (plain) {
    float sum[kTokens] = {};
    for (int at = 0; at < args.hidden; at += Plain::kColumns) {
      if (at > 0) one.load(at, lane, args.hidden);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float found[1] = {};
        one.add(found, rows + t * vectors, at, lane, args.hidden, false);
        sum[t] += found[0];
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float total = warp_sum(sum[t]);
      if (lane != 0 || t >= args.tokens) continue;
      if (task < experts)
        args.logits[t * experts + task] =
            total + (args.router_bias != nullptr ? widen(args.router_bias[task]) : 0.f);
      else
        args.gates[t] = 1.f / (1.f + __expf(-rounded(total)));
    }
  } else if (shared) {
    float gate[kTokens] = {}, up[kTokens] = {};
    for (int at = 0; at < args.hidden; at += Pair::kColumns) {
      if (at > 0) two.load(at, lane, args.hidden);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float found[2] = {};
        two.add(found, rows + t * vectors, at, lane, args.hidden, args.shared_permuted);
        gate[t] += found[0];
        up[t] += found[1];
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float g = warp_sum(gate[t]), u = warp_sum(up[t]);
      if (lane == 0 && t < args.tokens)
        args.between[(t * (args.rules.top + 1) + args.rules.top) * args.pitch + feature] =
            static_cast<bf16>(narrow2(activated(g, u, 0), 0.f));
    }
  }
}

// ---- 2: gate and up of the chosen experts

template <typename Weight, bool kOnce>
__global__ void __launch_bounds__(32 * kWarps, 2) few_gate_up(const __grid_constant__ FewArguments args) {
  extern __shared__ uint4 rows[];
  __shared__ FewChoice choice;
  wait_for_predecessors();
  // Not before: who starts behind this may count on the first launch having finished.
  let_dependents_start();
  const int vectors = args.hidden / 8, lane = threadIdx.x % 32;
  choice.choose(args);
  // Meanwhile the warps that don't choose fetch the rows.
  const int choosing = args.tokens * 32;
  if (threadIdx.x >= choosing) {
    for (int i = threadIdx.x - choosing; i < args.tokens * vectors; i += 32 * kWarps - choosing)
      rows[i] = __ldcg(reinterpret_cast<const uint4*>(args.normed) + i);
  }
  choice.list(args);

  const int warp = blockIdx.x * kWarps + threadIdx.x / 32;
  const int warps = gridDim.x * kWarps, slots = args.rules.top + 1;
  using Pair = Rows<Weight, 2>;
  for (int task = warp; task < choice.active * args.inner; task += warps) {
    const int member = task / args.inner, feature = task - member * args.inner;
    const int expert = choice.member[member];
    Pair two;
    const long long first = 2ll * expert * args.inner + feature;
    two.row[0] = Weight::at(args.gate_up, first, args.hidden, args.gate_up_scale, args.gate_up_pitch);
    two.row[1] =
        Weight::at(args.gate_up, first + args.inner, args.hidden, args.gate_up_scale, args.gate_up_pitch);
    if (kOnce) two.load(0, lane, args.hidden);
    // The memory is to be busy while this warp multiplies.
    const int next = task + warps;
    if (lane < 2 && next < choice.active * args.inner) {
      const int behind = next / args.inner;
      const long long row = 2ll * choice.member[behind] * args.inner + next - behind * args.inner;
      prefetch_to_l2(
          static_cast<const char*>(args.gate_up) + (row + lane * args.inner) * args.hidden * Weight::kBytes,
          args.hidden * Weight::kBytes);
    }
    for (int takers = choice.takers[member]; takers != 0; takers &= takers - 1) {
      const int t = __ffs(takers) - 1;
      float sum[2] = {};
      if constexpr (kOnce) {
        two.add(sum, rows + t * vectors, 0, lane, args.hidden, false);
      } else {
        for (int at = 0; at < args.hidden; at += Pair::kColumns) {
          two.load(at, lane, args.hidden);
          two.add(sum, rows + t * vectors, at, lane, args.hidden, false);
        }
      }
      float gate = warp_sum(sum[0]), up = warp_sum(sum[1]);
      if (lane != 0) continue;
      if (args.gate_up_bias != nullptr) {
        gate += widen(args.gate_up_bias[first]);
        up += widen(args.gate_up_bias[first + args.inner]);
      }
      args.between[(t * slots + choice.slot(member, t)) * args.pitch + feature] =
          static_cast<bf16>(narrow2(activated(gate, up, args.oss), 0.f));
    }
  }
  if (args.prefetch && lane == 0) {
    // The memory would have a pause between this launch and the next one.
    const long long bytes = static_cast<long long>(args.hidden) * args.inner * Weight::kBytes;
    const int pieces = static_cast<int>(bytes / kPrefetched);
    for (int piece = warp; piece < choice.active * pieces; piece += warps) {
      const int member = piece / pieces;
      prefetch_to_l2(static_cast<const char*>(args.down) + choice.member[member] * bytes +
                         static_cast<long long>(piece - member * pieces) * kPrefetched,
                     kPrefetched);
    }
  }
}

// ---- 3: down and the sum

// A lane has kSlots x kPer vectors on their way: kPer of each of kSlots experts.
template <typename Weight, int kSlots, int kPer>
__global__ void __launch_bounds__(32 * kDownWarps, 1) few_down(const __grid_constant__ FewArguments args) {
  extern __shared__ uint4 between[];
  __shared__ FewChoice choice;
  constexpr int kVector = Weight::kVector, kColumns = 32 * kPer * kVector;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int top = args.rules.top, slots = top + 1, used = top + (args.shared_inner > 0);
  // The launch before lets this one start when it has seen the first one's end.
  choice.choose(args);
  __syncthreads();
  bool waited = false;
  for (int base = blockIdx.x * kDownWarps; base < args.hidden; base += gridDim.x * kDownWarps) {
    const int feature = min(base + warp, args.hidden - 1);
    float mine = 0.f;
    for (int t = 0; t < args.tokens; ++t) {
      float sum = 0.f;
      for (int first = 0; first < used; first += kSlots) {
        for (int column = 0; column < args.pitch; column += kColumns) {
          uint4 piece[kSlots][kPer];
          float scale[Weight::kScaled ? kSlots : 1][Weight::kScaled ? kPer : 1];
#pragma unroll
          for (int s = 0; s < kSlots; ++s) {
            const int slot = first + s;
            const int width = choice.width(args, t, slot);
            const Weight row = slot < top ? Weight::at(args.down, choice.row(args, t, slot) + feature,
                                                       args.inner, args.down_scale, args.down_pitch)
                                          : Weight::at(args.shared_down, feature, args.shared_inner,
                                                       args.shared_down_scale, args.shared_down_pitch);
#pragma unroll
            for (int v = 0; v < kPer; ++v) {
              const int at = column + (v * 32 + lane) * kVector;
              if (at < width) {
                piece[s][v] = row.vector(at);
                if constexpr (Weight::kScaled) scale[s][v] = row.factor(at);
              }
            }
          }
          if (first == 0 && column == 0 && lane < used) {
            // The next token's rows, or those of the next feature's first token.
            const bool more = t + 1 < args.tokens;
            const int token = more ? t + 1 : 0;
            const int at = more ? feature : feature + gridDim.x * kDownWarps;
            const int width = at < args.hidden ? choice.width(args, token, lane) : 0;
            const void* from = lane < top ? args.down : args.shared_down;
            const long long row = lane < top ? choice.row(args, token, lane) : 0;
            if (width > 0)
              prefetch_to_l2(static_cast<const char*>(from) + (row + at) * width * Weight::kBytes,
                             width * Weight::kBytes);
          }
          if (!waited) {
            waited = true;
            let_dependents_start();
            wait_for_predecessors();
            for (int i = threadIdx.x; i < args.tokens * slots * args.pitch / 8; i += 32 * kDownWarps)
              between[i] = __ldcg(reinterpret_cast<const uint4*>(args.between) + i);
            __syncthreads();
          }
#pragma unroll
          for (int s = 0; s < kSlots; ++s) {
            const int slot = first + s;
            const int width = choice.width(args, t, slot);
            if (width == 0) continue;
            const float by = slot < top                    ? choice.weight[t][slot]
                             : args.shared_gate != nullptr ? __ldcg(args.gates + t)
                                                           : 1.f;
            const uint4* x = between + ((t * slots + slot) * args.pitch + column) / 8;
#pragma unroll
            for (int v = 0; v < kPer; ++v) {
              const int at = (v * 32 + lane) * kVector;
              if (column + at < width) {
                float found = Weight::dot(piece[s][v], x + at / 8, slot >= top && args.shared_permuted);
                if constexpr (Weight::kScaled) found *= scale[s][v];
                sum = fmaf(by, found, sum);
              }
            }
          }
        }
      }
      if (args.down_bias != nullptr && lane < top) {
        const int expert = choice.expert[t][lane];
        if (expert >= 0)
          sum += choice.weight[t][lane] *
                 widen(args.down_bias[static_cast<long long>(expert) * args.hidden + feature]);
      }
      sum = warp_sum(sum);
      if (lane == t) mine = sum;
    }
    if (base + warp < args.hidden && lane < args.tokens) {
      if (args.residual != nullptr) {
        bf16* to = args.residual + lane * args.residual_pitch + feature;
        float before = widen(*to);
        if (args.x != nullptr) before = rounded(before + widen(args.x[lane * args.x_pitch + feature]));
        *to = static_cast<bf16>(narrow2(before + rounded(mine), 0.f));
      } else {
        args.out[static_cast<long long>(lane) * args.hidden + feature] =
            static_cast<bf16>(narrow2(mine, 0.f));
      }
    }
  }
}

template <typename Weight>
auto pick_down(int pitch) {
  const int vectors = (pitch + 32 * Weight::kVector - 1) / (32 * Weight::kVector);  // of a lane in a row
  return vectors == 1   ? few_down<Weight, 9, 1>
         : vectors == 2 ? few_down<Weight, 9, 2>
                        : few_down<Weight, 4, 4>;
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
  using Pair = Rows<Weight, 2>;
  const int row_bytes = 2 * args.hidden;
  const auto route = args.tokens == 1 ? few_route<Weight, 1> : few_route<Weight, 2>;
  const int rows = args.rules.experts + args.shared_inner + (args.shared_gate != nullptr);
  cudaError_t error = launch(route, {(rows + kWarps - 1) / kWarps, 32 * kWarps, args.tokens * row_bytes},
                             args, early, stream);
  if (error != cudaSuccess) return error;
  const int most = args.tokens * args.rules.top * args.inner;
  const int blocks = min(2 * units, (most + kWarps - 1) / kWarps);
  const auto gate_up = args.hidden <= Pair::kColumns ? few_gate_up<Weight, true> : few_gate_up<Weight, false>;
  error = launch(gate_up, {blocks, 32 * kWarps, args.tokens * row_bytes}, args, early, stream);
  if (error != cudaSuccess) return error;
  const int down_blocks = min(units, (args.hidden + kDownWarps - 1) / kDownWarps);
  const int shared = args.tokens * (args.rules.top + 1) * args.pitch * 2;
  return launch(pick_down<Weight>(args.pitch), {down_blocks, 32 * kDownWarps, shared}, args, early, stream);
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
