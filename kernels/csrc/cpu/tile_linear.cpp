// Linear layers in bfloat16 through AMX tiles, from one row (the time is that of reading the weight) to
// thousands.

#include "tile_linear.h"

#include "tile_kernel.h"

namespace qt {
namespace QT_ISA {
namespace {

// Rows that fit one pass: the panel streams from memory, and the tiles are configured once.
void few_rows(const TileLinearArgs& a, Range panels) {
  const long steps = a.k / kStepFeatures;
  configure_rows(a.rows);
  for (long panel = panels.begin; panel < panels.end; ++panel) {
    const bf16* in = static_cast<const bf16*>(a.weight) + panel * steps * 2 * kTile;
    clear_block(a.rows);
    multiply_steps<true>(a.x, a.x_stride, a.rows, in, steps);
    store_block(a, 0, a.rows, panel);
  }
  _tile_release();
}

}  // namespace
}  // namespace QT_ISA

void tile_linear(const TileLinearArgs& a) {
  using namespace QT_ISA;
  if (a.rows == 0) return;
  const long panels = (a.n + kPanelColumns - 1) / kPanelColumns, panel_size = a.k * kPanelColumns;
  parallel(threads_for(a.n * a.k * 2), [&](int thread, int threads) {
    if (a.rows <= kBlockRows) {
      few_rows(a, share(panels, thread, threads));
    } else {
      many_rows<true>(a, thread, threads,
                      [&](long panel) { return static_cast<const bf16*>(a.weight) + panel * panel_size; });
    }
  });
}

}  // namespace qt
