// Prefill attention in bfloat16 through AMX tiles.
#pragma once

#include "kernels.h"

#ifndef QT_ISA
#error "compile with -DQT_ISA=<level>"
#endif

namespace qt::QT_ISA {

// A tile takes 16 keys of one block and 32 elements of a head.
static inline bool prefill_tiles_fit(const PagedCache& cache) {
  return cache.head_dim % 32 == 0 && cache.block_tokens % 16 == 0;
}

void attention_prefill_tiles(const AttentionArgs& a);

}  // namespace qt::QT_ISA
