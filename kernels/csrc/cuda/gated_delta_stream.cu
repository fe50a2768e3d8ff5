// The decode step of a gated delta net for many rows: as gated_delta_step.cu, but a thread block goes from k
// head to k head, and the copy engine carries the states of their v heads through a ring in shared memory, so
// that reading, computing and writing overlap. What the convolution needs of the next item is fetched while
// this one is computed.
#include <cuda_runtime.h>

#include "dependent_launch.cuh"
#include "gated_delta_step.cuh"
#include "hopper.cuh"
#include "warp_mma.cuh"

namespace quickturn {
namespace {

constexpr int kDim = 128;
constexpr int kWidth = 4;
constexpr int kTaps = kWidth - 1;
constexpr int kThreads = 256;  // that compute; one more warp loads, one stores
constexpr int kWarps = kThreads / 32;
constexpr int kRows = kDim / kWarps;  // of a state, for a warp; a lane has four columns
constexpr int kPieces = 4;            // copies that bring a state
constexpr float kL2Eps = 1e-6f;

template <typename State>
struct Ring {
  static constexpr int kBytes = kDim * kDim * sizeof(State);
  static constexpr int kSlots = sizeof(State) == 4 ? 3 : 6;
};

struct Smem {
  alignas(16) float mixed[2][(2 + 8) * kDim];     // q, k, and v of up to eight heads; of two items in turn
  alignas(16) float partial[2][kWarps][2][kDim];  // of two states in turn
  alignas(8) uint64_t barriers[3 * 6];
};

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

__device__ __forceinline__ void computing_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}

__device__ __forceinline__ void store_bytes(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
               "r"(from), "r"(bytes), "l"(kEvictFirst)
               : "memory");
}

// Four neighbouring elements of a state in shared memory.
__device__ __forceinline__ float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ float4 load_four(const bf16* from) {
  const uint2 packed = *reinterpret_cast<const uint2*>(from);
  return make_float4(__uint_as_float(packed.x << 16), __uint_as_float(packed.x & 0xFFFF0000u),
                     __uint_as_float(packed.y << 16), __uint_as_float(packed.y & 0xFFFF0000u));
}
__device__ __forceinline__ void store_four(float* to, const float4& value) {
  *reinterpret_cast<float4*>(to) = value;
}
__device__ __forceinline__ void store_four(bf16* to, const float4& value) {
  *reinterpret_cast<uint2*>(to) = make_uint2(narrow2(value.x, value.y), narrow2(value.z, value.w));
}

// Where a row's states come from and go to.
struct Place {
  long long source, target;
  bool reading;

  __device__ Place(const GatedDeltaStepArguments& args, int row) {
    target = static_cast<const int*>(args.state_out)[row];
    source = static_cast<const int*>(args.state_in)[row];
    reading = source >= 0 && target >= 0 && static_cast<const unsigned char*>(args.state_zero)[row] == 0;
  }
};

// What one item needs besides states: the convolution's inputs and weights of the thread's channels.
template <int kGroup>
struct Fetched {
  static constexpr int kTurns = (2 + kGroup) * kDim / kThreads + ((2 + kGroup) * kDim % kThreads != 0);
  bf16 taps[kTurns][kWidth];
  uint2 weights[kTurns];
  float bias[kTurns];
  float a, b, a_log;  // of head threadIdx.x % kGroup

  static __device__ __forceinline__ bool has(int turn) {
    return threadIdx.x + turn * kThreads < (2 + kGroup) * kDim;
  }
  static __device__ __forceinline__ int channel(const GatedDeltaStepArguments& args, int key_head, int turn) {
    const int local = threadIdx.x + turn * kThreads, tensor = local / kDim;
    return tensor < 2 ? (tensor * args.key_heads + key_head) * kDim + local % kDim
                      : (2 * args.key_heads + key_head * kGroup) * kDim + local - 2 * kDim;
  }
  __device__ __forceinline__ void fetch(const GatedDeltaStepArguments& args, const Place& place,
                                        long long row, int key_head) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!has(turn)) continue;
      const int at = channel(args, key_head, turn);
      const bf16* from = static_cast<const bf16*>(args.conv_states) + place.source * args.conv_block_pitch +
                         static_cast<long long>(at) * kTaps;
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) taps[turn][tap] = place.reading ? from[tap] : bf16{0};
      taps[turn][kTaps] = static_cast<const bf16*>(args.qkv)[row * args.qkv_pitch + at];
      weights[turn] = static_cast<const uint2*>(args.conv_weight)[at];
      bias[turn] = args.conv_bias != nullptr ? widen(static_cast<const bf16*>(args.conv_bias)[at]) : 0.f;
    }
    const int head = key_head * kGroup + threadIdx.x % kGroup;
    a = widen(static_cast<const bf16*>(args.a)[row * args.a_pitch + head]) +
        static_cast<const float*>(args.dt_bias)[head];
    b = widen(static_cast<const bf16*>(args.b)[row * args.b_pitch + head]);
    a_log = static_cast<const float*>(args.a_log)[head];
  }
};

