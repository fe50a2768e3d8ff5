// Prefill attention in bfloat16 through AMX tiles, flash style, float32 softmax.
//
// Everything is transposed: S^T = K Q^T and O^T = V^T P^T. Keys are then left operands straight from the
// cache, a vector of S^T is one key for 16 queries, so that the softmax runs along vectors and never across
// lanes, and the terms become a right operand by packing two vectors. Only V needs a transposition, once for
// all the queries of a unit. Queries lie in lane groups: one head's 16 consecutive tokens.
//
// Few queries behind many keys make few units: then each is cut into parts, runs of its keys, and whichever
// thread is the last of a unit merges what its parts came to.

#include "attention_prefill_tiles.h"

#include "attention_prefill_parts.h"
#include "tiles.h"
#include "transpose.h"

namespace qt::QT_ISA {
namespace {

constexpr long kTile = 512;  // bf16 elements of a tile

// A thread's buffers, cut from one allocation.
struct Scratch {
  float* scores;    // [2][kKeys][16]
  uint32_t* terms;  // [2][kKeys / 2][16]: pairs of bf16, the right operands of O^T
  bf16* queries;    // [lane groups][dim / 32] tiles: right operands of S^T
  bf16* values;     // [kKeys / 32][dim / 16] tiles: left operands of O^T

  static size_t bytes(long lane_groups, long dim) {
    return static_cast<size_t>(lane_groups * dim * 32 + 2 * kKeys * (64 + 32) + kKeys * dim * 2);
  }
  Scratch(void* memory, long lane_groups, long dim) {
    scores = static_cast<float*>(memory);
    terms = reinterpret_cast<uint32_t*>(scores + 2 * kKeys * 16);
    queries = reinterpret_cast<bf16*>(terms + kKeys * 16);
    values = queries + lane_groups * dim * 16;
  }
};

// 2^x to 4e-6 of itself, better than the bf16 that it is rounded to. Far negative x give 0.
__m512 fast_exp2(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(9.5702314e-3F);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5508968e-2F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022986e-1F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314697e-1F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F));
  return _mm512_scalef_ps(p, whole);
}

