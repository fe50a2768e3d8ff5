// Root-mean-square norm, with or without a residual added first.

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace qt::QT_ISA {
namespace {

// Sum of squares of a row; with a residual, the row becomes residual + x (rounded to T), written to residual.
template <class T, bool kResidual>
float square_sum(const T* x, T* residual, long size) {
  vf sums[2] = {};
  long i = 0;
  for (int turn = 0; i + kLanes <= size; i += kLanes, turn ^= 1) {
    vf value = load(x + i);
    if constexpr (kResidual) {
      value = round_to(value + load(residual + i), x);
      store(residual + i, value);
    }
    sums[turn] += value * value;
  }
  float total = sum(sums[0] + sums[1]);
  for (; i < size; ++i) {
    float value = to_float(x[i]);
    if constexpr (kResidual) {
      value = round_to(value + to_float(residual[i]), x);
      put(residual + i, value);
    }
    total += value * value;
  }
  return total;
}

template <class T>
void scale_row(const T* x, const T* weight, T* out, long size, float factor) {
  long i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(out + i, round_to(load(x + i) * factor, x) * load(weight + i));
  for (; i < size; ++i) put(out + i, round_to(to_float(x[i]) * factor, x) * to_float(weight[i]));
}

template <class T>
void rms_norm_typed(const NormArgs& a) {
  const long row_bytes = a.size * static_cast<long>(sizeof(T)) * (a.residual == nullptr ? 2 : 4);
  parallel(threads_for(a.rows * row_bytes), [&](int thread, int threads) {
    const Range rows = share(a.rows, thread, threads);
    for (long row = rows.begin; row < rows.end; ++row) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      T* residual = a.residual == nullptr ? nullptr : static_cast<T*>(a.residual) + row * a.size;
      const float total = residual == nullptr ? square_sum<T, false>(x, residual, a.size)
                                              : square_sum<T, true>(x, residual, a.size);
      const float factor = 1.0F / __builtin_sqrtf(total / static_cast<float>(a.size) + a.eps);
      scale_row(residual == nullptr ? x : residual, static_cast<const T*>(a.weight),
                static_cast<T*>(a.out) + row * a.size, a.size, factor);
    }
  });
}

}  // namespace

void rms_norm(const NormArgs& a) {
  if (a.dtype == DType::kFloat32) {
    rms_norm_typed<float>(a);
  } else {
    rms_norm_typed<bf16>(a);
  }
}

}  // namespace qt::QT_ISA
