// Routing of any number of tokens, and the sorting of their choices into the tiles of moe_grouped.cu.
#include <cuda_runtime.h>

#include "dependent_launch.cuh"
#include "hopper.cuh"
#include "moe_route.cuh"

namespace quickturn {

struct TileArguments {
  const int* chosen;  // [pairs]
  int* counts;        // [blocks, experts], between the two kernels
  int* tile_experts;
  int* tile_rows;
  int* tile_pairs;  // [tiles, size]
  int* tiles;
  int pairs, experts, size;
};

namespace {

constexpr int kRouteWarps = 4;
constexpr int kSortThreads = 1024;  // and pairs, of a block
constexpr int kSortWarps = kSortThreads / 32;

__global__ void __launch_bounds__(32 * kRouteWarps)
    route_tokens(const RoutingRules rules, const float* logits, long long logits_pitch,
                 const long long* positions, float* weights, int* chosen, int tokens) {
  let_dependents_start();
  wait_for_predecessors();
  const int token = blockIdx.x * kRouteWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= tokens) return;
  float weight = 0.f;
  int expert = -1;
  if (positions == nullptr || positions[token] >= 0)
    choose_experts(rules, logits + token * logits_pitch, weight, expert);
  if (lane < rules.top) {
    weights[static_cast<long long>(token) * rules.top + lane] = weight;
    chosen[static_cast<long long>(token) * rules.top + lane] = expert;
  }
}

// How often a block's pairs chose each expert.
__global__ void __launch_bounds__(kSortThreads) count_pairs(const TileArguments args) {
  __shared__ int count[kMaxExperts];
  let_dependents_start();
  for (int e = threadIdx.x; e < args.experts; e += kSortThreads) count[e] = 0;
  wait_for_predecessors();
  __syncthreads();
  const int pair = blockIdx.x * kSortThreads + threadIdx.x;
  const int expert = pair < args.pairs ? args.chosen[pair] : -1;
  if (expert >= 0 && expert < args.experts) atomicAdd(&count[expert], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < args.experts; e += kSortThreads)
    args.counts[blockIdx.x * args.experts + e] = count[e];
}

// Each pair's place: behind the tiles of the experts before, behind the same expert's pairs of the blocks
// before, of the warps before, and of the lanes before.
__global__ void __launch_bounds__(kSortThreads) place_pairs(const TileArguments args) {
  __shared__ short before[kSortWarps][kMaxExperts];
  __shared__ int first[kMaxExperts], sums[kSortWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kSortWarps * kMaxExperts; i += kSortThreads) (&before[0][0])[i] = 0;
  wait_for_predecessors();
  __syncthreads();
  const int pair = blockIdx.x * kSortThreads + threadIdx.x;
  int expert = pair < args.pairs ? args.chosen[pair] : -1;
  if (expert >= args.experts) expert = -1;
  const unsigned same = __match_any_sync(0xFFFFFFFFu, expert);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (expert >= 0 && rank == 0) before[warp][expert] = static_cast<short>(__popc(same));

  // Thread e looks after expert e.
  const int e = threadIdx.x;
  int total = 0, earlier = 0;
  if (e < args.experts) {
    for (int block = 0; block < gridDim.x; ++block) {
      const int count = args.counts[block * args.experts + e];
      if (block < blockIdx.x) earlier += count;
      total += count;
    }
  }
  const int tiles = (total + args.size - 1) / args.size;
  int upto = tiles;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  for (int w = 0; w < warp; ++w) upto += sums[w];
  if (e < args.experts) {
    int sum = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = before[w][e];
      before[w][e] = static_cast<short>(sum);
      sum += count;
    }
    first[e] = (upto - tiles) * args.size + earlier;
    if (blockIdx.x == 0) {
      for (int tile = 0; tile < tiles; ++tile) {
        args.tile_experts[upto - tiles + tile] = e;
        args.tile_rows[upto - tiles + tile] = min(total - tile * args.size, args.size);
      }
      for (int i = (upto - tiles) * args.size + total; i < upto * args.size; ++i) args.tile_pairs[i] = -1;
      if (e == args.experts - 1) *args.tiles = upto;
    }
  }
  __syncthreads();
  if (expert >= 0) args.tile_pairs[first[expert] + before[warp][expert] + rank] = pair;
}

}  // namespace
}  // namespace quickturn

// logits: float32 [tokens, experts], rows `logits_pitch` elements apart. positions: [tokens] or null.
// weights, chosen: [tokens, top]. At most 512 experts and 16 choices, one group. Returns a cudaError_t;
// doesn't wait.
extern "C" int quickturn_route(const quickturn::RoutingRules* rules, const float* logits,
                               long long logits_pitch, const long long* positions, float* weights,
                               int* chosen, int tokens, void* stream) {
  using namespace quickturn;
  if (rules->experts > kMaxExperts || rules->top > kMaxTop || rules->top < 1) return cudaErrorInvalidValue;
  const dim3 blocks((tokens + kRouteWarps - 1) / kRouteWarps);
  return launch_dependent(route_tokens, {blocks, 32 * kRouteWarps}, true, stream, *rules, logits,
                          logits_pitch, positions, weights, chosen, tokens);
}

// See TileArguments; `counts` has a row for every 1,024 pairs. Returns a cudaError_t.
extern "C" int quickturn_moe_tiles(const quickturn::TileArguments* args, void* stream) {
  using namespace quickturn;
  if (args->experts > kMaxExperts || args->pairs < 1) return cudaErrorInvalidValue;
  const LaunchShape shape{dim3((args->pairs + kSortThreads - 1) / kSortThreads), kSortThreads};
  const cudaError_t error = launch_dependent(count_pairs, shape, true, stream, *args);
  return error != cudaSuccess ? error : launch_dependent(place_pairs, shape, true, stream, *args);
}
