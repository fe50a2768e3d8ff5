// RMS norm of bfloat16 rows, with the residual addition ahead of it: one block a row, the row held in
// registers. It exists beside the portable one for dependent launch: it lets the matrix product behind it
// start streaming weights at once.
#include <cuda_runtime.h>

#include "dependent_launch.cuh"
#include "hopper.cuh"
#include "norm.cuh"

namespace quickturn {
namespace {

struct NormArguments {
  const uint4* x;
  uint4* residual;     // null: only the norm of x
  const void* weight;  // bfloat16, or float32
  uint4* out;
  long long x_pitch, residual_pitch;  // in vectors
  int vectors;                        // of a row
  float width, eps;
};

template <bool kWide>
__global__ void __launch_bounds__(1024) norm_row(const NormArguments args) {
  __shared__ float partial[32];
  let_dependents_start();
  NormedRow<kWide> normed;
  normed.load_weight(args.weight, args.vectors);
  wait_for_predecessors();
  const long long row = blockIdx.x;
  const uint4* x = args.x + row * args.x_pitch;
  uint4* residual = args.residual == nullptr ? nullptr : args.residual + row * args.residual_pitch;
  normed.run([x](int at, float(&value)[8]) { unpack(x[at], value); }, residual, args.out + row * args.vectors,
             partial, args.vectors, args.width, args.eps);
}

}  // namespace
}  // namespace quickturn

// x, residual: [rows, width] bfloat16, pitches in elements; residual null for the plain norm. weight [width]
// bfloat16, or float32 with `wide`; out [rows, width]. Width and pitches are multiples of 8, width at most
// 16,384, pointers 16-byte aligned. Returns a cudaError_t.
extern "C" int quickturn_rms_norm(const void* x, long long x_pitch, void* residual, long long residual_pitch,
                                  const void* weight, int wide, void* out, int rows, int width, float eps,
                                  int early, void* stream) {
  using namespace quickturn;
  if (width % 8 || x_pitch % 8 || residual_pitch % 8 || width > 8 * kMaxVectors * 1024)
    return cudaErrorInvalidValue;
  NormArguments args{static_cast<const uint4*>(x),
                     static_cast<uint4*>(residual),
                     weight,
                     static_cast<uint4*>(out),
                     x_pitch / 8,
                     residual_pitch / 8,
                     width / 8,
                     static_cast<float>(width),
                     eps};
  const auto kernel = wide ? norm_row<true> : norm_row<false>;
  const cudaError_t error = divide_memory(kernel);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, {dim3(rows), norm_threads(args.vectors)}, early, stream, args);
}
