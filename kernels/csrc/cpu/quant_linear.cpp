// Linear layers over quantised weights. One row: numbers are widened to float32 and multiplied there,
// exactly, and a group's sum is scaled once. More rows: steps are dequantised to bfloat16 tiles in the L1
// cache, or for many rows whole panels in the L2 cache, and go through the matrix unit.

#include "quant_linear.h"

#include <cstdlib>

#include "tile_kernel.h"

namespace qt {
namespace QT_ISA {
namespace {

constexpr long kFewSteps = 4;  // dequantised at once for few rows: 8 KiB

__m512 load_halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Lanes of a vector of tile elements: 8 columns by 2 features. The 16 columns' numbers spread over two such
// vectors.
__m512 spread(__m512 columns, int half) {
  const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_ps(half == 0 ? low : _mm512_add_epi32(low, _mm512_set1_epi32(8)), columns);
}

__m512 sixteen_numbers() { return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

// A tile of one format: where its numbers and scales lie in a step, and its numbers as floats.
template <Quant kFormat>
struct Tile;

template <>
struct Tile<Quant::kInt8> {
  const uint8_t* numbers;
  __m512 scales;

  Tile(const uint8_t* step, long tile)
      : numbers(step + tile * 512), scales(load_halves(step + 1024 + tile * 32)) {}

  // 8 columns (half 0 or 1) of pair `pair`.
  __m512 floats(int pair, int half) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + pair * 32 + half * 16));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
};

template <>
struct Tile<Quant::kInt4> {
  __m512i words[4];
  __m512 scales, minima;

  Tile(const uint8_t* step, long tile)
      : scales(load_halves(step + 512 + tile * 32)), minima(load_halves(step + 576 + tile * 32)) {
    for (int i = 0; i < 4; ++i) words[i] = _mm512_loadu_si512(step + tile * 256 + i * 64);
  }

