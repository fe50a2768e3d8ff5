// What the mixtures over a few tokens share: the arguments of their launches, rows of weights in registers,
// and the choice.
#pragma once
#include <cstdint>

#include "hopper.cuh"
#include "moe_route.cuh"
#include "norm.cuh"
#include "scalars.cuh"

namespace quickturn {

constexpr int kFewTokens = 2;

// Mirrored by a ctypes structure.
struct FewArguments {
  const bf16* x;       // [tokens, hidden]; with a norm, null or what is added to the residual ahead of it
  bf16* residual;      // [tokens, hidden], or null: then no norm, and the result goes to `out`
  const void* norm;    // [hidden], bfloat16 or float32 (`wide`), or null
  const bf16* router;  // [experts, hidden]
  const bf16* router_bias;     // [experts] or null
  const long long* positions;  // [tokens], negative for padding, or null
  const void* gate_up;         // [experts, 2 inner, hidden]
  const void* down;            // [experts, hidden, inner]
  const bf16* gate_up_bias;    // [experts, 2 inner] or null
  const bf16* down_bias;       // [experts, hidden] or null
  const void* shared_gate_up;  // [2 shared_inner, hidden] or null
  const void* shared_down;     // [hidden, shared_inner] or null
  const bf16* shared_gate;     // [hidden] or null
  const float* gate_up_scale;  // of 128 x 128 blocks, or null
  const float* down_scale;
  const float* shared_gate_up_scale;
  const float* shared_down_scale;
  float* logits;  // [tokens, experts], between the launches
  float* gates;   // [tokens]
  bf16* normed;   // [tokens, hidden]
  bf16* between;  // [tokens, top + 1, pitch], the shared expert's last
  bf16* out;      // [tokens, hidden], if there is no residual
  RoutingRules rules;
  long long x_pitch, residual_pitch;
  int tokens, hidden, inner, shared_inner, pitch;
  int gate_up_pitch, down_pitch, shared_gate_up_pitch, shared_down_pitch;  // elements of a row of scales
  int shared_permuted;  // the shared expert's columns are in the order of linear_fp8.cu
  int oss, wide;
  int prefetch;  // the second launch asks for down into L2 (without rings)
  float eps;
  int gate_stages, down_stages;  // of a warp's ring; the launches' own business
};

__device__ __forceinline__ uint4 stream_vector(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ __forceinline__ void prefetch_to_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ float low_half(uint32_t two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high_half(uint32_t two) { return __uint_as_float(two & 0xFFFF0000u); }

// Rows of bfloat16.
struct PlainWeight {
  static constexpr int kVector = 8;  // elements of 16 bytes
  static constexpr int kBytes = 2;
  static constexpr bool kScaled = false;

  const bf16* row;

  static __device__ __forceinline__ PlainWeight at(const void* weight, long long row, int columns,
                                                   const float* = nullptr, int = 0) {
    return {static_cast<const bf16*>(weight) + row * columns};
  }
  __device__ __forceinline__ uint4 vector(int column) const { return stream_vector(row + column); }
  __device__ __forceinline__ float factor(int) const { return 1.f; }

  // x: the same columns in shared memory.
  static __device__ __forceinline__ float dot(const uint4& w, const uint4* x, bool) {
    const uint4 b = *x;
    float even = low_half(w.x) * low_half(b.x), odd = high_half(w.x) * high_half(b.x);
    even = fmaf(low_half(w.y), low_half(b.y), even), odd = fmaf(high_half(w.y), high_half(b.y), odd);
    even = fmaf(low_half(w.z), low_half(b.z), even), odd = fmaf(high_half(w.z), high_half(b.z), odd);
    even = fmaf(low_half(w.w), low_half(b.w), even), odd = fmaf(high_half(w.w), high_half(b.w), odd);
    return even + odd;
  }
};

// Rows of e4m3 with a factor for each 128 x 128 block.
struct ScaledWeight {
  static constexpr int kVector = 16;
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;

  const unsigned char* row;
  const float* scale;

  static __device__ __forceinline__ ScaledWeight at(const void* weight, long long row, int columns,
                                                    const float* scale, int pitch) {
    return {static_cast<const unsigned char*>(weight) + row * columns, scale + row / 128 * pitch};
  }
  __device__ __forceinline__ uint4 vector(int column) const { return stream_vector(row + column); }
  __device__ __forceinline__ float factor(int column) const { return __ldg(scale + column / 128); }

  // permuted: of 16 columns, word q has 2q, 2q + 8, 2q + 1, 2q + 9.
  static __device__ __forceinline__ float dot(const uint4& w, const uint4* x, bool permuted) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    const uint4 first = x[0], second = x[1];
    const uint32_t b[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t low = widen_e4m3(static_cast<uint16_t>(words[q]));
      const uint32_t high = widen_e4m3(static_cast<uint16_t>(words[q] >> 16));
      const float x0 = low_half(permuted ? b[q] : b[2 * q]);
      const float x1 = permuted ? low_half(b[q + 4]) : high_half(b[2 * q]);
      const float x2 = permuted ? high_half(b[q]) : low_half(b[2 * q + 1]);
      const float x3 = high_half(permuted ? b[q + 4] : b[2 * q + 1]);
      even = fmaf(Half::widen(static_cast<uint16_t>(low)), x0, even);
      odd = fmaf(Half::widen(static_cast<uint16_t>(low >> 16)), x1, odd);
      even = fmaf(Half::widen(static_cast<uint16_t>(high)), x2, even);
      odd = fmaf(Half::widen(static_cast<uint16_t>(high >> 16)), x3, odd);
    }
    return even + odd;
  }
};

// Up to 2,048 columns of kRows rows, spread over a warp.
template <typename Weight, int kRows>
struct Rows {
  static constexpr int kColumns = 2048;
  static constexpr int kHeld = kColumns / 32 / Weight::kVector;

  Weight row[kRows];
  uint4 piece[kRows][kHeld];
  float scale[kRows][kHeld];

  __device__ __forceinline__ void load(int first, int lane, int columns) {
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int at = first + (v * 32 + lane) * Weight::kVector;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (at < columns) {
          piece[r][v] = row[r].vector(at);
          scale[r][v] = row[r].factor(at);
        }
    }
  }

  // x: a whole row of them in shared memory.
  __device__ __forceinline__ void add(float (&sum)[kRows], const uint4* x, int first, int lane, int columns,
                                      bool permuted) const {
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int at = first + (v * 32 + lane) * Weight::kVector;
      if (at < columns) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          sum[r] += scale[r][v] * Weight::dot(piece[r][v], x + at / 8, permuted);
      }
    }
  }
};

