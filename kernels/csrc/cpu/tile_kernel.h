// Products of rows of x with panels of tiles, and the stores of their results: shared by every weight format.
#pragma once

#include <immintrin.h>

#include "parallel.h"
#include "simd.h"
#include "tile_linear.h"
#include "tiles.h"

namespace qt::QT_ISA {

inline constexpr long kTile = 512;                // bf16 elements of a tile
inline constexpr long kBlockRows = 32;            // rows of x that one pass over a panel multiplies
inline constexpr long kRowBlockBytes = 1L << 20;  // of x, half of a core's L2, kept while the panels go by
inline constexpr long kPrefetchSteps = 4;         // 2 KiB each

static void clear_block(long rows) {
  _tile_zero(0);
  _tile_zero(1);
  if (rows > 16) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// Accumulators (up to 32 rows by 32 columns) += x times `steps` steps of tiles. kStream: the tiles come from
// memory.
template <bool kTwoRowTiles, bool kStream>
static void multiply_steps(const bf16* x, long x_stride, const bf16* tiles, long steps) {
  const bf16* x2 = x + 16 * x_stride;
  for (long step = 0; step < steps; ++step, tiles += 2 * kTile, x += kStepFeatures, x2 += kStepFeatures) {
    if constexpr (kStream) {
      const char* ahead = reinterpret_cast<const char*>(tiles + kPrefetchSteps * 2 * kTile);
      for (int line = 0; line < 32; ++line) _mm_prefetch(ahead + line * 64, _MM_HINT_T0);
    }
    _tile_loadd(6, tiles, 64);
    _tile_loadd(7, tiles + kTile, 64);
    _tile_loadd(4, x, x_stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoRowTiles) {
      _tile_loadd(5, x2, x_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

template <bool kStream>
static void multiply_steps(const bf16* x, long x_stride, long rows, const bf16* tiles, long steps) {
  if (rows > 16) {
    multiply_steps<true, kStream>(x, x_stride, tiles, steps);
  } else {
    multiply_steps<false, kStream>(x, x_stride, tiles, steps);
  }
}

// Tile shapes for `rows` rows, at most 32.
static void configure_rows(long rows) {
  configure_tiles(static_cast<int>(rows < 16 ? rows : 16), static_cast<int>(rows < 16 ? 0 : rows - 16), 16);
}

static void store_row(const float* sums, const TileLinearArgs& a, long row, long column, long count) {
  const __mmask16 wanted = static_cast<__mmask16>((1U << count) - 1U);
  __m512 value = _mm512_load_ps(sums);
  if (a.bias != nullptr) {
    const __m256i bias = _mm256_maskz_loadu_epi16(wanted, a.bias + column);
    value = _mm512_add_ps(value, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bias), 16));
  }
  if (a.out_dtype == DType::kFloat32) {
    _mm512_mask_storeu_ps(static_cast<float*>(a.out) + row * a.n + column, wanted, value);
  } else {
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(value);
    _mm256_mask_storeu_epi16(static_cast<bf16*>(a.out) + row * a.n + column, wanted, half);
  }
}

// The accumulators to rows [row, row + rows) and the columns of `panel`.
static void store_block(const TileLinearArgs& a, long row, long rows, long panel) {
  alignas(64) float sums[4][256];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if (rows > 16) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  for (long half = 0; half < 2; ++half) {
    const long column = panel * kPanelColumns + half * 16, left = a.n - column;
    if (left <= 0) break;
    for (long i = 0; i < rows; ++i) {
      store_row(sums[i / 16 * 2 + half] + i % 16 * 16, a, row + i, column, left < 16 ? left : 16);
    }
  }
}

// Rows [begin, end) by one panel: blocks of 32, then what is left with tiles of its own size. kStream: the
// panel comes from memory, and lies in the cache from the second block on.
template <bool kStream>
static void panel_rows(const TileLinearArgs& a, const bf16* in, long panel, Range rows, long steps) {
  for (long row = rows.begin; row < rows.end; row += kBlockRows) {
    const long count = rows.end - row < kBlockRows ? rows.end - row : kBlockRows;
    if (count < kBlockRows) configure_rows(count);
    clear_block(count);
    const bf16* x = a.x + row * a.x_stride;
    if (kStream && row == rows.begin) {
      multiply_steps<true>(x, a.x_stride, count, in, steps);
    } else {
      multiply_steps<false>(x, a.x_stride, count, in, steps);
    }
    store_block(a, row, count, panel);
    if (count < kBlockRows) configure_rows(kBlockRows);
  }
}

// Any number of rows. `source(panel)` gives a panel as bf16 tiles; it is asked once for each block of rows.
template <bool kStream, class Source>
static void many_rows(const TileLinearArgs& a, int thread, int threads, const Source& source) {
  const long steps = a.k / kStepFeatures, panels = (a.n + kPanelColumns - 1) / kPanelColumns;
  long block = kRowBlockBytes / (a.k * 2) / kBlockRows * kBlockRows;
  block = block < 4 * kBlockRows ? 4 * kBlockRows : block;
  const long blocks = (a.rows + block - 1) / block;
  configure_rows(kBlockRows);
  const Range mine = share(blocks * panels, thread, threads);
  for (long task = mine.begin; task < mine.end; ++task) {
    const Range rows =
        share(a.rows / 16 + (a.rows % 16 != 0), static_cast<int>(task / panels), static_cast<int>(blocks));
    const long end = rows.end * 16 < a.rows ? rows.end * 16 : a.rows;
    panel_rows<kStream>(a, source(task % panels), task % panels, {rows.begin * 16, end}, steps);
  }
  _tile_release();
}

}  // namespace qt::QT_ISA
