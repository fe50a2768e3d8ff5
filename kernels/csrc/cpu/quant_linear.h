// Linear layers over weights that stay quantised in memory: 8 bits, or 4 bits with a minimum, in groups of 32
// input features. At one row the bytes read are the time.
//
// The layout is that of tile_linear.h with another step. A step (32 features x 32 columns = 32 groups) holds
// the numbers q of its two tiles, then 32 scales d and, with 4 bits, 32 minima m, in float16; a weight is d q
// or d q + m (the formats that GGML calls Q8_0 and Q4_1; what was dequantised from them packs to the same
// numbers).
//   8 bits: a tile is [16 pairs][16 columns][2] signed bytes.
//   4 bits: a tile is [2 halves of the columns][2 halves of the pairs][8 columns][2] 32-bit words; nibble i
//   of a word
//           belongs to pair i of its half.
#pragma once

#include "tile_linear.h"

namespace qt {

enum class Quant : int { kInt8 = 0, kInt4 = 1 };

inline constexpr long kStepBytes[] = {1024 + 64, 512 + 128};

struct QuantPackArgs {
  DType dtype;
  const void* weight;  // [n, k], rows contiguous
  void* packed;
  long n, k, stride;
};

// These need Isa::kAmx. In `unpack_quant_rows` the output is bfloat16.
void pack_quant(Quant format, const QuantPackArgs& a);
void unpack_quant_rows(Quant format, const int64_t* ids, const void* packed, bf16* out, long count, long k,
                       long table_rows);
void quant_linear(Quant format, const TileLinearArgs& a);

}  // namespace qt
