// Decode attention as one of the phases of decode_stack.cu.
//
// Each row is cut as if it were alone: the tiles of its kv heads form one line, a block takes an equal piece.
// So a row's result doesn't depend on the other rows. Where several blocks share a head, they send their
// parts as packets, and blocks that each own a quarter of a head's dims add them up.
#pragma once
#include "decode_stack.cuh"

namespace quickturn {
namespace stack {

constexpr int kKeys = 32;       // of a tile: keys and values fill a slot
constexpr int kQueryRows = 16;  // of a query's tile
constexpr float kNone = -__builtin_huge_valf();
constexpr int kQuarter = 32;              // dims that one block adds up
constexpr int kPartPitch = kDim / 2 + 1;  // packets of a head's part: two floats each, then top and total
constexpr int kTileBytes = kKeys * kDim * 2;
constexpr int kSumPitch = kDim + 8;  // floats from head to head, for the banks' sake

// Of one row: the stored keys that it sees, [oldest, stored), and this block's piece of its line of tiles.
struct Piece {
  int context, oldest, stored, first_tile, tiles, size, begin, end;
};

__device__ __forceinline__ Piece piece_of(const StackArguments& args, int context) {
  Piece piece;
  piece.context = context;
  piece.stored = context > 0 ? context - 1 : 0;  // the newest key doesn't go through the cache
  piece.oldest = args.window > 0 && context > args.window ? context - args.window : 0;
  if (piece.oldest >= piece.stored) piece.stored = 0;
  piece.first_tile = piece.oldest / kKeys;
  piece.tiles = max((piece.stored + kKeys - 1) / kKeys - piece.first_tile, 1);
  const int line = piece.tiles * args.kv_heads, blocks = gridDim.x;
  piece.size = (line + blocks - 1) / blocks;
  piece.begin = min(static_cast<int>(blockIdx.x) * piece.size, line);
  piece.end = min(piece.begin + piece.size, line);
  return piece;
}

__device__ __forceinline__ void load_page(uint32_t to, const TensorMap* map, int column, int head, int offset,
                                          int block, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%4, "
      "%5}], [%6];" ::"r"(to),
      "l"(map), "r"(column), "r"(head), "r"(offset), "r"(block), "r"(barrier)
      : "memory");
}

// Requests the visible tiles of this block's pieces; one warp.
__device__ __forceinline__ void request_keys(const Plan& plan, Ring& ring, const TensorMap* maps,
                                             const Piece* pieces) {
  const StackArguments& args = plan.args;
  const int lane = this_thread() % 32;
  const int page = min(args.block_tokens, kKeys), pages = kKeys / page, ahead = 32 / pages;
#pragma unroll 1
  for (int row = 0; row < args.rows; ++row) {
    const Piece piece = pieces[row];
    const int* table = args.tables + row * args.table_pitch;
#pragma unroll 1
    for (int at = piece.begin; at < piece.end;) {
      const int head = at / piece.tiles, first = at % piece.tiles;
      const int count = min(piece.tiles - first, piece.end - at);
#pragma unroll 1
      for (int done = 0; done < count; done += ahead) {
        const int mine = (piece.first_tile + first + done) * kKeys + lane * page;
        const bool visible = mine < piece.stored && mine + page > piece.oldest && done + lane / pages < count;
        const int block = visible ? __ldcg(table + mine / args.block_tokens) : 0;
#pragma unroll 1
        for (int tile = 0; tile < ahead && done + tile < count; ++tile) {
          const bool turn = visible && lane / pages == tile;
          const int present = __popc(__ballot_sync(0xFFFFFFFFu, turn));
          if (present == 0) continue;
          const uint32_t full = ring.full();
          ring.wait_empty();
          if (lane == 0) barrier_expect(full, present * page * kDim * 2 * 2);
          __syncwarp();
          if (turn) {
            const uint32_t to = ring.slot() + lane % pages * page * 128;
#pragma unroll
            for (int slice = 0; slice < kDim / kSliceColumns; ++slice) {
              const uint32_t there = to + slice * kKeys * 128;
              load_page(there, maps, slice * kSliceColumns, head, mine % args.block_tokens, block, full);
              load_page(there + kTileBytes, maps + 1, slice * kSliceColumns, head, mine % args.block_tokens,
                        block, full);
            }
          }
          ring.advance(args.stages);
        }
      }
      at += count;
    }
  }
}

// The phase's shared memory at `Layout::x`, byte offsets: the query's tile of 16 rows, the newest key's, the
// warps' sums [kWarps, group, kSumPitch] and their maxima and totals [kWarps, kQueryRows]. The newest value's
// tile lies by itself, at `Layout::fresh`, because its other rows must be finite.
constexpr int kFreshKeyAt = kQueryRows * kDim * 2;
constexpr int kSumsAt = 2 * kFreshKeyAt;

__host__ __device__ constexpr int stats_at(int group) { return kSumsAt + kWarps * group * kSumPitch * 4; }
__host__ __device__ constexpr int scratch_bytes(int group) {
  return stats_at(group) + kWarps * kQueryRows * 8;
}

// One head in a warp: lane i has dims 2 i and 2 i + 1, and in `high` those 64 further on.
struct Head {
  float low[2], high[2];

