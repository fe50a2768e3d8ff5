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

// One warp chooses for one token, of at most 32 kPer experts. logits: [experts], written by other blocks.
// Lane j returns the j-th choice. A lane has neighbours, so that of equals the lower lane has the lower
// index.
template <int kPer>
__device__ __forceinline__ void choose_experts(const RoutingRules& rules, const float* logits, float& weight,
                                               int& expert) {
  const int lane = threadIdx.x % 32, per = (rules.experts + 31) / 32;
  float score[kPer];
  uint32_t rank[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const bool real = i < per && lane * per + i < rules.experts;
    score[i] = real ? __ldcg(logits + lane * per + i) : -INFINITY;
    rank[i] = real ? rank_of(score[i]) : 0;
  }
  if (rules.scoring == kSoftmax) {
    float highest = score[0], total = 0.f;
#pragma unroll
    for (int i = 1; i < kPer; ++i) highest = fmaxf(highest, score[i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, step));
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      score[i] = __expf(score[i] - highest);
      total += score[i];
    }
    total = 1.f / warp_sum(total);
#pragma unroll
    for (int i = 0; i < kPer; ++i) score[i] *= total;
  } else if (rules.scoring == kSigmoid) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) score[i] = 1.f / (1.f + __expf(-score[i]));
  }
  if (rules.correction != nullptr || rules.scoring == kSigmoid) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (rank[i] == 0) continue;
      const float correction = rules.correction != nullptr ? rules.correction[lane * per + i] : 0.f;
      rank[i] = rank_of(score[i] + correction);
    }
  }
  weight = 0.f;
  expert = -1;
  for (int j = 0; j < rules.top; ++j) {
    uint32_t best[kPer / 2];
    float value[kPer / 2];
    int at[kPer / 2];
#pragma unroll
    for (int i = 0; i < kPer / 2; ++i) {
      // Of two neighbours the earlier wins among equals.
      const bool later = rank[2 * i + 1] > rank[2 * i];
      best[i] = later ? rank[2 * i + 1] : rank[2 * i];
      value[i] = later ? score[2 * i + 1] : score[2 * i];
      at[i] = 2 * i + later;
    }
#pragma unroll
    for (int width = 1; width < kPer / 2; width *= 2)
#pragma unroll
      for (int i = 0; i < kPer / 2; i += 2 * width) {
        const bool later = best[i + width] > best[i];
        best[i] = later ? best[i + width] : best[i];
        value[i] = later ? value[i + width] : value[i];
        at[i] = later ? at[i + width] : at[i];
      }
    const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, best[0]);
    const int winner = __ffs(__ballot_sync(0xFFFFFFFFu, best[0] == most)) - 1;
    const float found = __shfl_sync(0xFFFFFFFFu, value[0], winner);
    const int place = __shfl_sync(0xFFFFFFFFu, at[0], winner);
    if (lane == j) {
      weight = found;
      expert = winner * per + place;
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (lane == winner && i == place) rank[i] = 0;
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

__device__ __forceinline__ void choose_experts(const RoutingRules& rules, const float* logits, float& weight,
                                               int& expert) {
  if (rules.experts <= kMaxExperts / 2)
    choose_experts<kMaxExperts / 64>(rules, logits, weight, expert);
  else
    choose_experts<kMaxExperts / 32>(rules, logits, weight, expert);
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
