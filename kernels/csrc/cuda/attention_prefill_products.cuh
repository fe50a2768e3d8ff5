// Warpgroup products of attention: scores from two operands in shared memory, and outputs from weights in
// registers and values that lie key by key (the transposed operand).
#pragma once
#include "hopper.cuh"

namespace quickturn {

// Descriptor of an operand of [depth, columns] whose columns are contiguous: slices of 64 columns, each with
// 128 bytes a row, swizzled in groups of eight rows; `slice` bytes from one slice to the next.
__device__ __forceinline__ uint64_t transposed_operand(uint32_t address, uint32_t slice) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(slice >> 4) << 16) |
         (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 62);
}

// The descriptor of what lies `bytes` further, a multiple of 16.
__device__ __forceinline__ uint64_t further(uint64_t operand, int bytes) {
  const uint32_t low = static_cast<uint32_t>(operand) + static_cast<uint32_t>(bytes >> 4);
  return (operand & 0xFFFFFFFF00000000ull) | low;
}

// Tells the compiler that a value is the same in the whole warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// Keeps the compiler from moving uses of registers that products write across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define QT_LIST_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QT_LIST_40 \
  QT_LIST_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define QT_LIST_48 \
  QT_LIST_40 ", " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define QT_LIST_64 \
  QT_LIST_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QT_LIST_128 \
  QT_LIST_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" ", " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define QT_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                 "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define QT_D32(i) QT_D8(i), QT_D8(i + 8), QT_D8(i + 16), QT_D8(i + 24)
#define QT_BOUND_32 QT_D32(0)
#define QT_BOUND_40 QT_D32(0), QT_D8(32)
#define QT_BOUND_48 QT_D32(0), QT_D8(32), QT_D8(40)
#define QT_BOUND_64 QT_D32(0), QT_D32(32)
#define QT_BOUND_128 QT_D32(0), QT_D32(32), QT_D32(64), QT_D32(96)
// clang-format on

// d[64, kColumns] (+)= a[64, 16] b[kColumns, 16]^T, both in shared memory; `add` 0 starts from zero.
template <int kColumns, bool kHalf>
struct ScoreProduct;

// d[64, kColumns] (+)= a[64, 16] b[16, kColumns], a in registers, b by `transposed_operand`.
template <int kColumns, bool kHalf>
struct OutputProduct;

#define QT_SCORES(COLUMNS, COUNT, HALF, TYPE, A, B, P)                                                      \
  template <>                                                                                               \
  struct ScoreProduct<COLUMNS, HALF> {                                                                      \
    static __device__ __forceinline__ void run(float (&d)[COUNT], uint64_t a, uint64_t b, int add) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                   "k16.f32." TYPE "." TYPE " {" QT_LIST_##COUNT "}, " A ", " B ", p, 1, 1, 0, 0;\n}\n"     \
                   : QT_BOUND_##COUNT                                                                       \
                   : "l"(a), "l"(b), "r"(add));                                                             \
    }                                                                                                       \
  };

#define QT_OUTPUTS(COLUMNS, COUNT, HALF, TYPE, A, B, P)                                                     \
  template <>                                                                                               \
  struct OutputProduct<COLUMNS, HALF> {                                                                     \
    static __device__ __forceinline__ void run(float (&d)[COUNT], const uint32_t* a, uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                   "k16.f32." TYPE "." TYPE " {" QT_LIST_##COUNT "}, {" A "}, " B ", p, 1, 1, 1;\n}\n"      \
                   : QT_BOUND_##COUNT                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                         \
    }                                                                                                       \
  };

#define QT_BOTH_TYPES(WHAT, COLUMNS, COUNT, ...)   \
  WHAT(COLUMNS, COUNT, false, "bf16", __VA_ARGS__) \
  WHAT(COLUMNS, COUNT, true, "f16", __VA_ARGS__)

QT_BOTH_TYPES(QT_SCORES, 64, 32, "%32", "%33", "%34")
QT_BOTH_TYPES(QT_SCORES, 80, 40, "%40", "%41", "%42")
QT_BOTH_TYPES(QT_SCORES, 96, 48, "%48", "%49", "%50")
QT_BOTH_TYPES(QT_SCORES, 128, 64, "%64", "%65", "%66")
QT_BOTH_TYPES(QT_OUTPUTS, 64, 32, "%32, %33, %34, %35", "%36", "%37")
QT_BOTH_TYPES(QT_OUTPUTS, 128, 64, "%64, %65, %66, %67", "%68", "%69")
QT_BOTH_TYPES(QT_OUTPUTS, 256, 128, "%128, %129, %130, %131", "%132", "%133")

#undef QT_BOTH_TYPES
#undef QT_OUTPUTS
#undef QT_SCORES

}  // namespace quickturn