  // As another block sent it, normed with `norm` unless that is null. Rounded as separate kernels would.
  __device__ __forceinline__ void receive(const uint4* packets, const unsigned char* norm, float eps,
                                          unsigned flag) {
    const int lane = this_thread() % 32;
    const int at[2] = {lane / 2, kDim / 8 + lane / 2};
    uint2 data[2];
    await(data, packets, at, flag);
    unpack2(lane % 2 ? data[0].y : data[0].x, low);
    unpack2(lane % 2 ? data[1].y : data[1].x, high);
    if (norm == nullptr) return;
    const float squares = low[0] * low[0] + high[0] * high[0] + (low[1] * low[1] + high[1] * high[1]);
    const float scale = rsqrtf(warp_sum(squares) / kDim + eps);
    float low_by[2], high_by[2];
    unpack2(reinterpret_cast<const uint32_t*>(norm)[lane], low_by);
    unpack2(reinterpret_cast<const uint32_t*>(norm)[32 + lane], high_by);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low[i] = rounded(rounded(low[i] * scale) * low_by[i]);
      high[i] = rounded(rounded(high[i] * scale) * high_by[i]);
    }
  }

  // angles: the cosines of half a head, then the sines.
  __device__ __forceinline__ void rotate(const float* angles) {
    const int lane = this_thread() % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float cosine = angles[lane * 2 + i], sine = angles[kDim / 2 + lane * 2 + i];
      const float first = low[i], second = high[i];
      low[i] = first * cosine - second * sine;
      high[i] = second * cosine + first * sine;
    }
  }

  __device__ __forceinline__ void put(bf16* to) const {
    uint32_t* own = reinterpret_cast<uint32_t*>(to) + this_thread() % 32;
    own[0] = narrow2(low[0], low[1]);
    own[32] = narrow2(high[0], high[1]);
  }

  // To `row` of a swizzled tile of kQueryRows.
  __device__ __forceinline__ void put_swizzled(unsigned char* tile, int row) const {
    const int at = this_thread() % 32 * 2;
    *reinterpret_cast<uint32_t*>(tile + swizzled(kQueryRows, row, at) + at % 8 * 2) = narrow2(low[0], low[1]);
    *reinterpret_cast<uint32_t*>(tile + swizzled(kQueryRows, row, kDim / 2 + at) + at % 8 * 2) =
        narrow2(high[0], high[1]);
  }

 private:
  static __device__ __forceinline__ void unpack2(uint32_t word, float (&value)[2]) {
    value[0] = __uint_as_float(word << 16);
    value[1] = __uint_as_float(word & 0xFFFF0000u);
  }
};

// The running softmax of a warp over up to eight query heads: head lane / 4 is this lane's.
struct Softmax8 {
  float top, total, out[kDim / 8][2];

