// Ragged causal attention over the paged cache for many query tokens, bfloat16 or float16, as
// FlashAttention-3 (Shah et al. 2024) does it on Hopper: one warp requests queries, keys and values through
// the copy engine, two warpgroups compute 64 rows each. While the softmax of a tile of keys runs, the tensor
// cores have the outputs of the tile before, and the other warpgroup's products. (Barriers that make the two
// take turns cost more than they gave.) attention_prefill.cuh has the cutting of the work: one block a
// multiprocessor, equal pieces, parts that meet in a tree.
#include <cuda_runtime.h>

#include "attention_prefill.cuh"
#include "attention_prefill_products.cuh"
#include "tensor_map.h"

namespace quickturn {
namespace {

constexpr int kComputing = kGroups * 128;
constexpr int kThreads = kComputing + 128;
constexpr int kSharedLimit = 232448;

// What a head dim is computed with: tiles of kKeys keys, kSlots tiles of keys or values in flight.
template <int kDim_, int kKeys_, int kSlots_, bool kHalf_>
struct Form {
  static constexpr int kDim = kDim_, kKeys = kKeys_, kSlots = kSlots_;
  // Of a computing thread and of a requesting one; 65,536 in all.
  static constexpr int kRegisters = kDim > 128 ? 224 : 208, kFewRegisters = kDim > 128 ? 56 : 88;
  static constexpr bool kHalf = kHalf_;
  static constexpr int kSlices = kDim / kSliceColumns;
  static constexpr int kQueryBytes = kTileRows * kDim * 2;
  static constexpr int kQuerySlice = kTileRows * 128;
  static constexpr int kSlotBytes = kKeys * kDim * 2;
  static constexpr int kSlotSlice = kKeys * 128;
  static constexpr int kEnds = kQueryBytes + kSlots * kSlotBytes;
  static constexpr int kShared = kEnds + (kMaxRows + 1) * 4;
};

struct Barriers {
  uint32_t query_full, query_empty, full, empty;
};

__device__ __forceinline__ void load_queries(uint32_t to, const TensorMap* map, int column, int head,
                                             int token, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(column), "r"(head), "r"(token), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void load_page(uint32_t to, const TensorMap* map, int column, int head, int offset,
                                          int block, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(column), "r"(head), "r"(offset), "r"(block), "r"(barrier)
      : "memory");
}

// A place in the ring of keys and values.
template <int kSlots>
struct Place {
  int slot = 0;
  uint32_t parity;
  __device__ explicit Place(uint32_t first) : parity(first) {}
  __device__ __forceinline__ void next() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

// Requests what the segments of a block's pieces need, in the order in which it is used up: the keys of a
// tile, then the values of the tile before. One warp; lanes hold table entries for several tiles ahead, and
// each requests the pages whose entries it holds. Pages that nobody sees are asked for as block -1: the copy
// engine writes zeros.
template <typename F>
__device__ __forceinline__ void request(const PrefillArguments& args, const TensorMap* q_map,
                                        const TensorMap* k_map, const TensorMap* v_map, const int* ends,
                                        uint32_t shared, const Barriers& barriers, Segment* told) {
  const int lane = threadIdx.x % 32;
  const int line = ends[args.rows], pieces = gridDim.x * args.rounds;
  const int piece_units = max((line + pieces - 1) / pieces, args.least_piece);
  const int pages = F::kKeys / args.box, ahead = 32 / pages;
  const int my_tile = lane / pages, my_key = lane * args.box;
  Place<F::kSlots> place(1);
  uint32_t query_parity = 1;

  for (int piece = blockIdx.x; piece * piece_units < line && piece < pieces; piece += gridDim.x) {
    const int piece_start = piece * piece_units, piece_end = min(piece_start + piece_units, line);
    Cursor cursor = find<F::kKeys>(args, ends, piece_start);
    for (int at = piece_start;;) {
      const int tile_start = at - cursor.within;
      if (cursor.within < cursor.keys.real()) {
        const int seen = min(min(cursor.keys.real() - cursor.within, piece_end - at), cursor.keys.count);
        const int first = cursor.keys.first + cursor.within;
        const int token = cursor.tile * args.tile_tokens;
        barrier_wait(barriers.query_empty, query_parity);
        query_parity ^= 1;
        if (lane == 0) {
          Segment& segment = told[query_parity];
          segment.token = cursor.tokens.first + token;
          segment.tokens = min(args.tile_tokens, cursor.tokens.length - token);
          segment.position = cursor.tokens.context - cursor.tokens.length + token;
          segment.head = cursor.head;
          segment.context = cursor.tokens.context;
          segment.oldest = cursor.keys.oldest;
          segment.first = first;
          segment.count = seen;
          const int first_piece = tile_start / piece_units;
          segment.part = piece - first_piece;
          segment.parts = (tile_start + cursor.keys.real() - 1) / piece_units - first_piece + 1;
          segment.first_piece = first_piece;
          segment.slot = piece * 2 + (at != piece_start);
          if (seen > 0)
            barrier_expect(barriers.query_full, args.tile_tokens * args.group * F::kDim * 2);
          else
            barrier_arrive(barriers.query_full);
        }
        __syncwarp();
        if (seen > 0 && lane < F::kSlices)
          load_queries(shared + lane * F::kQuerySlice, q_map, lane * kSliceColumns, cursor.head * args.group,
                       cursor.tokens.first + token, barriers.query_full);

        const int* table = args.tables + cursor.row * args.table_pitch;
        const int end =
            min((first + seen) * F::kKeys, cursor.tokens.context - cursor.tokens.length +
                                               min(token + args.tile_tokens, cursor.tokens.length));
        int now = -1, before = -1;
        for (int tile = 0; tile <= seen && seen > 0; ++tile) {
          const int turn = tile % ahead;
          if (turn == 0) {
            before = now;
            const int key = (first + tile) * F::kKeys + my_key;
            now = key < end && key + args.box > cursor.keys.oldest ? __ldg(table + key / args.block_tokens)
                                                                   : -1;
          }
#pragma unroll
          for (int kind = 0; kind < 2; ++kind) {  // keys, then the values of the tile before
            if (kind == 0 ? tile == seen : tile == 0) continue;
            const int owner = kind == 0 ? turn : (tile - 1) % ahead;
            const uint32_t full = barriers.full + place.slot * 8;
            barrier_wait(barriers.empty + place.slot * 8, place.parity);
            if (lane == 0) barrier_expect(full, F::kSlotBytes);
            __syncwarp();
            if (my_tile == owner) {
              const int block = kind == 1 && turn == 0 ? before : now;
              const int offset = my_key % F::kKeys;
              const int key = (first + tile - kind) * F::kKeys + offset;
              const uint32_t to = shared + F::kQueryBytes + place.slot * F::kSlotBytes + offset * 128;
#pragma unroll
              for (int slice = 0; slice < F::kSlices; ++slice)
                load_page(to + slice * F::kSlotSlice, kind == 0 ? k_map : v_map, slice * kSliceColumns,
                          cursor.head, key % args.block_tokens, block, full);
            }
            place.next();
          }
        }
      }
      at = tile_start + cursor.keys.units();
      if (at >= piece_end) break;
      advance<F::kKeys>(args, cursor);
    }
  }
  barrier_wait(barriers.query_empty, query_parity);
  if (lane == 0) {
    told[query_parity ^ 1].token = -1;
    barrier_arrive(barriers.query_full);
  }
}

template <bool kHalf>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if (!kHalf) return narrow2(low, high);
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// scores = queries keys^T; begins, doesn't wait.
template <typename F>
__device__ __forceinline__ void multiply_keys(float (&scores)[F::kKeys / 2], uint64_t queries,
                                              uint32_t keys) {
  const uint64_t b = operand(keys);
  products_begin();
#pragma unroll
  for (int slice = 0; slice < F::kSlices; ++slice)
#pragma unroll
    for (int step = 0; step < kSliceColumns / 16; ++step)
      ScoreProduct<F::kKeys, F::kHalf>::run(scores, further(queries, slice * F::kQuerySlice + step * 32),
                                            further(b, slice * F::kSlotSlice + step * 32),
                                            slice > 0 || step > 0);
  products_commit();
}

// out += weights values; begins, doesn't wait.
template <typename F>
__device__ __forceinline__ void multiply_values(float (&out)[F::kDim / 2],
                                                const uint32_t (&weights)[F::kKeys / 4], uint32_t values) {
  const uint64_t b = transposed_operand(values, F::kSlotSlice);
  products_begin();
#pragma unroll
  for (int step = 0; step < F::kKeys / 16; ++step)
    OutputProduct<F::kDim, F::kHalf>::run(out, weights + step * 4, further(b, step * 16 * 128), 1);
  products_commit();
}

// The key tiles from .. to - 1 of a segment are seen whole by all rows of a warpgroup.
struct Edges {
  int from, to;
};

template <int kKeys>
__device__ __forceinline__ Edges edges_of(const PrefillArguments& args, const Segment& segment, int group) {
  const int first = segment.position + group * kGroupRows / args.group;
  const int last = segment.position + (group * kGroupRows + kGroupRows - 1) / args.group;
  const int behind = args.window > 0 ? max(last - args.window + 1, 0) : 0;  // keys before it are unseen
  return {(behind + kKeys - 1) / kKeys - segment.first, max(first + 1, 0) / kKeys - segment.first};
}

// Hides keys that the thread's two rows don't see.
template <int kKeys>
__device__ __forceinline__ void hide_unseen(float (&scores)[kKeys / 2], const PrefillArguments& args,
                                            const Segment& segment, int tile) {
  const int line = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int start = (segment.first + tile) * kKeys + threadIdx.x % 4 * 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    // The newest key that the row sees, and the one before the oldest.
    const int newest = segment.position + (line + row * 8) / args.group - start;
    const int before = args.window > 0 ? newest - args.window : -1 - start;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const int key = i / 2 * 8 + i % 2;
      float& score = scores[i / 2 * 4 + row * 2 + i % 2];
      score = key <= newest && key > before ? score : kNone;
    }
  }
}

// Scores become weights; the sums so far are to be scaled by `shrink`.
template <int kKeys, int kDim>
__device__ __forceinline__ void soften(float (&scores)[kKeys / 2], Running<kDim>& state, float (&shrink)[2],
                                       float scale_log2) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float best = scores[row * 2];
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 4)
      best = fmaxf(best, fmaxf(scores[i + row * 2], scores[i + row * 2 + 1]));
    best = fmaxf(state.top[row], quad_max(best));
    const float base = best == kNone ? 0.f : best * scale_log2;
    shrink[row] = exp2_fast(state.top[row] * scale_log2 - base);
    state.top[row] = best;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
      for (int k = i + row * 2; k < i + row * 2 + 2; ++k) {
        scores[k] = exp2_fast(fmaf(scores[k], scale_log2, -base));
        sum += scores[k];
      }
    }
    state.total[row] = state.total[row] * shrink[row] + sum;
  }
}

