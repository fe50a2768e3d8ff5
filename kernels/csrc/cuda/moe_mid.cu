// What lies around the experts' products of a mixture over up to 64 tokens: in one launch the choice and its
// sorting into tiles, in another the weighted sum, the shared expert and the residual addition.
#include <cuda_runtime.h>

#include "dependent_launch.cuh"
#include "hopper.cuh"
#include "moe_route.cuh"
#include "norm.cuh"
#include "warp_mma.cuh"

namespace quickturn {

constexpr int kMidTokens = 64;

// Both mirrored by ctypes structures. Pair number token * slots + j is the token's j-th choice; if `slots` is
// `rules.top` + 1, the one behind the choices is the shared expert, whose number is `rules.experts`.
struct MidSort {
  const float* logits;         // [tokens, experts], or null: `chosen` is given
  const long long* positions;  // [tokens], negative for padding, or null
  float* weights;              // [tokens, top]
  int* chosen;                 // [tokens, top], given ones may be anything
  int* tile_experts;           // [tiles]
  int* tile_pairs;             // [tiles, size], -1 where a tile has no more
  int* tiles;
  RoutingRules rules;
  long long logits_pitch;
  int tokens, slots, size;
};

struct MidCombine {
  const bf16* results;         // [tokens, slots, hidden]
  const float* weights;        // [tokens, top]
  const int* chosen;           // [tokens, top]
  const long long* positions;  // padding tokens have no row in `shared`, or null
  const bf16* shared;          // the shared expert's rows, or null
  const bf16* x;               // what the layer was given
  const bf16* gate;            // [hidden], of the shared expert, or null: 1
  bf16* out;
  long long shared_pitch, x_pitch, out_pitch;
  int tokens, top, slots, experts, hidden;
  int adds;  // to what `out` has
};

namespace {

constexpr int kSortThreads = 1024, kSortWarps = kSortThreads / 32;
constexpr int kMembers = kMaxExperts + 1;

struct SortMemory {
  unsigned long long takers[kMembers];
  int first[kMembers];
  int sums[kSortWarps];
  short picked[kMidTokens * (kMaxTop + 1)];
};

// A warp chooses for a token. Who chose an expert is a mask of tokens, so that a pair's place within its
// expert is a count of bits: the order is that of the tokens, whoever comes first. Without `writes` nothing
// goes to global memory.
__device__ __forceinline__ void choose_and_sort(const MidSort& args, SortMemory& memory, bool writes) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int experts = args.rules.experts, top = args.rules.top;
  if (threadIdx.x < kMembers) memory.takers[threadIdx.x] = 0;
  __syncthreads();
  for (int token = warp; token < args.tokens; token += kSortWarps) {
    // Not kept in L1: the first round comes ahead of the wait.
    const bool real = args.positions == nullptr || __ldcg(args.positions + token) >= 0;
    float weight = 0.f;
    int expert = -1;
    if (args.logits != nullptr) {
      if (real) choose_experts(args.rules, args.logits + token * args.logits_pitch, weight, expert);
      if (lane < top && writes) {
        args.weights[token * top + lane] = weight;
        args.chosen[token * top + lane] = expert;
      }
    } else if (lane < top) {
      expert = __ldcg(args.chosen + token * top + lane);
      if (expert >= experts) expert = -1;
    }
    if (lane == top) expert = real ? experts : -1;
    if (lane < args.slots) {
      memory.picked[token * args.slots + lane] = static_cast<short>(max(expert, -1));
      if (expert >= 0) atomicOr(&memory.takers[expert], 1ull << token);
    }
  }
  __syncthreads();
  // Thread e looks after expert e.
  const int e = threadIdx.x;
  const int count = e < kMembers ? __popcll(memory.takers[e]) : 0;
  const int tiles = (count + args.size - 1) / args.size;
  int upto = tiles;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) memory.sums[warp] = upto;
  __syncthreads();
  upto += __reduce_add_sync(0xFFFFFFFFu, static_cast<unsigned>(lane < warp ? memory.sums[lane] : 0));
  if (tiles > 0) {
    memory.first[e] = (upto - tiles) * args.size;
    if (writes) {
      for (int tile = upto - tiles; tile < upto; ++tile) args.tile_experts[tile] = e;
      for (int i = memory.first[e] + count; i < upto * args.size; ++i) args.tile_pairs[i] = -1;
    }
  }
  if (e == kSortThreads - 1 && writes) *args.tiles = upto;
  __syncthreads();
  for (int pair = threadIdx.x; pair < args.tokens * args.slots; pair += kSortThreads) {
    const int expert = memory.picked[pair], token = pair / args.slots;
    if (expert < 0) continue;
    const int place = memory.first[expert] + __popcll(memory.takers[expert] & ((1ull << token) - 1));
    if (writes) args.tile_pairs[place] = pair;
  }
  __syncthreads();
}

