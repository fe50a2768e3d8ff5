// Dot products of one token's query heads with a run of keys: the first half of decode attention.
#pragma once

#include "attention_common.h"

#if defined(__AMX_TILE__)
#include "tiles.h"
#endif

namespace qt::QT_ISA {

inline constexpr long kMaxHeadDim = 256;
inline constexpr long kMaxGroup = 16;  // query heads handled at once

// Any type, any shape: the query is widened once, then each key is dotted with every head.
template <class T>
class PlainQuery {
 public:
  PlainQuery(const T* q, long group, long dim) : group_(group), dim_(dim) {
    for (long i = 0; i < group * dim; ++i) q_[i] = to_float(q[i]);
  }

  // scores[g * stride + j] for the `count` keys from position `begin`.
  void scores(const PagedCache& cache, const KeyRun& run, long begin, long count, float* scores,
              long stride) const {
    for (long j = 0; j < count; ++j) {
      const T* key = key_at<T>(cache, run, begin + j);
      for (long g = 0; g < group_; ++g) scores[g * stride + j] = dot(q_ + g * dim_, key);
    }
  }

 private:
  float dot(const float* q, const T* key) const {
    vf sums[2] = {};
    long d = 0;
    for (int turn = 0; d + kLanes <= dim_; d += kLanes, turn ^= 1) sums[turn] += load(q + d) * load(key + d);
    float total = sum(sums[0] + sums[1]);
    for (; d < dim_; ++d) total += q[d] * to_float(key[d]);
    return total;
  }

  long group_, dim_;
  alignas(64) float q_[kMaxGroup * kMaxHeadDim];
};

#if defined(__AMX_TILE__)
// bfloat16 through matrix tiles: 16 keys (rows, straight from the cache) by the query heads (columns).
// Needs a head dimension of whole tiles, and blocks of whole tiles, since a tile reads 16 keys of one block;
// keys past `count` are read (they lie in the block) and their scores are not used.
class TileQuery {
 public:
  static bool fits(const PagedCache& cache) {
    return cache.head_dim % 32 == 0 && cache.block_tokens % 16 == 0;
  }

  TileQuery(const bf16* q, long group, long dim) : group_(group), dim_(dim) {
    // Column g of the right-hand tile holds pairs of consecutive elements of head g.
    __builtin_memset(pairs_, 0, sizeof pairs_);
    for (long g = 0; g < group; ++g) {
      for (long pair = 0; pair < dim / 2; ++pair) {
        __builtin_memcpy(&pairs_[pair * 16 + g], q + g * dim + 2 * pair, sizeof(uint32_t));
      }
    }
    configure_tiles(16, 16, 16);
  }
  ~TileQuery() { _tile_release(); }
  TileQuery(const TileQuery&) = delete;
  TileQuery& operator=(const TileQuery&) = delete;

  void scores(const PagedCache& cache, const KeyRun& run, long begin, long count, float* scores,
              long stride) const {
    alignas(64) float products[16 * 16];
    const vi column = [] {
      vi index{};
      for (int i = 0; i < 16; ++i) index[i] = i * 16;
      return index;
    }();
    // The first key may lie inside a tile: then the tile starts earlier, and its first scores are dropped.
    const long aligned = begin & ~15L;
    for (long key = aligned; key < begin + count; key += 16) {
      const bf16* keys = key_at<bf16>(cache, run, key);
      _tile_zero(0);
      for (long d = 0; d < dim_; d += 32) {
        _tile_loadd(4, keys + d, cache.k_token_stride * 2);
        _tile_loadd(6, pairs_ + d * 8, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, products, 64);
      // Lanes that are wanted: from `begin` on, and not past the count (the next head's line follows).
      const long skip = key < begin ? begin - key : 0, last = begin + count - key;
      const unsigned wanted = (0xffffU << skip) & (last < 16 ? (1U << last) - 1U : 0xffffU);
      for (long g = 0; g < group_; ++g) {
        const __m512 line = _mm512_i32gather_ps((__m512i)column, products + g, 4);
        float* out = scores + g * stride + (key + skip - begin);
        _mm512_mask_compressstoreu_ps(out, static_cast<__mmask16>(wanted), line);
      }
    }
  }

 private:
  long group_, dim_;
  alignas(64) uint32_t pairs_[kMaxHeadDim / 2 * 16];
};
#endif

}  // namespace qt::QT_ISA
