// Vectors of the widest registers that a translation unit is compiled for.
//
// Every kernel file is compiled once a level (see CMakeLists.txt) with QT_ISA naming the level's namespace.
// All code of a level must live in that namespace and use no templates of the standard library: a shared
// inline function compiled for AVX-512 could otherwise be the copy that the linker keeps for every level.
#pragma once

#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "dtypes.h"

#ifndef QT_ISA
#error "compile with -DQT_ISA=<level>"
#endif

namespace qt::QT_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vu16 __attribute__((vector_size(kLanes * 2)));

// ---- scalars

static inline float to_float(float x) { return x; }

static inline float to_float(bf16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}

// Round to nearest even; NaN stays NaN.
static inline bf16 to_bf16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {static_cast<uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

static inline void put(float* p, float x) { *p = x; }
static inline void put(bf16* p, float x) { *p = to_bf16(x); }

static inline float round_to(float x, const float*) { return x; }
static inline float round_to(float x, const bf16*) { return to_float(to_bf16(x)); }

// ---- loads and stores

static inline vf splat(float x) { return vf{} + x; }

static inline vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

static inline vf load(const bf16* p) {
  vu16 half;
  __builtin_memcpy(&half, p, sizeof half);
  return (vf)(__builtin_convertvector(half, vu) << 16);
}

static inline void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }

static inline void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  __builtin_memcpy(p, &half, sizeof half);
#else
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const vu nan = (bits >> 16) | 0x40U;
  const vu result = (bits & 0x7fffffffU) > 0x7f800000U ? nan : rounded;
  const vu16 half = __builtin_convertvector(result, vu16);
  __builtin_memcpy(p, &half, sizeof half);
#endif
}

// The value that a store as the pointer's type and a load again would give.
static inline vf round_to(vf x, const float*) { return x; }
static inline vf round_to(vf x, const bf16*) {
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U;
  return (vf)((bits & 0x7fffffffU) > 0x7f800000U ? bits : rounded);
}

// ---- arithmetic

static inline vf max(vf a, vf b) { return a > b ? a : b; }
static inline vf min(vf a, vf b) { return a < b ? a : b; }

static inline float sum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
#endif
}

static inline float largest(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
#endif
}

static inline bool any(vi mask) {
  int32_t hit = 0;
  for (int i = 0; i < kLanes; ++i) hit |= mask[i];
  return hit != 0;
}

static inline vf lane_numbers() {
  vf x{};
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(i);
  return x;
}

// 2^x to a relative error of about 1e-7 (Taylor of degree 7 on [-1/2, 1/2]); 0 below 2^-126.
static inline vf exp2(vf x) {
  const vf clamped = min(max(x, splat(-127.0F)), splat(127.0F));
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const vf shifted = clamped + kMagic;
  const vf f = clamped - (shifted - kMagic);
  vf p = splat(1.5252734e-5F);
  p = p * f + 1.5403530e-4F;
  p = p * f + 1.3333558e-3F;
  p = p * f + 9.6181291e-3F;
  p = p * f + 5.5504109e-2F;
  p = p * f + 2.4022651e-1F;
  p = p * f + 6.9314718e-1F;
  p = p * f + 1.0F;
  const vi exponent = ((vi)shifted - 0x4b400000) << 23;
  const vf result = (vf)((vi)p + exponent);
  return x < -126.0F ? splat(0.0F) : result;
}

static inline vf exp(vf x) { return exp2(x * 1.44269504F); }

// log x of positive numbers above 2^-126, to about 1e-7: x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)),
// and log(1 + f) = f - f^2 / 2 + f^3 P(f), P of degree 7 fitted for the least relative error.
static inline vf log(vf x) {
  const vi bits = (vi)x;
  const vi exponent = (bits - 0x3f3504f3) >> 23;
  const vf f = (vf)(bits - (exponent << 23)) - 1.0F;
  vf p = splat(-7.6344237e-2F);
  p = p * f + 1.2761560e-1F;
  p = p * f - 1.3160202e-1F;
  p = p * f + 1.4201762e-1F;
  p = p * f - 1.6623355e-1F;
  p = p * f + 2.0001227e-1F;
  p = p * f - 2.5000823e-1F;
  p = p * f + 3.3333331e-1F;
  const vf square = f * f;
  return __builtin_convertvector(exponent, vf) * 6.9314718e-1F + (f + square * (p * f - 0.5F));
}

static inline vf tanh(vf x) { return 1.0F - 2.0F / (exp(2.0F * x) + 1.0F); }

}  // namespace qt::QT_ISA
