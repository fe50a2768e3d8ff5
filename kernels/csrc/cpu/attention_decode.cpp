// Decode attention: one query token a row against its paged keys and values, flash style, split over threads.
//
// The work is every (row, kv head, chunk of keys), laid end to end and cut into one equal piece a thread. A
// unit (row, kv head, up to 16 of its query heads) that lies in one piece is finished there; one that is cut
// leaves partial softmax states that are merged after the join. This balances any batch, a single row
// included.

#include "attention_common.h"
#include "attention_scores.h"
#include "parallel.h"

namespace qt::QT_ISA {
namespace {

constexpr long kChunk = 128;     // keys a softmax step
constexpr int kMaxThreads = 64;  // bounds the stack that the cut states take: 33 KiB a thread

struct State {
  long unit = -1;
  long group = 0;
  float maximum[kMaxGroup];
  float total[kMaxGroup];
  alignas(64) float sums[kMaxGroup * kMaxHeadDim];
};

void reset(State& s, long unit, long group, long dim) {
  s.unit = unit;
  s.group = group;
  for (long g = 0; g < group; ++g) {
    s.maximum[g] = kFarBelow;
    s.total[g] = 0;
  }
  __builtin_memset(s.sums, 0, static_cast<size_t>(group * dim) * sizeof(float));
}

struct Unit {
  long row, kv_head, first_head, group;
};

// How the heads are cut into units: `splits` a kv head.
struct Shape {
  long group, splits, per_row;
  explicit Shape(const AttentionArgs& a)
      : group(a.q_heads / a.cache.kv_heads),
        splits((group + kMaxGroup - 1) / kMaxGroup),
        per_row(a.cache.kv_heads * splits) {}
  Unit unit(long index) const {
    const long in_row = index % per_row, kv_head = in_row / splits, first = in_row % splits * kMaxGroup;
    return {index / per_row, kv_head, kv_head * group + first,
            group - first < kMaxGroup ? group - first : kMaxGroup};
  }
};

// One head's dot products to softmax terms, in place; returns the factor for what was summed before.
float softmax_terms(float* scores, long count, ScoreScale scale, float& maximum, float& total) {
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
void weigh_heads(const T* const* v, long count, const float* terms, float* sums, long dim) {
  constexpr int kWide = 2;
  long d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes) {
    vf acc[kHeads][kWide];
    for (int g = 0; g < kHeads; ++g) {
      for (int w = 0; w < kWide; ++w) acc[g][w] = load(sums + g * dim + d + w * kLanes);
    }
    for (long j = 0; j < count; ++j) {
      vf value[kWide];
      for (int w = 0; w < kWide; ++w) value[w] = load(v[j] + d + w * kLanes);
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
      for (long j = 0; j < count; ++j) sums[g * dim + d] += to_float(v[j][d]) * terms[g * kChunk + j];
    }
  }
}

template <class T>
void weigh_values(const T* const* v, long count, const float* terms, State& s, long dim) {
  long g = 0;
  for (; g + 4 <= s.group; g += 4) weigh_heads<T, 4>(v, count, terms + g * kChunk, s.sums + g * dim, dim);
  const float* rest = terms + g * kChunk;
  if (s.group - g == 3) weigh_heads<T, 3>(v, count, rest, s.sums + g * dim, dim);
  if (s.group - g == 2) weigh_heads<T, 2>(v, count, rest, s.sums + g * dim, dim);
  if (s.group - g == 1) weigh_heads<T, 1>(v, count, rest, s.sums + g * dim, dim);
}

template <class T, class Query>
void attend(const AttentionArgs& a, const Unit& unit, State& s, long begin, long end) {
  const PagedCache& cache = a.cache;
  const long dim = cache.head_dim;
  const ScoreScale scale = score_scale(a);
  const KeyRun run{a.block_tables + unit.row * a.block_table_stride, unit.kv_head};
  const Query query(static_cast<const T*>(a.q) + unit.row * a.q_stride + unit.first_head * dim, s.group, dim);
  alignas(64) float scores[kMaxGroup * kChunk + 16];
  const T* values[kChunk];
  for (long key = begin; key < end; key += kChunk) {
    const long count = end - key < kChunk ? end - key : kChunk;
    query.scores(cache, run, key, count, scores, kChunk);
    for (long j = 0; j < count; ++j) values[j] = value_at<T>(cache, run, key + j);
    for (long g = 0; g < s.group; ++g) {
      const float factor = softmax_terms(scores + g * kChunk, count, scale, s.maximum[g], s.total[g]);
      if (factor == 1.0F) continue;
      for (long d = 0; d < dim; ++d) s.sums[g * dim + d] *= factor;
    }
    weigh_values<T>(values, count, scores, s, dim);
  }
}

template <class T>
void finish(const AttentionArgs& a, const Unit& unit, const State& s) {
  const long dim = a.cache.head_dim;
  for (long g = 0; g < s.group; ++g) {
    T* out = static_cast<T*>(a.out) + (unit.row * a.q_heads + unit.first_head + g) * dim;
    float total = s.total[g], factor = 1;
    if (a.sinks != nullptr) {
      const float sink = a.sinks[unit.first_head + g] * kLog2e;
      const float peak = sink > s.maximum[g] ? sink : s.maximum[g];
      factor = exp2(splat(s.maximum[g] - peak))[0];
      total = total * factor + exp2(splat(sink - peak))[0];
    }
    factor /= total;
    for (long d = 0; d < dim; ++d) put(out + d, s.sums[g * dim + d] * factor);
  }
}

void merge(State& into, const State& other, long dim) {
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

struct Keys {
  long begin, chunks, end;
};

Keys visible_keys(const AttentionArgs& a, long row) {
  const long end = a.context_lens[row];
  const long begin = end > 0 ? first_key(a, end - 1) : 0;
  return {begin, (end - begin + kChunk - 1) / kChunk, end};
}

// The chunks [mine.begin, mine.end) of the whole; first and last units may be cut and are left in `cut`.
template <class T, class Query>
void run_piece(const AttentionArgs& a, const Shape& shape, Range mine, State* cut) {
  State local;
  long at = 0;
  for (long row = 0; row < a.rows && at < mine.end; ++row) {
    const Keys keys = visible_keys(a, row);
    if (at + keys.chunks * shape.per_row <= mine.begin) {
      at += keys.chunks * shape.per_row;
      continue;
    }
    for (long u = 0; u < shape.per_row && at < mine.end; ++u, at += keys.chunks) {
      const long from = mine.begin > at ? mine.begin - at : 0;
      const long to = mine.end - at < keys.chunks ? mine.end - at : keys.chunks;
      if (from >= to) continue;
      const Unit unit = shape.unit(row * shape.per_row + u);
      const bool whole = from == 0 && to == keys.chunks;
      State& state = whole ? local : cut[from != 0 ? 0 : 1];
      reset(state, row * shape.per_row + u, unit.group, a.cache.head_dim);
      const long end = keys.begin + to * kChunk;
      attend<T, Query>(a, unit, state, keys.begin + from * kChunk, end < keys.end ? end : keys.end);
      if (whole) finish<T>(a, unit, state);
    }
  }
}

// Every thread's cut states in order are neighbours of the same unit: merge runs of them.
template <class T>
void merge_cuts(const AttentionArgs& a, const Shape& shape, State* cuts, int count) {
  State* open = nullptr;
  for (int i = 0; i < count; ++i) {
    if (cuts[i].unit < 0) continue;
    if (open != nullptr && open->unit == cuts[i].unit) {
      merge(*open, cuts[i], a.cache.head_dim);
      continue;
    }
    if (open != nullptr) finish<T>(a, shape.unit(open->unit), *open);
    open = &cuts[i];
  }
  if (open != nullptr) finish<T>(a, shape.unit(open->unit), *open);
}

template <class T, class Query>
void decode_typed(const AttentionArgs& a) {
  const Shape shape(a);
  long chunks = 0, keys = 0;
  const long row_out = a.q_heads * a.cache.head_dim;
  for (long row = 0; row < a.rows; ++row) {
    const Keys visible = visible_keys(a, row);
    chunks += visible.chunks * shape.per_row;
    keys += visible.end - visible.begin;
    if (visible.chunks == 0) {
      __builtin_memset(static_cast<T*>(a.out) + row * row_out, 0, static_cast<size_t>(row_out) * sizeof(T));
    }
  }
  int threads = threads_for(keys * 2 * a.cache.kv_heads * a.cache.head_dim * static_cast<long>(sizeof(T)));
  threads = threads < kMaxThreads ? threads : kMaxThreads;
  State* states =
      static_cast<State*>(__builtin_alloca_with_align(static_cast<size_t>(2 * threads) * sizeof(State), 512));
  for (int i = 0; i < 2 * threads; ++i) states[i].unit = -1;
  parallel(threads, [&](int thread, int count) {
    run_piece<T, Query>(a, shape, share(chunks, thread, count), states + 2 * thread);
  });
  merge_cuts<T>(a, shape, states, 2 * threads);
}

}  // namespace

void attention_decode(const AttentionArgs& a) {
  if (a.dtype == DType::kFloat32) {
    decode_typed<float, PlainQuery<float>>(a);
    return;
  }
#if defined(__AMX_TILE__)
  if (TileQuery::fits(a.cache)) {
    decode_typed<bf16, TileQuery>(a);
    return;
  }
#endif
  decode_typed<bf16, PlainQuery<bf16>>(a);
}

}  // namespace qt::QT_ISA
