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
constexpr int kQueryRows = 16;  // of the query's tile
constexpr int kMaxGroup = 8;    // query heads of a kv head: one a warp
constexpr float kNone = -__builtin_huge_valf();
constexpr int kQuarter = 32;              // dims that one block adds up
constexpr int kPartPitch = kDim / 2 + 1;  // packets of a head's part: two floats each, then top and total
constexpr int kTileBytes = kKeys * kDim * 2;
constexpr int kSumPitch = kDim + 8;  // floats from head to head, for the banks' sake
constexpr int kMaxSegments = 2 * kMaxRows, kMaxUnits = 16;

// Of one row: the stored keys that it sees, [oldest, stored), and this block's piece of its line of tiles.
struct Piece {
  int oldest, stored, first_tile, tiles, size, begin, end;
};

__device__ __forceinline__ Piece piece_of(const StackArguments& args, int context) {
  Piece piece;
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

// This block's share of one (row, kv head): tiles of stored keys from `key` on; of them [oldest, stored) is
// visible. The newest key comes on top where `newest` isn't negative: its position.
struct Segment {
  int row, kv_head, key, tiles, oldest, stored, newest;
  int part;  // where its sums go, in heads of `StackArguments::parts`; negative if it is all that there is
};

// A quarter of a head whose parts this block adds up: packets of part 0 and part 1, parts, and the result's.
struct Unit {
  int first, second, parts, out;
};

struct Work {
  int segments, units;
};

// Lists this block's segments; one thread.
__device__ __forceinline__ int list_segments(const StackArguments& args, Segment* segments) {
  int count = 0;
  for (int row = 0; row < args.rows; ++row) {
    const int context = __ldcg(args.lens + row), group = args.heads / args.kv_heads;
    const Piece piece = piece_of(args, context);
    for (int at = piece.begin; at < piece.end;) {
      const int first = at % piece.tiles, taken = min(piece.tiles - first, piece.end - at);
      Segment& segment = segments[count++];
      segment.row = row;
      segment.kv_head = at / piece.tiles;
      segment.key = (piece.first_tile + first) * kKeys;
      segment.tiles = piece.stored > 0 ? taken : 0;
      segment.oldest = piece.oldest;
      segment.stored = piece.stored;
      segment.newest = first + taken == piece.tiles ? context - 1 : -1;
      const int slot = (row * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * 2;
      segment.part = taken == piece.tiles ? -1 : (slot + (at != piece.begin)) * group;
      at += taken;
    }
  }
  return count;
}

// The `index`-th unit of this block; `parts` is less than 2 where there is nothing to do.
__device__ __forceinline__ Unit unit_of(const StackArguments& args, int index) {
  constexpr int kQuarters = kDim / kQuarter;
  const int at = blockIdx.x + index * gridDim.x, group = args.heads / args.kv_heads, blocks = gridDim.x;
  Unit unit{0, 0, 0, 0};
  if (at >= args.rows * args.heads * kQuarters) return unit;
  const int quarter = at % kQuarters, head = at / kQuarters % args.heads, row = at / kQuarters / args.heads;
  const Piece piece = piece_of(args, __ldcg(args.lens + row));
  const int head_start = head / group * piece.tiles, first_block = head_start / piece.size;
  unit.parts = (head_start + piece.tiles - 1) / piece.size - first_block + 1;
  const int slot = (row * blocks + first_block) * 2;
  // Part 0 may be the second segment of its block; the others are the first of theirs.
  unit.first = ((slot + (head_start != first_block * piece.size)) * group + head % group) * kPartPitch;
  unit.second = ((slot + 2) * group + head % group) * kPartPitch;
  unit.out = (row * args.heads + head) * (kDim / 4) + quarter * (kQuarter / 4);
  return unit;
}

__device__ __forceinline__ void load_tile(uint32_t to, const TensorMap* map, int offset, int head, int block,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%2, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(0), "r"(offset), "r"(head), "r"(block), "r"(barrier)
      : "memory");
}

// Requests the tiles of this block's segments; one warp.
__device__ __forceinline__ void request_keys(const Plan& plan, Ring& ring, const TensorMap* maps,
                                             const Segment* segments, int count) {
  const StackArguments& args = plan.args;
  const int lane = this_thread() % 32;
#pragma unroll 1
  for (int index = 0; index < count; ++index) {
    const Segment& segment = segments[index];
    const int* table = args.tables + segment.row * args.table_pitch;
#pragma unroll 1
    for (int done = 0; done < segment.tiles; done += 32) {
      const int key = segment.key + (done + lane) * kKeys, tiles = min(32, segment.tiles - done);
      const int block = lane < tiles ? __ldcg(table + key / args.block_tokens) : 0;
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        ring.wait_empty();
        if (lane == tile) {
          const int offset = key % args.block_tokens;
          barrier_expect(ring.full(), 2 * kTileBytes);
          load_tile(ring.slot(), maps, offset, segment.kv_head, block, ring.full());
          load_tile(ring.slot() + kTileBytes, maps + 1, offset, segment.kv_head, block, ring.full());
        }
        ring.advance(1, args.stages);
      }
    }
  }
}