template <typename State, int kGroup>
__device__ void load_states(const GatedDeltaStepArguments& args, uint32_t ring, uint32_t full,
                            uint32_t empty) {
  using R = Ring<State>;
  if (!args.settled) wait_for_predecessors();
  int tile = 0;
  for (int item = blockIdx.x; item < args.rows * args.key_heads; item += gridDim.x) {
    const int row = item / args.key_heads, key_head = item % args.key_heads;
    const Place place(args, row);
    if (place.target < 0) continue;
    for (int member = 0; member < kGroup; ++member, ++tile) {
      const int slot = tile % R::kSlots;
      const uint32_t ready = full + slot * 8, to = ring + slot * R::kBytes;
      barrier_wait(empty + slot * 8, (tile / R::kSlots & 1) ^ 1);
      if (!place.reading) {
        barrier_arrive(ready);
        continue;
      }
      barrier_expect(ready, R::kBytes);
      const char* from = reinterpret_cast<const char*>(
          static_cast<const State*>(args.states) + place.source * args.state_block_pitch +
          static_cast<long long>(key_head * kGroup + member) * kDim * kDim);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        load_bytes(to + piece * (R::kBytes / kPieces), from + piece * (R::kBytes / kPieces),
                   R::kBytes / kPieces, ready);
    }
  }
}