// Keeps the compiler from waiting for products before a sum of weights is there, on which nothing before that
// wait depends: as far as it knows, the sum may be negative and stored.
__device__ __forceinline__ void hold(float sum, volatile int* word) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}\n" ::"f"(sum),
               "r"(shared_address(const_cast<int*>(word)))
               : "memory");
}

template <int kKeys, bool kHalf>
__device__ __forceinline__ void pack_all(uint32_t (&weights)[kKeys / 4], const float (&scores)[kKeys / 2]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) weights[i] = pack<kHalf>(scores[i * 2], scores[i * 2 + 1]);
}

// Memory beyond the row's keys may hold anything, and zero times NaN is NaN: such values become zero. Each
// warpgroup does it for itself.
template <typename F>
__device__ __forceinline__ void clear_unseen(uint32_t values, const Segment& segment, int tile, int group) {
  const int start = (segment.first + tile) * F::kKeys;
  const int from = segment.oldest - start, to = segment.context - start;
  if (from <= 0 && to >= F::kKeys) return;
  for (int i = threadIdx.x % 128; i < F::kKeys * F::kDim / 8; i += 128) {
    const int key = i % F::kKeys;
    if (key < from || key >= to)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                       values + swizzled(F::kKeys, key, i / F::kKeys * 8)),
                   "r"(0)
                   : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// The results of a tile's rows, each by the one thread of four that holds 8 neighbours after an exchange.
template <typename F>
__device__ __forceinline__ void store(const PrefillArguments& args, const Segment& segment, int group,
                                      Running<F::kDim>& state) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = group * kGroupRows + threadIdx.x % 128 / 32 * 16 + half * 8 + lane / 4;
    const int token = line / args.group, head = segment.head * args.group + line % args.group;
    const bool real = token < segment.tokens;
    float total = state.total[half], by = 1.f;
    if (args.sinks != nullptr && real) {
      const float sink = __ldg(args.sinks + head) * 1.44269504f, top = state.top[half] * args.scale_log2;
      const float best = fmaxf(sink, top);
      by = exp2_fast(top - best);
      total = total * by + exp2_fast(sink - best);
    }
    by = total > 0.f ? by / total : 0.f;
    bf16* to = static_cast<bf16*>(args.out) +
               (static_cast<long long>(segment.token + token) * args.kv_heads * args.group + head) * F::kDim +
               quad * 8;
#pragma unroll
    for (int i = 0; i < F::kDim / 32; ++i) {
      uint32_t word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* pair = state.out + (i * 4 + k) * 4 + half * 2;
        word[k] = pack<F::kHalf>(pair[0] * by, pair[1] * by);
      }
      // A transposition of four by four words among four threads.
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k & step) continue;
          uint32_t& low = word[k];
          uint32_t& high = word[k | step];
          const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, quad & step ? low : high, step);
          if (quad & step)
            low = got;
          else
            high = got;
        }
      }
      if (real) *reinterpret_cast<uint4*>(to + i * 32) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

