// Per-head norm (optional), neox-style rotary embedding, and the write of keys and values to the paged cache.

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace qt::QT_ISA {
namespace {

inline constexpr long kMaxHeadDim = 512;

// `x`, or its norm in `scratch` where there is a weight.
template <class T>
const T* norm_head(const T* x, const T* weight, long size, float eps, T* scratch) {
  if (weight == nullptr) return x;
  float total = 0;
  for (long i = 0; i < size; ++i) total += to_float(x[i]) * to_float(x[i]);
  const float factor = 1.0F / __builtin_sqrtf(total / static_cast<float>(size) + eps);
  for (long i = 0; i < size; ++i)
    put(scratch + i, round_to(to_float(x[i]) * factor, x) * to_float(weight[i]));
  return scratch;
}

// Rotates the first 2 * half elements of `x` into `out` (which may be `x`); the rest is copied.
template <class T>
void rotate_head(const T* x, T* out, const float* cosine, const float* sine, long half, long size) {
  long i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vf a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[half + i]);
    put(out + i, a * cosine[i] - b * sine[i]);
    put(out + half + i, b * cosine[i] + a * sine[i]);
  }
  if (out != x) {
    for (i = 2 * half; i < size; ++i) out[i] = x[i];
  }
}

template <class T>
void rotary_token(const RotaryArgs& a, long token) {
  const int64_t slot = a.slots[token];
  if (slot < 0) return;
  const PagedCache& cache = a.cache;
  const long dim = cache.head_dim, half = a.rotary_dim / 2;
  const float* cosine = a.cos_sin + a.positions[token] * a.cos_sin_stride;
  const float* sine = cosine + half;
  T scratch[kMaxHeadDim];
  T* q = static_cast<T*>(a.q) + token * a.q_stride;
  for (long head = 0; head < a.q_heads; ++head, q += dim) {
    const T* from = norm_head(q, static_cast<const T*>(a.q_weight), dim, a.eps, scratch);
    rotate_head(from, q, cosine, sine, half, dim);
  }
  const long block = slot / cache.block_tokens, offset = slot % cache.block_tokens;
  const T* k = static_cast<const T*>(a.k) + token * a.k_stride;
  T* k_out = static_cast<T*>(cache.k) + block * cache.k_block_stride + offset * cache.k_token_stride;
  for (long head = 0; head < cache.kv_heads; ++head, k += dim, k_out += dim) {
    const T* from = norm_head(k, static_cast<const T*>(a.k_weight), dim, a.eps, scratch);
    rotate_head(from, k_out, cosine, sine, half, dim);
  }
  const T* v = static_cast<const T*>(a.v) + token * a.v_stride;
  T* v_out = static_cast<T*>(cache.v) + block * cache.v_block_stride + offset * cache.v_token_stride;
  __builtin_memcpy(v_out, v, static_cast<size_t>(cache.kv_heads * dim) * sizeof(T));
}

template <class T>
void rotary_typed(const RotaryArgs& a) {
  const long heads = a.q_heads + 2 * a.cache.kv_heads;
  const long bytes = a.tokens * heads * a.cache.head_dim * static_cast<long>(sizeof(T));
  parallel(threads_for(bytes, 8192), [&](int thread, int threads) {
    const Range tokens = share(a.tokens, thread, threads);
    for (long token = tokens.begin; token < tokens.end; ++token) rotary_token<T>(a, token);
  });
}

}  // namespace

void rotary_cache_write(const RotaryArgs& a) {
  if (a.dtype == DType::kFloat32) {
    rotary_typed<float>(a);
  } else {
    rotary_typed<bf16>(a);
  }
}

}  // namespace qt::QT_ISA
