// Dot products of one token's query heads with a run of keys: the first half of decode attention.
#pragma once

#include "attention_common.h"

#if defined(__AMX_TILE__)
#include "tiles.h"
#endif

namespace qt::QT_ISA {

inline constexpr long kMaxHeadDim = 256;
inline constexpr long kMaxGroup = 16;  // query heads handled at once

inline constexpr long kChunk = 64;  // keys a softmax step

// Where a chunk's keys and values lie.
template <class T>
struct Chunk {
  long begin = 0, count = 0;
  const T* keys[kChunk];
  const T* values[kChunk];

  void find(const PagedCache& cache, const KeyRun& run, long first, long keys_in_chunk) {
    begin = first;
    count = keys_in_chunk;
    for (long j = 0; j < count;) {
      const T* key = key_at<T>(cache, run, begin + j);
      const T* value = value_at<T>(cache, run, begin + j);
      const long in_block = cache.block_tokens - (begin + j) % cache.block_tokens;
      const long end = j + in_block < count ? j + in_block : count;
      for (; j < end; ++j, key += cache.k_token_stride, value += cache.v_token_stride) {
        keys[j] = key;
        values[j] = value;
      }
    }
  }

  // The cache is read from memory: chunk n + 1 is fetched row by row while chunk n is computed.
  void prefetch_key(long j, long dim) const {
    if (j < count) prefetch_row(keys[j], dim);
  }
  void prefetch_value(long j, long dim) const {
    if (j < count) prefetch_row(values[j], dim);
  }

 private:
  static void prefetch_row(const T* row, long dim) {
    for (long d = 0; d < dim; d += 64 / static_cast<long>(sizeof(T))) __builtin_prefetch(row + d);
  }
};

// Any type, any shape: the query is widened once, then each key is dotted with every head.
template <class T>
class PlainQuery {
 public:
  explicit PlainQuery(long dim) : dim_(dim) {}

  // The heads to come: q [group, dim].
  void take(const T* q, long group) {
    group_ = group;
    for (long i = 0; i < group * dim_; ++i) q_[i] = to_float(q[i]);
  }

  // scores[g * kChunk + j] for the chunk's keys. `next` is what will be wanted then.
  void scores(const PagedCache&, const Chunk<T>& chunk, const Chunk<T>& next, float* scores) const {
    for (long j = 0; j < chunk.count; ++j) {
      next.prefetch_key(j, dim_);
      for (long g = 0; g < group_; ++g) scores[g * kChunk + j] = dot(q_ + g * dim_, chunk.keys[j]);
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

  long group_ = 0, dim_;
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

  explicit TileQuery(long dim) : dim_(dim) {
    __builtin_memset(pairs_, 0, sizeof pairs_);
    configure_tiles(16, 16, 16);
  }
  ~TileQuery() { _tile_release(); }
  TileQuery(const TileQuery&) = delete;
  TileQuery& operator=(const TileQuery&) = delete;

  // Column g of the right-hand tiles holds pairs of consecutive elements of head g.
  void take(const bf16* q, long group) {
    group_ = group;
    for (long g = 0; g < group; ++g) {
      for (long pair = 0; pair < dim_ / 2; ++pair) {
        __builtin_memcpy(&pairs_[pair * 16 + g], q + g * dim_ + 2 * pair, sizeof(uint32_t));
      }
    }
  }

  void scores(const PagedCache& cache, const Chunk<bf16>& chunk, const Chunk<bf16>& next,
              float* scores) const {
    // The first key may lie inside a tile: then the tile starts earlier, and its first scores are dropped.
    const long skip = chunk.begin % 16, tiles = (skip + chunk.count + 15) / 16;
    alignas(64) float products[(kChunk / 16 + 1) * 256];
    for (long tile = 0; tile < tiles; tile += 4) {
      for (long i = tile; i < tile + 4 && i < tiles; ++i) {
        for (long j = i * 16; j < i * 16 + 16; ++j) next.prefetch_key(j, dim_);
      }
      four_tiles(cache, chunk, tile, tiles, skip, products + tile * 256);
    }
    for (long tile = 0; tile < tiles; ++tile) {
      // Lanes that are wanted: from the first key on, and not past the count (the next head's line follows).
      const long at = tile * 16 - skip, drop = at < 0 ? skip : 0, last = chunk.count - at;
      const unsigned wanted = (0xffffU << drop) & (last < 16 ? (1U << last) - 1U : 0xffffU);
      for (long g = 0; g < group_; ++g) {
        const __m512 line = _mm512_i32gather_ps(rows_of_tile(), products + tile * 256 + g, 4);
        _mm512_mask_compressstoreu_ps(scores + g * kChunk + at + drop, static_cast<__mmask16>(wanted), line);
      }
    }
  }

 private:
  static __m512i rows_of_tile() {
    return _mm512_mullo_epi32(_mm512_cvtps_epi32((__m512)lane_numbers()), _mm512_set1_epi32(16));
  }

  // Four independent products, to hide the latency of each.
  void four_tiles(const PagedCache& cache, const Chunk<bf16>& chunk, long tile, long tiles, long skip,
                  float* products) const {
    const bf16* keys[4];
    for (long i = 0; i < 4; ++i) {
      const long at = (tile + i < tiles ? tile + i : tile) * 16 - skip;
      keys[i] = at >= 0 ? chunk.keys[at] : chunk.keys[0] - skip * cache.k_token_stride;
    }
    before_tile_loads();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long d = 0; d < dim_; d += 32) {
      _tile_loadd(6, pairs_ + d * 8, 64);
      _tile_loadd(4, keys[0] + d, cache.k_token_stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, keys[1] + d, cache.k_token_stride * 2);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, keys[2] + d, cache.k_token_stride * 2);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, keys[3] + d, cache.k_token_stride * 2);
      _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, products, 64);
    if (tile + 1 < tiles) _tile_stored(1, products + 256, 64);
    if (tile + 2 < tiles) _tile_stored(2, products + 512, 64);
    if (tile + 3 < tiles) _tile_stored(3, products + 768, 64);
  }

  long group_ = 0, dim_;
  alignas(64) uint32_t pairs_[kMaxHeadDim / 2 * 16];
};
#endif

}  // namespace qt::QT_ISA
