// The first largest element of a row.
#pragma once

#include "simd.h"

namespace qt::QT_ISA {

// -1 where there is a NaN or the largest is not finite.
template <class T>
static inline int64_t argmax_row(const T* x, long size) {
  // A vector pass finds the largest value, a second one its first position; the row is in the cache by then.
  const float infinity = __builtin_inff();
  vf best[2] = {splat(-infinity), splat(-infinity)};
  vi nan{};
  long i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const vf first = load(x + i), second = load(x + i + kLanes);
    nan |= (first != first) | (second != second);
    best[0] = max(first, best[0]);
    best[1] = max(second, best[1]);
  }
  float peak = largest(max(best[0], best[1]));
  bool bad = any(nan);
  for (; i < size; ++i) {
    const float value = to_float(x[i]);
    bad |= value != value;
    peak = value > peak ? value : peak;
  }
  if (bad || peak == infinity || peak == -infinity) return -1;
  constexpr long kBlock = 8 * kLanes;
  for (i = 0; i + kBlock <= size; i += kBlock) {
    vi hits{};
    for (long j = 0; j < kBlock; j += kLanes) hits |= load(x + i + j) == peak;
    if (any(hits)) break;
  }
  while (to_float(x[i]) != peak) ++i;
  return i;
}

}  // namespace qt::QT_ISA
