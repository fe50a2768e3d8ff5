// Packing bfloat16 weights into tiles, and reading rows back (the embedding of tied weights).

#include <immintrin.h>

#include "parallel.h"
#include "simd.h"
#include "tile_linear.h"
#include "transpose.h"

namespace qt {
namespace {

constexpr long kStepSize = kPanelColumns * kStepFeatures;

}  // namespace

void pack_tiles(const PackArgs& a) {
  const long panels = (a.n + kPanelColumns - 1) / kPanelColumns, steps = a.k / kStepFeatures;
  for (long tile = 0; tile < 2 * panels; ++tile) {
    const long first = tile * 16;
    bf16* out = a.packed + tile / 2 * steps * kStepSize + tile % 2 * 512;
    for (long step = 0; step < steps; ++step, out += kStepSize) {
      __m512i rows[16];
      for (long i = 0; i < 16; ++i) {
        rows[i] = first + i < a.n
                      ? _mm512_loadu_si512(a.weight + (first + i) * a.stride + step * kStepFeatures)
                      : _mm512_setzero_si512();
      }
      QT_ISA::transpose16(rows);
      for (long i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 32, rows[i]);
    }
  }
}

void unpack_rows(const UnpackRowsArgs& a) {
  const long steps = a.k / kStepFeatures;
  parallel(threads_for(a.count * a.k * 32), [&](int thread, int threads) {
    const Range mine = share(a.count, thread, threads);
    for (long i = mine.begin; i < mine.end; ++i) {
      const long id = a.ids[i];
      if (id < 0 || id >= a.table_rows) {
        __builtin_memset(static_cast<void*>(a.out + i * a.k), 0, static_cast<size_t>(a.k) * sizeof(bf16));
        continue;
      }
      const bf16* in =
          a.packed + id / kPanelColumns * steps * kStepSize + id % kPanelColumns / 16 * 512 + id % 16 * 2;
      bf16* out = a.out + i * a.k;
      for (long step = 0; step < steps; ++step, in += kStepSize, out += kStepFeatures) {
        for (long pair = 0; pair < 16; ++pair) __builtin_memcpy(out + pair * 2, in + pair * 32, 4);
      }
    }
  });
}

}  // namespace qt
