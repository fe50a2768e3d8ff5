// Decode attention, the parts of a block: how work is cut, the online softmax of one warp, and the query's
// preparation. attention_decode.cu puts them together.
#pragma once
#include "hopper.cuh"
#include "scalars.cuh"
#include "warp_mma.cuh"

namespace quickturn {

constexpr int kWarpKeys = 16;   // of a tile are one warp's
constexpr int kQueryRows = 16;  // query heads of a kv head, padded
constexpr float kNone = -__builtin_huge_valf();

// A cache of the model's own 16-bit type. kDim: dims of a head.
template <typename TypeOf, int kDimOf>
struct SameCache {
  using Type = TypeOf;     // of the model
  using Product = TypeOf;  // of the matrix products' operands
  static constexpr int kDim = kDimOf;
  static constexpr bool kFp8 = false;
  static constexpr int kBytes = 2;      // of an element
  static constexpr int kTileKeys = 64;  // of a tile, 16 for each warp that computes
};

// A cache of e4m3, in which a byte becomes a half. The bytes that a thread loads are neighbours in a head, so
// the query's dims are permuted to match, and so are those of the result until it's stored.
template <typename TypeOf, int kDimOf>
struct Fp8Cache {
  using Type = TypeOf;
  using Product = Half;
  static constexpr int kDim = kDimOf;
  static constexpr bool kFp8 = true;
  static constexpr int kBytes = 1;
  // Converting takes issue slots: two warps on a scheduler, but where the sums of so many don't fit.
  static constexpr int kTileKeys = kDimOf == 256 ? 64 : 128;
  // A half's range is the smaller one: a query of bfloat16 is divided by 16.
  static constexpr float kQueryScale = TypeOf::kWide ? 1.f / 16 : 1.f;
};

template <typename Cache>
constexpr int kWarps = Cache::kTileKeys / kWarpKeys;  // that compute; one more requests the keys
template <typename Cache>
constexpr int kComputing = kWarps<Cache> * 32;
template <typename Cache>
constexpr int kRowBytes = Cache::kDim * Cache::kBytes < 128 ? Cache::kDim * Cache::kBytes : 128;

// Byte offset of byte `column` of `row` in a tile of keys or values of `rows` rows, as the copy engine writes
// it: slices of up to 128 bytes of each row, one behind the other. Its modes of 128- and of 64-byte rows
// exchange the 16-byte units of a row by the bits above the ones that count 128 bytes' units.
template <typename Cache>
__device__ __forceinline__ uint32_t tile_offset(int rows, int row, int column) {
  const int within = row * kRowBytes<Cache> + column % 128;
  return static_cast<uint32_t>(column / 128 * rows * 128 +
                               (within ^ (within >> 3 & (kRowBytes<Cache> - 16))));
}

// Elements of q, k, v, the norms' weights, the gate and out are 16-bit floats of the model's type.
struct DecodeArguments {
  const bf16 *q, *k, *v;            // of this step; k and v only where it writes the cache
  const void *q_weight, *k_weight;  // null: no norm of heads; float32 with `wide`
  const bf16* gate;                 // [rows, heads * head_dim], or null
  const float* cos_sin;             // [positions, rotated]
  void *k_cache, *v_cache;
  bf16* out;
  const int *tables, *lens;
  float *parts, *part_stats;  // [blocks * 2, group, head_dim], [blocks * 2, group, 2]
  int* arrived;               // [rows * kv_heads], zero before and after
  long long q_token_pitch, q_head_pitch, k_token_pitch, k_head_pitch, v_token_pitch, v_head_pitch;
  long long cos_sin_pitch, table_pitch, gate_pitch;
  long long k_block_pitch, k_row_pitch, v_block_pitch, v_row_pitch;
  float scale_log2, eps;
  float k_scale, v_scale;  // an e4m3 cache holds keys and values divided by these
  int rows, kv_heads, group, block_tokens, window, table_width, stages;
  int rotated;  // dims of a head that turn: all, or the first ones, see `Head::rotate_first`
  int wide;
};

// Which stored keys a row sees: [oldest, stored); `tiles` from `first_tile` on. A row has one tile at least,
// if an empty one, so that somebody writes its result.
struct RowKeys {
  int oldest, stored, first_tile, tiles;
};

template <int kTileKeys, bool kFresh>
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
template <int kTileKeys, bool kFresh>
__device__ __forceinline__ void count_tiles(const DecodeArguments& args, int* ends) {
  const int lane = threadIdx.x % 32, run = (args.rows + 31) / 32;
  int sum = 0;
  for (int i = 0; i < run; ++i) {
    const int row = lane * run + i;
    if (row < args.rows) sum += keys_of<kTileKeys, kFresh>(__ldcg(args.lens + row), args.window).tiles;
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
    if (row < args.rows)
      ends[row] = before += keys_of<kTileKeys, kFresh>(__ldcg(args.lens + row), args.window).tiles;
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
template <typename Cache>
struct Softmax {
  using Product = typename Cache::Product;
  static constexpr int kDim = Cache::kDim;
  // out[i]: dims i * 8 + lane % 4 * 2 and the next; of e4m3, where i is even every second dim from i * 8 +
  // lane % 4 * 4 on, where it's odd those between.
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
    multiply_keys(score, query, keys, rows, at);
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
      weight[half * 2] = Product::narrow2(w[0], w[1]);
      weight[half * 2 + 1] = Product::narrow2(w[2], w[3]);
    }
    add_values(weight, shrink, values, rows, at);
  }

 private:
  // score[step parity][keys / 8] += q k^T
  static __device__ __forceinline__ void multiply_keys(float (&score)[2][2][4], uint32_t query, uint32_t keys,
                                                       int rows, int at) {
    const int lane = threadIdx.x % 32;
    const int row = at + (lane & 7) + (lane >> 4) * 8, column = (lane >> 3 & 1) * 16;  // in bytes
    const auto query_at = [&](int step) {
      return query + swizzled(kQueryRows, lane & 15, step * 16 + (lane >> 4) * 8);
    };
    uint32_t a[4], b[4];
    if constexpr (Cache::kFp8) {
#pragma unroll
      for (int pair = 0; pair < kDim / 32; ++pair) {
        // Keys 0 to 7 of the first and the second 16 dims, then keys 8 to 15.
        load_matrices(b, keys + tile_offset<Cache>(rows, row, pair * 32 + column));
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          load_matrices(a, query_at(pair * 2 + step));
#pragma unroll
          for (int half = 0; half < 2; ++half)
            multiply<Product>(score[step][half], a, widen_e4m3(b[half * 2 + step] & 0xFFFF),
                              widen_e4m3(b[half * 2 + step] >> 16));
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        load_matrices(a, query_at(step));
        load_matrices(b, keys + tile_offset<Cache>(rows, row, step * 32 + column));
        multiply<Product>(score[step & 1][0], a, b[0], b[1]);
        multiply<Product>(score[step & 1][1], a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void add_to(float (&sum)[4], const float (&shrink)[2],
                                         const uint32_t (&weight)[4], uint32_t b0, uint32_t b1) {
    sum[0] *= shrink[0], sum[1] *= shrink[0], sum[2] *= shrink[1], sum[3] *= shrink[1];
    multiply<Product>(sum, weight, b0, b1);
  }

  // out = out * shrink + weight v
  __device__ __forceinline__ void add_values(const uint32_t (&weight)[4], const float (&shrink)[2],
                                             uint32_t values, int rows, int at) {
    const int lane = threadIdx.x % 32;
    const int row = at + (lane & 15), column = (lane >> 4) * 16;
    uint32_t b[4];
#pragma unroll
    for (int step = 0; step < kDim * Cache::kBytes / 32; ++step) {
      // Keys 0 to 7 and 8 to 15 of the first 16 bytes, then of the second.
      load_transposed(b, values + tile_offset<Cache>(rows, row, step * 32 + column));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t first = b[half * 2], second = b[half * 2 + 1];
        if constexpr (Cache::kFp8) {
          // Of two keys two neighbouring dims each: the keys of each dim are to be side by side.
          const uint32_t one = __byte_perm(first, 0, 0x3120), other = __byte_perm(second, 0, 0x3120);
          add_to(out[step * 4 + half * 2], shrink, weight, widen_e4m3(one & 0xFFFF),
                 widen_e4m3(other & 0xFFFF));
          add_to(out[step * 4 + half * 2 + 1], shrink, weight, widen_e4m3(one >> 16),
                 widen_e4m3(other >> 16));
        } else {
          add_to(out[step * 2 + half], shrink, weight, first, second);
        }
      }
    }
  }
};

// Of the query rows that a lane holds the one of `half`, to `to` + dim in shared memory.
template <typename Cache>
__device__ __forceinline__ void put_sums(const Softmax<Cache>& state, int half, float* to) {
  const int quad = threadIdx.x % 4;
  if constexpr (Cache::kFp8) {
#pragma unroll
    for (int i = 0; i < Cache::kDim / 16; ++i) {
      const float(&even)[4] = state.out[i * 2];
      const float(&odd)[4] = state.out[i * 2 + 1];
      *reinterpret_cast<float4*>(to + i * 16 + quad * 4) =
          make_float4(even[half * 2], odd[half * 2], even[half * 2 + 1], odd[half * 2 + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Cache::kDim / 8; ++i)
      *reinterpret_cast<float2*>(to + i * 8 + quad * 2) =
          make_float2(state.out[i][half * 2], state.out[i][half * 2 + 1]);
  }
}

// One head held by a warp: of each half of the dims, elements lane * kEach ... of this lane.
template <int kDim, typename Type = Bfloat>
struct Head {
  static constexpr int kEach = kDim / 64;
  float low[kEach], high[kEach];

  __device__ __forceinline__ void load(const bf16* from) {
    const int at = threadIdx.x % 32 * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      low[i] = Type::widen(__ldcg(from + at + i));
      high[i] = Type::widen(__ldcg(from + kDim / 2 + at + i));
    }
  }

  __device__ __forceinline__ float inverse_root(float eps) const {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares += low[i] * low[i] + high[i] * high[i];
    return rsqrtf(warp_sum(squares) / kDim + eps);
  }

  // RMS norm, rounded to the model's type after each product.
  __device__ __forceinline__ void norm(const bf16* weight, float eps) {
    const float scale = inverse_root(eps);
    Head by;
    by.load(weight);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      low[i] = rounded_to<Type>(rounded_to<Type>(low[i] * scale) * by.low[i]);
      high[i] = rounded_to<Type>(rounded_to<Type>(high[i] * scale) * by.high[i]);
    }
  }

  // With a float32 weight, rounded once.
  __device__ __forceinline__ void norm(const float* weight, float eps) {
    const float scale = inverse_root(eps);
    const int at = threadIdx.x % 32 * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      low[i] = rounded_to<Type>(low[i] * scale * __ldg(weight + at + i));
      high[i] = rounded_to<Type>(high[i] * scale * __ldg(weight + kDim / 2 + at + i));
    }
  }

  // The first `rotated` dims alone, at most half of them: dim i turns with dim i + rotated / 2, which another
  // lane has. rotated / 2 is kEach times a power of two.
  __device__ __forceinline__ void rotate_first(const float* cos_sin, int rotated) {
    const int lane = threadIdx.x % 32, apart = rotated / 2 / kEach;
    const bool second = lane >= apart;
    const int at = (lane - (second ? apart : 0)) * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, low[i], apart);
      if (lane >= 2 * apart) continue;
      const float cosine = cos_sin[at + i], sine = cos_sin[rotated / 2 + at + i];
      low[i] = low[i] * cosine + (second ? other : -other) * sine;
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

  // Calls put(dim, value) for each of this lane's elements.
  template <typename Put>
  __device__ __forceinline__ void each(Put put) const {
    const int at = threadIdx.x % 32 * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      put(at + i, low[i]);
      put(kDim / 2 + at + i, high[i]);
    }
  }

  __device__ __forceinline__ void put(bf16* to) const {
    each([&](int dim, float value) { to[dim] = static_cast<bf16>(Type::narrow2(value, 0.f)); });
  }

  // To `row` of a swizzled tile of 16 rows.
  __device__ __forceinline__ void put_swizzled(unsigned char* tile, int row) const {
    each([&](int dim, float value) {
      *reinterpret_cast<bf16*>(tile + swizzled(kQueryRows, row, dim) + dim % 8 * 2) =
          static_cast<bf16>(Type::narrow2(value, 0.f));
    });
  }
};

// A query head to `row` of the query tile, as the products with this cache want it.
template <typename Cache, typename Type = typename Cache::Type>
__device__ __forceinline__ void put_query(const Head<Cache::kDim, Type>& head, unsigned char* tile, int row) {
  if constexpr (Cache::kFp8) {
    head.each([&](int dim, float value) {
      // Four neighbouring dims are the two pairs of one thread's operand.
      const int place = dim / 16 * 16 + dim % 16 / 4 * 2 + (dim & 1) + (dim >> 1 & 1) * 8;
      *reinterpret_cast<bf16*>(tile + swizzled(kQueryRows, row, place) + place % 8 * 2) =
          static_cast<bf16>(Half::narrow2(rounded_to<Type>(value) * Cache::kQueryScale, 0.f));
    });
  } else {
    head.put_swizzled(tile, row);
  }
}

// A key or value to the cache at `to`, and to the first row of a tile of 16. In e4m3 it's divided by `scale`.
template <typename Cache, typename Type = typename Cache::Type>
__device__ __forceinline__ void put_fresh(const Head<Cache::kDim, Type>& head, unsigned char* to,
                                          unsigned char* tile, float scale) {
  head.each([&](int dim, float value) {
    const uint32_t place = tile_offset<Cache>(kQueryRows, 0, dim * Cache::kBytes);
    if constexpr (Cache::kFp8) {
      const auto byte = static_cast<unsigned char>(narrow_e4m3(rounded_to<Type>(value) / scale, 0.f));
      to[dim] = byte;
      tile[place] = byte;
    } else {
      const auto bits = static_cast<bf16>(Type::narrow2(value, 0.f));
      reinterpret_cast<bf16*>(to)[dim] = bits;
      *reinterpret_cast<bf16*>(tile + place) = bits;
    }
  });
}

}  // namespace quickturn