  __device__ __forceinline__ void clear() {
    top = kNone;
    total = 0.f;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) out[i][0] = out[i][1] = 0.f;
  }

  // 16 keys from row `at` of a tile of `rows` rows; those in [from, to), counted from `at`, are visible, and
  // the values of the others must be finite.
  __device__ __forceinline__ void add(uint32_t query, uint32_t keys, uint32_t values, int rows, int at,
                                      int from, int to, float scale_log2) {
    const int lane = this_thread() % 32;
    float score[2][2][2] = {};
    const int key_row = at + (lane & 7) + (lane >> 4) * 8, key_column = (lane >> 3 & 1) * 8;
#pragma unroll
    for (int step = 0; step < kDim / 16; step += 2) {
      uint32_t a[4];
      load_matrices(a, query + swizzled(kQueryRows, lane & 7, step * 16 + (lane >> 3) * 8));
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        uint32_t b[4];
        load_matrices(b, keys + swizzled(rows, key_row, (step + odd) * 16 + key_column));
        multiply_eight(score[odd][0], a[odd * 2], a[odd * 2 + 1], b[0], b[1]);
        multiply_eight(score[odd][1], a[odd * 2], a[odd * 2 + 1], b[2], b[3]);
      }
    }
    float best = top;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = half * 8 + lane % 4 * 2 + i;
        const float sum = (score[0][half][i] + score[1][half][i]) * scale_log2;
        score[0][half][i] = key >= from && key < to ? sum : kNone;
        best = fmaxf(best, score[0][half][i]);
      }
    }
    best = quad_max(best);  // finite: some key is visible
    const float shrink = exp2_fast(top - best);
    top = best;
    total *= shrink;
    uint32_t weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = exp2_fast(score[0][half][0] - best), high = exp2_fast(score[0][half][1] - best);
      total += low + high;
      weight[half] = narrow2(low, high);
    }
    const int value_row = at + (lane & 15), value_column = (lane >> 4) * 8;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t b[4];
      load_transposed(b, values + swizzled(rows, value_row, step * 16 + value_column));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&sum)[2] = out[step * 2 + half];
        sum[0] *= shrink, sum[1] *= shrink;
        multiply_eight(sum, weight[0], weight[1], b[half * 2], b[half * 2 + 1]);
      }
    }
  }
};

// This row's query heads of one kv head into shared memory; with `newest` also its key and value, here and
// in the cache.
__device__ __forceinline__ void prepare(const Plan& plan, const StackLayer& layer, unsigned char* shared,
                                        int row, int context, int kv_head, bool newest, unsigned flag) {
  const StackArguments& args = plan.args;
  const int warp = this_thread() / 32, group = args.heads / args.kv_heads;
  const uint4* packets =
      args.qkv + static_cast<long long>(row) * (args.heads + 2 * args.kv_heads) * (kDim / 4);
  const float* angles = reinterpret_cast<const float*>(shared + plan.at.angles) + row * kDim;
  const unsigned char* norms = shared + plan.at.head_norms;
#pragma unroll 1
  for (int member = warp; member < group; member += kWarps) {
    Head head;
    head.receive(packets + (kv_head * group + member) * (kDim / 4), layer.q_norm != nullptr ? norms : nullptr,
                 args.eps, flag);
    head.rotate(angles);
    head.put_swizzled(shared + plan.at.x, member);
  }
  if (!newest || context == 0 || warp < kWarps - 2) return;
  const bool is_key = warp == kWarps - 1;
  const int position = context - 1, offset = position % args.block_tokens;
  const long long block = __ldcg(args.tables + row * args.table_pitch + position / args.block_tokens);
  Head head;
  head.receive(packets + (args.heads + (is_key ? 0 : args.kv_heads) + kv_head) * (kDim / 4),
               is_key && layer.k_norm != nullptr ? norms + kHeadBytes : nullptr, args.eps, flag);
  if (is_key) {
    head.rotate(angles);
    head.put_swizzled(shared + plan.at.x + kFreshKeyAt, 0);
    head.put(layer.k_cache + block * args.k_block_pitch + offset * args.k_row_pitch + kv_head * kDim);
  } else {
    head.put_swizzled(shared + plan.at.fresh, 0);
    head.put(layer.v_cache + block * args.v_block_pitch + offset * args.v_row_pitch + kv_head * kDim);
  }
}