// Goes through everything once before the logits are there, whatever lies in their place: then the code has
// come to the multiprocessor when it is needed.
__global__ void __launch_bounds__(kSortThreads) sort_tokens(const __grid_constant__ MidSort args) {
  __shared__ SortMemory memory;
  let_dependents_start();
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    if (round > 0) wait_for_predecessors();
    choose_and_sort(args, memory, round > 0);
  }
}

constexpr int kCombineThreads = 256, kCombineWarps = kCombineThreads / 32;
constexpr int kAtOnce = 9;  // rows on their way to a thread

__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  float left[8], right[8], sum = 0.f;
  unpack(a, left);
  unpack(b, right);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(left[i], right[i], sum);
  return sum;
}

// One block a token. What was ready before the products is read while they end: they let this launch start
// only when all those before them had finished.
__global__ void __launch_bounds__(kCombineThreads) combine(const __grid_constant__ MidCombine args) {
  __shared__ const bf16* row[kMaxTop + 1];
  __shared__ float factor[kMaxTop + 1];
  __shared__ float partial[kCombineWarps];
  const long long token = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = args.hidden / 8;
  const bool shared =
      args.shared != nullptr && (args.positions == nullptr || __ldcg(args.positions + token) >= 0);
  let_dependents_start();
  float sum = 0.f;
  if (shared && args.gate != nullptr) {
    const uint4* x = reinterpret_cast<const uint4*>(args.x + token * args.x_pitch);
    const uint4* gate = reinterpret_cast<const uint4*>(args.gate);
    for (int v = threadIdx.x; v < vectors; v += kCombineThreads) sum += dot(__ldcg(x + v), gate[v]);
  }
  sum = warp_sum(sum);
  if (lane == 0) partial[warp] = sum;
  if (threadIdx.x < args.top) {
    const int expert = __ldcg(args.chosen + token * args.top + threadIdx.x);
    const bool real = expert >= 0 && expert < args.experts;
    row[threadIdx.x] = real ? args.results + (token * args.slots + threadIdx.x) * args.hidden : nullptr;
    factor[threadIdx.x] = real ? __ldcg(args.weights + token * args.top + threadIdx.x) : 0.f;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kCombineWarps; ++w) sum += partial[w];
    row[args.top] = shared ? args.shared + token * args.shared_pitch : nullptr;
    factor[args.top] = args.gate != nullptr ? 1.f / (1.f + __expf(-rounded(sum))) : 1.f;
  }
  __syncthreads();
  // As in sort_tokens.
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    if (round > 0) wait_for_predecessors();
    for (int v = threadIdx.x; v < vectors; v += kCombineThreads) {
      float total[8] = {};
      for (int base = 0; base <= args.top; base += kAtOnce) {
        uint4 piece[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const bf16* from = base + i <= args.top ? row[base + i] : nullptr;
          piece[i] =
              from != nullptr ? __ldcg(reinterpret_cast<const uint4*>(from) + v) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (base + i > args.top) break;
          float value[8];
          unpack(piece[i], value);
#pragma unroll
          for (int k = 0; k < 8; ++k) total[k] = fmaf(factor[base + i], value[k], total[k]);
        }
      }
      uint4* out = reinterpret_cast<uint4*>(args.out + token * args.out_pitch) + v;
      if (args.adds) {
        float before[8];
        unpack(__ldcg(out), before);
#pragma unroll
        for (int k = 0; k < 8; ++k) total[k] = before[k] + rounded(total[k]);
      }
      if (round > 0) *out = pack(total);
    }
  }
}

template <typename Arguments>
cudaError_t launch(void (*kernel)(Arguments), int blocks, int threads, const Arguments& args, int early,
                   void* stream) {
  const cudaError_t error = divide_memory(kernel);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, {dim3(blocks), threads}, early != 0, stream, args);
}

}  // namespace
}  // namespace quickturn

// See MidSort. At most 64 tokens, 512 experts, 16 choices, which are different experts. Returns a
// cudaError_t; launches on `stream` and doesn't wait. Unless `early`, it begins when the launch ahead has
// finished.
extern "C" int quickturn_moe_mid_sort(const quickturn::MidSort* args, int early, void* stream) {
  using namespace quickturn;
  const RoutingRules& rules = args->rules;
  if (args->tokens < 1 || args->tokens > kMidTokens || rules.top < 1 || rules.top > kMaxTop ||
      rules.experts > kMaxExperts || args->slots < rules.top || args->slots > rules.top + 1 || args->size < 1)
    return cudaErrorInvalidValue;
  return launch(sort_tokens, 1, kSortThreads, *args, early, stream);
}

// See MidCombine. `early` needs a launch ahead that lets this one start only when those before it have
// finished. hidden and pitches are multiples of 8, pointers 16-byte aligned.
extern "C" int quickturn_moe_mid_combine(const quickturn::MidCombine* args, int early, void* stream) {
  using namespace quickturn;
  if (args->tokens < 1 || args->top < 1 || args->top > kMaxTop || args->hidden % 8)
    return cudaErrorInvalidValue;
  return launch(combine, args->tokens, kCombineThreads, *args, early, stream);
}
