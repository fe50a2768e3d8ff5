// Prefill attention in bfloat16 through AMX tiles, flash style, float32 softmax.
//
// Everything is transposed: S^T = K Q^T and O^T = V^T P^T. Keys are then left operands straight from the
// cache, a vector of S^T is one key for 16 queries, so that the softmax runs along vectors and never across
// lanes, and the terms become a right operand by packing two vectors. Only V needs a transposition, once for
// all the queries of a unit. Queries lie in lane groups: one head's 16 consecutive tokens.

#include "attention_prefill_tiles.h"

#include "attention_units.h"
#include "tiles.h"
#include "transpose.h"

namespace qt::QT_ISA {
namespace {

constexpr long kTokens = 64;  // query tokens of a unit: 4 lane groups a head
constexpr long kKeys = 128;   // keys a softmax step
constexpr long kGroupsPerHead = kTokens / 16;
constexpr long kTile = 512;  // bf16 elements of a tile
constexpr long kMaxLaneGroups = kMaxUnitHeads * kGroupsPerHead;

// A thread's buffers, cut from one allocation.
struct Scratch {
  float* sums;      // [lane groups][dim][16]
  float* scores;    // [2][kKeys][16]
  uint32_t* terms;  // [2][kKeys / 2][16]: pairs of bf16, the right operands of O^T
  bf16* queries;    // [lane groups][dim / 32] tiles: right operands of S^T
  bf16* values;     // [kKeys / 32][dim / 16] tiles: left operands of O^T