// Who chose whom.
struct FewChoice {
  float weight[kFewTokens][kMaxTop + 1];  // the shared expert's behind the last choice
  short expert[kFewTokens][kMaxTop];      // -1: nobody
  short member[kFewTokens * kMaxTop];     // the experts that someone chose, in their own order
  unsigned takers[kFewTokens * kMaxTop];  // bit t is token t
  unsigned slots[kFewTokens * kMaxTop];   // four bits a token: which of its choices it is
  unsigned seen[kMaxExperts / 32];
  int active;

  // Ahead of `choose`, with a barrier in between.
  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kFewTokens * kMaxTop; i += blockDim.x) takers[i] = slots[i] = 0;
    for (int i = threadIdx.x; i < kMaxExperts / 32; i += blockDim.x) seen[i] = 0;
  }

  // All threads of the block; a warp chooses for one token at a time. kWeighs: not only whom. Ends with a
  // barrier.
  template <bool kWeighs>
  __device__ __forceinline__ void choose(const FewArguments& args) {
    const int lane = threadIdx.x % 32, top = args.rules.top;
    for (int t = threadIdx.x / 32; t < args.tokens; t += blockDim.x / 32) {
      // Asked for together with the logits.
      const bool real = args.positions == nullptr || __ldcg(args.positions + t) >= 0;
      float by = 0.f;
      int which = -1;
      choose_experts<kWeighs>(args.rules, args.logits + t * args.rules.experts, by, which);
      if (lane < top) {
        if constexpr (kWeighs) weight[t][lane] = real ? by : 0.f;
        expert[t][lane] = static_cast<short>(real ? which : -1);
      }
      if constexpr (kWeighs)
        if (lane == top) weight[t][top] = args.shared_gate != nullptr ? __ldcg(args.gates + t) : 1.f;
      if (args.tokens == 1) list_one(real ? which : -1, top);
    }
    __syncthreads();
    if (args.tokens == 1) return;
    for (int i = threadIdx.x; i < args.tokens * top; i += blockDim.x) {
      const int e = expert[i / top][i % top];
      if (e >= 0) atomicOr(seen + e / 32, 1u << e % 32);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < args.tokens * top; i += blockDim.x) {
      const int t = i / top, j = i - t * top, e = expert[t][j];
      if (e < 0) continue;
      int at = __popc(seen[e / 32] & ((1u << e % 32) - 1));
#pragma unroll
      for (int word = 0; word < kMaxExperts / 32; ++word)
        if (word < e / 32) at += __popc(seen[word]);
      member[at] = static_cast<short>(e);
      atomicOr(takers + at, 1u << t);
      atomicOr(slots + at, static_cast<unsigned>(j) << (4 * t));
    }
    if (threadIdx.x == 0) {
      int count = 0;
#pragma unroll
      for (int word = 0; word < kMaxExperts / 32; ++word) count += __popc(seen[word]);
      active = count;
    }
    __syncthreads();
  }

  // What `choose` does with all tokens' choices, by the warp that knows the only ones.
  __device__ __forceinline__ void list_one(int which, int top) {
    const int lane = threadIdx.x % 32;
    int at = 0;
    for (int j = 0; j < top; ++j) at += __shfl_sync(0xFFFFFFFFu, which, j) < which;
    if (lane < top && which >= 0) {
      member[at] = static_cast<short>(which);
      takers[at] = 1;
      slots[at] = lane;
    }
    if (lane == 0) active = which >= 0 ? top : 0;
  }

  // Columns of down that a slot of a token has to do with: none where nobody was chosen. The slot behind the
  // choices is the shared expert's.
  __device__ __forceinline__ int width(const FewArguments& args, int t, int slot) const {
    if (slot > args.rules.top) return 0;
    if (slot == args.rules.top) return args.shared_inner;
    return expert[t][slot] >= 0 ? args.inner : 0;
  }

  // The first row of down of the expert that a token chose.
  __device__ __forceinline__ long long row(const FewArguments& args, int t, int slot) const {
    return static_cast<long long>(expert[t][slot]) * args.hidden;
  }

  // Which of a taker's choices a member is.
  __device__ __forceinline__ int slot(int at, int token) const { return slots[at] >> (4 * token) & 15; }
};

}  // namespace quickturn