__m512i load_wide(const bf16* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Queries of a lane group as right operands: tile row = pair of elements, column = token.
void pack_queries(const AttentionArgs& a, const Unit& unit, long head, long first, bf16* out) {
  for (long d = 0; d < a.cache.head_dim; d += 32, out += kTile) {
    __m512i rows[16];
    for (long i = 0; i < 16; ++i) {
      const long token = first + i < unit.count ? first + i : unit.count - 1;
      rows[i] = _mm512_loadu_si512(static_cast<const bf16*>(a.q) + (unit.token + token) * a.q_stride +
                                   head * a.cache.head_dim + d);
    }
    transpose16(rows);
    for (long i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, rows[i]);
  }
}

// Rows of keys that will be read in the next step. They lie too far apart to be fetched by themselves.
void prefetch_rows(const PagedCache& cache, const KeyRun& run, long begin, long end) {
  if (begin >= end) return;
  const bf16* key = key_at<bf16>(cache, run, begin);
  const bf16* value = value_at<bf16>(cache, run, begin);
  for (long j = begin; j < end; ++j, key += cache.k_token_stride, value += cache.v_token_stride) {
    for (long d = 0; d < cache.head_dim; d += 32) {
      __builtin_prefetch(key + d, 0, 2);
      __builtin_prefetch(value + d, 0, 2);
    }
  }
}

// Values of 32 keys, of which the first is a multiple of 16, as left operands: tile row = element of the
// head, columns = keys. Keys from `count` on are zero, whatever the cache holds there. Meanwhile the keys and
// values of 32 others are fetched, those of [ahead, end).
void pack_values(const PagedCache& cache, const KeyRun& run, long begin, long count, long ahead, long end,
                 bf16* out) {
  const bf16* first = value_at<bf16>(cache, run, begin);
  const bf16* second = count > 16 ? value_at<bf16>(cache, run, begin + 16) : first;
  for (long d = 0; d < cache.head_dim; d += 16, out += kTile) {
    const long from = ahead + 32 * d / cache.head_dim, to = ahead + 32 * (d + 16) / cache.head_dim;
    prefetch_rows(cache, run, from, to < end ? to : end);
    __m512i pairs[16];
    for (long i = 0; i < 16; ++i) {
      const bf16* even_row = (i < 8 ? first : second) + 2 * i % 16 * cache.v_token_stride + d;
      const bf16* odd_row = even_row + cache.v_token_stride;
      const __m512i even = 2 * i < count ? load_wide(even_row) : _mm512_setzero_si512();
      const __m512i odd = 2 * i + 1 < count ? load_wide(odd_row) : _mm512_setzero_si512();
      pairs[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
    transpose16(pairs);
    for (long i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, pairs[i]);
  }
}

// S^T of `tiles` tiles of 16 keys (an even number) for two lane groups, or for the first alone.
template <bool kTwo>
void multiply_keys(const bf16* const* keys, long stride, long tiles, const bf16* q0, const bf16* q1, long dim,
                   float* s0, float* s1) {
  before_tile_loads();
  for (long tile = 0; tile < tiles; tile += 2) {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (kTwo) {
      _tile_zero(1);
      _tile_zero(3);
    }
    for (long d = 0; d < dim; d += 32) {
      _tile_loadd(6, q0 + d * 16, 64);
      _tile_loadd(4, keys[tile] + d, stride * 2);
      _tile_loadd(5, keys[tile + 1] + d, stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwo) {
        _tile_loadd(7, q1 + d * 16, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, s0 + tile * 256, 64);
    _tile_stored(2, s0 + tile * 256 + 256, 64);
    if constexpr (kTwo) {
      _tile_stored(1, s1 + tile * 256, 64);
      _tile_stored(3, s1 + tile * 256 + 256, 64);
    }
  }
}

// O^T += V^T P^T over `steps` steps of 32 keys for two lane groups, or for the first alone.
template <bool kTwo>
void multiply_values(const bf16* values, long steps, const uint32_t* p0, const uint32_t* p1, long dim,
                     float* o0, float* o1) {
  const long step_size = dim / 16 * kTile;
  before_tile_loads();
  for (long d = 0; d < dim; d += 32) {
    _tile_loadd(0, o0 + d * 16, 64);
    _tile_loadd(2, o0 + d * 16 + 256, 64);
    if constexpr (kTwo) {
      _tile_loadd(1, o1 + d * 16, 64);
      _tile_loadd(3, o1 + d * 16 + 256, 64);
    }
    for (long step = 0; step < steps; ++step) {
      const bf16* v = values + step * step_size + d / 16 * kTile;
      _tile_loadd(4, v, 64);
      _tile_loadd(5, v + kTile, 64);
      _tile_loadd(6, p0 + step * 256, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwo) {
        _tile_loadd(7, p1 + step * 256, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, o0 + d * 16, 64);
    _tile_stored(2, o0 + d * 16 + 256, 64);
    if constexpr (kTwo) {
      _tile_stored(1, o1 + d * 16, 64);
      _tile_stored(3, o1 + d * 16 + 256, 64);
    }
  }
}

// Soft cap and masks, in place, so that what follows knows one factor and no exception.
void transform_scores(const AttentionArgs& a, ScoreScale scale, long begin, long count, __m512 position,
                      float* s) {
  const __m512 hidden = _mm512_set1_ps(2 * kFarBelow / scale.factor);  // below every running maximum
  const __m512 oldest =
      _mm512_sub_ps(position, _mm512_set1_ps(static_cast<float>(a.window > 0 ? a.window : 1L << 40)));
  for (long j = 0; j < count; ++j) {
    const __m512 key = _mm512_set1_ps(static_cast<float>(begin + j));
    __m512 value = _mm512_load_ps(s + j * 16);
    if (scale.softcap > 0) value = (__m512)(scaled((vf)value, scale) / scale.factor);
    const __mmask16 seen =
        _mm512_cmp_ps_mask(key, position, _CMP_LE_OQ) & _mm512_cmp_ps_mask(key, oldest, _CMP_GT_OQ);
    _mm512_store_ps(s + j * 16, _mm512_mask_blend_ps(seen, hidden, value));
  }
}

// One online softmax step of a lane group: scores to packed terms, and the sums so far scaled to the new
// maximum.
void softmax_step(const float* s, long count, float factor, Softmax& state, uint32_t* terms, long dim) {
  const __m512 scale = _mm512_set1_ps(factor);
  __m512 best0 = _mm512_load_ps(s), best1 = _mm512_load_ps(s + 16);
  for (long j = 2; j < count; j += 2) {
    best0 = _mm512_max_ps(best0, _mm512_load_ps(s + j * 16));
    best1 = _mm512_max_ps(best1, _mm512_load_ps(s + j * 16 + 16));
  }
  const __m512 peak = _mm512_max_ps(state.maximum, _mm512_mul_ps(_mm512_max_ps(best0, best1), scale));
  __m512 total0 = _mm512_setzero_ps(), total1 = total0;
  const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  for (long j = 0; j < count; j += 2) {
    const __m512 even = fast_exp2(_mm512_fmsub_ps(_mm512_load_ps(s + j * 16), scale, peak));
    const __m512 odd = fast_exp2(_mm512_fmsub_ps(_mm512_load_ps(s + j * 16 + 16), scale, peak));
    total0 = _mm512_add_ps(total0, even);
    total1 = _mm512_add_ps(total1, odd);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    // low | (rounded & high)
    _mm512_store_si512(terms + j * 8, _mm512_ternarylogic_epi32(low, rounded, high, 0xf8));
  }
  const __mmask16 moved = _mm512_cmp_ps_mask(peak, state.maximum, _CMP_NEQ_OQ);
  const __m512 total = _mm512_add_ps(total0, total1);
  if (moved == 0) {
    state.total = _mm512_add_ps(state.total, total);
    return;
  }
  const __m512 shrink = fast_exp2(_mm512_sub_ps(state.maximum, peak));
  state.total = _mm512_fmadd_ps(state.total, shrink, total);
  state.maximum = peak;
  for (float* sums = state.sums; sums < state.sums + dim * 16; sums += 16)
    _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), shrink));
}

// The other's keys are other keys of the same queries.
void merge(Softmax& into, const Softmax& other, long dim) {
  const __m512 peak = _mm512_max_ps(into.maximum, other.maximum);
  const __m512 mine = fast_exp2(_mm512_sub_ps(into.maximum, peak)),
               theirs = fast_exp2(_mm512_sub_ps(other.maximum, peak));
  into.maximum = peak;
  into.total = _mm512_fmadd_ps(into.total, mine, _mm512_mul_ps(other.total, theirs));
  for (long d = 0; d < dim * 16; d += 16) {
    const __m512 sum = _mm512_mul_ps(_mm512_load_ps(other.sums + d), theirs);
    _mm512_store_ps(into.sums + d, _mm512_fmadd_ps(_mm512_load_ps(into.sums + d), mine, sum));
  }
}

void finish_lanes(const AttentionArgs& a, const Unit& unit, const LaneGroup& lanes, const Softmax& state) {
  const long dim = a.cache.head_dim;
  const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0F), state.total);
  for (long d = 0; d < dim; d += 16) {
    __m512i rows[16];
    for (long i = 0; i < 16; ++i) {
      rows[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(state.sums + (d + i) * 16), factor));
    }
    transpose16(rows);
    for (long i = 0; i < 16 && lanes.first + i < unit.count; ++i) {
      const long token = unit.token + lanes.first + i;
      store(static_cast<bf16*>(a.out) + (token * a.q_heads + lanes.head) * dim + d, (vf)rows[i]);
    }
  }
}

// Where nothing has been seen yet; with `sinks` they have been.
void start_lanes(const AttentionArgs& a, long head, bool sinks, Softmax& state) {
  state.maximum = _mm512_set1_ps(sinks ? a.sinks[head] * kLog2e : kFarBelow);
  state.total = _mm512_set1_ps(sinks ? 1.0F : 0.0F);
  __builtin_memset(state.sums, 0, static_cast<size_t>(a.cache.head_dim) * 16 * sizeof(float));
}

// One softmax step of up to two lane groups, from `group` on: `count` keys from `key` on.
template <bool kTwo>
void attend_lanes(const AttentionArgs& a, const Unit& unit, const Scratch& scratch, const bf16* const* keys,
                  Range step, long group, Softmax* states) {
  const long dim = a.cache.head_dim, key = step.begin;
  const LaneGroup lanes[2] = {lane_group(unit, group), lane_group(unit, kTwo ? group + 1 : group)};
  const bool in_order = lanes[0].first <= lanes[1].first;  // else the second is another head's
  const long earliest = unit.position + (in_order ? lanes[0] : lanes[1]).first;
  const long latest = unit.position + (in_order ? lanes[1] : lanes[0]).first + 15;
  const long last = latest < unit.position + unit.count ? latest : unit.position + unit.count - 1;
  if (key > last) return;
  const long wanted = last < step.end ? last + 1 - key : step.end - key, steps = (wanted + 31) / 32;
  const ScoreScale scale = score_scale(a);
  const bf16* queries = scratch.queries + group * dim * 16;
  multiply_keys<kTwo>(keys, a.cache.k_token_stride, 2 * steps, queries, queries + dim * 16, dim,
                      scratch.scores, scratch.scores + kKeys * 16);
  const bool masked =
      scale.softcap > 0 || key + steps * 32 - 1 > earliest || (a.window > 0 && key <= last - a.window);
  for (long j = 0; j < (kTwo ? 2 : 1); ++j) {
    float* scores = scratch.scores + j * kKeys * 16;
    if (masked) transform_scores(a, scale, key, steps * 32, positions_of(unit, lanes[j]), scores);
    softmax_step(scores, steps * 32, scale.factor, states[j], scratch.terms + j * kKeys * 8, dim);
  }
  multiply_values<kTwo>(scratch.values, steps, scratch.terms, scratch.terms + kKeys * 8, dim, states[0].sums,
                        kTwo ? states[1].sums : nullptr);
}

// Part `part` of `parts` of a unit, all of its lane groups.
void attend_part(const AttentionArgs& a, const Unit& unit, long part, long parts, const Scratch& scratch,
                 const Partial& partial) {
  const PagedCache& cache = a.cache;
  const long dim = cache.head_dim, groups = lane_groups_of(unit), end = unit.position + unit.count;
  const KeyRun run{unit.blocks, unit.kv_head};
  for (long i = 0; i < groups; ++i) {
    const LaneGroup lanes = lane_group(unit, i);
    pack_queries(a, unit, lanes.head, lanes.first, scratch.queries + i * dim * 16);
    Softmax state = partial.load(i);
    start_lanes(a, lanes.head, a.sinks != nullptr && part == 0, state);
    partial.store(i, state);
  }
  // Steps start at whole tiles; keys before the window's first are masked.
  const long begin = first_key(a, unit.position) & ~15L;
  const Range steps =
      share((end - begin + kKeys - 1) / kKeys, static_cast<int>(part), static_cast<int>(parts));
  const long until = begin + steps.end * kKeys < end ? begin + steps.end * kKeys : end;
  for (long key = begin + steps.begin * kKeys; key < until; key += kKeys) {
    const long count = end - key < kKeys ? end - key : kKeys;
    const bf16* keys[kKeys / 16];
    for (long j = 0; j < kKeys / 16; ++j)
      keys[j] = key_at<bf16>(cache, run, key + (j * 16 < count ? j * 16 : 0));
    for (long j = 0; j < count; j += 32) {
      pack_values(cache, run, key + j, count - j, key + kKeys + j, until,
                  scratch.values + j / 32 * (dim / 16 * kTile));
    }
    for (long i = 0; i < groups; i += 2) {
      Softmax states[2] = {partial.load(i), partial.load(i + 1 < groups ? i + 1 : i)};
      if (i + 1 < groups) {
        attend_lanes<true>(a, unit, scratch, keys, {key, key + count}, i, states);
        partial.store(i + 1, states[1]);
      } else {
        attend_lanes<false>(a, unit, scratch, keys, {key, key + count}, i, states);
      }
      partial.store(i, states[0]);
    }
  }
}

}  // namespace