// One of the warpgroups that compute: 64 rows of each tile.
template <typename F>
__device__ __forceinline__ void compute(const PrefillArguments& args, uint32_t shared,
                                        const Barriers& barriers, const Segment* told, volatile int* word) {
  constexpr int kKeys = F::kKeys, kDim = F::kDim;
  const int group = uniform(threadIdx.x / 128), lane = threadIdx.x % 32;
  const uint64_t queries = operand(shared + group * kGroupRows * 128);
  const uint32_t ring = shared + F::kQueryBytes;
  Place<F::kSlots> place(0);
  uint32_t query_parity = 0;

  const auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };

  while (true) {
    barrier_wait(barriers.query_full, query_parity);
    // Two, because the next may come while we store this one's results.
    const Segment& segment = told[query_parity];
    query_parity ^= 1;
    if (segment.token < 0) break;
    const int count = uniform(segment.count);
    Running<kDim> state;
    state.clear();
    if (count == 0) {
      release(barriers.query_empty);
      store<F>(args, segment, group, state);
      continue;
    }
    const Edges edges = edges_of<kKeys>(args, segment, group);
    const auto hide = [&](float(&scores)[kKeys / 2], int tile) {
      if (tile < edges.from || tile >= edges.to) hide_unseen<kKeys>(scores, args, segment, tile);
    };
    const auto clean = [&](uint32_t values, int tile) {
      if (tile < edges.from || tile >= edges.to) clear_unseen<F>(values, segment, tile, group);
    };

    float scores[kKeys / 2], shrink[2];
    uint32_t weights[kKeys / 4];
    barrier_wait(barriers.full + place.slot * 8, place.parity);
    multiply_keys<F>(scores, queries, ring + place.slot * F::kSlotBytes);
    products_wait<0>();
    pin(scores);
    release(barriers.empty + place.slot * 8);
    place.next();
    if (count == 1) release(barriers.query_empty);
    hide(scores, 0);
    soften<kKeys, kDim>(scores, state, shrink, args.scale_log2);
    pack_all<kKeys, F::kHalf>(weights, scores);

    for (int tile = 1; tile < count; ++tile) {
      const int keys_slot = place.slot;
      barrier_wait(barriers.full + place.slot * 8, place.parity);
      place.next();
      const int values_slot = place.slot;
      barrier_wait(barriers.full + place.slot * 8, place.parity);
      place.next();
      clean(ring + values_slot * F::kSlotBytes, tile - 1);
      multiply_keys<F>(scores, queries, ring + keys_slot * F::kSlotBytes);
      multiply_values<F>(state.out, weights, ring + values_slot * F::kSlotBytes);
      products_wait<1>();
      pin(scores);
      release(barriers.empty + keys_slot * 8);
      if (tile == count - 1) release(barriers.query_empty);
      hide(scores, tile);
      soften<kKeys, kDim>(scores, state, shrink, args.scale_log2);
      hold(state.total[0] + state.total[1], word);
      products_wait<0>();
      pin(state.out);
      release(barriers.empty + values_slot * 8);
      pack_all<kKeys, F::kHalf>(weights, scores);
      state.scale(shrink);
    }

    barrier_wait(barriers.full + place.slot * 8, place.parity);
    clean(ring + place.slot * F::kSlotBytes, count - 1);
    multiply_values<F>(state.out, weights, ring + place.slot * F::kSlotBytes);
    products_wait<0>();
    pin(state.out);
    release(barriers.empty + place.slot * 8);
    place.next();
#pragma unroll
    for (int row = 0; row < 2; ++row) state.total[row] = quad_sum(state.total[row]);
    if (gather<kDim>(args, segment, group, state, word)) store<F>(args, segment, group, state);
  }
}

