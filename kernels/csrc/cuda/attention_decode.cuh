// Decode attention, the parts of a block: how work is cut, the online softmax of one warp, and the query's
// preparation. attention_decode.cu puts them together.
#pragma once
#include "hopper.cuh"
#include "warp_mma.cuh"

namespace quickturn {

constexpr int kTileKeys = 64;
constexpr int kWarps = 4;                      // that compute; one more requests the keys
constexpr int kWarpKeys = kTileKeys / kWarps;  // of a tile are one warp's
constexpr int kComputing = kWarps * 32;
constexpr int kQueryRows = 16;  // query heads of a kv head, padded
constexpr float kNone = -__builtin_huge_valf();

struct DecodeArguments {
  const bf16 *q, *k, *v;            // of this step; k and v only where it writes the cache
  const bf16 *q_weight, *k_weight;  // null: no norm of heads
  const float* cos_sin;
  bf16 *k_cache, *v_cache, *out;
  const int *tables, *lens;
  float *parts, *part_stats;  // [blocks * 2, group, head_dim], [blocks * 2, group, 2]
  int* arrived;               // [rows * kv_heads], zero before and after
  long long q_token_pitch, q_head_pitch, k_token_pitch, k_head_pitch, v_token_pitch, v_head_pitch;
  long long cos_sin_pitch, table_pitch;
  long long k_block_pitch, k_row_pitch, v_block_pitch, v_row_pitch;
  float scale_log2, eps;
  int rows, kv_heads, group, block_tokens, window, table_width, stages;
};

// Which stored keys a row sees: [oldest, stored); `tiles` from `first_tile` on. A row has one tile at least,
// if an empty one, so that somebody writes its result.
struct RowKeys {
  int oldest, stored, first_tile, tiles;
};

template <bool kFresh>
__device__ __forceinline__ RowKeys keys_of(int context, int window) {
  RowKeys keys;
  keys.stored = kFresh && context > 0 ? context - 1 : context;
  keys.oldest = window > 0 && context > window ? context - window : 0;
  if (keys.oldest >= keys.stored) keys.stored = 0;  // a window of one: only the fresh key
  keys.first_tile = keys.oldest / kTileKeys;
  const int tiles = (keys.stored + kTileKeys - 1) / kTileKeys - keys.first_tile;
  keys.tiles = tiles > 1 ? tiles : 1;
  return keys;
}

// `ends[r]`: tiles of the rows up to and with r. One warp; rows in 32 runs.
template <bool kFresh>
__device__ __forceinline__ void count_tiles(const DecodeArguments& args, int* ends) {
  const int lane = threadIdx.x % 32, run = (args.rows + 31) / 32;
  int sum = 0;
  for (int i = 0; i < run; ++i) {
    const int row = lane * run + i;
    if (row < args.rows) sum += keys_of<kFresh>(__ldcg(args.lens + row), args.window).tiles;
  }
  int before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, before, step);
    if (lane >= step) before += other;
  }
  before -= sum;
  for (int i = 0; i < run; ++i) {
    const int row = lane * run + i;
    if (row < args.rows) ends[row] = before += keys_of<kFresh>(__ldcg(args.lens + row), args.window).tiles;
  }
}

// A run of tiles of one (row, kv head) in a block's piece of the line of all tiles.
struct Segment {
  int row, head, head_start, first, count, row_tiles;
  __device__ bool whole() const { return count == row_tiles; }
  __device__ bool last() const { return first + count == row_tiles; }
};

__device__ __forceinline__ Segment segment_at(const int* ends, const DecodeArguments& args, int at, int end) {
  int low = 0, high = args.rows - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] * args.kv_heads > at)
      high = middle;
    else
      low = middle + 1;
  }
  const int before = low > 0 ? ends[low - 1] : 0;
  Segment segment;
  segment.row = low;
  segment.row_tiles = ends[low] - before;
  const int within = at - before * args.kv_heads;
  segment.head = within / segment.row_tiles;
  segment.first = within % segment.row_tiles;
  segment.head_start = at - segment.first;
  segment.count = min(segment.row_tiles - segment.first, end - at);
  return segment;
}