// As in attention_decode.cu: values of this warp's 16 keys outside [from, to) become zero.
__device__ __forceinline__ void clear_hidden(unsigned char* values, int at, int from, int to) {
  for (int i = this_thread() % 32; i < 16 * kDim / 8; i += 32) {
    const int key = i % 16, column = i / 16 * 8;
    if (key < from || key >= to)
      *reinterpret_cast<uint4*>(values + swizzled(kKeys, at + key, column)) = make_uint4(0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// The attention of this block's piece of one (row, kv head): `count` tiles from tile `first`.
__device__ __forceinline__ void attend(const Plan& plan, const StackLayer& layer, Ring& ring,
                                       unsigned char* shared, int row, const Piece& piece, int kv_head,
                                       int first, int count, bool second, unsigned flag) {
  const StackArguments& args = plan.args;
  const bool newest = first + count == piece.tiles;
  prepare(plan, layer, shared, row, piece.context, kv_head, newest, flag);
  sync_computing();
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32,
            group = args.heads / args.kv_heads;
  unsigned char* scratch = shared + plan.at.x;
  float* sums = reinterpret_cast<float*>(scratch + kSumsAt);
  float2* stats = reinterpret_cast<float2*>(scratch + stats_at(group));
  const uint32_t query = shared_address(scratch);
  Softmax8 state;
  state.clear();
  // The newest key comes first, to a warp that has the fewest tiles ahead of it.
#pragma unroll 1
  for (int tile = newest && piece.context > 0 ? -1 : 0; tile < count; ++tile) {
    uint32_t keys = query + kFreshKeyAt, values = shared_address(shared + plan.at.fresh);
    int rows = kQueryRows, half = 0, from = 0, to = 1;
    bool mine = warp == count % (kWarps / 2) * 2;
    if (tile >= 0) {
      const int start = (piece.first_tile + first + tile) * kKeys;
      if (start >= piece.stored || start + kKeys <= piece.oldest) continue;
      keys = ring.slot(), values = keys + kTileBytes, rows = kKeys;
      half = warp % 2 * 16, from = max(piece.oldest - start - half, 0);
      to = min(piece.stored - start - half, 16);
      mine = warp / 2 == tile % (kWarps / 2) && from < to;
      ring.wait_full();
      if (mine && (from > 0 || to < 16))
        clear_hidden(shared + ring.stage * kSlotBytes + kTileBytes, half, from, to);
    }
    if (mine) state.add(query, keys, values, rows, half, from, to, args.scale_log2);
    if (tile >= 0) ring.release(args.stages);
  }

  // The warps' sums meet.
  const int own = lane / 4;
  const float all = quad_sum(state.total);
  if (own < group) {
    if (lane % 4 == 0) stats[warp * kQueryRows + own] = make_float2(state.top, all);
    float* to = sums + (warp * group + own) * kSumPitch + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
      *reinterpret_cast<float2*>(to + i * 8) = make_float2(state.out[i][0], state.out[i][1]);
  }
  sync_computing();
  const long long slot = (static_cast<long long>(row) * gridDim.x + blockIdx.x) * 2 + second;
#pragma unroll 1
  for (int i = thread; i < group * (kDim / 4); i += kComputing) {
    const int member = i / (kDim / 4), vector = i % (kDim / 4);
    float top = kNone, total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, stats[w * kQueryRows + member].x);
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 one = stats[w * kQueryRows + member];
      const float by = one.y > 0.f ? exp2_fast(one.x - top) : 0.f;
      const float4 values = reinterpret_cast<const float4*>(sums + (w * group + member) * kSumPitch)[vector];
      total += one.y * by;
      sum[0] += values.x * by, sum[1] += values.y * by, sum[2] += values.z * by, sum[3] += values.w * by;
    }
    if (count == piece.tiles) {
      const float by = total > 0.f ? 1.f / total : 0.f;
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] *= by;
      const uint2 packed = pack4(sum);
      store_packet(args.attended +
                       (static_cast<long long>(row) * args.heads + kv_head * group + member) * (kDim / 4) +
                       vector,
                   packed.x, packed.y, flag);
    } else {
      uint4* part = args.parts + (slot * group + member) * kPartPitch;
      store_packet(part + vector * 2, __float_as_uint(sum[0]), __float_as_uint(sum[1]), flag);
      store_packet(part + vector * 2 + 1, __float_as_uint(sum[2]), __float_as_uint(sum[3]), flag);
      if (vector == 0) store_packet(part + kDim / 2, __float_as_uint(top), __float_as_uint(total), flag);
    }
  }
  sync_computing();
}

