// Where the 16-byte chunks of a small right operand lie in shared memory, and how a product's descriptor
// finds them. Plain arithmetic, so that it can be checked without a GPU.
//
// A product of 16 columns of K reads, for each of its 8 rows, two chunks of 8 columns: 8 chunks that adjoin
// for the rows, and 8 more a given distance on. Chunk c of row r lies at (c * pitch + r) * 16: there is room
// for the rows of x alone, and what the product reads beyond them belongs to other chunks, or to nobody.
// Those columns of the result are nowhere used.
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
constexpr int kSliceChunks = 8;  // 64 columns

// Chunks from one chunk of a row to its next: odd, so that a row is written without bank conflicts.
QT_HOST_DEVICE int chunk_pitch(int rows) { return rows | 1; }

QT_HOST_DEVICE int chunk_place(int pitch, int row, int chunk) { return (chunk * pitch + row) * kChunkBytes; }

// Bytes that slices of 64 columns take, rounded up to what the ring behind them is aligned to.
QT_HOST_DEVICE int operand_bytes(int pitch, int slices) {
  return (slices * kSliceChunks * pitch * kChunkBytes + 1023) / 1024 * 1024;
}

// The descriptor, without a swizzle, of the 16 columns of the two chunks at `address` and behind it. The
// distance is the leading offset; with 8 rows the stride offset has no meaning.
QT_HOST_DEVICE uint64_t chunks_operand(uint32_t address, int pitch) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(pitch) << 16 |
         static_cast<uint64_t>(pitch) << 32;
}

// The order in which norm.cu sums a row: threads of `virtual_warps` warps, two vectors each, `warps` * 32
// vectors apart. Whoever sums in this order gets its bits.
QT_HOST_DEVICE int virtual_warps(int vectors) { return ((vectors + 1) / 2 + 31) / 32; }
QT_HOST_DEVICE int vector_of(int warp, int lane, int half, int warps) {
  return warp * 32 + lane + half * warps * 32;
}

}  // namespace quickturn
