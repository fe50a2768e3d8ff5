// RMS norm of bfloat16 rows, with the residual addition ahead of it: one block a row, the row held in
// registers. It exists beside the portable one for dependent launch: it lets the matrix product behind it
// start streaming weights at once.
#include <cuda_runtime.h>

#include "hopper.cuh"

namespace quickturn {
namespace {

constexpr int kMaxVectors = 2;  // of 8 elements, a thread

struct NormArguments {
  const uint4* x;
  uint4* residual;     // null: only the norm of x
  const void* weight;  // bfloat16, or float32
  uint4* out;
  long long x_pitch, residual_pitch;  // in vectors
  int vectors;                        // of a row
  float width, eps;
};

__device__ __forceinline__ void unpack(const uint4& packed, float (&value)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[2 * i] = __uint_as_float(words[i] << 16);
    value[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ uint4 pack(const float (&value)[8]) {
  return make_uint4(narrow2(value[0], value[1]), narrow2(value[2], value[3]), narrow2(value[4], value[5]),
                    narrow2(value[6], value[7]));
}

// Eight elements of the weight as they come: 16 bytes, or 32 with kWide.
template <bool kWide>
struct Factors {
  uint4 parts[kWide ? 2 : 1];

  __device__ __forceinline__ void load(const void* weight, int at) {
#pragma unroll
    for (int i = 0; i < (kWide ? 2 : 1); ++i)
      parts[i] = static_cast<const uint4*>(weight)[at * (kWide ? 2 : 1) + i];
  }

  // The normed values times the weight. A float32 weight multiplies before anything is rounded, one of
  // bfloat16 after.
  __device__ __forceinline__ void apply(float (&value)[8], float scale) const {
    if constexpr (kWide) {
      const uint32_t words[8] = {parts[0].x, parts[0].y, parts[0].z, parts[0].w,
                                 parts[1].x, parts[1].y, parts[1].z, parts[1].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] = value[i] * scale * __uint_as_float(words[i]);
    } else {
      float by[8];
      unpack(parts[0], by);
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] = rounded(value[i] * scale) * by[i];
    }
  }
};

template <bool kWide>
__global__ void __launch_bounds__(1024) norm_row(const NormArguments args) {
  __shared__ float partial[32];
  let_dependents_start();
  Factors<kWide> weight[kMaxVectors];
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at < args.vectors) weight[v].load(args.weight, at);
  }
  wait_for_predecessors();
  const long long row = blockIdx.x;
  float value[kMaxVectors][8];
  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= args.vectors) continue;
    unpack(args.x[row * args.x_pitch + at], value[v]);
    if (args.residual != nullptr) {
      uint4* kept = args.residual + row * args.residual_pitch + at;
      float before[8];
      unpack(*kept, before);
#pragma unroll
      for (int i = 0; i < 8; ++i) value[v][i] += before[i];
      const uint4 sum = pack(value[v]);
      *kept = sum;
      unpack(sum, value[v]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += value[v][i] * value[v][i];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
  const int warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = threadIdx.x % 32 < warps ? partial[threadIdx.x % 32] : 0.f;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
  const float scale = rsqrtf(squares / args.width + args.eps);
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= args.vectors) continue;
    weight[v].apply(value[v], scale);
    args.out[row * args.vectors + at] = pack(value[v]);
  }
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
  // As in linear.cu: a different division of the multiprocessor's memory would keep the product behind from
  // starting early.
  const auto kernel = wide ? norm_row<true> : norm_row<false>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                 cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(rows);
  const int threads = ((args.vectors + kMaxVectors - 1) / kMaxVectors + 31) / 32 * 32;
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}