__device__ __forceinline__ void prefetch_line(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Asks for what the blocks will read one after the other: a layer's weights have driven the block tables and
// the counters out of L2, and each would cost a trip to memory of its own. The blocks share the lines.
__device__ __forceinline__ void prefetch_tables(const DecodeArguments& args, int thread, int threads) {
  constexpr int kLine = 128 / 4;
  const int row_lines = (args.table_width + kLine - 1) / kLine;
  for (int line = blockIdx.x * threads + thread; line < args.rows * row_lines; line += gridDim.x * threads)
    prefetch_line(args.tables + line / row_lines * args.table_pitch + line % row_lines * kLine);
  const int counter_lines = (args.rows * args.kv_heads + kLine - 1) / kLine;
  for (int line = blockIdx.x * threads + thread; line < counter_lines; line += gridDim.x * threads)
    prefetch_line(args.arrived + line * kLine);
}

// The running softmax of a warp: rows lane / 4 and lane / 4 + 8 of the query tile.
template <int kDim>
struct Softmax {
  float top[2], total[2], out[kDim / 8][4];

  __device__ __forceinline__ void clear() {
    top[0] = top[1] = kNone;
    total[0] = total[1] = 0.f;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.f;
  }

  // 16 keys from row `at` of a tile of `rows` rows; those in [from, to), counted from `at`, are visible, and
  // the values of the others must be finite.
  __device__ __forceinline__ void add(uint32_t query, uint32_t keys, uint32_t values, int rows, int at,
                                      int from, int to, float scale_log2) {
    const int lane = threadIdx.x % 32;
    float score[2][2][4] = {};
    const int key_row = at + (lane & 7) + (lane >> 4) * 8, key_column = (lane >> 3 & 1) * 8;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t a[4], b[4];
      load_matrices(a, query + swizzled(kQueryRows, lane & 15, step * 16 + (lane >> 4) * 8));
      load_matrices(b, keys + swizzled(rows, key_row, step * 16 + key_column));
      multiply(score[step & 1][0], a, b[0], b[1]);
      multiply(score[step & 1][1], a, b[2], b[3]);
    }
    float best[2] = {top[0], top[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = half * 8 + lane % 4 * 2 + (i & 1);
        const float sum = (score[0][half][i] + score[1][half][i]) * scale_log2;
        score[0][half][i] = key >= from && key < to ? sum : kNone;
        best[i / 2] = fmaxf(best[i / 2], score[0][half][i]);
      }
    }
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best[i] = quad_max(best[i]);  // finite: some key is visible
      shrink[i] = exp2_fast(top[i] - best[i]);
      top[i] = best[i];
      total[i] *= shrink[i];
    }
    uint32_t weight[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = exp2_fast(score[0][half][i] - best[i / 2]);
        total[i / 2] += w[i];
      }
      weight[half * 2] = narrow2(w[0], w[1]);
      weight[half * 2 + 1] = narrow2(w[2], w[3]);
    }
    const int value_row = at + (lane & 15), value_column = (lane >> 4) * 8;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t b[4];
      load_transposed(b, values + swizzled(rows, value_row, step * 16 + value_column));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&sum)[4] = out[step * 2 + half];
        sum[0] *= shrink[0], sum[1] *= shrink[0], sum[2] *= shrink[1], sum[3] *= shrink[1];
        multiply(sum, weight, b[half * 2], b[half * 2 + 1]);
      }
    }
  }
};

// One head held by a warp: of each half of the dims, elements lane * kEach ... of this lane.
template <int kDim>
struct Head {
  static constexpr int kEach = kDim / 64;
  float low[kEach], high[kEach];

  __device__ __forceinline__ void load(const bf16* from) {
    const int at = threadIdx.x % 32 * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      low[i] = widen(__ldcg(from + at + i));
      high[i] = widen(__ldcg(from + kDim / 2 + at + i));
    }
  }

  // RMS norm, rounded to bfloat16 after each product.
  __device__ __forceinline__ void norm(const bf16* weight, float eps) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares += low[i] * low[i] + high[i] * high[i];
    const float scale = rsqrtf(warp_sum(squares) / kDim + eps);
    Head by;
    by.load(weight);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      low[i] = rounded(rounded(low[i] * scale) * by.low[i]);
      high[i] = rounded(rounded(high[i] * scale) * by.high[i]);
    }
  }

  __device__ __forceinline__ void rotate(const float* cos_sin) {
    const int at = threadIdx.x % 32 * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float cosine = cos_sin[at + i], sine = cos_sin[kDim / 2 + at + i];
      const float first = low[i], second = high[i];
      low[i] = first * cosine - second * sine;
      high[i] = second * cosine + first * sine;
    }
  }

  __device__ __forceinline__ void put(bf16* to) const {
    const int at = threadIdx.x % 32 * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      to[at + i] = static_cast<bf16>(narrow2(low[i], 0.f));
      to[kDim / 2 + at + i] = static_cast<bf16>(narrow2(high[i], 0.f));
    }
  }

  // To `row` of a swizzled tile of 16 rows.
  __device__ __forceinline__ void put_swizzled(unsigned char* tile, int row) const {
    const int at = threadIdx.x % 32 * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int one = at + i, other = kDim / 2 + at + i;
      *reinterpret_cast<bf16*>(tile + swizzled(kQueryRows, row, one) + one % 8 * 2) =
          static_cast<bf16>(narrow2(low[i], 0.f));
      *reinterpret_cast<bf16*>(tile + swizzled(kQueryRows, row, other) + other % 8 * 2) =
          static_cast<bf16>(narrow2(high[i], 0.f));
    }
  }
};

}  // namespace quickturn
