// AMX tile configuration. Register roles of every kernel here: 0-3 accumulators, 4-5 left, 6-7 right
// operands.
#pragma once

#include <immintrin.h>

#include <cstdint>

#ifndef QT_ISA
#error "compile with -DQT_ISA=<level>"
#endif

namespace qt::QT_ISA {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// GCC's tile intrinsics don't say that they read memory: without this between a store and the load of a tile,
// the store may come too late or be dropped. (Their load of a configuration has the same fault, so it is
// written out.)
static inline void before_tile_loads() { asm volatile("" ::: "memory"); }

// Left operands 4 and 5 have `rows0` and `rows1` rows of 32 bf16; accumulators 0, 1 belong to 4, and 2, 3
// to 5. Right operands have 16 rows of `columns` pairs.
static inline void configure_tiles(int rows0, int rows1, int columns) {
  TileConfig config;
  const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, 16, 16};
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<uint8_t>(rows[i]);
    const bool left = i == 4 || i == 5;
    config.column_bytes[i] = static_cast<uint16_t>(rows[i] == 0 ? 0 : (left ? 64 : columns * 4));
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

}  // namespace qt::QT_ISA
