// Linear layers of few rows over a plain row-major weight: each weight row is read once, in order, and dotted
// with every row of x. The time is that of reading the weight.

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace qt::QT_ISA {
namespace {

template <class T>
void write_out(const StreamLinearArgs& a, long row, long column, float value) {
  if (a.bias != nullptr) value += to_float(static_cast<const T*>(a.bias)[column]);
  if (a.out_dtype == DType::kFloat32) {
    put(static_cast<float*>(a.out) + row * a.n + column, value);
  } else {
    put(static_cast<bf16*>(a.out) + row * a.n + column, value);
  }
}

// Two weight rows by kRows rows of x.
template <class T, int kRows>
void dot_block(const StreamLinearArgs& a, long row, long column) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* w = static_cast<const T*>(a.weight) + column * a.weight_stride;
  const long w2 = column + 1 < a.n ? a.weight_stride : 0;
  // Even and odd steps go to sums of their own: with few rows the adder's latency would be the limit.
  constexpr int kChains = kRows <= 2 ? 2 : 1;
  vf sums[kChains][2][kRows] = {};
  long i = 0;
  for (; i + kChains * kLanes <= a.k; i += kChains * kLanes) {
    for (int chain = 0; chain < kChains; ++chain) {
      const long j = i + chain * kLanes;
      __builtin_prefetch(w + j + 2 * a.weight_stride);
      __builtin_prefetch(w + j + w2 + 2 * a.weight_stride);
      const vf first = load(w + j), second = load(w + w2 + j);
      for (int r = 0; r < kRows; ++r) {
        const vf value = load(x + r * a.x_stride + j);
        sums[chain][0][r] += first * value;
        sums[chain][1][r] += second * value;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    vf total[2] = {sums[0][0][r], sums[0][1][r]};
    for (int chain = 1; chain < kChains; ++chain) {
      total[0] += sums[chain][0][r];
      total[1] += sums[chain][1][r];
    }
    float first = sum(total[0]), second = sum(total[1]);
    for (long j = i; j < a.k; ++j) {
      const float value = to_float(x[r * a.x_stride + j]);
      first += to_float(w[j]) * value;
      second += to_float(w[w2 + j]) * value;
    }
    write_out<T>(a, row + r, column, first);
    if (w2 != 0) write_out<T>(a, row + r, column + 1, second);
  }
}

template <class T>
void stream_typed(const StreamLinearArgs& a) {
  const long pairs = (a.n + 1) / 2;
  parallel(threads_for(a.n * a.k * static_cast<long>(sizeof(T))), [&](int thread, int threads) {
    const Range columns = share(pairs, thread, threads);
    for (long pair = columns.begin; pair < columns.end; ++pair) {
      long row = 0;
      for (; row + 4 <= a.rows; row += 4) dot_block<T, 4>(a, row, 2 * pair);
      if (a.rows - row == 3) dot_block<T, 3>(a, row, 2 * pair);
      if (a.rows - row == 2) dot_block<T, 2>(a, row, 2 * pair);
      if (a.rows - row == 1) dot_block<T, 1>(a, row, 2 * pair);
    }
  });
}

}  // namespace

void stream_linear(const StreamLinearArgs& a) {
  if (a.dtype == DType::kFloat32) {
    stream_typed<float>(a);
  } else {
    stream_typed<bf16>(a);
  }
}

}  // namespace qt::QT_ISA
