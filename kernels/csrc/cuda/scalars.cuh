// The 16-bit floats as traits, and e4m3 bytes from and to them in registers.
#pragma once
#include <cstdint>

#include "hopper.cuh"
#include "warp_mma.cuh"

namespace quickturn {

// A 16-bit float type: its bits, conversions, and where the exponent and mantissa bits of an e4m3 byte go so
// that one multiplication by a power of two (`kLift`, twice) makes the value of them, subnormals included.
struct Bfloat {
  static constexpr bool kWide = true;            // float32's range
  static constexpr uint32_t kLift = 0x7B807B80;  // 2^120: the exponents' biases are 127 and 7
  static constexpr int kDown = 4;                // from the high byte of a half word
  static constexpr uint32_t kMask = 0x07F007F0;
  static __device__ __forceinline__ float widen(uint16_t bits) { return quickturn::widen(bits); }
  static __device__ __forceinline__ uint32_t narrow2(float low, float high) {
    return quickturn::narrow2(low, high);
  }
  static __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
    uint32_t product;
    // -0 as the addend: adding +0 would lose the sign of a zero.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
  }
};

struct Half {
  static constexpr bool kWide = false;
  static constexpr uint32_t kLift = 0x5C005C00;  // 2^8: the biases are 15 and 7
  static constexpr int kDown = 1;
  static constexpr uint32_t kMask = 0x3F803F80;
  static __device__ __forceinline__ float widen(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static __device__ __forceinline__ uint32_t narrow2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
  }
};

// Rounds to the type and back.
template <typename Type>
__device__ __forceinline__ float rounded_to(float value) {
  return Type::widen(static_cast<uint16_t>(Type::narrow2(value, 0.f)));
}

// `low` and `high` as e4m3 in two bytes, ties to even, out of range to the largest.
__device__ __forceinline__ uint16_t narrow_e4m3(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// Two e4m3 bytes as two halves.
__device__ __forceinline__ uint32_t widen_e4m3(uint16_t two) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
  return halves;
}

// c[16, 8] += a[16, 16] b[16, 8] in float32, of this type.
template <typename Type>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (Type::kWide) {
    multiply(c, a, b0, b1);
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Bytes 0 and 2 of four e4m3 values as two 16-bit floats, and bytes 1 and 3. NaN bytes become 480.
template <typename Type>
__device__ __forceinline__ uint32_t even_bytes(uint32_t four) {
  constexpr int kUp = 8 - Type::kDown;
  return Type::multiply2(((four << kUp) & Type::kMask) | ((four << 8) & 0x80008000u), Type::kLift);
}

template <typename Type>
__device__ __forceinline__ uint32_t odd_bytes(uint32_t four) {
  return Type::multiply2(((four >> Type::kDown) & Type::kMask) | (four & 0x80008000u), Type::kLift);
}

}  // namespace quickturn
