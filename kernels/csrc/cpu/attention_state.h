// The softmax state of decode attention: what a chunk of keys adds to it, how partial states merge, and the
// output.
#pragma once

#include "attention_scores.h"

namespace qt::QT_ISA {

// Up to kMaxGroup query heads of one kv head, over the keys seen so far.
struct State {
  long unit = -1;  // which row and heads; -1: unused
  long group = 0;
  float maximum[kMaxGroup];
  float total[kMaxGroup];
  alignas(64) float sums[kMaxGroup * kMaxHeadDim];
};

static void reset(State& s, long unit, long group, long dim) {
  s.unit = unit;
  s.group = group;
  for (long g = 0; g < group; ++g) {
    s.maximum[g] = kFarBelow;
    s.total[g] = 0;
  }
  __builtin_memset(s.sums, 0, static_cast<size_t>(group * dim) * sizeof(float));
}

// One head's dot products to softmax terms, in place; returns the factor for what was summed before.
static float softmax_terms(float* scores, long count, ScoreScale scale, float& maximum, float& total) {
  vf best = splat(kFarBelow);
  for (long i = 0; i < count; i += kLanes) {
    vf value = scaled(load(scores + i), scale);
    if (i + kLanes > count) {
      value = lane_numbers() < static_cast<float>(count - i) ? value : splat(-__builtin_inff());
    }
    store(scores + i, value);
    best = max(value, best);
  }
  const float chunk_best = largest(best), peak = chunk_best > maximum ? chunk_best : maximum;
  vf sums{};
  for (long i = 0; i < count; i += kLanes) {
    const vf term = exp2(load(scores + i) - peak);
    store(scores + i, term);
    sums += term;
  }
  const float factor = exp2(splat(maximum - peak))[0];
  total = total * factor + sum(sums);
  maximum = peak;
  return factor;
}

// sums[g][d] += sum over j of terms[g][j] * v[j][d], for kHeads heads.
template <class T, int kHeads>
static void weigh_heads(const Chunk<T>& chunk, const Chunk<T>& next, const float* terms, float* sums,
                        long dim) {
  constexpr int kWide = 2;
  long d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes) {
    vf acc[kHeads][kWide];
    for (int g = 0; g < kHeads; ++g) {
      for (int w = 0; w < kWide; ++w) acc[g][w] = load(sums + g * dim + d + w * kLanes);
    }
    for (long j = 0; j < chunk.count; ++j) {
      if (d == 0) next.prefetch_value(j, dim);
      vf value[kWide];
      for (int w = 0; w < kWide; ++w) value[w] = load(chunk.values[j] + d + w * kLanes);
      for (int g = 0; g < kHeads; ++g) {
        for (int w = 0; w < kWide; ++w) acc[g][w] += value[w] * terms[g * kChunk + j];
      }
    }
    for (int g = 0; g < kHeads; ++g) {
      for (int w = 0; w < kWide; ++w) store(sums + g * dim + d + w * kLanes, acc[g][w]);
    }
  }
  for (; d < dim; ++d) {
    for (int g = 0; g < kHeads; ++g) {
      for (long j = 0; j < chunk.count; ++j) {
        sums[g * dim + d] += to_float(chunk.values[j][d]) * terms[g * kChunk + j];
      }
    }
  }
}

template <class T>
static void weigh_values(const Chunk<T>& chunk, const Chunk<T>& next, const float* terms, State& s,
                         long dim) {
  long g = 0;
  for (; g + 4 <= s.group; g += 4) weigh_heads<T, 4>(chunk, next, terms + g * kChunk, s.sums + g * dim, dim);
  const float* rest = terms + g * kChunk;
  if (s.group - g == 3) weigh_heads<T, 3>(chunk, next, rest, s.sums + g * dim, dim);
  if (s.group - g == 2) weigh_heads<T, 2>(chunk, next, rest, s.sums + g * dim, dim);
  if (s.group - g == 1) weigh_heads<T, 1>(chunk, next, rest, s.sums + g * dim, dim);
}

// The outputs of the state's heads, from `first_head` of `row` on.
template <class T>
static void finish(const AttentionArgs& a, long row, long first_head, const State& s) {
  const long dim = a.cache.head_dim;
  for (long g = 0; g < s.group; ++g) {
    T* out = static_cast<T*>(a.out) + (row * a.q_heads + first_head + g) * dim;
    float total = s.total[g], factor = 1;
    if (a.sinks != nullptr) {
      const float sink = a.sinks[first_head + g] * kLog2e;
      const float peak = sink > s.maximum[g] ? sink : s.maximum[g];
      factor = exp2(splat(s.maximum[g] - peak))[0];
      total = total * factor + exp2(splat(sink - peak))[0];
    }
    factor /= total;
    for (long d = 0; d < dim; ++d) put(out + d, s.sums[g * dim + d] * factor);
  }
}

// Both have the same unit.
static void merge(State& into, const State& other, long dim) {
  for (long g = 0; g < into.group; ++g) {
    const float peak = into.maximum[g] > other.maximum[g] ? into.maximum[g] : other.maximum[g];
    const float mine = exp2(splat(into.maximum[g] - peak))[0],
                theirs = exp2(splat(other.maximum[g] - peak))[0];
    into.maximum[g] = peak;
    into.total[g] = into.total[g] * mine + other.total[g] * theirs;
    for (long d = 0; d < dim; ++d) {
      into.sums[g * dim + d] = into.sums[g * dim + d] * mine + other.sums[g * dim + d] * theirs;
    }
  }
}

}  // namespace qt::QT_ISA
