// Prefill attention: how the work is cut into pieces, and how the parts of a tile meet.
//
// A tile is 128 rows of scores: consecutive tokens of one request times the query heads of one kv head. What
// it costs is counted in units: its tiles of keys, and one for its beginning and end. The units of all tiles,
// row by row, head by head, form one line, which is cut into equal pieces: so every block has the same work,
// whatever the lengths, and they are read on the device.
#pragma once
#include "hopper.cuh"
#include "warp_mma.cuh"

namespace quickturn {

constexpr int kGroups = 2;  // warpgroups that compute; one more warp requests
constexpr int kGroupRows = 64;
constexpr int kTileRows = kGroups * kGroupRows;
constexpr int kMaxRows = 383;
constexpr int kOverhead = 1;  // units
constexpr float kNone = -__builtin_huge_valf();

struct PrefillArguments {
  void* out;  // [tokens, heads, head_dim]
  const int *tables, *starts, *lens;
  const float* sinks;  // [heads] or null
  float4* parts;       // [pieces * 2, kGroups, head_dim / 8 + 1, 128]
  int* arrived;        // [pieces * kGroups], zero before and after
  long long table_pitch;
  float scale_log2;
  int tokens, rows, kv_heads, group, tile_tokens, block_tokens, box, window;
  int rounds;       // pieces of each block
  int least_piece;  // units; shorter pieces would spend more on their meeting
};

// The tokens of a row; row `args.rows` is what follows the last: it sees nothing, and gets zeros.
struct RowTokens {
  int first, length, context, tiles;
};

__device__ __forceinline__ RowTokens tokens_of(const PrefillArguments& args, int row) {
  const bool real = row < args.rows;
  RowTokens tokens;
  tokens.first = __ldg(args.starts + row);
  tokens.length = max((real ? __ldg(args.starts + row + 1) : args.tokens) - tokens.first, 0);
  tokens.context = real ? __ldg(args.lens + row) : 0;
  tokens.tiles = (tokens.length + args.tile_tokens - 1) / args.tile_tokens;
  return tokens;
}

// The tiles of kKeys keys that a tile of queries sees: `count` from `first` on.
struct TileKeys {
  int oldest, first, count;
  __device__ int real() const { return max(count, 1); }
  __device__ int units() const { return real() + kOverhead; }
};

template <int kKeys>
__device__ __forceinline__ TileKeys keys_of(const PrefillArguments& args, const RowTokens& row, int tile) {
  const int before = row.context - row.length;
  const int end = before + min((tile + 1) * args.tile_tokens, row.length);
  TileKeys keys;
  keys.oldest = args.window > 0 ? max(before + tile * args.tile_tokens - args.window + 1, 0) : 0;
  keys.first = keys.oldest / kKeys;
  keys.count = max((end + kKeys - 1) / kKeys - keys.first, 0);
  return keys;
}

// `ends[r]`: units of the rows up to and with r, padding included. All warps of the block.
template <int kKeys>
__device__ __forceinline__ void count_units(const PrefillArguments& args, int* ends) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row <= args.rows; row += blockDim.x / 32) {
    const RowTokens tokens = tokens_of(args, row);
    int sum = 0;
    for (int tile = lane; tile < tokens.tiles; tile += 32) sum += keys_of<kKeys>(args, tokens, tile).units();
    sum = __reduce_add_sync(0xFFFFFFFFu, sum);
    if (lane == 0) ends[row] = sum * args.kv_heads;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int before = 0;
    for (int base = 0; base <= args.rows; base += 32) {
      int sum = base + lane <= args.rows ? ends[base + lane] : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
      }
      sum += before;
      if (base + lane <= args.rows) ends[base + lane] = sum;
      before = __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
  }
  __syncthreads();
}

// Where a block stands in the line.
struct Cursor {
  RowTokens tokens;
  TileKeys keys;
  int row, head, tile;
  int within;  // units of the tile behind us
};

// One warp.
template <int kKeys>
__device__ __forceinline__ Cursor find(const PrefillArguments& args, const int* ends, int at) {
  Cursor cursor;
  int low = 0, high = args.rows;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > at)
      high = middle;
    else
      low = middle + 1;
  }
  cursor.row = low;
  cursor.tokens = tokens_of(args, low);
  const int before = low > 0 ? ends[low - 1] : 0;
  const int units = (ends[low] - before) / args.kv_heads;
  cursor.head = (at - before) / units;
  int left = (at - before) % units;
  const int lane = threadIdx.x % 32;
  for (int base = 0;; base += 32) {
    const int mine =
        base + lane < cursor.tokens.tiles ? keys_of<kKeys>(args, cursor.tokens, base + lane).units() : 0;
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += other;
    }
    const uint32_t beyond = __ballot_sync(0xFFFFFFFFu, sum > left);
    if (beyond != 0) {
      const int owner = __ffs(beyond) - 1;
      cursor.tile = base + owner;
      cursor.within = left - __shfl_sync(0xFFFFFFFFu, sum - mine, owner);
      break;
    }
    left -= __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
  cursor.keys = keys_of<kKeys>(args, cursor.tokens, cursor.tile);
  return cursor;
}