void attention_prefill_tiles(const AttentionArgs& a) {
  clear_padding<bf16>(a);
  const Units units(a, kTokens);
  if (units.count() == 0) return;
  const long dim = a.cache.head_dim, lane_groups = units.max_heads() * (kTokens / 16);
  const long parts = parts_for(units.count(), most_steps(a)), floats = Partial::floats(lane_groups, dim);
  const Shared shared(parts == 1 ? 0 : units.count(), parts, floats);
  const size_t own = Scratch::bytes(lane_groups, dim),
               bytes = own + static_cast<size_t>(floats) * sizeof(float);
  for_each_task(units.count() * parts, bytes, [&](long task, void* memory) {
    const Unit unit = units.at(task / parts);
    float* const spare = reinterpret_cast<float*>(static_cast<char*>(memory) + own);
    const auto partial = [&](long part) {
      return Partial(parts == 1 ? spare : shared.sums + (task / parts * parts + part) * floats, dim);
    };
    configure_tiles(16, 16, 16);
    attend_part(a, unit, task % parts, parts, Scratch(memory, lane_groups, dim), partial(task % parts));
    _tile_release();
    if (parts > 1 && !shared.last(task / parts, parts)) return;
    for (long i = 0; i < lane_groups_of(unit); ++i) {
      Softmax state = partial(0).load(i);
      for (long part = 1; part < parts; ++part) merge(state, partial(part).load(i), dim);
      finish_lanes(a, unit, lane_group(unit, i), state);
    }
  });
}

}  // namespace qt::QT_ISA
