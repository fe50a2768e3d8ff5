// One token of a gated delta net for each row: causal convolution, the delta rule on a 128 x 128 state a
// head, and the gated norm, in one kernel. A thread block has some columns of one head's state in registers,
// so a state is read once and written once; the blocks that share a k head form a cluster, because the
// convolution's state may be written only when all of them have read it, and a head's norm needs all columns.
#include <cuda_runtime.h>

#include "dependent_launch.cuh"
#include "gated_delta_step.cuh"
#include "hopper.cuh"
#include "warp_mma.cuh"

namespace quickturn {
namespace {

constexpr int kDim = 128;  // of keys and of values
constexpr int kWidth = 4;  // of the convolution
constexpr int kTaps = kWidth - 1;
constexpr float kL2Eps = 1e-6f;

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

// Sixteen bytes of a state as floats, and back.
template <typename State>
struct Vector;

template <>
struct Vector<float> {
  static constexpr int kElements = 4;
  static __device__ __forceinline__ void load(const float* from, float (&to)[4]) {
    const float4 packed = __ldcs(reinterpret_cast<const float4*>(from));
    to[0] = packed.x, to[1] = packed.y, to[2] = packed.z, to[3] = packed.w;
  }
  static __device__ __forceinline__ void store(float* to, const float (&from)[4]) {
    __stcs(reinterpret_cast<float4*>(to), make_float4(from[0], from[1], from[2], from[3]));
  }
};

template <>
struct Vector<bf16> {
  static constexpr int kElements = 8;
  static __device__ __forceinline__ void load(const bf16* from, float (&to)[8]) {
    const uint4 packed = __ldcs(reinterpret_cast<const uint4*>(from));
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  static __device__ __forceinline__ void store(bf16* to, const float (&from)[8]) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(narrow2(from[0], from[1]), narrow2(from[2], from[3]),
                                                    narrow2(from[4], from[5]), narrow2(from[6], from[7])));
  }
};

__device__ __forceinline__ void store_remote(uint32_t address, uint32_t rank, float value) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ bf16 narrow(float value) { return static_cast<bf16>(narrow2(value, 0.f)); }

// Grid: (parts of a head, heads, rows); cluster: (parts, heads of a k head, 1).
template <typename State, int kColumns, int kThreads>
__global__ void __launch_bounds__(kThreads) gated_delta_step(const GatedDeltaStepArguments args) {
  constexpr int kElements = Vector<State>::kElements;
  constexpr int kLanes = kColumns / kElements;  // threads that share a row of the state
  constexpr int kGroups = kThreads / kLanes;    // rows at once
  constexpr int kSteps = kDim / kGroups;        // rows of a thread
  constexpr int kWarps = kThreads / 32;
  constexpr int kParts = kDim / kColumns;
  constexpr int kChannels = 2 * kDim + kColumns;  // of q, k and our part of v
  constexpr int kTurns = (kChannels + kThreads - 1) / kThreads;

  __shared__ alignas(16) float mixed[kChannels];
  __shared__ alignas(16) float partial[kWarps][2][kColumns];
  __shared__ float squares[kParts];

  let_dependents_start();
  const int part = blockIdx.x, head = blockIdx.y;
  const long long row = blockIdx.z;
  const int group = args.heads / args.key_heads;
  const int key_head = head / group;
  const int lane = threadIdx.x % kLanes, first_row = threadIdx.x / kLanes;
  const int column = part * kColumns + lane * kElements;
  if (!args.settled) wait_for_predecessors();

  const long long target = static_cast<const int*>(args.state_out)[row];
  const long long source = static_cast<const int*>(args.state_in)[row];
  const bool reading =
      source >= 0 && target >= 0 && static_cast<const unsigned char*>(args.state_zero)[row] == 0;
  bf16* out = static_cast<bf16*>(args.out) + (row * args.heads + head) * kDim + column;
  float state[kSteps][kElements];
  const long long at = (static_cast<long long>(head) * kDim + first_row) * kDim + column;
  if (reading) {
    const State* from = static_cast<const State*>(args.states) + source * args.state_block_pitch + at;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) Vector<State>::load(from + step * kGroups * kDim, state[step]);
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < kElements; ++i) state[step][i] = 0.f;
  }

  // The convolution's inputs of our channels, the newest still missing.
  int channels[kTurns];
  bf16 taps[kTurns][kWidth];
  float weights[kTurns][kWidth], sums[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int local = threadIdx.x + turn * kThreads;
    const int tensor = local / kDim;  // q, k, v
    channels[turn] = tensor < 2 ? (tensor * args.key_heads + key_head) * kDim + local % kDim
                                : (2 * args.key_heads + head) * kDim + part * kColumns + local - 2 * kDim;
    if (local >= kChannels) continue;
    const uint2 packed = static_cast<const uint2*>(args.conv_weight)[channels[turn]];
    weights[turn][0] = __uint_as_float(packed.x << 16);
    weights[turn][1] = __uint_as_float(packed.x & 0xFFFF0000u);
    weights[turn][2] = __uint_as_float(packed.y << 16);
    weights[turn][3] = __uint_as_float(packed.y & 0xFFFF0000u);
    sums[turn] =
        args.conv_bias != nullptr ? widen(static_cast<const bf16*>(args.conv_bias)[channels[turn]]) : 0.f;
    const bf16* from = static_cast<const bf16*>(args.conv_states) + source * args.conv_block_pitch +
                       static_cast<long long>(channels[turn]) * kTaps;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) taps[turn][tap] = reading ? from[tap] : bf16{0};
  }
  const float a_log = static_cast<const float*>(args.a_log)[head];
  const float dt_bias = static_cast<const float*>(args.dt_bias)[head];

  if (args.settled) wait_for_predecessors();
  if (target < 0) {
    // Padding: the same for all of the cluster, so nobody waits for us.
    if (first_row == 0) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) out[i] = 0;
    }
    return;
  }
  const float x = widen(static_cast<const bf16*>(args.a)[row * args.a_pitch + head]) + dt_bias;
  const float softplus = fmaxf(x, 0.f) + log1pf(__expf(-fabsf(x)));
  const float decay = __expf(-__expf(a_log) * softplus);
  const float beta =
      1.f / (1.f + __expf(-widen(static_cast<const bf16*>(args.b)[row * args.b_pitch + head])));
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int local = threadIdx.x + turn * kThreads;
    if (local >= kChannels) continue;
    taps[turn][kTaps] = static_cast<const bf16*>(args.qkv)[row * args.qkv_pitch + channels[turn]];
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap) sums[turn] += weights[turn][tap] * widen(taps[turn][tap]);
    // Rounded, as the convolution alone leaves it.
    mixed[local] = rounded(silu(sums[turn]));
  }
  __syncthreads();

  const float4 q4 = reinterpret_cast<const float4*>(mixed)[threadIdx.x % 32];
  const float4 k4 = reinterpret_cast<const float4*>(mixed + kDim)[threadIdx.x % 32];
  const float qq = warp_sum(q4.x * q4.x + q4.y * q4.y + q4.z * q4.z + q4.w * q4.w);
  const float kk = warp_sum(k4.x * k4.x + k4.y * k4.y + k4.z * k4.z + k4.w * k4.w);
  const float qk = warp_sum(q4.x * k4.x + q4.y * k4.y + q4.z * k4.z + q4.w * k4.w);
  const float q_norm = rsqrtf(qq + kL2Eps) * args.scale, k_norm = rsqrtf(kk + kL2Eps);

  // k^T S and q^T S of our columns; out = q^T S' follows from q^T S and q^T k.
  float known[kElements] = {}, seen[kElements] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const float q = mixed[step * kGroups + first_row], k = mixed[kDim + step * kGroups + first_row];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      known[i] += k * state[step][i];
      seen[i] += q * state[step][i];
    }
  }
