// What the launches of moe_few.cu share: their arguments, rows of weights in registers, and the choice.
#pragma once
#include <cstdint>

#include "hopper.cuh"
#include "moe_route.cuh"
#include "norm.cuh"
#include "scalars.cuh"

namespace quickturn {

constexpr int kFewTokens = 8;

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
  float eps;
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
};

// What a warp multiplies at once: 256 columns of 16 rows with eight tokens. The rows are two groups of eight,
// `low` and `high`, which may lie apart. Lane l has four columns' vectors of row l / 4 of both, and of token
// l / 4; which of them is which column of a product doesn't matter, as long as rows and tokens agree.
template <typename Weight>
struct Tile {
  static constexpr int kStep = 4 * Weight::kVector;
  static constexpr int kColumns = 256;
  static constexpr int kSteps = kColumns / kStep;
  static constexpr int kX = Weight::kVector / 8;  // vectors of a token beside one of a row

  Weight low, high;
  uint4 rows[2][kSteps];
  uint4 tokens[kSteps][kX];

  // Of columns [from, end), at most kColumns of them; zeros for those beyond.
  __device__ __forceinline__ void load_rows(int from, int end) {
#pragma unroll
    for (int v = 0; v < kSteps; ++v) {
      const int at = from + v * kStep + threadIdx.x % 4 * Weight::kVector;
      rows[0][v] = rows[1][v] = make_uint4(0, 0, 0, 0);
      if (at < end) {
        rows[0][v] = low.vector(at);
        rows[1][v] = high.vector(at);
      }
    }
  }

  // `read(column)` gives eight values of this lane's token; if there's no such token, `real` is false.
  template <typename Read>
  __device__ __forceinline__ void load_tokens(Read read, bool real, int from, int end) {
#pragma unroll
    for (int v = 0; v < kSteps; ++v) {
      const int at = from + v * kStep + threadIdx.x % 4 * Weight::kVector;
#pragma unroll
      for (int i = 0; i < kX; ++i)
        tokens[v][i] = real && at < end ? read(at + i * 8) : make_uint4(0, 0, 0, 0);
    }
  }

  // sum[0], sum[1]: row l / 4 of `low`, tokens l % 4 * 2 and the next; sum[2], sum[3]: that row of `high`.
  // permuted: of 16 e4m3 columns, word q has 2q, 2q + 8, 2q + 1, 2q + 9.
  __device__ __forceinline__ void multiply_to(float (&sum)[4], int from, int end, bool permuted) const {
    float part[2][4] = {};
#pragma unroll
    for (int v = 0; v < kSteps; ++v) {
      const uint32_t l[4] = {rows[0][v].x, rows[0][v].y, rows[0][v].z, rows[0][v].w};
      const uint32_t h[4] = {rows[1][v].x, rows[1][v].y, rows[1][v].z, rows[1][v].w};
      if constexpr (Weight::kScaled) {
        const int at = min(from + v * kStep, end - 1);
        const uint4 &first = tokens[v][0], &second = tokens[v][kX - 1];
        const uint32_t x[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        float found[4] = {};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const uint32_t a[4] = {even_bytes<Bfloat>(l[word]), even_bytes<Bfloat>(h[word]),
                                 odd_bytes<Bfloat>(l[word]), odd_bytes<Bfloat>(h[word])};
          const uint32_t even = permuted ? x[word] : __byte_perm(x[2 * word], x[2 * word + 1], 0x5410);
          const uint32_t odd = permuted ? x[word + 4] : __byte_perm(x[2 * word], x[2 * word + 1], 0x7632);
          multiply(found, a, even, odd);
        }
        const float by[2] = {low.factor(at), high.factor(at)};
#pragma unroll
        for (int i = 0; i < 4; ++i) part[0][i] += found[i] * by[i / 2];
      } else {
        const uint4& x = tokens[v][0];
        const uint32_t a[2][4] = {{l[0], h[0], l[1], h[1]}, {l[2], h[2], l[3], h[3]}};
        multiply(part[0], a[0], x.x, x.y);
        multiply(part[1], a[1], x.z, x.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += part[0][i] + part[1][i];
  }
};

// This lane's sums to [16][kFewTokens], `low` rows first.
__device__ __forceinline__ void put_sums(const float (&sum)[4], float* to) {
  const int row = threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) to[(row + i / 2 * 8) * kFewTokens + token + i % 2] = sum[i];
}

// Who chose whom. At most eight tokens.
struct FewChoice {
  float weight[kFewTokens][kMaxTop];
  short expert[kFewTokens][kMaxTop];   // -1: nobody
  short member[kFewTokens * kMaxTop];  // the experts that someone chose, in the order of who chose first
  unsigned char takers[kFewTokens * kMaxTop];  // bit t is token t
  unsigned slots[kFewTokens * kMaxTop];        // four bits a token: which of its choices it is
  int counts[4];
  int active;

  // One warp a token. No barrier at its end.
  __device__ __forceinline__ void choose(const FewArguments& args) {
    const int t = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= args.tokens) return;
    float by = 0.f;
    int which = -1;
    if (args.positions == nullptr || args.positions[t] >= 0)
      choose_experts(args.rules, args.logits + t * args.rules.experts, by, which);
    if (lane < args.rules.top) {
      weight[t][lane] = by;
      expert[t][lane] = static_cast<short>(which);
    }
  }

  // All threads of the block, of at least four warps; a thread has one choice of one token. Ends with a
  // barrier.
  __device__ __forceinline__ void list(const FewArguments& args) {
    __syncthreads();
    const int top = args.rules.top, t = threadIdx.x / kMaxTop, j = threadIdx.x % kMaxTop;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int e = t < args.tokens && j < top ? expert[t][j] : -1;
    bool first = e >= 0;
    int mask = 0;
    unsigned places = 0;
    if (e >= 0) {
      for (int other = 0; other < args.tokens; ++other) {
        for (int i = 0; i < top; ++i) {
          if (expert[other][i] != e) continue;
          first = first && other >= t;
          mask |= 1 << other;
          places |= static_cast<unsigned>(i) << (4 * other);
        }
      }
    }
    const unsigned firsts = __ballot_sync(0xFFFFFFFFu, first);
    if (lane == 0 && warp < 4) counts[warp] = __popc(firsts);
    __syncthreads();
    if (first) {
      int at = __popc(firsts & ((1u << lane) - 1));
      for (int w = 0; w < warp; ++w) at += counts[w];
      member[at] = static_cast<short>(e);
      takers[at] = static_cast<unsigned char>(mask);
      slots[at] = places;
    }
    if (threadIdx.x == 0) active = counts[0] + counts[1] + counts[2] + counts[3];
    __syncthreads();
  }

  // Which of a taker's choices a member is.
  __device__ __forceinline__ int slot(int at, int token) const { return slots[at] >> (4 * token) & 15; }
};

}  // namespace quickturn