  // The shuffle looks at the low 4 bits of each word only, so that a shift selects the nibble.
  __m512 floats(int pair, int half) const {
    const __m512i shifted =
        _mm512_srli_epi32(words[half * 2 + pair / 8], static_cast<unsigned>(pair % 8 * 4));
    return _mm512_permutexvar_ps(shifted, sixteen_numbers());
  }
};

void prefetch_step(const uint8_t* step, long bytes) {
  for (long line = 0; line < bytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(step + line), _MM_HINT_T0);
}

// ---- one row

// The row of x in float32, and the sum of each group's features.
struct Row {
  const float* x;
  const float* sums;
};

template <Quant kFormat>
void panel_row(const TileLinearArgs& a, const Row& row, long panel, long steps) {
  constexpr long kBytes = kStepBytes[static_cast<int>(kFormat)];
  const uint8_t* step = static_cast<const uint8_t*>(a.weight) + panel * steps * kBytes;
  __m512 totals[2][2] = {}, offsets[2] = {};
  for (long s = 0; s < steps; ++s, step += kBytes) {
    prefetch_step(step + 4 * kBytes, kBytes);
    const double* pairs = reinterpret_cast<const double*>(row.x + s * kStepFeatures);
    for (int t = 0; t < 2; ++t) {
      const Tile<kFormat> tile(step, t);
      __m512 sums[2] = {};
#pragma GCC unroll 16
      for (int pair = 0; pair < 16; ++pair) {
        const __m512 x = _mm512_castpd_ps(_mm512_set1_pd(pairs[pair]));
        sums[0] = _mm512_fmadd_ps(tile.floats(pair, 0), x, sums[0]);
        sums[1] = _mm512_fmadd_ps(tile.floats(pair, 1), x, sums[1]);
      }
      totals[t][0] = _mm512_fmadd_ps(sums[0], spread(tile.scales, 0), totals[t][0]);
      totals[t][1] = _mm512_fmadd_ps(sums[1], spread(tile.scales, 1), totals[t][1]);
      if constexpr (kFormat == Quant::kInt4) {
        offsets[t] = _mm512_fmadd_ps(tile.minima, _mm512_set1_ps(row.sums[s]), offsets[t]);
      }
    }
  }
  for (long t = 0; t < 2; ++t) {
    const long column = panel * kPanelColumns + t * 16, left = a.n - column;
    if (left <= 0) break;
    // Columns are pairs of lanes of the two vectors: even lanes plus odd lanes.
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 total = _mm512_add_ps(_mm512_permutex2var_ps(totals[t][0], even, totals[t][1]),
                                       _mm512_permutex2var_ps(totals[t][0], odd, totals[t][1]));
    alignas(64) float out[16];
    _mm512_store_ps(out, _mm512_add_ps(total, offsets[t]));
    store_row(out, a, 0, column, left < 16 ? left : 16);
  }
}

template <Quant kFormat>
void one_row(const TileLinearArgs& a, Range panels) {
  const long steps = a.k / kStepFeatures;
  float* x = static_cast<float*>(
      std::aligned_alloc(64, static_cast<size_t>(a.k + (steps + 15) / 16 * 16) * sizeof(float)));
  float* sums = x + a.k;
  for (long s = 0; s < steps; ++s) {
    const vf low = load(a.x + s * kStepFeatures), high = load(a.x + s * kStepFeatures + 16);
    store(x + s * kStepFeatures, low);
    store(x + s * kStepFeatures + 16, high);
    sums[s] = sum(low + high);
  }
  for (long panel = panels.begin; panel < panels.end; ++panel) panel_row<kFormat>(a, {x, sums}, panel, steps);
  std::free(x);
}

// ---- more rows

template <Quant kFormat>
void dequantise(const uint8_t* step, bf16* out) {
  for (int t = 0; t < 2; ++t) {
    const Tile<kFormat> tile(step, t);
    const __m512 scales[2] = {spread(tile.scales, 0), spread(tile.scales, 1)};
    __m512 minima[2] = {};
    if constexpr (kFormat == Quant::kInt4) {
      minima[0] = spread(tile.minima, 0);
      minima[1] = spread(tile.minima, 1);
    }
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const __m512 low = _mm512_fmadd_ps(tile.floats(pair, 0), scales[0], minima[0]);
      const __m512 high = _mm512_fmadd_ps(tile.floats(pair, 1), scales[1], minima[1]);
      _mm512_store_si512(out + t * kTile + pair * 32, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

template <Quant kFormat>
void few_rows(const TileLinearArgs& a, Range panels) {
  constexpr long kBytes = kStepBytes[static_cast<int>(kFormat)];
  alignas(64) bf16 tiles[kFewSteps * 2 * kTile];
  const long steps = a.k / kStepFeatures;
  configure_rows(a.rows);
  for (long panel = panels.begin; panel < panels.end; ++panel) {
    const uint8_t* step = static_cast<const uint8_t*>(a.weight) + panel * steps * kBytes;
    clear_block(a.rows);
    for (long s = 0; s < steps; s += kFewSteps) {
      const long count = steps - s < kFewSteps ? steps - s : kFewSteps;
      for (long i = 0; i < count; ++i, step += kBytes) {
        prefetch_step(step + 2 * kFewSteps * kBytes, kBytes);
        dequantise<kFormat>(step, tiles + i * 2 * kTile);
      }
      before_tile_loads();
      multiply_steps<false>(a.x + s * kStepFeatures, a.x_stride, a.rows, tiles, count);
    }
    store_block(a, 0, a.rows, panel);
  }
  _tile_release();
}

template <Quant kFormat>
void linear(const TileLinearArgs& a) {
  constexpr long kBytes = kStepBytes[static_cast<int>(kFormat)];
  const long panels = (a.n + kPanelColumns - 1) / kPanelColumns, steps = a.k / kStepFeatures;
  parallel(threads_for(a.n * a.k), [&](int thread, int threads) {
    if (a.rows == 1) {
      one_row<kFormat>(a, share(panels, thread, threads));
    } else if (a.rows <= kBlockRows) {
      few_rows<kFormat>(a, share(panels, thread, threads));
    } else {
      auto* tiles =
          static_cast<bf16*>(std::aligned_alloc(64, static_cast<size_t>(steps * 2 * kTile) * sizeof(bf16)));
      many_rows<false>(a, thread, threads, [&](long panel) {
        const uint8_t* step = static_cast<const uint8_t*>(a.weight) + panel * steps * kBytes;
        for (long s = 0; s < steps; ++s) dequantise<kFormat>(step + s * kBytes, tiles + s * 2 * kTile);
        before_tile_loads();
        return tiles;
      });
      std::free(tiles);
    }
  });
}

}  // namespace
}  // namespace QT_ISA

void quant_linear(Quant format, const TileLinearArgs& a) {
  if (a.rows == 0) return;
  if (format == Quant::kInt8) {
    QT_ISA::linear<Quant::kInt8>(a);
  } else {
    QT_ISA::linear<Quant::kInt4>(a);
  }
}

}  // namespace qt