// Writes the states that have been computed, and gives their slots back.
template <typename State, int kGroup>
__device__ void store_states(const GatedDeltaStepArguments& args, uint32_t ring, uint32_t done,
                             uint32_t empty) {
  using R = Ring<State>;
  if (!args.settled) wait_for_predecessors();
  int tile = 0;
  for (int item = blockIdx.x; item < args.rows * args.key_heads; item += gridDim.x) {
    const int row = item / args.key_heads, key_head = item % args.key_heads;
    const Place place(args, row);
    if (place.target < 0) continue;
    for (int member = 0; member < kGroup; ++member, ++tile) {
      const int slot = tile % R::kSlots;
      barrier_wait(done + slot * 8, tile / R::kSlots & 1);
      store_bytes(static_cast<State*>(args.states) + place.target * args.state_block_pitch +
                      static_cast<long long>(key_head * kGroup + member) * kDim * kDim,
                  ring + slot * R::kBytes, R::kBytes);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      barrier_arrive(empty + slot * 8);
    }
  }
  // Shared memory must last until all is written.
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <typename State, int kGroup>
__device__ void compute(const GatedDeltaStepArguments& args, Smem& smem, char* ring, uint32_t full,
                        uint32_t done) {
  using R = Ring<State>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane * 4;
  const int items = args.rows * args.key_heads;
  wait_for_predecessors();
  Fetched<kGroup> next;
  if (blockIdx.x < items)
    next.fetch(args, Place(args, blockIdx.x / args.key_heads), blockIdx.x / args.key_heads,
               blockIdx.x % args.key_heads);
  float4 weight = make_float4(0.f, 0.f, 0.f, 0.f);
  if (args.gate != nullptr)
    weight = args.wide_norm_weight ? load_four(static_cast<const float*>(args.norm_weight) + column)
                                   : load_four(static_cast<const bf16*>(args.norm_weight) + column);
  int tile = 0, turn_of_mixed = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const long long row = item / args.key_heads;
    const int key_head = item % args.key_heads;
    const Place place(args, row);
    const Fetched<kGroup> here = next;
    if (item + gridDim.x < items) {
      const int after = item + gridDim.x;
      next.fetch(args, Place(args, after / args.key_heads), after / args.key_heads, after % args.key_heads);
    }
    bf16* out = static_cast<bf16*>(args.out) + (row * args.heads + key_head * kGroup) * kDim;
    if (place.target < 0) {
      for (int i = threadIdx.x; i < kGroup * kDim; i += kThreads) out[i] = 0;
      continue;
    }
    float* mixed = smem.mixed[turn_of_mixed ^= 1];
#pragma unroll
    for (int turn = 0; turn < Fetched<kGroup>::kTurns; ++turn) {
      if (!here.has(turn)) continue;
      float sum = here.bias[turn];
      sum += __uint_as_float(here.weights[turn].x << 16) * widen(here.taps[turn][0]);
      sum += __uint_as_float(here.weights[turn].x & 0xFFFF0000u) * widen(here.taps[turn][1]);
      sum += __uint_as_float(here.weights[turn].y << 16) * widen(here.taps[turn][2]);
      sum += __uint_as_float(here.weights[turn].y & 0xFFFF0000u) * widen(here.taps[turn][3]);
      // Rounded, as the convolution alone leaves it.
      mixed[threadIdx.x + turn * kThreads] = rounded(silu(sum));
      bf16* kept = static_cast<bf16*>(args.conv_states) + place.target * args.conv_block_pitch +
                   static_cast<long long>(here.channel(args, key_head, turn)) * kTaps;
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) kept[tap] = here.taps[turn][tap + 1];
    }
    computing_sync();
    const float4 q4 = *reinterpret_cast<const float4*>(mixed + column);
    const float4 k4 = *reinterpret_cast<const float4*>(mixed + kDim + column);
    const float qq = warp_sum(q4.x * q4.x + q4.y * q4.y + q4.z * q4.z + q4.w * q4.w);
    const float kk = warp_sum(k4.x * k4.x + k4.y * k4.y + k4.z * k4.z + k4.w * k4.w);
    const float qk = warp_sum(q4.x * k4.x + q4.y * k4.y + q4.z * k4.z + q4.w * k4.w);
    const float q_norm = rsqrtf(qq + kL2Eps) * args.scale, k_norm = rsqrtf(kk + kL2Eps);
    const float softplus = fmaxf(here.a, 0.f) + log1pf(__expf(-fabsf(here.a)));
    const float own_decay = __expf(-__expf(here.a_log) * softplus), own_beta = 1.f / (1.f + __expf(-here.b));

    for (int member = 0; member < kGroup; ++member, ++tile) {
      const int head = key_head * kGroup + member, slot = tile % R::kSlots;
      const float decay = __shfl_sync(0xFFFFFFFFu, own_decay, member);
      const float beta = __shfl_sync(0xFFFFFFFFu, own_beta, member);
      const bool writes = warp == tile % kWarps;
      uint2 gates = {};
      if (writes && args.gate != nullptr)
        gates = *reinterpret_cast<const uint2*>(static_cast<const bf16*>(args.gate) + row * args.gate_pitch +
                                                head * args.gate_head_pitch + column);
      State* state = reinterpret_cast<State*>(ring + slot * R::kBytes) + warp * kRows * kDim + column;
      barrier_wait(full + slot * 8, tile / R::kSlots & 1);
      float4 part[kRows];
      float4 known = make_float4(0.f, 0.f, 0.f, 0.f), seen = known;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        part[i] = place.reading ? load_four(state + i * kDim) : make_float4(0.f, 0.f, 0.f, 0.f);
        const float q = mixed[warp * kRows + i], k = mixed[kDim + warp * kRows + i];
        known.x += k * part[i].x, known.y += k * part[i].y, known.z += k * part[i].z,
            known.w += k * part[i].w;
        seen.x += q * part[i].x, seen.y += q * part[i].y, seen.z += q * part[i].z, seen.w += q * part[i].w;
      }
      store_four(&smem.partial[tile & 1][warp][0][column], known);
      store_four(&smem.partial[tile & 1][warp][1][column], seen);
      computing_sync();
      known = seen = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        const float4 k = load_four(&smem.partial[tile & 1][other][0][column]),
                     q = load_four(&smem.partial[tile & 1][other][1][column]);
        known.x += k.x, known.y += k.y, known.z += k.z, known.w += k.w;
        seen.x += q.x, seen.y += q.y, seen.z += q.z, seen.w += q.w;
      }
      const float4 v = load_four(mixed + (2 + member) * kDim + column);
      const float kept = decay * k_norm, written = k_norm * beta;
      const float4 delta = make_float4(written * (v.x - kept * known.x), written * (v.y - kept * known.y),
                                       written * (v.z - kept * known.z), written * (v.w - kept * known.w));
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float k = mixed[kDim + warp * kRows + i];
        store_four(state + i * kDim,
                   make_float4(decay * part[i].x + k * delta.x, decay * part[i].y + k * delta.y,
                               decay * part[i].z + k * delta.z, decay * part[i].w + k * delta.w));
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(done + slot * 8);
      if (writes) {
        float4 result = make_float4(rounded(q_norm * (decay * seen.x + qk * delta.x)),
                                    rounded(q_norm * (decay * seen.y + qk * delta.y)),
                                    rounded(q_norm * (decay * seen.z + qk * delta.z)),
                                    rounded(q_norm * (decay * seen.w + qk * delta.w)));
        if (args.gate != nullptr) {
          const float4 gate = load_four(reinterpret_cast<const bf16*>(&gates));
          const float sum =
              warp_sum(result.x * result.x + result.y * result.y + result.z * result.z + result.w * result.w);
          const float by = rsqrtf(sum / kDim + args.eps);
          result.x = rounded(result.x * by), result.y = rounded(result.y * by);
          result.z = rounded(result.z * by), result.w = rounded(result.w * by);
          result.x *= weight.x, result.y *= weight.y, result.z *= weight.z, result.w *= weight.w;
          if (!args.wide_norm_weight) {
            result.x = rounded(result.x), result.y = rounded(result.y);
            result.z = rounded(result.z), result.w = rounded(result.w);
          }
          result.x *= silu(gate.x), result.y *= silu(gate.y), result.z *= silu(gate.z),
              result.w *= silu(gate.w);
        }
        store_four(out + member * kDim + column, result);
      }
    }
  }
}

