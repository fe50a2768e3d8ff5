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

// Batcher's merge exchange from one step on, the largest first.
template <int kRun, int kApart, int kCount>
__device__ __forceinline__ void sort_down(uint32_t (&value)[kCount]) {
#pragma unroll
  for (int i = kApart % kRun; i + kApart < kCount; ++i)
    if ((i - kApart % kRun) / kApart % 2 == 0 && i / (2 * kRun) == (i + kApart) / (2 * kRun)) {
      const uint32_t low = min(value[i], value[i + kApart]);
      value[i] = max(value[i], value[i + kApart]);
      value[i + kApart] = low;
    }
  if constexpr (kApart > 1)
    sort_down<kRun, kApart / 2>(value);
  else if constexpr (2 * kRun < kCount)
    sort_down<2 * kRun, 2 * kRun>(value);
}

// One warp chooses for one token, of at most 32 kPer experts. logits: [experts], written by other blocks.
// Lane j returns the j-th choice. A lane has neighbours, so that of equals the lower lane has the lower
// index. Without kWeighs the weight is nothing.
template <int kPer, bool kWeighs>
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
  // Softmax doesn't change the order.
  if (rules.scoring == kSoftmax && (kWeighs || rules.correction != nullptr)) {
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
  uint32_t sorted[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) sorted[i] = rank[i];
  sort_down<1, 1>(sorted);
  uint32_t mine = 0;    // of lane j: the j-th rank,
  unsigned owners = 0;  // and the lanes that had it ahead of all others
  for (int j = 0; j < rules.top; ++j) {
    const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, sorted[0]);
    const unsigned who = __ballot_sync(0xFFFFFFFFu, sorted[0] == most);
    if (lane == j) {
      mine = most;
      owners = who;
    }
    // The lowest of them gives it.
    if ((who & ((2u << lane) - 1)) == 1u << lane) {
#pragma unroll
      for (int i = 0; i + 1 < kPer; ++i) sorted[i] = sorted[i + 1];
      sorted[kPer - 1] = 0;
    }
  }
  // Which of its owner's experts it is. Equal ranks are neighbours among the choices: one owner gave them in
  // the order of its experts.
  const int owner = max(__ffs(owners) - 1, 0);
  const uint32_t ahead = __shfl_up_sync(0xFFFFFFFFu, mine, 1);
  const int ahead_owner = __shfl_up_sync(0xFFFFFFFFu, owner, 1);
  const bool first = lane == 0 || ahead != mine || ahead_owner != owner;
  int skipped = lane - (31 - __clz(__ballot_sync(0xFFFFFFFFu, first) & ((2u << lane) - 1)));
  int place = 0;
  float found = 0.f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const bool equal = __shfl_sync(0xFFFFFFFFu, rank[i], owner) == mine;
    if (equal && skipped == 0) place = i;
    if constexpr (kWeighs) {
      const float value = __shfl_sync(0xFFFFFFFFu, score[i], owner);
      if (equal && skipped == 0) found = value;
    }
    skipped -= equal;
  }
  weight = lane < rules.top ? found : 0.f;
  expert = lane < rules.top ? owner * per + place : -1;
  if constexpr (!kWeighs) return;
  if (rules.scoring == kSoftmaxAfter) {
    const float first = __shfl_sync(0xFFFFFFFFu, weight, 0);
    weight = lane < rules.top ? __expf(weight - first) : 0.f;
    weight /= warp_sum(weight);
  } else if (rules.normalize) {
    weight /= warp_sum(weight) + 1e-20f;
  }
  weight *= rules.scale;
}

template <bool kWeighs = true>
__device__ __forceinline__ void choose_experts(const RoutingRules& rules, const float* logits, float& weight,
                                               int& expert) {
  if (rules.experts <= kMaxExperts / 2)
    choose_experts<kMaxExperts / 64, kWeighs>(rules, logits, weight, expert);
  else
    choose_experts<kMaxExperts / 32, kWeighs>(rules, logits, weight, expert);
}

}  // namespace quickturn
