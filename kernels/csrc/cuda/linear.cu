// Products of few rows: out[M, N] = x[M, K] W[N, K]^T, with nothing folded in.
#include "few_rows_launch.cuh"

// x: [rows, columns] bfloat16, `x_pitch` elements apart. weight: [features (with `gated` 2 features),
// columns], rows adjoining. out: [rows, features], float32 if `wide`. Returns a cudaError_t; launches on
// `stream` and does not wait.
extern "C" int quickturn_linear_few_rows(const void* x, long long x_pitch, const void* weight,
                                         const void* bias, void* out, int rows, int features, int columns,
                                         int gated, int wide, const LinearPlan* plan, void* stream) {
  using namespace quickturn;
  constexpr Fold kFold = Fold::kNone;
  const int padded = padded_rows(rows);
  Launch launch;
  Source<kFold> source;
  if (!arrange(launch, {weight, bias, out, rows, features, columns, gated != 0, wide != 0}, *plan, padded) ||
      !encode_map(source.x, x, rows, columns, x_pitch, padded, kSwizzled))
    return cudaErrorInvalidValue;
  const Kernel<kFold> kernel = padded == 8    ? pick<kFold, 8>(plan->tile_rows)
                               : padded == 16 ? pick<kFold, 16>(plan->tile_rows)
                               : padded == 32 ? pick<kFold, 32>(plan->tile_rows)
                                              : pick<kFold, 64>(plan->tile_rows);
  return start(launch, source, kernel, *plan, stream);
}