// To the next tile, which exists.
template <int kKeys>
__device__ __forceinline__ void advance(const PrefillArguments& args, Cursor& cursor) {
  cursor.within = 0;
  if (++cursor.tile == cursor.tokens.tiles) {
    cursor.tile = 0;
    if (++cursor.head == args.kv_heads) {
      cursor.head = 0;
      do {
        cursor.tokens = tokens_of(args, ++cursor.row);
      } while (cursor.tokens.tiles == 0);
    }
  }
  cursor.keys = keys_of<kKeys>(args, cursor.tokens, cursor.tile);
}

// A run of key tiles of one tile, as the requesting warp tells the computing ones; `token` -1 ends.
struct Segment {
  int token, tokens;   // the tile's first, and how many it has
  int position, head;  // of the first token; the kv head
  int context, oldest;
  int first, count;  // tiles of keys
  int part, parts, first_piece, slot;
};

__device__ __forceinline__ int exchange(int* at, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(at), "r"(value)
               : "memory");
  return before;
}

__device__ __forceinline__ int look(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// The running softmax of a warpgroup: rows lane / 4 and lane / 4 + 8 of each warp's 16. `top` in units of
// unscaled scores.
template <int kDim>
struct Running {
  float top[2], total[2], out[kDim / 2];

  __device__ __forceinline__ void clear() {
    top[0] = top[1] = kNone;
    total[0] = total[1] = 0.f;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i] = 0.f;
  }

  __device__ __forceinline__ void scale(const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i] *= by[i / 2 % 2];
  }

  __device__ __forceinline__ void put(float4* to) const {
    __stcg(to, make_float4(top[0], top[1], total[0], total[1]));
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
      __stcg(to + (i + 1) * 128, make_float4(out[i * 4], out[i * 4 + 1], out[i * 4 + 2], out[i * 4 + 3]));
  }

  // The order of the two doesn't matter, to the last bit.
  __device__ __forceinline__ void merge(const float4* from, float scale_log2) {
    const float4 stats = __ldcg(from);
    const float other_top[2] = {stats.x, stats.y}, other_total[2] = {stats.z, stats.w};
    float mine[2], theirs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float best = fmaxf(top[i], other_top[i]);
      const float base = best == kNone ? 0.f : best;
      mine[i] = exp2_fast((top[i] - base) * scale_log2);
      theirs[i] = exp2_fast((other_top[i] - base) * scale_log2);
      total[i] = __fadd_rn(__fmul_rn(total[i], mine[i]), __fmul_rn(other_total[i], theirs[i]));
      top[i] = best;
    }
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      if (i % 8 == 0) __syncwarp();  // more loads in flight would take the registers of the sums
      const float4 other = __ldcg(from + (i + 1) * 128);
      float* sum = out + i * 4;
      sum[0] = __fadd_rn(__fmul_rn(sum[0], mine[0]), __fmul_rn(other.x, theirs[0]));
      sum[1] = __fadd_rn(__fmul_rn(sum[1], mine[0]), __fmul_rn(other.y, theirs[0]));
      sum[2] = __fadd_rn(__fmul_rn(sum[2], mine[1]), __fmul_rn(other.z, theirs[1]));
      sum[3] = __fadd_rn(__fmul_rn(sum[3], mine[1]), __fmul_rn(other.w, theirs[1]));
    }
  }
};

// Brings the parts of a tile together in a tree, so that the sum doesn't depend on who is late and nobody
// adds up many. Of two siblings the later takes the earlier one's sum along. True for the one who has all.
// One warpgroup; `word` is a word of shared memory of its own.
template <int kDim>
__device__ __forceinline__ bool gather(const PrefillArguments& args, const Segment& segment, int group,
                                       Running<kDim>& state, volatile int* word) {
  const int thread = threadIdx.x % 128;
  constexpr long long kSlot = (kDim / 8 + 1) * 128;
  const auto sync = [&] { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); };
  for (int step = 1; step < segment.parts; step *= 2) {
    const int right = (segment.part & ~(2 * step - 1)) | step;
    if (right >= segment.parts) continue;
    int* meeting = args.arrived + (segment.first_piece + right) * kGroups + group;
    if (thread == 0) *word = look(meeting);
    sync();
    int sibling = *word;
    if (sibling == 0) {
      state.put(args.parts + (segment.slot * kGroups + group) * kSlot + thread);
      // All threads' stores before the one thread's release; its acquire before all threads' loads.
      sync();
      if (thread == 0) *word = exchange(meeting, segment.slot + 1);
      sync();
      sibling = *word;
    }
    sync();
    if (sibling == 0) return false;
    if (thread == 0) *meeting = 0;
    state.merge(args.parts + ((sibling - 1) * kGroups + group) * kSlot + thread, args.scale_log2);
  }
  return true;
}

}  // namespace quickturn