// The phase's shared memory at `Layout::x`, byte offsets: the query's tile, the newest key and value, the
// sums of the warps [kWarps, group, kSumPitch], and of each warp and the newest key [kMaxGroup] maxima and
// totals.
constexpr int kKeyAt = kQueryRows * kDim * 2, kValueAt = kKeyAt + kHeadBytes, kSumsAt = kValueAt + kHeadBytes;

__host__ __device__ constexpr int stats_at(int group) { return kSumsAt + kWarps * group * kSumPitch * 4; }
__host__ __device__ constexpr int scratch_bytes(int group) {
  return stats_at(group) + (kWarps + 1) * kMaxGroup * 8;
}

// One head in a warp: lane i has dims 2 i and 2 i + 1, and in `high` those 64 further on.
struct Head {
  float low[2], high[2];

  // What of it survives as bfloat16.
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int i = 0; i < 2; ++i) low[i] = rounded(low[i]), high[i] = rounded(high[i]);
  }

  // The product with a head of bfloat16 in shared memory.
  __device__ __forceinline__ float dot(const unsigned char* other) const {
    float first[2], second[2];
    unpack2(reinterpret_cast<const uint32_t*>(other)[this_thread() % 32], first);
    unpack2(reinterpret_cast<const uint32_t*>(other)[32 + this_thread() % 32], second);
    return warp_sum(low[0] * first[0] + low[1] * first[1] + (high[0] * second[0] + high[1] * second[1]));
  }

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

  __device__ __forceinline__ void put(void* to) const {
    uint32_t* own = static_cast<uint32_t*>(to) + this_thread() % 32;
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

  // 16 keys from row `at` of a tile; those in [from, to), counted from `at`, are visible, and
  // the values of the others must be finite.
  __device__ __forceinline__ void add(uint32_t query, uint32_t keys, uint32_t values, int at, int from,
                                      int to, float scale_log2) {
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
        load_matrices(b, keys + swizzled(kKeys, key_row, (step + odd) * 16 + key_column));
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
      load_transposed(b, values + swizzled(kKeys, value_row, step * 16 + value_column));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&sum)[2] = out[step * 2 + half];
        sum[0] *= shrink, sum[1] *= shrink;
        multiply_eight(sum, weight[0], weight[1], b[half * 2], b[half * 2 + 1]);
      }
    }
  }
};

