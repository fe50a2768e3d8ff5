// Routing inside the kernel that multiplies: scores of one token in one warp, and the lists of who multiplies
// with which expert.
#pragma once
#include <cstdint>

#include "hopper.cuh"
#include "warp_mma.cuh"

namespace quickturn {

constexpr int kMaxExperts = 512;
constexpr int kMaxTop = 16;
constexpr int kMaxTokens = 64;
constexpr int kLaneExperts = kMaxExperts / 32;

enum Scoring { kSoftmax = 0, kSigmoid = 1, kSoftmaxAfter = 2 };

struct RoutingRules {
  int experts, top, scoring, normalize;
  float scale;
  const float* correction;  // [experts] or null
};

// What all warps of a block know about the choice. Active experts are in ascending order, the shared one
// last.
struct Choice {
  unsigned long long takers[kMaxExperts + 1];  // by expert: bit t is token t
  float weight[kMaxTokens][kMaxTop + 1];
  short chosen[kMaxTokens][kMaxTop];  // -1: nobody
  short active[kMaxExperts + 1];
  short first[kMaxExperts + 2];             // of an active expert's entries in `pairs`
  short place[kMaxExperts + 1];             // the same by expert
  short pairs[kMaxTokens * (kMaxTop + 1)];  // token | choice << 8
  int warp_active[8], warp_pairs[8];
  int count;  // of active experts
};

// An order-preserving image of a float; NaN comes above 0, which stands for what can't be chosen.
__device__ __forceinline__ uint32_t rank_of(float value) {
  if (value != value) return 1;
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rank = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return rank > 1 ? rank : 1;
}

// One warp chooses for one token. logits: [experts], written by other blocks. Lane j returns the j-th choice.
__device__ __forceinline__ void choose_experts(const RoutingRules& rules, const float* logits, float& weight,
                                               int& expert) {
  const int lane = threadIdx.x % 32;
  float score[kLaneExperts];
  uint32_t rank[kLaneExperts];
  float highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    const int e = i * 32 + lane;
    score[i] = i * 32 < rules.experts && e < rules.experts ? __ldcg(logits + e) : -INFINITY;
    rank[i] = e < rules.experts ? rank_of(score[i]) : 0;
    highest = fmaxf(highest, score[i]);
  }
  if (rules.scoring == kSoftmax) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, step));
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) {
      if (i * 32 >= rules.experts) break;
      score[i] = __expf(score[i] - highest);
      total += score[i];
    }
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) score[i] /= total;
  } else if (rules.scoring == kSigmoid) {
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) score[i] = 1.f / (1.f + __expf(-score[i]));
  }
  if (rules.correction != nullptr || rules.scoring == kSigmoid) {
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) {
      const int e = i * 32 + lane;
      if (e < rules.experts)
        rank[i] = rank_of(score[i] + (rules.correction != nullptr ? rules.correction[e] : 0.f));
    }
  }
  weight = 0.f;
  expert = -1;
  for (int j = 0; j < rules.top; ++j) {
    uint32_t best = 0;
    int at = 0;
    float value = 0.f;
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) {
      if (i * 32 >= rules.experts) break;
      if (rank[i] > best) {
        best = rank[i];
        at = i;
        value = score[i];
      }
    }
    const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, best);
    const unsigned found =
        __reduce_min_sync(0xFFFFFFFFu, best == most ? static_cast<unsigned>(at * 32 + lane) : 0xFFFFu);
    value = __shfl_sync(0xFFFFFFFFu, value, found % 32);
    if (lane == j) {
      weight = value;
      expert = static_cast<int>(found);
    }
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i)
      if (found == static_cast<unsigned>(i * 32 + lane)) rank[i] = 0;
  }
  if (rules.scoring == kSoftmaxAfter) {
    const float first = __shfl_sync(0xFFFFFFFFu, weight, 0);
    weight = lane < rules.top ? __expf(weight - first) : 0.f;
    weight /= warp_sum(weight);
  } else if (rules.normalize) {
    weight /= warp_sum(weight) + 1e-20f;
  }
  weight *= rules.scale;
}

// All consumer threads: from chosen experts to lists. `tokens_mask`: tokens that take the shared expert, 0
// without one. Ends with a barrier.
template <int kConsumers>
__device__ __forceinline__ void make_lists(Choice& choice, int tokens, int top, int experts,
                                           unsigned long long tokens_mask) {
  const auto sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); };
  constexpr int kWarps = kConsumers / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int e = threadIdx.x; e < experts; e += kConsumers) choice.takers[e] = 0;
  sync();
  for (int i = threadIdx.x; i < tokens * top; i += kConsumers) {
    const int e = choice.chosen[i / top][i % top];
    if (e >= 0) atomicOr(&choice.takers[e], 1ull << (i / top));
  }
  sync();
  // Each warp looks at a stretch of the experts; the lists of the warps follow each other.
  const int stretch = (experts + 32 * kWarps - 1) / (32 * kWarps) * 32;
  const int begin = warp * stretch, end = min(begin + stretch, experts);
  int active = 0, pairs = 0;
  for (int base = begin; base < end; base += 32) {
    const int n = base + lane < end ? __popcll(choice.takers[base + lane]) : 0;
    active += __popc(__ballot_sync(0xFFFFFFFFu, n > 0));
    pairs += n;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) pairs += __shfl_xor_sync(0xFFFFFFFFu, pairs, step);
  if (lane == 0) {
    choice.warp_active[warp] = active;
    choice.warp_pairs[warp] = pairs;
  }
  sync();
  active = pairs = 0;
  int all_active = 0, all_pairs = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) active = all_active, pairs = all_pairs;
    all_active += choice.warp_active[w];
    all_pairs += choice.warp_pairs[w];
  }
  for (int base = begin; base < end; base += 32) {
    const int n = base + lane < end ? __popcll(choice.takers[base + lane]) : 0;
    const unsigned some = __ballot_sync(0xFFFFFFFFu, n > 0);
    int before = n;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, before, step);
      if (lane >= step) before += other;
    }
    if (n > 0) {
      const int at = active + __popc(some & ((1u << lane) - 1));
      choice.active[at] = static_cast<short>(base + lane);
      choice.first[at] = choice.place[base + lane] = static_cast<short>(pairs + before - n);
    }
    active += __popc(some);
    pairs += __shfl_sync(0xFFFFFFFFu, before, 31);
  }
  if (threadIdx.x == 0) {
    choice.first[all_active] = static_cast<short>(all_pairs);
    if (tokens_mask != 0) {
      choice.active[all_active] = static_cast<short>(experts);
      choice.first[all_active + 1] = static_cast<short>(all_pairs + __popcll(tokens_mask));
    }
    choice.count = all_active;
  }
  for (int t = threadIdx.x; t < tokens; t += kConsumers)
    if (tokens_mask >> t & 1)
      choice.pairs[all_pairs + __popcll(tokens_mask & ((1ull << t) - 1))] = static_cast<short>(t | top << 8);
  sync();
  for (int i = threadIdx.x; i < tokens * top; i += kConsumers) {
    const int t = i / top, e = choice.chosen[t][i % top];
    if (e < 0) continue;
    const int rank = __popcll(choice.takers[e] & ((1ull << t) - 1));
    choice.pairs[choice.place[e] + rank] = static_cast<short>(t | (i % top) << 8);
  }
  sync();
}

}  // namespace quickturn
