// The kernels' arguments, and the table of functions that every instruction-set level fills.
//
// Pointers are untyped where `dtype` names the element type. Strides are in elements. Nothing here checks
// shapes: Python does.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace qt {

struct NormArgs {
  DType dtype;
  const void* x;       // [rows, size]
  void* residual;      // [rows, size] contiguous or null: residual += x, and the sum is what is normed
  const void* weight;  // [size]
  void* out;           // [rows, size] contiguous
  long rows, size, x_stride;
  float eps;
};

struct SiluArgs {
  DType dtype;
  const void* x;  // [rows, 2 * size], the gate first
  void* out;      // [rows, size] contiguous
  long rows, size, x_stride;
};

struct PagedCache {
  void* k;  // [blocks, block_tokens, kv_heads, head_dim]
  void* v;
  long k_block_stride, v_block_stride, k_token_stride, v_token_stride;
  long block_tokens, kv_heads, head_dim;
};

struct RotaryArgs {
  DType dtype;
  void* q;  // [tokens, q_heads, head_dim], heads contiguous
  const void* k;
  const void* v;
  long q_stride, k_stride, v_stride;  // of a token
  const int64_t* positions;
  const float* cos_sin;  // [max_pos, rotary_dim]: half cosines, half sines
  long rotary_dim, cos_sin_stride;
  const int64_t* slots;
  const void* q_weight;  // [head_dim] or null
  const void* k_weight;
  float eps;
  long tokens, q_heads;
  PagedCache cache;
};

struct AttentionArgs {
  DType dtype;
  const void* q;  // [tokens, q_heads, head_dim], heads contiguous
  void* out;      // [tokens, q_heads, head_dim] contiguous
  long q_stride, q_heads;
  PagedCache cache;
  const int32_t* block_tables;
  long block_table_stride;
  const int32_t* query_start;  // [rows + 1]; null: one query a row
  const int32_t* context_lens;
  long rows, tokens;
  float scale, softcap;
  long window;         // 0: all
  const float* sinks;  // [q_heads] or null
};

struct GatherArgs {
  const int64_t* ids;
  const void* table;  // [vocabulary, row_bytes]
  void* out;
  long count, row_bytes, table_rows;  // ids outside the table give zeros
};

struct StreamLinearArgs {
  DType dtype;
  DType out_dtype;
  const void* x;       // [rows, k]
  const void* weight;  // [n, k], rows contiguous
  const void* bias;    // [n] of `dtype`, or null
  void* out;           // [rows, n] contiguous
  long rows, n, k, x_stride, weight_stride;
};

// The first largest element; -1 where there is a NaN or the largest is not finite.
struct ArgmaxArgs {
  DType dtype;
  const void* x;  // [rows, size]
  int64_t* out;
  long rows, size, x_stride;
};

// One token a row: the largest logit / temperature + noise (see ops/sampling/noise.py) among what the filters
// leave; of rows with a temperature under 1e-5 the first largest logit. -1 as for argmax.
struct DrawArgs {
  DType dtype;  // with filters float32 only
  const void* logits;
  long rows, size, stride;
  const float* temperature;
  const int32_t* top_k;  // the three filters, or null
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* positions;
  int64_t* out;
};

// The least of `size` logits that top-k, then top-p, then min-p keep; `peak` is the largest, all are finite
// or minus infinity. k 0, p 1 and m 0 are off.
float least_kept(const float* logits, long size, float peak, float temperature, int k, float p, float m);

struct Kernels {
  const char* name;
  void (*rms_norm)(const NormArgs&);
  void (*silu_and_mul)(const SiluArgs&);
  void (*rotary_cache_write)(const RotaryArgs&);
  void (*attention_decode)(const AttentionArgs&);
  void (*attention_prefill)(const AttentionArgs&);
  void (*gather_rows)(const GatherArgs&);
  void (*stream_linear)(const StreamLinearArgs&);
  void (*argmax)(const ArgmaxArgs&);
  void (*draw)(const DrawArgs&);
};

}  // namespace qt