// As in attention_decode.cu: values of this warp's 16 keys outside [from, to) become zero.
__device__ __forceinline__ void clear_hidden(unsigned char* values, int at, int from, int to) {
#pragma unroll 1
  for (int i = this_thread() % 32; i < 16 * kDim / 8; i += 32) {
    const int key = i % 16, column = i / 16 * 8;
    if (key < from || key >= to)
      *reinterpret_cast<uint4*>(values + swizzled(kKeys, at + key, column)) = make_uint4(0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// One segment: the query heads and what is new of keys and values as packets, the stored ones from the ring.
__device__ __forceinline__ void attend(const Plan& plan, const StackLayer& layer, Ring& ring,
                                       unsigned char* shared, const Segment& segment, unsigned flag) {
  const StackArguments& args = plan.args;
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32;
  const int group = args.heads / args.kv_heads, kv_head = segment.kv_head, newest = segment.newest;
  unsigned char* scratch = shared + plan.at.x;
  const unsigned char* norms = shared + plan.at.head_norms;
  const uint4* packets =
      args.qkv + static_cast<long long>(segment.row) * (args.heads + 2 * args.kv_heads) * (kDim / 4);
  const float* angles = reinterpret_cast<const float*>(shared + plan.at.angles) + segment.row * kDim;
  Head query;
  if (warp < group) {
    query.receive(packets + (kv_head * group + warp) * (kDim / 4), layer.q_norm != nullptr ? norms : nullptr,
                  args.eps, flag);
    query.rotate(angles);
    query.round();
    query.put_swizzled(scratch, warp);
  }
  if (newest >= 0 && warp >= kWarps - 2) {
    const bool is_key = warp == kWarps - 1;
    const long long block = __ldcg(args.tables + segment.row * args.table_pitch + newest / args.block_tokens);
    const int offset = newest % args.block_tokens;
    Head head;
    head.receive(packets + (args.heads + (is_key ? 0 : args.kv_heads) + kv_head) * (kDim / 4),
                 is_key && layer.k_norm != nullptr ? norms + kHeadBytes : nullptr, args.eps, flag);
    if (is_key) head.rotate(angles);
    head.put(scratch + (is_key ? kKeyAt : kValueAt));
    if (is_key)
      head.put(layer.k_cache + block * args.k_block_pitch + offset * args.k_row_pitch + kv_head * kDim);
    else
      head.put(layer.v_cache + block * args.v_block_pitch + offset * args.v_row_pitch + kv_head * kDim);
  }
  sync_computing();
  float* sums = reinterpret_cast<float*>(scratch + kSumsAt);
  float2* stats = reinterpret_cast<float2*>(scratch + stats_at(group));
  if (warp < group) {
    const float score = newest >= 0 ? query.dot(scratch + kKeyAt) * args.scale_log2 : kNone;
    if (lane == 0) stats[kWarps * kMaxGroup + warp] = make_float2(score, newest >= 0 ? 1.f : 0.f);
  }
  Softmax8 state;
  state.clear();
  Ring mine = ring;
  mine.advance(warp / 2, args.stages);
#pragma unroll 1
  for (int tile = warp / 2; tile < segment.tiles; tile += kPairs) {
    const int half = warp % 2 * 16, start = segment.key + tile * kKeys + half;
    const int from = max(segment.oldest - start, 0), to = min(segment.stored - start, 16);
    mine.wait_full();
    if (from < to) {
      if (from > 0 || to < 16) clear_hidden(shared + mine.stage * kSlotBytes + kTileBytes, half, from, to);
      state.add(shared_address(scratch), mine.slot(), mine.slot() + kTileBytes, half, from, to,
                args.scale_log2);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(mine.empty());
    mine.advance(kPairs, args.stages);
  }
  ring.skip(segment.tiles, args.stages);

  // The warps' sums meet, and the newest key's value with them.
  const float all = quad_sum(state.total);
  if (lane / 4 < group) {
    if (lane % 4 == 0) stats[warp * kMaxGroup + lane / 4] = make_float2(state.top, all);
    float* to = sums + (warp * group + lane / 4) * kSumPitch + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
      *reinterpret_cast<float2*>(to + i * 8) = make_float2(state.out[i][0], state.out[i][1]);
  }
  sync_computing();
  const int member = thread / (kDim / 4), vector = thread % (kDim / 4);
  if (member < group) {
    float top = kNone, total = 0.f, sum[4] = {};
#pragma unroll
    for (int w = 0; w <= kWarps; ++w) top = fmaxf(top, stats[w * kMaxGroup + member].x);
#pragma unroll
    for (int w = 0; w <= kWarps; ++w) {
      const float2 one = stats[w * kMaxGroup + member];
      const float by = one.y > 0.f ? exp2_fast(one.x - top) : 0.f;
      float values[4];
      if (w == kWarps) {
        unpack4(reinterpret_cast<const uint2*>(scratch + kValueAt)[vector], values);
      } else {
        const float4 four = reinterpret_cast<const float4*>(sums + (w * group + member) * kSumPitch)[vector];
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
      }
      total += one.y * by;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += by > 0.f ? values[i] * by : 0.f;
    }
    if (segment.part < 0) {
      const float by = total > 0.f ? 1.f / total : 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] *= by;
      const uint2 packed = pack4(sum);
      store_packet(
          args.attended + (segment.row * args.heads + kv_head * group + member) * (kDim / 4) + vector,
          packed.x, packed.y, flag);
    } else {
      uint4* part = args.parts + static_cast<long long>(segment.part + member) * kPartPitch;
      store_packet(part + vector * 2, __float_as_uint(sum[0]), __float_as_uint(sum[1]), flag);
      store_packet(part + vector * 2 + 1, __float_as_uint(sum[2]), __float_as_uint(sum[3]), flag);
      if (vector == 0) store_packet(part + kDim / 2, __float_as_uint(top), __float_as_uint(total), flag);
    }
  }
  sync_computing();
}

// Adds up the parts of a quarter of a head that several blocks shared.
__device__ __forceinline__ void combine(const Plan& plan, unsigned char* shared, const Unit& unit,
                                        unsigned flag) {
  constexpr int kWide = kQuarter / 2, kAtOnce = kComputing / kWide;
  const StackArguments& args = plan.args;
  const int thread = this_thread(), pair = thread % kWide;
  const int step = 2 * (args.heads / args.kv_heads) * kPartPitch;
  const int quarter = unit.out % (kDim / 4) / (kQuarter / 4);
  float4* scratch = reinterpret_cast<float4*>(shared + plan.at.x);
  float top = kNone, total = 0.f, sum[2] = {};
#pragma unroll 1
  for (int part = thread / kWide; part < unit.parts; part += kAtOnce) {
    const int base = part == 0 ? unit.first : unit.second + (part - 1) * step;
    const int at[2] = {base + quarter * kWide + pair, base + kDim / 2};
    uint2 data[2];
    await(data, args.parts, at, flag);
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
    for (int i = 0; i < kAtOnce; ++i) best = fmaxf(best, scratch[i * kWide + pair].x);
    float whole = 0.f, low = 0.f, high = 0.f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float4 one = scratch[i * kWide + pair];
      const float by = one.y > 0.f ? exp2_fast(one.x - best) : 0.f;
      whole += one.y * by, low += one.z * by, high += one.w * by;
    }
    const float by = whole > 0.f ? 1.f / whole : 0.f;
    const uint32_t mine = narrow2(low * by, high * by), other = __shfl_down_sync(0xFFFFFFFFu, mine, 1);
    if (thread < kWide && pair % 2 == 0) store_packet(args.attended + unit.out + pair / 2, mine, other, flag);
  }
  sync_computing();
}

}  // namespace stack
}  // namespace quickturn
