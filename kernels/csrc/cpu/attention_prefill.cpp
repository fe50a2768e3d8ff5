// Prefill attention over paged keys and values, flash style, for any type and register width.
//
// Queries lie in the lanes: a lane group is one head's kLanes consecutive tokens, and scores, softmax and
// sums are held transposed (a vector a key, a vector an output dimension), so that no step needs a sum across
// lanes.

#include "attention_common.h"
#include "attention_units.h"

#if defined(__AMX_TILE__)
#include "attention_prefill_tiles.h"
#endif

namespace qt::QT_ISA {
namespace {

constexpr long kTokens = 32;  // query tokens of a unit
constexpr long kKeys = 32;    // keys a softmax step
constexpr long kUnroll = 8;

// Keys and values of one step as float rows. float caches are used where they lie.
template <class T>
struct Step {
  const float* keys[kKeys];
  const float* values[kKeys];
};

void widen(const bf16* from, float* to, long size) {
  long i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i));
  for (; i < size; ++i) to[i] = to_float(from[i]);
}

const float* as_floats(const float* row, float*, long) { return row; }
const float* as_floats(const bf16* row, float* scratch, long size) {
  widen(row, scratch, size);
  return scratch;
}

template <class T>
void fetch(const PagedCache& cache, const KeyRun& run, long begin, long count, float* scratch,
           Step<T>& step) {
  const long dim = cache.head_dim;
  for (long j = 0; j < kKeys; ++j) {
    // Past the end the last row stands in: its scores are masked.
    const long key = begin + (j < count ? j : count - 1);
    step.keys[j] = as_floats(key_at<T>(cache, run, key), scratch + j * dim, dim);
    step.values[j] = as_floats(value_at<T>(cache, run, key), scratch + (kKeys + j) * dim, dim);
  }
}

// One lane group's state; q and sums are [dim][kLanes].
struct Lanes {
  const float* q;
  float* sums;
  vf maximum, total, position;
};

void dot_keys(const float* const* keys, const float* q, long dim, vf* scores) {
  for (long j = 0; j < kKeys; j += kUnroll) {
    vf acc[kUnroll] = {};
    for (long d = 0; d < dim; ++d) {
      const vf value = load(q + d * kLanes);
      for (long i = 0; i < kUnroll; ++i) acc[i] += value * keys[j + i][d];
    }
    for (long i = 0; i < kUnroll; ++i) scores[j + i] = acc[i];
  }
}

void weigh_values(const float* const* values, const vf* terms, vf factor, long dim, float* sums) {
  long d = 0;
  for (; d + kUnroll <= dim; d += kUnroll) {
    vf acc[kUnroll];
    for (long i = 0; i < kUnroll; ++i) acc[i] = load(sums + (d + i) * kLanes) * factor;
    for (long j = 0; j < kKeys; ++j) {
      for (long i = 0; i < kUnroll; ++i) acc[i] += terms[j] * values[j][d + i];
    }
    for (long i = 0; i < kUnroll; ++i) store(sums + (d + i) * kLanes, acc[i]);
  }
  for (; d < dim; ++d) {
    vf acc = load(sums + d * kLanes) * factor;
    for (long j = 0; j < kKeys; ++j) acc += terms[j] * values[j][d];
    store(sums + d * kLanes, acc);
  }
}

template <class T>
void attend_step(const AttentionArgs& a, ScoreScale scale, const Step<T>& step, long begin, Lanes& lanes) {
  vf scores[kKeys];
  dot_keys(step.keys, lanes.q, a.cache.head_dim, scores);
  vf peak = lanes.maximum;
  for (long j = 0; j < kKeys; ++j) {
    const float key = static_cast<float>(begin + j);
    vf value = scaled(scores[j], scale);
    value = lanes.position >= key ? value : splat(-__builtin_inff());
    if (a.window > 0) {
      value = lanes.position - static_cast<float>(a.window) < key ? value : splat(-__builtin_inff());
    }
    scores[j] = value;
    peak = max(value, peak);
  }
  vf total{};
  for (long j = 0; j < kKeys; ++j) {
    scores[j] = exp2(scores[j] - peak);
    total += scores[j];
  }
  const vf factor = exp2(lanes.maximum - peak);
  lanes.total = lanes.total * factor + total;
  lanes.maximum = peak;
  weigh_values(step.values, scores, factor, a.cache.head_dim, lanes.sums);
}

