// Products of up to 8 rows that norm their rows themselves, or add their result to the residual stream: so
// that a decode step of few rows has no kernels for norms.
#include "few_rows_launch.cuh"

// As quickturn_linear_few_rows with x = rms_norm(residual + branch): residual, branch (or null) [rows,
// columns] bfloat16, pitches in elements, multiples of 8; norm_weight [columns], float32 if `wide_norm`.
// Columns are a multiple of 8, at most 8,192; rows at most 8; pointers 16-byte aligned. `chunk_pitch`: see
// operand_layout.h; odd and at least `rows`, or 0.
extern "C" int quickturn_norm_linear(const void* residual, long long residual_pitch, const void* branch,
                                     long long branch_pitch, const void* norm_weight, int wide_norm,
                                     float eps, int chunk_pitch, const void* weight, const void* bias,
                                     void* out, int rows, int features, int columns, int gated, int wide,
                                     const LinearPlan* plan, void* stream) {
  using namespace quickturn;
  constexpr Fold kFold = Fold::kNorm;
  if (rows > kNormRows || columns % kChunkColumns || columns > kMaxVirtualWarps * 64 * kChunkColumns ||
      residual_pitch % kChunkColumns || branch_pitch % kChunkColumns ||
      (chunk_pitch != 0 && (chunk_pitch < rows || chunk_pitch % 2 == 0)))
    return cudaErrorInvalidValue;
  Launch launch;
  if (!arrange(launch, {weight, bias, out, rows, features, columns, gated != 0, wide != 0}, *plan, 0))
    return cudaErrorInvalidValue;
  Source<kFold> source;
  NormSource& x = source.x;
  x.residual = static_cast<const uint4*>(residual);
  x.branch = static_cast<const uint4*>(branch);
  x.weight = norm_weight;
  x.residual_pitch = residual_pitch / kChunkColumns;
  x.branch_pitch = branch_pitch / kChunkColumns;
  x.vectors = columns / kChunkColumns;
  x.pitch = chunk_pitch;
  x.bytes = (operand_bytes(chunk_pitch, launch.slices) + 1023) / 1024 * 1024;
  x.eps = eps;
  x.wide = wide_norm != 0;
  launch.shared += x.bytes;
  return start(launch, source, pick<kFold, 8>(plan->tile_rows), *plan, stream);
}

// residual += branch; residual += x W^T + bias, in place and rounded each time, as is the product. x: [rows,
// columns], residual, branch (or null): [rows, features], bfloat16, pitches in elements; features and the
// pitches of residual and branch are multiples of 4, their pointers 8-byte aligned. Rows: at most 8.
extern "C" int quickturn_linear_add(const void* x, long long x_pitch, const void* weight, const void* bias,
                                    void* residual, long long residual_pitch, const void* branch,
                                    long long branch_pitch, int rows, int features, int columns,
                                    const LinearPlan* plan, void* stream) {
  using namespace quickturn;
  constexpr Fold kFold = Fold::kAdd;
  if (rows > 8 || features % 4 || residual_pitch % 4 || branch_pitch % 4) return cudaErrorInvalidValue;
  Launch launch;
  Source<kFold> source;
  if (!arrange(launch, {weight, bias, nullptr, rows, features, columns, false, false}, *plan, 8) ||
      !encode_map(source.x, x, rows, columns, x_pitch, 8, kSwizzled))
    return cudaErrorInvalidValue;
  source.residual = static_cast<bf16*>(residual);
  source.branch = static_cast<const bf16*>(branch);
  source.residual_pitch = residual_pitch;
  source.branch_pitch = branch_pitch;
  return start(launch, source, pick<kFold, 8>(plan->tile_rows), *plan, stream);
}