template <typename F>
__global__ void __launch_bounds__(kThreads, 1)
    prefill(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
            const __grid_constant__ TensorMap v_map, const __grid_constant__ PrefillArguments args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ alignas(8) uint64_t barrier_words[2 + 2 * F::kSlots];
  __shared__ Segment told[2];
  __shared__ int words[kGroups];
  const uint32_t shared = shared_address(memory);
  int* ends = reinterpret_cast<int*>(memory + F::kEnds);
  const uint32_t first = shared_address(barrier_words);
  const Barriers barriers{first, first + 8, first + 16, first + 16 + F::kSlots * 8};
  if (threadIdx.x == kComputing) {
    prefetch_map(&q_map);
    prefetch_map(&k_map);
    prefetch_map(&v_map);
    barrier_init(barriers.query_full, 1);
    barrier_init(barriers.query_empty, kComputing / 32);
    for (int slot = 0; slot < F::kSlots; ++slot) {
      barrier_init(barriers.full + slot * 8, 1);
      barrier_init(barriers.empty + slot * 8, kComputing / 32);
    }
    barrier_init_fence();
  }
  count_units<F::kKeys>(args, ends);

  if (threadIdx.x >= kComputing) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(F::kFewRegisters));
    if (threadIdx.x < kComputing + 32) request<F>(args, &q_map, &k_map, &v_map, ends, shared, barriers, told);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(F::kRegisters));
    compute<F>(args, shared, barriers, told, words + threadIdx.x / 128);
  }
}

