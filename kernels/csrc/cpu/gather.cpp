// Rows of a table by id, and the index of the largest element of a row.

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace qt::QT_ISA {
namespace {

template <class T>
int64_t argmax_row(const T* x, long size) {
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

template <class T>
void argmax_typed(const ArgmaxArgs& a) {
  parallel(threads_for(a.rows * a.size * static_cast<long>(sizeof(T))), [&](int thread, int threads) {
    const Range rows = share(a.rows, thread, threads);
    for (long row = rows.begin; row < rows.end; ++row) {
      a.out[row] = argmax_row(static_cast<const T*>(a.x) + row * a.x_stride, a.size);
    }
  });
}

}  // namespace

void argmax(const ArgmaxArgs& a) {
  if (a.dtype == DType::kFloat32) {
    argmax_typed<float>(a);
  } else {
    argmax_typed<bf16>(a);
  }
}

void gather_rows(const GatherArgs& a) {
  parallel(threads_for(a.count * a.row_bytes), [&](int thread, int threads) {
    const Range ids = share(a.count, thread, threads);
    for (long i = ids.begin; i < ids.end; ++i) {
      char* out = static_cast<char*>(a.out) + i * a.row_bytes;
      if (a.ids[i] < 0 || a.ids[i] >= a.table_rows) {
        __builtin_memset(out, 0, static_cast<size_t>(a.row_bytes));
      } else {
        __builtin_memcpy(out, static_cast<const char*>(a.table) + a.ids[i] * a.row_bytes,
                         static_cast<size_t>(a.row_bytes));
      }
    }
  });
}

}  // namespace qt::QT_ISA
