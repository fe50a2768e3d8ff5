// Routing: one token in one warp.
#pragma once
#include <cstdint>

#include "hopper.cuh"
#include "warp_mma.cuh"

namespace quickturn {

constexpr int kMaxExperts = 512;
constexpr int kMaxTop = 16;

enum Scoring { kSoftmax = 0, kSigmoid = 1, kSoftmaxAfter = 2 };

struct RoutingRules {
  int experts, top, scoring, normalize;
  float scale;
  const float* correction;  // [experts] or null
};

// An order-preserving image of a float; NaN comes above 0, which stands for what can't be chosen.
__device__ __forceinline__ uint32_t rank_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.f);  // -0 is 0
  const uint32_t rank = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return value == value && rank > 1 ? rank : 1;
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
  // All on their way before the first is looked at.
#pragma unroll
  for (int i = 0; i < kPer; ++i) score[i] = __ldcg(logits + min(lane * per + i, rules.experts - 1));
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const bool real = i < per && lane * per + i < rules.experts;
    rank[i] = real ? rank_of(score[i]) : 0;
    score[i] = real ? score[i] : -INFINITY;
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
    float correction[kPer] = {};
    if (rules.correction != nullptr) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) correction[i] = rules.correction[min(lane * per + i, rules.experts - 1)];
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) rank[i] = rank[i] == 0 ? 0 : rank_of(score[i] + correction[i]);
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

}  // namespace quickturn
