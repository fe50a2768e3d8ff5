// Activations to e4m3 for the products of many rows: x / scale with scale = max |x| / 448, over 128 columns
// of a row or over a whole one. Within each 16 columns in the order of the weights (linear_fp8.cu).
#include <cuda_runtime.h>

#include "dependent_launch.cuh"
#include "scalars.cuh"

namespace quickturn {
namespace {

constexpr float kLargest = 448.f;
constexpr float kSmallest = 1e-12f;  // as in ops/linear/fp8.py
constexpr int kUnit = 16;            // columns of a thread
constexpr int kGroupThreads = 128 / kUnit;
constexpr int kThreads = 256;
constexpr int kRows = kThreads / kGroupThreads;  // of a block, where groups are scaled
constexpr int kMaxUnits = 4;                     // of a thread, where rows are

struct Arguments {
  const uint16_t* x;
  unsigned char* out;  // [padded rows, columns]
  float* scales;       // [groups, padded rows], or [padded rows]
  long long pitch;     // of x, in elements
  int rows, padded_rows, columns;
};

// 16 columns; rows that are only padding are zeros.
template <typename Type>
struct Unit {
  float value[kUnit];

  __device__ __forceinline__ void load(const Arguments& args, int row, int column) {
    uint4 half[2] = {};
    if (row < args.rows && column < args.columns) {
      const auto* from = reinterpret_cast<const uint4*>(args.x + row * args.pitch + column);
      half[0] = __ldcs(from);
      half[1] = __ldcs(from + 1);
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const uint4& part = half[i / 8];
      const uint32_t word = i / 2 % 4 == 0   ? part.x
                            : i / 2 % 4 == 1 ? part.y
                            : i / 2 % 4 == 2 ? part.z
                                             : part.w;
      value[i] = Type::widen(static_cast<uint16_t>(i % 2 ? word >> 16 : word));
    }
  }

  __device__ __forceinline__ float top() const {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) most = fmaxf(most, fabsf(value[i]));
    return most;
  }

  // Divided by `scale`, correctly rounded: many 16-bit values lie right between two e4m3 ones.
  __device__ __forceinline__ void store(const Arguments& args, int row, int column, float scale) const {
    if (row >= args.padded_rows || column >= args.columns) return;
    const float by = __frcp_rn(scale);
    const auto over = [&](float x) {
      const float quotient = x * by;
      return fmaf(fmaf(-quotient, scale, x), by, quotient);
    };
    uint32_t word[4];
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      const uint32_t low = narrow_e4m3(over(value[2 * quad]), over(value[2 * quad + 8]));
      const uint32_t high = narrow_e4m3(over(value[2 * quad + 1]), over(value[2 * quad + 9]));
      word[quad] = low | high << 16;
    }
    *reinterpret_cast<uint4*>(args.out + static_cast<long long>(row) * args.columns + column) =
        make_uint4(word[0], word[1], word[2], word[3]);
  }
};

template <typename Type>
__global__ void __launch_bounds__(kThreads) quantize_groups(const Arguments args) {
  let_dependents_start();
  wait_for_predecessors();
  const int row = blockIdx.y * kRows + threadIdx.x / kGroupThreads;
  const int column = blockIdx.x * 128 + threadIdx.x % kGroupThreads * kUnit;
  Unit<Type> unit;
  unit.load(args, row, column);
  float top = unit.top();
#pragma unroll
  for (int step = 1; step < kGroupThreads; step *= 2)
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
  top = fmaxf(top, kSmallest);
  unit.store(args, row, column, top / kLargest);
  if (threadIdx.x % kGroupThreads == 0 && row < args.padded_rows)
    args.scales[static_cast<long long>(blockIdx.x) * args.padded_rows + row] = top / kLargest;
}

template <typename Type>
__global__ void __launch_bounds__(kThreads) quantize_rows(const Arguments args) {
  let_dependents_start();
  wait_for_predecessors();
  __shared__ float tops[kThreads / 32];
  const int row = blockIdx.x;
  Unit<Type> unit[kMaxUnits];
  float top = kSmallest;
#pragma unroll
  for (int i = 0; i < kMaxUnits; ++i) {
    unit[i].load(args, row, (i * kThreads + threadIdx.x) * kUnit);
    top = fmaxf(top, unit[i].top());
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) top = fmaxf(top, tops[i]);
#pragma unroll
  for (int i = 0; i < kMaxUnits; ++i)
    unit[i].store(args, row, (i * kThreads + threadIdx.x) * kUnit, top / kLargest);
  if (threadIdx.x == 0) args.scales[row] = top / kLargest;
}

}  // namespace
}  // namespace quickturn

// x: [rows, columns] bfloat16 (`half`: float16), `pitch` elements apart and 16-byte aligned; columns a
// multiple of 16. out: [padded_rows, columns] e4m3, the rows past `rows` zeros. scales: float32 [columns /
// 128 rounded up, padded_rows], with `whole` one for each row, and at most 16,384 columns. Returns a
// cudaError_t.
extern "C" int quickturn_quantize(const void* x, long long pitch, void* out, void* scales, int rows,
                                  int padded_rows, int columns, int half, int whole, void* stream) {
  using namespace quickturn;
  if (rows < 1 || padded_rows < rows || columns < kUnit || columns % kUnit != 0 ||
      (whole && columns > kMaxUnits * kThreads * kUnit))
    return cudaErrorInvalidValue;
  const Arguments args{static_cast<const uint16_t*>(x),
                       static_cast<unsigned char*>(out),
                       static_cast<float*>(scales),
                       pitch,
                       rows,
                       padded_rows,
                       columns};
  const auto kernel = whole ? (half ? quantize_rows<Half> : quantize_rows<Bfloat>)
                            : (half ? quantize_groups<Half> : quantize_groups<Bfloat>);
  const dim3 blocks =
      whole ? dim3(padded_rows) : dim3((columns + 127) / 128, (padded_rows + kRows - 1) / kRows);
  return launch_dependent(kernel, {blocks, kThreads}, true, stream, args);
}