#pragma unroll
  for (int stride = kLanes; stride < 32; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      known[i] += __shfl_xor_sync(0xFFFFFFFFu, known[i], stride);
      seen[i] += __shfl_xor_sync(0xFFFFFFFFu, seen[i], stride);
    }
  }
  if (threadIdx.x % 32 < kLanes) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      partial[threadIdx.x / 32][0][lane * kElements + i] = known[i];
      partial[threadIdx.x / 32][1][lane * kElements + i] = seen[i];
    }
  }
  __syncthreads();
  float delta[kElements], result[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    float k_sum = 0.f, q_sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      k_sum += partial[warp][0][lane * kElements + i];
      q_sum += partial[warp][1][lane * kElements + i];
    }
    delta[i] = k_norm * beta * (mixed[2 * kDim + lane * kElements + i] - decay * k_norm * k_sum);
    result[i] = rounded(q_norm * (decay * q_sum + qk * delta[i]));
  }
  const bool normed = args.gate != nullptr;
  if (normed && threadIdx.x < 32) {
    float sum = 0.f;
    if (first_row == 0) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) sum += result[i] * result[i];
    }
    sum = warp_sum(sum);
    if (kParts == 1) {
      if (threadIdx.x == 0) squares[0] = sum;
    } else if (threadIdx.x < kParts) {
      store_remote(shared_address(&squares[part]), head % group * kParts + threadIdx.x, sum);
    }
  }
  cluster_arrive();

  State* to = static_cast<State*>(args.states) + target * args.state_block_pitch + at;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const float k = mixed[kDim + step * kGroups + first_row];
