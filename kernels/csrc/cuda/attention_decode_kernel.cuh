// Paged decode attention of rows of 16-bit floats, optionally with what stands before it in a layer: norm of
// the heads of q and k, rotary, and the cache write of this step's key and value.
//
// The tiles of 64 (of e4m3: 128) keys of all rows and kv heads form one line, cut into equal pieces, one a
// block, from the lengths that the blocks read themselves: a graph can be replayed for any. In a block one
// warp keeps a ring of tiles full; the others compute, each with 16 keys of every tile and a softmax of its
// own. They meet when a (row, head) ends; where several blocks share one, the block that is last to deliver
// its part adds up.
//
// Launched dependent, a block requests keys before the kernel ahead has finished: all but this step's own key
// were written long ago, and that one doesn't go through the cache.
#pragma once
#include <cuda_runtime.h>

#include <type_traits>

#include "attention_decode.cuh"
#include "dependent_launch.cuh"
#include "tensor_map.h"

namespace quickturn {
namespace decode_attention {

template <typename Cache>
constexpr int kThreads = kComputing<Cache> + 32;
constexpr int kMinStages = 2, kMaxStages = 12;
constexpr int kSharedLimit = 231000;

// Byte offsets in dynamic shared memory.
struct Layout {
  int fresh, query, sums, stats, weights, ends, bytes;
};

// Of the keys, or of the values, of a tile.
template <typename Cache>
constexpr int kTileBytes = Cache::kTileKeys * Cache::kDim * Cache::kBytes;
template <typename Cache>
constexpr int kFreshBytes = kQueryRows * Cache::kDim * Cache::kBytes;

template <typename Cache>
__host__ __device__ Layout layout_of(int stages, int group, int rows, int blocks) {
  Layout at;
  at.fresh = stages * 2 * kTileBytes<Cache>;
  at.query = at.fresh + 2 * kFreshBytes<Cache>;
  at.sums = at.query + kQueryRows * Cache::kDim * 2;
  at.stats = at.sums + kWarps<Cache> * group * Cache::kDim * 4;
  at.weights = at.stats + kWarps<Cache> * kQueryRows * 2 * 4;
  at.ends = at.weights + blocks * group * 2 * 4;
  at.bytes = at.ends + rows * 4;
  return at;
}

__device__ __forceinline__ void load_keys(uint32_t to, const TensorMap* map, int column, int head, int offset,
                                          int block, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(column), "r"(head), "r"(offset), "r"(block), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}

__device__ __forceinline__ int count_up(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

template <typename Cache>
__device__ __forceinline__ void sync_computing() {
  asm volatile("bar.sync 1, %0;" ::"n"(kComputing<Cache>) : "memory");
}

// Requests the tiles of a block's piece in order; one warp. Lanes hold table entries for several tiles ahead,
// and each requests the pages whose entries it holds.
template <typename Cache, bool kFresh>
__device__ void request_keys(const DecodeArguments& args, const TensorMap* k_map, const TensorMap* v_map,
                             const int* ends, uint32_t ring, uint32_t full, uint32_t empty, int at, int end) {
  constexpr int kTileKeys = Cache::kTileKeys;
  const int lane = threadIdx.x % 32;
  const int page = min(args.block_tokens, kTileKeys), pages = kTileKeys / page, ahead = 32 / pages;
  int stage = 0;
  uint32_t parity = 1;
  while (at < end) {
    const Segment segment = segment_at(ends, args, at, end);
    const RowKeys keys = keys_of<Cache::kTileKeys, kFresh>(__ldcg(args.lens + segment.row), args.window);
    const int* table = args.tables + segment.row * args.table_pitch;
    for (int done = 0; done < segment.count; done += ahead) {
      const int mine = (keys.first_tile + segment.first + done) * kTileKeys + lane * page;
      const bool visible =
          mine < keys.stored && mine + page > keys.oldest && done + lane / pages < segment.count;
      const int block = visible ? __ldcg(table + mine / args.block_tokens) : 0;
      for (int tile = 0; tile < ahead && done + tile < segment.count; ++tile) {
        const bool turn = visible && lane / pages == tile;
        const int count = __popc(__ballot_sync(0xFFFFFFFFu, turn));
        if (count == 0) continue;
        barrier_wait(empty + stage * 8, parity);
        if (lane == 0) barrier_expect(full + stage * 8, count * page * Cache::kDim * Cache::kBytes * 2);
        __syncwarp();
        if (turn) {
          const uint32_t to = ring + stage * 2 * kTileBytes<Cache> + lane % pages * page * kRowBytes<Cache>;
          constexpr int kColumns = kRowBytes<Cache> / Cache::kBytes;  // of a slice
#pragma unroll
          for (int slice = 0; slice < Cache::kDim / kColumns; ++slice) {
            const uint32_t there = to + slice * kTileKeys * 128;
            const int offset = mine % args.block_tokens;
            load_keys(there, k_map, slice * kColumns, segment.head, offset, block, full + stage * 8);
            load_keys(there + kTileBytes<Cache>, v_map, slice * kColumns, segment.head, offset, block,
                      full + stage * 8);
          }
        }
        if (++stage == args.stages) stage = 0, parity ^= 1;
      }
    }
    at += segment.count;
  }
}

// Norm and rotary of a head of q or k.
template <typename Cache>
__device__ __forceinline__ void turn(const DecodeArguments& args,
                                     Head<Cache::kDim, typename Cache::Type>& head, const void* weight,
                                     const float* angles) {
  if (weight != nullptr) {
    if (args.wide)
      head.norm(static_cast<const float*>(weight), args.eps);
    else
      head.norm(static_cast<const bf16*>(weight), args.eps);
  }
  if (args.rotated == Cache::kDim)
    head.rotate(angles);
  else
    head.rotate_first(angles, args.rotated);
}

// The query heads of a segment into shared memory; with kFresh normed and rotated, and where the segment
// holds the row's newest key also that and its value, here and in the cache.
template <typename Cache, bool kFresh>
__device__ void prepare(const DecodeArguments& args, const Segment& segment, int context,
                        unsigned char* query, unsigned char* fresh) {
  constexpr int kDim = Cache::kDim, kAll = kWarps<Cache>;
  const int warp = threadIdx.x / 32;
  const float* angles = args.cos_sin + (context - 1) * args.cos_sin_pitch;
  for (int member = warp; member < args.group; member += kAll) {
    Head<kDim, typename Cache::Type> head;
    head.load(args.q + segment.row * args.q_token_pitch +
              (segment.head * args.group + member) * args.q_head_pitch);
    if (kFresh && context > 0) {
      turn<Cache>(args, head, args.q_weight, angles);
    }
    put_query<Cache>(head, query, member);
  }
  if (!kFresh || context == 0 || !segment.last() || warp < kAll - 2) return;
  const int position = context - 1;
  const long long block = __ldcg(args.tables + segment.row * args.table_pitch + position / args.block_tokens);
  const int offset = position % args.block_tokens;
  Head<kDim, typename Cache::Type> head;
  if (warp == kAll - 1) {
    head.load(args.k + segment.row * args.k_token_pitch + segment.head * args.k_head_pitch);
    turn<Cache>(args, head, args.k_weight, angles);
    const long long to = block * args.k_block_pitch + offset * args.k_row_pitch + segment.head * kDim;
    put_fresh<Cache>(head, static_cast<unsigned char*>(args.k_cache) + to * Cache::kBytes, fresh,
                     args.k_scale);
  } else {
    head.load(args.v + segment.row * args.v_token_pitch + segment.head * args.v_head_pitch);
    const long long to = block * args.v_block_pitch + offset * args.v_row_pitch + segment.head * kDim;
    put_fresh<Cache>(head, static_cast<unsigned char*>(args.v_cache) + to * Cache::kBytes,
                     fresh + kFreshBytes<Cache>, args.v_scale);
  }
}

// Memory beyond a row's keys may hold anything, and zero times NaN is NaN: this warp's values outside
// [from, to) become zero.
template <typename Cache>
__device__ __forceinline__ void clear_values(unsigned char* values, int at, int from, int to) {
  for (int i = threadIdx.x % 32; i < kWarpKeys * Cache::kDim * Cache::kBytes / 16; i += 32) {
    const int key = i % kWarpKeys, column = i / kWarpKeys * 16;
    if (key < from || key >= to)
      *reinterpret_cast<uint4*>(values + tile_offset<Cache>(Cache::kTileKeys, at + key, column)) =
          make_uint4(0, 0, 0, 0);
  }
  // The copy engine writes here next.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

__device__ __forceinline__ float4 scaled_sum(const float4& a, const float4& b, float by) {
  return make_float4(a.x + b.x * by, a.y + b.y * by, a.z + b.z * by, a.w + b.w * by);
}

// `gate`: null, or of each of the four elements what opens it.
template <typename Type>
__device__ __forceinline__ void store_result(bf16* to, const float4& sum, float total, const bf16* gate) {
  const float by = total > 0.f ? 1.f / total : 0.f;
  float value[4] = {sum.x * by, sum.y * by, sum.z * by, sum.w * by};
  if (gate != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float opening = 1.f / (1.f + __expf(-Type::widen(gate[i])));
      value[i] = rounded_to<Type>(value[i]) * rounded_to<Type>(opening);
    }
  }
  *reinterpret_cast<uint2*>(to) =
      make_uint2(Type::narrow2(value[0], value[1]), Type::narrow2(value[2], value[3]));
}

template <typename Cache, bool kFresh>
__global__ void __launch_bounds__(kThreads<Cache>, 1)
    decode(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
           const DecodeArguments args) {
  constexpr int kDim = Cache::kDim, kTileKeys = Cache::kTileKeys;
  constexpr int kAll = kWarps<Cache>, kAllThreads = kComputing<Cache>;
  extern __shared__ unsigned char unaligned[];
  __shared__ alignas(8) uint64_t barriers[2 * kMaxStages];
  __shared__ int last_to_deliver;
  unsigned char* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const Layout place = layout_of<Cache>(args.stages, args.group, args.rows, gridDim.x);
  int* ends = reinterpret_cast<int*>(shared + place.ends);
  const uint32_t full = shared_address(barriers), empty = full + kMaxStages * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  let_dependents_start();
  if (warp == 0) {
    count_tiles<Cache::kTileKeys, kFresh>(args, ends);
  } else if (warp == kAll) {
    if (lane == 0) {
      prefetch_map(&k_map);
      prefetch_map(&v_map);
      for (int stage = 0; stage < args.stages; ++stage) {
        barrier_init(full + stage * 8, 1);
        barrier_init(empty + stage * 8, kAll);
      }
      barrier_init_fence();
    }
  } else {
    prefetch_tables(args, threadIdx.x - 32, kAllThreads - 32);
    // Padding of the query and of the fresh key's tile must be finite.
    for (int i = threadIdx.x - 32; i < (place.sums - place.fresh) / 16; i += kAllThreads - 32)
      reinterpret_cast<uint4*>(shared + place.fresh)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  const int line = ends[args.rows - 1] * args.kv_heads;
  const int piece = (line + gridDim.x - 1) / gridDim.x;
  const int piece_start = min(static_cast<int>(blockIdx.x) * piece, line);
  const int piece_end = min(piece_start + piece, line);
  const uint32_t ring = shared_address(shared);

  if (warp == kAll) {
    request_keys<Cache, kFresh>(args, &k_map, &v_map, ends, ring, full, empty, piece_start, piece_end);
    wait_for_predecessors();
    return;
  }
  wait_for_predecessors();

  float* sums = reinterpret_cast<float*>(shared + place.sums);
  float2* stats = reinterpret_cast<float2*>(shared + place.stats);
  float2* gathered = reinterpret_cast<float2*>(shared + place.weights);
  const int group = args.group, vectors = group * kDim / 4;
  int stage = 0;
  uint32_t parity = 0;
  for (int at = piece_start; at < piece_end;) {
    const Segment segment = segment_at(ends, args, at, piece_end);
    const int context = __ldcg(args.lens + segment.row);
    const RowKeys keys = keys_of<Cache::kTileKeys, kFresh>(context, args.window);
    prepare<Cache, kFresh>(args, segment, context, shared + place.query, shared + place.fresh);
    sync_computing<Cache>();
    const uint32_t query = shared_address(shared + place.query);
    Softmax<Cache> state;
    state.clear();
    if (kFresh && warp == 0 && context > 0 && segment.last()) {
      const uint32_t fresh = shared_address(shared + place.fresh);
      state.add(query, fresh, fresh + kFreshBytes<Cache>, kQueryRows, 0, 0, 1, args.scale_log2);
    }
    for (int tile = 0; tile < segment.count; ++tile) {
      const int start = (keys.first_tile + segment.first + tile) * kTileKeys;
      if (start >= keys.stored || start + kTileKeys <= keys.oldest) continue;
      const int first = start + warp * kWarpKeys;
      const int from = max(keys.oldest - first, 0), to = min(keys.stored - first, kWarpKeys);
      barrier_wait(full + stage * 8, parity);
      if (from < to) {
        unsigned char* tile_at = shared + stage * 2 * kTileBytes<Cache>;
        if (from > 0 || to < kWarpKeys)
          clear_values<Cache>(tile_at + kTileBytes<Cache>, warp * kWarpKeys, from, to);
        const uint32_t loaded = shared_address(tile_at);
        state.add(query, loaded, loaded + kTileBytes<Cache>, kTileKeys, warp * kWarpKeys, from, to,
                  args.scale_log2);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage * 8);
      if (++stage == args.stages) stage = 0, parity ^= 1;
    }

    // The warps' sums meet in shared memory.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int member = lane / 4 + half * 8;
      const float total = quad_sum(state.total[half]);
      if (lane % 4 == 0) stats[warp * kQueryRows + member] = make_float2(state.top[half], total);
      if (member < group) put_sums(state, half, sums + (warp * group + member) * kDim);
    }
    sync_computing<Cache>();
    bf16* out =
        args.out + (static_cast<long long>(segment.row) * args.kv_heads + segment.head) * group * kDim;
    const bf16* gate = args.gate == nullptr ? nullptr
                                            : args.gate + segment.row * args.gate_pitch +
                                                  static_cast<long long>(segment.head) * group * kDim;
    const auto store = [&](int i, const float4& sum, float total) {
      store_result<typename Cache::Type>(out + i * 4, sum, total, gate == nullptr ? nullptr : gate + i * 4);
    };
    const int slot = blockIdx.x * 2 + (at != piece_start);
    for (int i = threadIdx.x; i < vectors; i += kAllThreads) {
      const int member = i / (kDim / 4);
      float top = kNone, total = 0.f;
#pragma unroll
      for (int w = 0; w < kAll; ++w) top = fmaxf(top, stats[w * kQueryRows + member].x);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < kAll; ++w) {
        const float2 one = stats[w * kQueryRows + member];
        const float by = one.y > 0.f ? exp2_fast(one.x - top) : 0.f;
        total += one.y * by;
        sum = scaled_sum(sum, reinterpret_cast<const float4*>(sums)[w * vectors + i], by);
      }
      if (segment.whole()) {
        store(i, sum, total);
      } else {
        __stcg(reinterpret_cast<float4*>(args.parts) + static_cast<long long>(slot) * vectors + i, sum);
        if (i % (kDim / 4) == 0)
          __stcg(reinterpret_cast<float2*>(args.part_stats) + slot * group + member, make_float2(top, total));
      }
    }
    if (!segment.whole()) {
      const int first_block = segment.head_start / piece;
      const int parts = (segment.head_start + segment.row_tiles - 1) / piece - first_block + 1;
      // All threads' stores before the one thread's release; its acquire before all threads' loads.
      sync_computing<Cache>();
      if (threadIdx.x == 0) {
        int* counter = args.arrived + segment.row * args.kv_heads + segment.head;
        last_to_deliver = count_up(counter) == parts - 1;
        if (last_to_deliver) *counter = 0;
      }
      sync_computing<Cache>();
      if (last_to_deliver) {
        // Part 0 may be the second segment of its block; the others are the first of theirs.
        const int first_slot = first_block * 2 + (segment.head_start != first_block * piece);
        for (int i = threadIdx.x; i < parts * group; i += kAllThreads) {
          const int part = i / group, from = part == 0 ? first_slot : (first_block + part) * 2;
          gathered[i] = __ldcg(reinterpret_cast<const float2*>(args.part_stats) + from * group + i % group);
        }
        sync_computing<Cache>();
        for (int i = threadIdx.x; i < vectors; i += kAllThreads) {
          const int member = i / (kDim / 4);
          float top = kNone, total = 0.f;
          for (int part = 0; part < parts; ++part) top = fmaxf(top, gathered[part * group + member].x);
          float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
          for (int part = 0; part < parts; ++part) {
            const int from = part == 0 ? first_slot : (first_block + part) * 2;
            const float4 values = __ldcg(reinterpret_cast<const float4*>(args.parts) +
                                         static_cast<long long>(from) * vectors + i);
            const float2 one = gathered[part * group + member];
            const float by = one.y > 0.f ? exp2_fast(one.x - top) : 0.f;
            total += one.y * by;
            sum = scaled_sum(sum, values, by);
          }
          store(i, sum, total);
        }
      }
    }
    at += segment.count;
  }
}

template <typename Cache>
bool encode_cache(TensorMap& map, const void* cache, const DecodeArguments& args, long long blocks,
                  long long row_pitch, long long block_pitch) {
  constexpr int kTileKeys = Cache::kTileKeys;
  const long long sizes[4] = {Cache::kDim, args.kv_heads, args.block_tokens, blocks};
  const long long pitches[3] = {Cache::kDim, row_pitch, block_pitch};
  const int box[4] = {kRowBytes<Cache> / Cache::kBytes, 1,
                      args.block_tokens < kTileKeys ? args.block_tokens : kTileKeys, 1};
  return encode_boxes<4>(map, cache, sizes, pitches, box, Cache::kBytes);
}

template <typename Cache, bool kFresh>
cudaError_t launch(DecodeArguments args, long long cache_blocks, int blocks, int early, cudaStream_t stream) {
  TensorMap k_map, v_map;
  if (!encode_cache<Cache>(k_map, args.k_cache, args, cache_blocks, args.k_row_pitch, args.k_block_pitch) ||
      !encode_cache<Cache>(v_map, args.v_cache, args, cache_blocks, args.v_row_pitch, args.v_block_pitch))
    return cudaErrorInvalidValue;
  int shared = 0;
  for (args.stages = kMaxStages; args.stages >= kMinStages; --args.stages) {
    shared = 1024 + layout_of<Cache>(args.stages, args.group, args.rows, blocks).bytes;
    if (shared <= kSharedLimit) break;
  }
  if (args.stages < kMinStages) return cudaErrorInvalidValue;
  if constexpr (Cache::kFp8) args.scale_log2 /= Cache::kQueryScale;
  const auto kernel = decode<Cache, kFresh>;
  const cudaError_t error = divide_memory(kernel, shared);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, {dim3(blocks), kThreads<Cache>, shared}, early != 0, stream, k_map, v_map,
                          args);
}

template <template <typename, int> typename Cache, typename Type>
cudaError_t launch_dims(const DecodeArguments& args, int head_dim, long long cache_blocks, int blocks,
                        int early, cudaStream_t stream) {
  const auto pick = [&](auto dim) {
    using Of = Cache<Type, decltype(dim)::value>;
    return args.k != nullptr ? launch<Of, true>(args, cache_blocks, blocks, early, stream)
                             : launch<Of, false>(args, cache_blocks, blocks, early, stream);
  };
  if (head_dim == 64) return pick(std::integral_constant<int, 64>{});
  if (head_dim == 128) return pick(std::integral_constant<int, 128>{});
  return head_dim == 256 ? pick(std::integral_constant<int, 256>{}) : cudaErrorInvalidValue;
}

// See DecodeArguments for the arrays; pitches in elements. half: the model's type is float16, else bfloat16.
// head_dim 64, 128 or 256; group up to 16; rows up to 1,024; block_tokens a power of two from 8 (of e4m3:
// 16). early: start before the kernel ahead has finished, which must have written neither lens, tables nor
// any key but this step's. Returns a cudaError_t.
template <template <typename, int> typename Cache>
int launch_any(const DecodeArguments* args, int half, int head_dim, long long cache_blocks, int blocks,
               int early, void* stream) {
  constexpr int kMaxRows = 1024, kLeastTokens = 16 / Cache<Half, 64>::kBytes;
  if (args->rows < 1 || args->rows > kMaxRows || args->group < 1 || args->group > kQueryRows ||
      args->block_tokens < kLeastTokens || (args->block_tokens & (args->block_tokens - 1)) || blocks < 1)
    return cudaErrorInvalidValue;
  const auto launch_as = half ? launch_dims<Cache, Half> : launch_dims<Cache, Bfloat>;
  return launch_as(*args, head_dim, cache_blocks, blocks, early, static_cast<cudaStream_t>(stream));
}

}  // namespace decode_attention
}  // namespace quickturn