template <typename State, int kGroup>
__global__ void __launch_bounds__(kThreads + 64, 1) gated_delta_stream(const GatedDeltaStepArguments args) {
  using R = Ring<State>;
  extern __shared__ char raw[];
  char* ring = raw + (128 - shared_address(raw) % 128) % 128;
  Smem& smem = *reinterpret_cast<Smem*>(ring + R::kSlots * R::kBytes);
  const uint32_t full = shared_address(smem.barriers), empty = full + R::kSlots * 8,
                 done = empty + R::kSlots * 8;
  let_dependents_start();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < R::kSlots; ++slot) {
      barrier_init(full + slot * 8, 1);
      barrier_init(empty + slot * 8, 1);
      barrier_init(done + slot * 8, kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kThreads)
    compute<State, kGroup>(args, smem, ring, full, done);
  else if (threadIdx.x == kThreads)
    load_states<State, kGroup>(args, shared_address(ring), full, empty);
  else if (threadIdx.x == kThreads + 32)
    store_states<State, kGroup>(args, shared_address(ring), done, empty);
}

template <typename State, int kGroup>
cudaError_t launch(const GatedDeltaStepArguments& args, int blocks, cudaStream_t stream) {
  const auto kernel = gated_delta_stream<State, kGroup>;
  constexpr int kShared = Ring<State>::kSlots * Ring<State>::kBytes + sizeof(Smem) + 128;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, {dim3(blocks), kThreads + 64, kShared}, true, stream, args);
}

template <typename State>
cudaError_t launch(const GatedDeltaStepArguments& args, int blocks, cudaStream_t stream) {
  switch (args.heads / args.key_heads) {
    case 1:
      return launch<State, 1>(args, blocks, stream);
    case 2:
      return launch<State, 2>(args, blocks, stream);
    case 4:
      return launch<State, 4>(args, blocks, stream);
    case 8:
      return launch<State, 8>(args, blocks, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace quickturn

// As quickturn_gated_delta_step, by `blocks` thread blocks that take k heads in turn; heads / key_heads is 1,
// 2, 4 or 8; gate's pitches are multiples of 4, gate and norm_weight 16-byte aligned. Returns a cudaError_t.
extern "C" int quickturn_gated_delta_stream(const quickturn::GatedDeltaStepArguments* args, int half_states,
                                            int blocks, void* stream) {
  using namespace quickturn;
  if (args->heads % args->key_heads != 0) return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  return half_states ? launch<bf16>(*args, blocks, on) : launch<float>(*args, blocks, on);
}