// Adds up the parts of the heads that several blocks shared.
__device__ __forceinline__ void combine(const Plan& plan, unsigned char* shared, unsigned flag) {
  const StackArguments& args = plan.args;
  const Piece* pieces = reinterpret_cast<const Piece*>(shared + plan.at.pieces);
  float4* scratch = reinterpret_cast<float4*>(shared + plan.at.x);
  constexpr int kPairs = kQuarter / 2, kAtOnce = kComputing / kPairs;
  const int thread = this_thread(), group = args.heads / args.kv_heads, pair = thread % kPairs;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < args.rows * args.heads * (kDim / kQuarter); unit += gridDim.x) {
    const int quarter = unit % (kDim / kQuarter), head = unit / (kDim / kQuarter) % args.heads;
    const int row = unit / (kDim / kQuarter) / args.heads;
    const Piece& piece = pieces[row];
    const int head_start = head / group * piece.tiles, first_block = head_start / piece.size;
    const int parts = (head_start + piece.tiles - 1) / piece.size - first_block + 1;
    if (parts == 1) continue;
    float top = kNone, total = 0.f, sum[2] = {};
#pragma unroll 1
    for (int part = thread / kPairs; part < parts; part += kAtOnce) {
      const long long slot = (static_cast<long long>(row) * gridDim.x + first_block + part) * 2 +
                             (part == 0 && head_start != first_block * piece.size);
      const uint4* packets = args.parts + (slot * group + head % group) * kPartPitch;
      const int at[2] = {quarter * kPairs + pair, kDim / 2};
      uint2 data[2];
      await(data, packets, at, flag);
      const float part_top = __uint_as_float(data[1].x), part_total = __uint_as_float(data[1].y);
      if (part_total <= 0.f) continue;
      const float best = fmaxf(top, part_top);
      const float shrink = exp2_fast(top - best), by = exp2_fast(part_top - best);
      top = best;
      total = total * shrink + part_total * by;
      sum[0] = sum[0] * shrink + __uint_as_float(data[0].x) * by;
      sum[1] = sum[1] * shrink + __uint_as_float(data[0].y) * by;
    }
    scratch[thread] = make_float4(top, total, sum[0], sum[1]);
    sync_computing();
    if (thread < 32) {
      float best = kNone;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) best = fmaxf(best, scratch[i * kPairs + pair].x);
      float whole = 0.f, low = 0.f, high = 0.f;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float4 one = scratch[i * kPairs + pair];
        const float by = one.y > 0.f ? exp2_fast(one.x - best) : 0.f;
        whole += one.y * by, low += one.z * by, high += one.w * by;
      }
      const float by = whole > 0.f ? 1.f / whole : 0.f;
      const uint32_t mine = narrow2(low * by, high * by), other = __shfl_down_sync(0xFFFFFFFFu, mine, 1);
      if (thread < kPairs && pair % 2 == 0)
        store_packet(args.attended + (static_cast<long long>(row) * args.heads + head) * (kDim / 4) +
                         quarter * (kQuarter / 4) + pair / 2,
                     mine, other, flag);
    }
    sync_computing();
  }
}

}  // namespace stack
}  // namespace quickturn
