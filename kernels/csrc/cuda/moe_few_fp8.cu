// A mixture of e4m3 experts with block scales over one or two tokens of a decode step, in three dependent
// launches:
//
//   1. moe_few_route.cuh
//   2. the choice (each block for itself), gate and up of the chosen experts
//   3. the choice again, down, the weighted sum and the residual additions
//
// A warp reads one or two rows of a weight into its registers and multiplies them with all tokens that want
// them, so that a weight is read once, however many tokens share it. The choice costs each block less than
// waiting for another one to publish it would; launch 3 makes it, and requests its first weights, while
// launch 2 still runs. Rows of bfloat16 are long enough for the rings of moe_few.cu, which are faster.
#include <cuda_runtime.h>

#include "hopper.cuh"
#include "moe_activation.cuh"
#include "moe_few.cuh"
#include "moe_few_route.cuh"
#include "moe_route.cuh"

namespace quickturn {
namespace {

using Weight = ScaledWeight;

constexpr int kDownWarps = 16;

// ---- 2: gate and up of the chosen experts

template <bool kOnce>
__global__ void __launch_bounds__(32 * kWarps, 2) few_gate_up(const __grid_constant__ FewArguments args) {
  extern __shared__ uint4 rows[];
  __shared__ FewChoice choice;
  choice.clear();
  __syncthreads();
  wait_for_predecessors();
  // Not before: who starts behind this may count on the first launch having finished.
  let_dependents_start();
  const int vectors = args.hidden / 8, lane = threadIdx.x % 32;
  // The warps that don't choose fetch the rows.
  const int choosing = args.tokens * 32;
  if (threadIdx.x >= choosing) {
    for (int i = threadIdx.x - choosing; i < args.tokens * vectors; i += 32 * kWarps - choosing)
      rows[i] = __ldcg(reinterpret_cast<const uint4*>(args.normed) + i);
  }
  choice.choose<false>(args);

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
template <int kSlots, int kPer>
__global__ void __launch_bounds__(32 * kDownWarps, 1) few_down(const __grid_constant__ FewArguments args) {
  extern __shared__ uint4 between[];
  __shared__ FewChoice choice;
  constexpr int kVector = Weight::kVector, kColumns = 32 * kPer * kVector;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int top = args.rules.top, slots = top + 1, used = top + (args.shared_inner > 0);
  choice.clear();
  __syncthreads();
  // The launch before lets this one start when it has seen the first one's end.
  choice.choose<true>(args);
  bool waited = false;
  for (int base = blockIdx.x * kDownWarps; base < args.hidden; base += gridDim.x * kDownWarps) {
    const int feature = min(base + warp, args.hidden - 1);
    float mine = 0.f;
    for (int t = 0; t < args.tokens; ++t) {
      float sum = 0.f;
      for (int first = 0; first < used; first += kSlots) {
        for (int column = 0; column < args.pitch; column += kColumns) {
          uint4 piece[kSlots][kPer];
          float scale[kSlots][kPer];
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
                scale[s][v] = row.factor(at);
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
                const float found = Weight::dot(piece[s][v], x + at / 8, slot >= top && args.shared_permuted);
                sum = fmaf(by, found * scale[s][v], sum);
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

auto pick_down(int pitch) {
  const int vectors = (pitch + 32 * Weight::kVector - 1) / (32 * Weight::kVector);  // of a lane in a row
  return vectors == 1 ? few_down<9, 1> : vectors == 2 ? few_down<9, 2> : few_down<4, 4>;
}

cudaError_t run(const FewArguments& args, int units, int early, cudaStream_t stream) {
  using Pair = Rows<Weight, 2>;
  const int row_bytes = 2 * args.hidden;
  cudaError_t error = args.tokens == 1 ? route_few<Weight, 1>(args, early, stream)
                                       : route_few<Weight, 2>(args, early, stream);
  if (error != cudaSuccess) return error;
  const int most = args.tokens * args.rules.top * args.inner;
  const int blocks = min(2 * units, (most + kWarps - 1) / kWarps);
  const auto gate_up = args.hidden <= Pair::kColumns ? few_gate_up<true> : few_gate_up<false>;
  error = launch(gate_up, {dim3(blocks), 32 * kWarps, args.tokens * row_bytes}, args, early, stream);
  if (error != cudaSuccess) return error;
  const int down_blocks = min(units, (args.hidden + kDownWarps - 1) / kDownWarps);
  const int shared = args.tokens * (args.rules.top + 1) * args.pitch * 2;
  return launch(pick_down(args.pitch), {dim3(down_blocks), 32 * kDownWarps, shared}, args, early, stream);
}

}  // namespace
}  // namespace quickturn

// See FewArguments: the experts, the shared one too, are e4m3 with block scales. Returns a cudaError_t;
// launches on `stream` and does not wait. Unless `early`, each launch begins when the one ahead has finished.
extern "C" int quickturn_moe_few_fp8(const quickturn::FewArguments* args, int units, int early,
                                     void* stream) {
  using namespace quickturn;
  if (!fits_few(*args, 128)) return cudaErrorInvalidValue;
  return run(*args, units, early, static_cast<cudaStream_t>(stream));
}