struct Tensors {
  const void *q, *k_cache, *v_cache;
  long long q_token_pitch, q_head_pitch;
  long long k_row_pitch, k_block_pitch, v_row_pitch, v_block_pitch, cache_blocks;
};

template <typename F>
cudaError_t launch(const Tensors& from, const PrefillArguments& args, int blocks, cudaStream_t stream) {
  static_assert(F::kShared + 1024 <= kSharedLimit);
  TensorMap q_map, k_map, v_map;
  const int q_box[3] = {kSliceColumns, args.group, args.tile_tokens};
  const int page[4] = {kSliceColumns, 1, args.box, 1};
  const long long q_sizes[3] = {F::kDim, args.kv_heads * args.group, args.tokens};
  const long long sizes[4] = {F::kDim, args.kv_heads, args.block_tokens, from.cache_blocks};
  if (F::kKeys % args.box != 0 || F::kKeys / args.box > 32 ||
      !encode_boxes<3>(q_map, from.q, q_sizes, {from.q_head_pitch, from.q_token_pitch}, q_box) ||
      !encode_boxes<4>(k_map, from.k_cache, sizes, {F::kDim, from.k_row_pitch, from.k_block_pitch}, page) ||
      !encode_boxes<4>(v_map, from.v_cache, sizes, {F::kDim, from.v_row_pitch, from.v_block_pitch}, page))
    return cudaErrorInvalidValue;
  const cudaError_t error =
      cudaFuncSetAttribute(prefill<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, F::kShared);
  if (error != cudaSuccess) return error;
  prefill<F><<<blocks, kThreads, F::kShared, stream>>>(q_map, k_map, v_map, args);
  return cudaGetLastError();
}

template <bool kHalf>
cudaError_t launch(int head_dim, const Tensors& from, const PrefillArguments& args, int blocks,
                   cudaStream_t stream) {
  if (head_dim == 64) return launch<Form<64, 128, 8, kHalf>>(from, args, blocks, stream);
  if (head_dim == 128) return launch<Form<128, 128, 6, kHalf>>(from, args, blocks, stream);
  if (head_dim == 256) return launch<Form<256, 64, 5, kHalf>>(from, args, blocks, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace quickturn

// See PrefillArguments for the arrays; pitches in elements. head_dim 64, 128 or 256; group up to 128; up to
// 383 rows; block_tokens a power of two from 8; box: keys that are requested at once, at most block_tokens
// and 64. Returns a cudaError_t.
extern "C" int quickturn_attention_prefill(const quickturn::PrefillArguments* args, const void* q,
                                           const void* k_cache, const void* v_cache, const long long* pitches,
                                           int head_dim, int half, int blocks, void* stream) {
  using namespace quickturn;
  if (args->rows > kMaxRows || args->group < 1 || args->group > kTileRows || blocks < 1 || args->box < 8)
    return cudaErrorInvalidValue;
  const Tensors from{q,          k_cache,    v_cache,    pitches[0], pitches[1],
                     pitches[2], pitches[3], pitches[4], pitches[5], pitches[6]};
  const auto on = static_cast<cudaStream_t>(stream);
  return half ? launch<true>(head_dim, from, *args, blocks, on)
              : launch<false>(head_dim, from, *args, blocks, on);
}