  static size_t bytes(long lane_groups, long dim) {
    return static_cast<size_t>(lane_groups * dim * (64 + 32) + 2 * kKeys * (64 + 32) + kKeys * dim * 2);
  }
  Scratch(void* memory, long lane_groups, long dim) {
    sums = static_cast<float*>(memory);
    scores = sums + lane_groups * dim * 16;
    terms = reinterpret_cast<uint32_t*>(scores + 2 * kKeys * 16);
    queries = reinterpret_cast<bf16*>(terms + kKeys * 16);
    values = queries + lane_groups * dim * 16;
  }
};

struct Softmax {
  __m512 maximum, total, position;
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

// Values of 32 keys as left operands: tile row = element of the head, columns = keys. Keys from `count` on
// are zero, whatever the cache holds there.
void pack_values(const PagedCache& cache, const KeyRun& run, long begin, long count, bf16* out) {
  const bf16* rows[32];
  for (long j = 0; j < 32; ++j) rows[j] = value_at<bf16>(cache, run, begin + (j < count ? j : 0));
  for (long d = 0; d < cache.head_dim; d += 16, out += kTile) {
    __m512i pairs[16];
    for (long i = 0; i < 16; ++i) {
      const __m512i even = 2 * i < count ? load_wide(rows[2 * i] + d) : _mm512_setzero_si512();
      const __m512i odd = 2 * i + 1 < count ? load_wide(rows[2 * i + 1] + d) : _mm512_setzero_si512();
      pairs[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
    transpose16(pairs);
    for (long i = 0; i < 16; ++i) _mm512_store_si512(out + i * 32, pairs[i]);
  }
}

// S^T of `tiles` tiles of 16 keys (an even number) for two lane groups.
void multiply_keys(const bf16* const* keys, long stride, long tiles, const bf16* q0, const bf16* q1, long dim,
                   float* s0, float* s1) {
  before_tile_loads();
  for (long tile = 0; tile < tiles; tile += 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long d = 0; d < dim; d += 32) {
      _tile_loadd(6, q0 + d * 16, 64);
      _tile_loadd(7, q1 + d * 16, 64);
      _tile_loadd(4, keys[tile] + d, stride * 2);
      _tile_loadd(5, keys[tile + 1] + d, stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, s0 + tile * 256, 64);
    _tile_stored(1, s1 + tile * 256, 64);
    _tile_stored(2, s0 + tile * 256 + 256, 64);
    _tile_stored(3, s1 + tile * 256 + 256, 64);
  }
}

// O^T += V^T P^T over `steps` steps of 32 keys for two lane groups.
void multiply_values(const bf16* values, long steps, const uint32_t* p0, const uint32_t* p1, long dim,
                     float* o0, float* o1) {
  const long step_size = dim / 16 * kTile;
  before_tile_loads();
  for (long d = 0; d < dim; d += 32) {
    _tile_loadd(0, o0 + d * 16, 64);
    _tile_loadd(1, o1 + d * 16, 64);
    _tile_loadd(2, o0 + d * 16 + 256, 64);
    _tile_loadd(3, o1 + d * 16 + 256, 64);
    for (long step = 0; step < steps; ++step) {
      const bf16* v = values + step * step_size + d / 16 * kTile;
      _tile_loadd(4, v, 64);
      _tile_loadd(5, v + kTile, 64);
      _tile_loadd(6, p0 + step * 256, 64);
      _tile_loadd(7, p1 + step * 256, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, o0 + d * 16, 64);
    _tile_stored(1, o1 + d * 16, 64);
    _tile_stored(2, o0 + d * 16 + 256, 64);
    _tile_stored(3, o1 + d * 16 + 256, 64);
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
void softmax_step(const float* s, long count, float factor, Softmax& state, uint32_t* terms, float* sums,
                  long dim) {
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
  for (long d = 0; d < dim; ++d)
    _mm512_store_ps(sums + d * 16, _mm512_mul_ps(_mm512_load_ps(sums + d * 16), shrink));
}

void finish_lanes(const AttentionArgs& a, const Unit& unit, long head, long first, const Softmax& state,
                  float* sums) {
  const long dim = a.cache.head_dim;
  const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0F), state.total);
  for (long d = 0; d < dim; d += 16) {
    __m512i rows[16];
    for (long i = 0; i < 16; ++i) {
      rows[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(sums + (d + i) * 16), factor));
    }
    transpose16(rows);
    for (long i = 0; i < 16 && first + i < unit.count; ++i) {
      bf16* out = static_cast<bf16*>(a.out) + ((unit.token + first + i) * a.q_heads + head) * dim + d;
      store(out, (vf)rows[i]);
    }
  }
}

void attend_unit(const AttentionArgs& a, const Unit& unit, const Scratch& scratch) {
  const PagedCache& cache = a.cache;
  const long dim = cache.head_dim, groups = unit.heads * kGroupsPerHead, end = unit.position + unit.count;
  const ScoreScale scale = score_scale(a);
  const KeyRun run{unit.blocks, unit.kv_head};
  Softmax states[kMaxLaneGroups];
  __builtin_memset(scratch.sums, 0, static_cast<size_t>(groups * dim * 16) * sizeof(float));
  for (long i = 0; i < groups; ++i) {
    const long head = unit.first_head + i / kGroupsPerHead, first = i % kGroupsPerHead * 16;
    pack_queries(a, unit, head, first, scratch.queries + i * dim * 16);
    states[i].maximum = _mm512_set1_ps(a.sinks == nullptr ? kFarBelow : a.sinks[head] * kLog2e);
    states[i].total = _mm512_set1_ps(a.sinks == nullptr ? 0.0F : 1.0F);
    states[i].position =
        _mm512_add_ps((__m512)lane_numbers(), _mm512_set1_ps(static_cast<float>(unit.position + first)));
  }
  // Steps start at whole tiles; keys before the window's first are masked.
  for (long key = first_key(a, unit.position) & ~15L; key < end; key += kKeys) {
    const long count = end - key < kKeys ? end - key : kKeys;
    const bf16* keys[kKeys / 16];
    for (long j = 0; j < kKeys / 16; ++j)
      keys[j] = key_at<bf16>(cache, run, key + (j * 16 < count ? j * 16 : 0));
    for (long j = 0; j < count; j += 32) {
      pack_values(cache, run, key + j, count - j, scratch.values + j / 32 * (dim / 16 * kTile));
    }
    for (long i = 0; i < groups; i += 2) {
      const long first = i % kGroupsPerHead * 16, first_position = unit.position + first;
      const long last = first_position + 31 < end - 1 ? first_position + 31 : end - 1;  // of both lane groups
      if (first >= unit.count || key > last) continue;
      const long wanted = last + 1 - key < count ? last + 1 - key : count, steps = (wanted + 31) / 32;
      multiply_keys(keys, cache.k_token_stride, 2 * steps, scratch.queries + i * dim * 16,
                    scratch.queries + (i + 1) * dim * 16, dim, scratch.scores, scratch.scores + kKeys * 16);
      const bool masked = scale.softcap > 0 || key + steps * 32 - 1 > first_position ||
                          (a.window > 0 && key <= last - a.window);
      for (long j = 0; j < 2; ++j) {
        float* scores = scratch.scores + j * kKeys * 16;
        if (masked) transform_scores(a, scale, key, steps * 32, states[i + j].position, scores);
        softmax_step(scores, steps * 32, scale.factor, states[i + j], scratch.terms + j * kKeys * 8,
                     scratch.sums + (i + j) * dim * 16, dim);
      }
      multiply_values(scratch.values, steps, scratch.terms, scratch.terms + kKeys * 8, dim,
                      scratch.sums + i * dim * 16, scratch.sums + (i + 1) * dim * 16);
    }
  }
  for (long i = 0; i < groups; ++i) {
    const long head = unit.first_head + i / kGroupsPerHead, first = i % kGroupsPerHead * 16;
    finish_lanes(a, unit, head, first, states[i], scratch.sums + i * dim * 16);
  }
}

}  // namespace

void attention_prefill_tiles(const AttentionArgs& a) {
  clear_padding<bf16>(a);
  const Units units(a, kTokens);
  const long lane_groups = units.max_heads() * kGroupsPerHead, dim = a.cache.head_dim;
  for_each_unit(units, Scratch::bytes(lane_groups, dim), [&](const Unit& unit, void* memory) {
    configure_tiles(16, 16, 16);
    attend_unit(a, unit, Scratch(memory, lane_groups, dim));
    _tile_release();
  });
}

}  // namespace qt::QT_ISA