constexpr long kGroupsPerHead = kTokens / kLanes;
constexpr long kMaxLaneGroups = kMaxUnitHeads * kGroupsPerHead;

// Lane group `index` of a unit: its head and its first token in the unit.
long head_of(const Unit& unit, long index) { return unit.first_head + index / kGroupsPerHead; }
long token_of(long index) { return index % kGroupsPerHead * kLanes; }

template <class T>
void start_lanes(const AttentionArgs& a, const Unit& unit, long index, float* q, Lanes& lanes) {
  const long dim = a.cache.head_dim, head = head_of(unit, index), first = token_of(index);
  for (long lane = 0; lane < kLanes; ++lane) {
    const long token = first + lane < unit.count ? first + lane : unit.count - 1;
    const T* row = static_cast<const T*>(a.q) + (unit.token + token) * a.q_stride + head * dim;
    for (long d = 0; d < dim; ++d) q[d * kLanes + lane] = to_float(row[d]);
  }
  __builtin_memset(lanes.sums, 0, static_cast<size_t>(dim * kLanes) * sizeof(float));
  lanes.q = q;
  lanes.maximum = splat(a.sinks == nullptr ? kFarBelow : a.sinks[head] * kLog2e);
  lanes.total = splat(a.sinks == nullptr ? 0.0F : 1.0F);
  lanes.position = lane_numbers() + static_cast<float>(unit.position + first);
}

template <class T>
void finish_lanes(const AttentionArgs& a, const Unit& unit, long index, const Lanes& lanes) {
  const long dim = a.cache.head_dim, head = head_of(unit, index), first = token_of(index);
  for (long lane = 0; lane < kLanes && first + lane < unit.count; ++lane) {
    T* out = static_cast<T*>(a.out) + ((unit.token + first + lane) * a.q_heads + head) * dim;
    const float factor = 1.0F / lanes.total[lane];
    for (long d = 0; d < dim; ++d) put(out + d, lanes.sums[d * kLanes + lane] * factor);
  }
}

template <class T>
void attend_unit(const AttentionArgs& a, const Unit& unit, float* scratch) {
  const long size = a.cache.head_dim * kLanes, groups = unit.heads * kGroupsPerHead;
  const ScoreScale scale = score_scale(a);
  const KeyRun run{unit.blocks, unit.kv_head};
  Lanes lanes[kMaxLaneGroups];
  float* rows = scratch + 2 * groups * size;
  for (long i = 0; i < groups; ++i) {
    lanes[i].sums = scratch + (groups + i) * size;
    start_lanes<T>(a, unit, i, scratch + i * size, lanes[i]);
  }
  const long end = unit.position + unit.count;
  Step<T> step;
  for (long key = first_key(a, unit.position); key < end; key += kKeys) {
    fetch<T>(a.cache, run, key, end - key, rows, step);
    for (long i = 0; i < groups; ++i) {
      const bool sees = token_of(i) < unit.count && key < unit.position + token_of(i) + kLanes;
      if (sees) attend_step<T>(a, scale, step, key, lanes[i]);
    }
  }
  for (long i = 0; i < groups; ++i) finish_lanes<T>(a, unit, i, lanes[i]);
}

template <class T>
void prefill_typed(const AttentionArgs& a) {
  clear_padding<T>(a);
  const Units units(a, kTokens);
  const long floats = (2 * units.max_heads() * kTokens + 2 * kKeys) * a.cache.head_dim;
  for_each_task(units.count(), static_cast<size_t>(floats) * sizeof(float), [&](long index, void* scratch) {
    attend_unit<T>(a, units.at(index), static_cast<float*>(scratch));
  });
}

}  // namespace

void attention_prefill(const AttentionArgs& a) {
  if (a.dtype == DType::kFloat32) {
    prefill_typed<float>(a);
    return;
  }
#if defined(__AMX_TILE__)
  if (prefill_tiles_fit(a.cache)) {
    attention_prefill_tiles(a);
    return;
  }
#endif
  prefill_typed<bf16>(a);
}

}  // namespace qt::QT_ISA
