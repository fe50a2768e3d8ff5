// silu(gate) * up over rows that hold the gate and then the up projection.

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace qt::QT_ISA {
namespace {

template <class T>
void silu_row(const T* gate, const T* up, T* out, long size) {
  long i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const vf g = load(gate + i);
    store(out + i, round_to(g / (1.0F + exp(-g)), gate) * load(up + i));
  }
  for (; i < size; ++i) {
    const float g = to_float(gate[i]);
    put(out + i, round_to(g / (1.0F + exp(splat(-g))[0]), gate) * to_float(up[i]));
  }
}

template <class T>
void silu_typed(const SiluArgs& a) {
  const long bytes = a.rows * a.size * 3 * static_cast<long>(sizeof(T));
  parallel(threads_for(bytes), [&](int thread, int threads) {
    const Range rows = share(a.rows, thread, threads);
    for (long row = rows.begin; row < rows.end; ++row) {
      const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
      silu_row(gate, gate + a.size, static_cast<T*>(a.out) + row * a.size, a.size);
    }
  });
}

}  // namespace

void silu_and_mul(const SiluArgs& a) {
  if (a.dtype == DType::kFloat32) {
    silu_typed<float>(a);
  } else {
    silu_typed<bf16>(a);
  }
}

}  // namespace qt::QT_ISA