#pragma unroll
    for (int i = 0; i < kElements; ++i) state[step][i] = decay * state[step][i] + k * delta[i];
    Vector<State>::store(to + step * kGroups * kDim, state[step]);
  }

  cluster_wait();
  const bool leader = part == 0 && head % group == 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int local = threadIdx.x + turn * kThreads;
    if (local >= kChannels || (local < 2 * kDim && !leader)) continue;
    bf16* kept = static_cast<bf16*>(args.conv_states) + target * args.conv_block_pitch +
                 static_cast<long long>(channels[turn]) * kTaps;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) kept[tap] = taps[turn][tap + 1];
  }
  if (first_row != 0) return;
  if (normed) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) total += squares[i];
    const float by = rsqrtf(total / kDim + args.eps);
    const bf16* gate =
        static_cast<const bf16*>(args.gate) + row * args.gate_pitch + head * args.gate_head_pitch + column;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      result[i] = rounded(result[i] * by);
      result[i] *= args.wide_norm_weight ? static_cast<const float*>(args.norm_weight)[column + i]
                                         : widen(static_cast<const bf16*>(args.norm_weight)[column + i]);
      if (!args.wide_norm_weight) result[i] = rounded(result[i]);
      result[i] *= silu(widen(gate[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) out[i] = narrow(result[i]);
}

template <typename State, int kColumns, int kThreads>
cudaError_t launch(const GatedDeltaStepArguments& args, cudaStream_t stream) {
  const auto kernel = gated_delta_step<State, kColumns, kThreads>;
  const cudaError_t error = divide_memory(kernel);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = kDim / kColumns;
  attributes[1].val.clusterDim.y = args.heads / args.key_heads;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kDim / kColumns, args.heads, args.rows);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <typename State>
cudaError_t launch(const GatedDeltaStepArguments& args, int columns, cudaStream_t stream) {
  switch (columns) {
    case 64:
      return launch<State, 64, 128>(args, stream);
    case 128:
      return launch<State, 128, 256>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace quickturn

// states float32 or (half_states) bfloat16. columns: of a state, for one thread block: 64 or 128; (128 /
// columns)
// * (heads / key_heads) is at most 8. 16-byte aligned states, 8-byte aligned conv_weight. Returns a
// cudaError_t.
extern "C" int quickturn_gated_delta_step(const quickturn::GatedDeltaStepArguments* args, int half_states,
                                          int columns, void* stream) {
  using namespace quickturn;
  if (args->heads % args->key_heads != 0 || kDim / columns * (args->heads / args->key_heads) > 8)
    return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  return half_states ? launch<bf16>(*args, columns, on) : launch<float>(*args, columns, on);
}
