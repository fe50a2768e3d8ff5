// The first launch of a mixture over a few tokens: the norm ahead of the layer (each block for itself), the
// router's logits, the shared expert's first half. And how all of them are launched.
#pragma once
#include <cuda_runtime.h>

#include "dependent_launch.cuh"
#include "hopper.cuh"
#include "moe_activation.cuh"
#include "moe_few.cuh"
#include "norm.cuh"

namespace quickturn {
namespace {

constexpr int kWarps = 8;          // of a block
constexpr int kPrefetched = 4096;  // bytes of a weight that one request brings to L2

__device__ __forceinline__ uint4 scaled(const FewArguments& args, const uint4* norm, const uint4& packed,
                                        int v, float scale) {
  float value[8];
  unpack(packed, value);
  if (args.wide) {
    Factors<true> factors;
    factors.load(norm, v);
    factors.apply(value, scale);
  } else {
    Factors<false> factors;
    factors.load(norm, v);
    factors.apply(value, scale);
  }
  return pack(value);
}

// The tokens' rows to shared memory, with a norm (its weight lies there already) as residual + x, rounded and
// normed. The first block keeps a copy for the second launch. A row's squares are always summed in eight
// groups of vectors, so that a token has the same bits in any company.
template <int kTokens>
__device__ __forceinline__ void read_rows(const FewArguments& args, uint4* rows, const uint4* norm,
                                          float* partial) {
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
      if (args.norm != nullptr) row[v] = scaled(args, norm, row[v], v, scale);
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
  constexpr int kTogether = kTokens < 2 ? 1 : 2;  // tokens at a time
  const int task = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int experts = args.rules.experts, feature = task - experts, vectors = args.hidden / 8;
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
  uint4* norm = rows + kTokens * vectors;
  if (args.norm != nullptr)
    for (int i = threadIdx.x; i < vectors * (args.wide ? 2 : 1); i += 32 * kWarps)
      norm[i] = __ldg(static_cast<const uint4*>(args.norm) + i);
  let_dependents_start();
  if (lane == 0) {
    // The third launch's; the memory has nothing else to do now.
    const long long bytes = static_cast<long long>(args.hidden) * args.shared_inner * Weight::kBytes;
    for (long long at = static_cast<long long>(task) * kPrefetched; at < bytes;
         at += static_cast<long long>(gridDim.x) * kWarps * kPrefetched)
      prefetch_to_l2(static_cast<const char*>(args.shared_down) + at,
                     static_cast<int>(min(bytes - at, static_cast<long long>(kPrefetched))));
  }
  wait_for_predecessors();
  read_rows<kTokens>(args, rows, norm, partial);
  for (int t = 0; t < args.tokens; t += kTogether) {
    const uint4* x = rows + t * vectors;
    // What a warp holds is enough for a row of 2,048; of longer ones each token reads the rest again.
    if (plain) {
      float sum[kTogether][1] = {};
      for (int at = 0; at < args.hidden; at += Plain::kColumns) {
        if (at + t > 0 && args.hidden > Plain::kColumns) one.load(at, lane, args.hidden);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) one.add(sum[i], x + i * vectors, at, lane, args.hidden, false);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float total = warp_sum(sum[i][0]);
        if (lane != 0 || t + i >= args.tokens) continue;
        if (task < experts)
          args.logits[(t + i) * experts + task] =
              total + (args.router_bias != nullptr ? widen(args.router_bias[task]) : 0.f);
        else
          args.gates[t + i] = 1.f / (1.f + __expf(-rounded(total)));
      }
    } else if (shared) {
      float sum[kTogether][2] = {};
      for (int at = 0; at < args.hidden; at += Pair::kColumns) {
        if (at + t > 0 && args.hidden > Pair::kColumns) two.load(at, lane, args.hidden);
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          two.add(sum[i], x + i * vectors, at, lane, args.hidden, args.shared_permuted);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float gate = warp_sum(sum[i][0]), up = warp_sum(sum[i][1]);
        if (lane == 0 && t + i < args.tokens)
          args.between[((t + i) * (args.rules.top + 1) + args.rules.top) * args.pitch + feature] =
              static_cast<bf16>(narrow2(activated(gate, up, 0), 0.f));
      }
    }
  }
}

cudaError_t launch(void (*kernel)(FewArguments), const LaunchShape& shape, const FewArguments& args,
                   int early, cudaStream_t stream) {
  const cudaError_t error = divide_memory(kernel, shape.shared);
  return error != cudaSuccess ? error : launch_dependent(kernel, shape, early != 0, stream, args);
}

template <typename Weight, int kTokens>
cudaError_t route_few(const FewArguments& args, int early, cudaStream_t stream) {
  const int rows = args.rules.experts + args.shared_inner + (args.shared_gate != nullptr);
  const int norm_bytes = args.norm == nullptr ? 0 : args.hidden * (args.wide ? 4 : 2);
  const int shared = kTokens * args.hidden * 2 + norm_bytes;
  return launch(few_route<Weight, kTokens>, {dim3((rows + kWarps - 1) / kWarps), 32 * kWarps, shared}, args,
                early, stream);
}

// What all kernels ask of the sizes.
inline bool fits_few(const FewArguments& args, int unit) {
  return args.tokens >= 1 && args.tokens <= kFewTokens && args.hidden % unit == 0 && args.inner % 16 == 0 &&
         args.shared_inner % 16 == 0 && args.pitch % 16 == 0 && args.rules.top <= kMaxTop &&
         args.rules.experts <= kMaxExperts;
}

}  // namespace
}  // namespace quickturn
