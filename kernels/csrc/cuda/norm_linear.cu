// Products of very few rows that norm their rows themselves, and products that add their result to the
// residual stream.
#include "few_rows_launch.cuh"

// As quickturn_linear_few_rows with rms_norm(x) for x: norm_weight [columns], float32 if `wide_norm`. Columns
// and x_pitch are multiples of 8, columns at most 4,096, rows at most 4, pointers 16-byte aligned.
extern "C" int quickturn_norm_linear(const void* x, long long x_pitch, const void* norm_weight, int wide_norm,
                                     float eps, const void* weight, const void* bias, void* out, int rows,
                                     int features, int columns, int gated, int wide, const LinearPlan* plan,
                                     void* stream) {
  using namespace quickturn;
  constexpr Fold kFold = Fold::kNorm;
  if (rows > kNormRows || columns > kNormColumns || columns % kChunkColumns || x_pitch % kChunkColumns)
    return cudaErrorInvalidValue;
  Launch launch;
  if (!arrange(launch, {weight, bias, out, rows, features, columns, gated != 0, wide != 0}, *plan, 0))
    return cudaErrorInvalidValue;
  Source<kFold> source;
  source.x.rows = static_cast<const uint4*>(x);
  source.x.weight = norm_weight;
  source.x.pitch = x_pitch / kChunkColumns;
  source.x.vectors = columns / kChunkColumns;
  source.x.bytes = operand_bytes(chunk_pitch(rows), launch.slices);
  source.x.eps = eps;
  source.x.wide = wide_norm != 0;
  launch.shared += source.x.bytes;
  return start(launch, source, pick<kFold, 8>(plan->tile_rows), *plan, stream);
}

// residual += x W^T + bias, in place, both rounded. x: [rows, columns], residual: [rows, features], bfloat16,
// pitches in elements; features and residual_pitch are multiples of 4, residual 8-byte aligned. Rows: at
// most 8.
extern "C" int quickturn_linear_add(const void* x, long long x_pitch, const void* weight, const void* bias,
                                    void* residual, long long residual_pitch, int rows, int features,
                                    int columns, const LinearPlan* plan, void* stream) {
  using namespace quickturn;
  constexpr Fold kFold = Fold::kAdd;
  if (rows > 8 || features % 4 || residual_pitch % 4) return cudaErrorInvalidValue;
  Launch launch;
  Source<kFold> source;
  if (!arrange(launch, {weight, bias, nullptr, rows, features, columns, false, false}, *plan, 8) ||
      !encode_map(source.x, x, rows, columns, x_pitch, 8, kSwizzled))
    return cudaErrorInvalidValue;
  source.residual = static_cast<bf16*>(residual);
  source.residual_pitch = residual_pitch;
  return start(launch, source, pick<kFold, 8>(plan->tile_rows), *plan, stream);
}
