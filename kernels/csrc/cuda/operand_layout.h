// Where the 16-byte chunks of a small right operand lie in shared memory, in either of two layouts, and how
// a product's descriptor finds them. Plain arithmetic, so that it can be checked without a GPU.
//
// A product of 16 columns of K reads, for each of its 8 rows, two chunks of 8 columns. What it reads for rows
// beyond those of x is nowhere used, and may be anything.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define QT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define QT_HOST_DEVICE inline
#endif

namespace quickturn {

constexpr int kChunkBytes = 16;
constexpr int kChunkColumns = 8;
constexpr int kOperandRows = 8;
constexpr int kSliceChunks = 8;  // 64 columns, 128 bytes: the width of the swizzle

// `pitch`: chunks from one chunk of a row to its next; odd, so that a row is written without bank conflicts,
// and at least the rows. 0: slices of 8 rows in the copy engine's 128-byte swizzle.
//
// A chunk lies at chunk_place for row 0, and for any row at row_place of that.
QT_HOST_DEVICE int chunk_place(int pitch, int chunk) {
  if (pitch > 0) return chunk * pitch * kChunkBytes;
  return (chunk / kSliceChunks * kOperandRows * kSliceChunks + chunk % kSliceChunks) * kChunkBytes;
}
QT_HOST_DEVICE int row_place(int pitch, int place, int row) {
  if (pitch > 0) return place + row * kChunkBytes;
  return (place + row * kSliceChunks * kChunkBytes) ^ row * kChunkBytes;
}

// Bytes that slices of 64 columns take.
QT_HOST_DEVICE int operand_bytes(int pitch, int slices) {
  return slices * kSliceChunks * (pitch > 0 ? pitch : kOperandRows) * kChunkBytes;
}

// The descriptor less its address, and what a slice and a step of 16 columns add to it. Without the swizzle a
// product's two chunks lie the leading (and here, with 8 rows, also the stride) offset apart.
QT_HOST_DEVICE uint64_t operand_form(int pitch) {
  if (pitch > 0) return static_cast<uint64_t>(pitch) << 16 | static_cast<uint64_t>(pitch) << 32;
  return 1ull << 16 | 64ull << 32 | 1ull << 62;
}
QT_HOST_DEVICE int slice_step(int pitch) { return pitch > 0 ? kSliceChunks * pitch : 64; }
QT_HOST_DEVICE int product_step(int pitch) { return pitch > 0 ? 2 * pitch : 2; }

// The order in which norm.cu sums a row: threads of `virtual_warps` warps, two vectors each, `apart` of each
// other. Whoever sums in this order gets its bits.
QT_HOST_DEVICE int virtual_warps(int vectors) { return ((vectors + 1) / 2 + 31) / 32; }
QT_HOST_DEVICE int vector_of(int warp, int lane, int half, int warps) {
  return warp * 32 + lane + half * warps * 32;
}

}  // namespace quickturn
