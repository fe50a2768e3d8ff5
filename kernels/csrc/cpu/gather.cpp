// Rows of a table by id, and the index of the largest element of a row.

#include "argmax_row.h"
#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace qt::QT_ISA {
namespace {

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
