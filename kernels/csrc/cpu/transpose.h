// Transposition of a 16 x 16 block of 32-bit elements in registers.
#pragma once

#include <immintrin.h>

#ifndef QT_ISA
#error "compile with -DQT_ISA=<level>"
#endif

namespace qt::QT_ISA {

static inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]),
                  d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c);
    t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d);
    t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  // t[4 g + c] holds column c of each 128-bit quarter, for rows 4 g to 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x88);
    const __m512i low23 = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xdd);
    const __m512i high23 = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xdd);
    r[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    r[4 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    r[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}

}  // namespace qt::QT_ISA
