// Linear layers over weights packed into AMX tiles.
//
// The packed layout of a weight [n, k], for every format: panels of 32 columns (rows of the weight), one
// after the other; a panel is k / 32 steps of 32 input features; a step is two right-hand tiles of 16
// columns. A bfloat16 tile is [16 pairs][16 columns][2]: 1 KiB. Missing columns of the last panel are zero. A
// thread that owns a range of panels reads one contiguous stream.
#pragma once

#include "dtypes.h"

namespace qt {

inline constexpr long kPanelColumns = 32;
inline constexpr long kStepFeatures = 32;

struct TileLinearArgs {
  DType out_dtype;
  const bf16* x;  // [rows, k]
  const void* weight;
  const bf16* bias;  // [n] or null
  void* out;         // [rows, n] contiguous
  long rows, n, k, x_stride;
};

struct PackArgs {
  const bf16* weight;  // [n, k], rows contiguous
  bf16* packed;
  long n, k, stride;
};

struct UnpackRowsArgs {
  const int64_t* ids;
  const bf16* packed;
  bf16* out;                  // [count, k]
  long count, k, table_rows;  // ids outside the table give zeros
};

// These need Isa::kAmx. Packing runs on the calling thread: loaders pack many weights at once.
void pack_tiles(const PackArgs& a);
void unpack_rows(const UnpackRowsArgs& a);
void tile_linear(const TileLinearArgs& a);

}  // namespace qt
