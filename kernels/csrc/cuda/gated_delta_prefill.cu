// The walk over the chunks of prompts of a gated delta net. A warpgroup keeps 64 columns of a head's state,
// transposed, in registers as the accumulator of its products, from a row's first chunk to its last; every
// product of a chunk takes its left operand from registers, so that nothing goes through shared memory but
// what the copy engine brings: keys, queries, values, and the chunk's two triangles.
//
// With S^T [values, keys] and a chunk's tokens as columns: M = V^T - (S^T K^T) diag(c), U = M T^T,
// O = (S^T Q^T) diag(d) + U A^T, and S^T becomes decay S^T + (U diag(e)) K.
#include <cuda_runtime.h>

#include "attention_prefill_products.cuh"
#include "dependent_launch.cuh"
#include "gated_delta_prefill.cuh"
#include "hopper.cuh"
#include "tensor_map.h"
#include "warp_mma.cuh"

namespace quickturn {
namespace {

constexpr int kStages = 3;
constexpr float kLog2E = 1.44269504f;

constexpr uint32_t kFactorBytes = kFactors * kChunk * 4;

// Offsets within a stage.
constexpr uint32_t kKeys = 0, kQueries = 2 * kTile, kSolved = 4 * kTile, kScores = 5 * kTile,
                   kValues = 6 * kTile;

template <int kGroups>
struct Layout {
  static constexpr uint32_t kFactorsAt = kValues + kGroups * kTile;
  static constexpr uint32_t kBytes = kFactorsAt + kFactorBytes;
  static constexpr uint32_t kStage = (kBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kOut = kStages * kStage;  // a tile for each warpgroup
  static constexpr uint32_t kTotal = kOut + kGroups * kTile + 1024;
};

// d[64, 64] (+)= a[64, 16] b[64, 16]^T, a in registers, b by `operand`.
__device__ __forceinline__ void product(float (&d)[32], const uint32_t* a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" QT_LIST_32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
      : QT_BOUND_32
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                 uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}

__device__ __forceinline__ float load_one(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

struct Maps {
  TensorMap q, k, v, solved, scores;
};

template <int kGroups>
__device__ void produce(const GatedDeltaScanArguments& args, const Maps& maps, const Walk& walk, int head,
                        uint32_t shared, uint32_t full, uint32_t empty) {
  using L = Layout<kGroups>;
  const int key_head = head / (args.heads / args.key_heads);
  const int column = blockIdx.x * kGroups * 64;
  // States and indexes are older; what the preparation makes is only read here.
  wait_for_predecessors();
  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    const int stage = chunk % kStages, turn = chunk / kStages;
    const uint32_t at = shared + stage * L::kStage, ready = full + stage * 8;
    barrier_wait(empty + stage * 8, (turn & 1) ^ 1);
    barrier_expect(ready, L::kBytes);
    const int token = walk.first(chunk);
    const long long place = (walk.slot + chunk) * args.heads + head;
#pragma unroll
    for (int slice = 0; slice < 2; ++slice)
      load_box(at + kKeys + slice * kTile, &maps.k, key_head * kDim + slice * 64, token, ready, kEvictLast);
    load_bytes(at + L::kFactorsAt, static_cast<const char*>(args.factors) + place * kFactorBytes,
               kFactorBytes, ready);
#pragma unroll
    for (int slice = 0; slice < 2; ++slice)
      load_box(at + kQueries + slice * kTile, &maps.q, key_head * kDim + slice * 64, token, ready,
               kEvictLast);
#pragma unroll
    for (int slice = 0; slice < kGroups; ++slice)
      load_box(at + kValues + slice * kTile, &maps.v, head * kDim + column + slice * 64, token, ready,
               kEvictFirst);
    load_box(at + kSolved, &maps.solved, 0, static_cast<int>(place) * kChunk, ready, kEvictFirst);
    load_box(at + kScores, &maps.scores, 0, static_cast<int>(place) * kChunk, ready, kEvictFirst);
  }
}

// The accumulator of [64, 64 or 128] as left operands, each column times its factor at `by` (0: none).
template <int kCount>
__device__ __forceinline__ void narrowed(uint32_t* a, const float (&d)[kCount], uint32_t by) {
#pragma unroll
  for (int tile = 0; tile < kCount / 4; ++tile) {
    float2 factor = make_float2(1.f, 1.f);
    if (by != 0) factor = load_pair(by + tile * 32);
    a[2 * tile] = narrow2(d[4 * tile] * factor.x, d[4 * tile + 1] * factor.y);
    a[2 * tile + 1] = narrow2(d[4 * tile + 2] * factor.x, d[4 * tile + 3] * factor.y);
  }
}

// Places of a thread's elements of the state, from its first one at `at`: value columns 8 apart, keys in
// pairs.
__device__ __forceinline__ long long state_place(long long block, const GatedDeltaScanArguments& args,
                                                 long long at, int i) {
  const int key = i / 4 * 8 + (threadIdx.x % 4) * 2 + (i & 1), down = (i & 2) * 4;
  return block * args.state_block_pitch + at + key * kDim + down;
}

template <int kCount>
__device__ __forceinline__ void store_state(const GatedDeltaScanArguments& args, long long block,
                                            long long at, const float (&state)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const long long place = state_place(block, args, at, i);
    if (args.half_states)
      static_cast<bf16*>(args.states)[place] = static_cast<bf16>(narrow2(state[i], 0.f));
    else
      static_cast<float*>(args.states)[place] = state[i];
  }
}

template <int kGroups>
__device__ void consume(const GatedDeltaScanArguments& args, const Walk& walk, int row, int head, int group,
                        uint32_t shared, uint32_t full, uint32_t empty) {
  using L = Layout<kGroups>;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, quad = lane % 4;
  const int column = (blockIdx.x * kGroups + group) * 64;  // of the head's values
  const long long target = static_cast<const int*>(args.state_out)[row];
  const long long source = static_cast<const int*>(args.state_in)[row];
  const bool reading = source >= 0 && static_cast<const unsigned char*>(args.state_zero)[row] == 0;
  // The thread's first element of the state: its value column; down: 8 further.
  const long long at = static_cast<long long>(head) * kDim * kDim + column + warp * 16 + lane / 4;
  float state[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    state[i] = 0.f;
    if (!reading) continue;
    const long long place = state_place(source, args, at, i);
    state[i] = args.half_states ? widen(static_cast<const bf16*>(args.states)[place])
                                : static_cast<const float*>(args.states)[place];
  }
  int kept = 0, kept_end = 0;
  if (args.kept_start != nullptr) {
    kept = static_cast<const int*>(args.kept_start)[row];
    kept_end = static_cast<const int*>(args.kept_start)[row + 1];
  }
  const uint32_t own = shared + L::kOut + group * kTile;

  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    const int stage = chunk % kStages, turn = chunk / kStages;
    const uint32_t tiles = shared + stage * L::kStage;
    const uint32_t keys = tiles + kKeys, factors = tiles + L::kFactorsAt;
    const uint32_t by_token = factors + quad * 8;  // of the thread's columns, 32 bytes a tile
    const int first = walk.first(chunk), count = walk.last(chunk) - first;
    uint32_t left[32];
    narrowed(left, state, 0);
    barrier_wait(full + stage * 8, turn & 1);

    float known[32], out[32];
    products_begin();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      product(known, left + step * 4, operand(keys + step / 4 * kTile + step % 4 * 32), step > 0);
    products_commit();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      product(out, left + step * 4, operand(tiles + kQueries + step / 4 * kTile + step % 4 * 32), step > 0);
    products_commit();
    if (count < kChunk) {
      // Tokens of other rows, or of none, lie there: whatever they are, they must not reach the state.
      for (int piece = thread; piece < (kChunk - count) * 16; piece += 128) {
        const uint32_t line = keys + piece % 2 * kTile + (count + piece / 16) * 128 + piece / 2 % 8 * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(line), "r"(0) : "memory");
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    }
    // Values as the accumulator has them: columns are tokens.
    uint32_t values[16];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int token = part * 16 + lane / 16 * 8 + lane % 8;
      const int chunk16 = (warp * 16 + lane / 8 % 2 * 8) / 8;
      uint32_t found[4];
      load_transposed(found, tiles + kValues + group * kTile + token * 128 + ((chunk16 ^ (token & 7)) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) values[part * 4 + i] = found[i];
    }
    products_wait<1>();
    pin(known);
    uint32_t right[16];
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 factor = load_pair(by_token + kChunk * 4 + tile * 32);
      const bool one = tile * 8 + quad * 2 < count, two = tile * 8 + quad * 2 + 1 < count;
      const uint32_t top = values[tile * 2], bottom = values[tile * 2 + 1];
      right[2 * tile] = narrow2(one ? low(top) - factor.x * known[4 * tile] : 0.f,
                                two ? high(top) - factor.y * known[4 * tile + 1] : 0.f);
      right[2 * tile + 1] = narrow2(one ? low(bottom) - factor.x * known[4 * tile + 2] : 0.f,
                                    two ? high(bottom) - factor.y * known[4 * tile + 3] : 0.f);
    }
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      product(known, right + step * 4, operand(tiles + kSolved + step * 32), step > 0);
    products_commit();
    products_wait<0>();
    pin(known);
    pin(out);
    narrowed(right, known, 0);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 factor = load_pair(by_token + 3 * kChunk * 4 + tile * 32);
      out[4 * tile] *= factor.x, out[4 * tile + 1] *= factor.y;
      out[4 * tile + 2] *= factor.x, out[4 * tile + 3] *= factor.y;
    }
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      product(out, right + step * 4, operand(tiles + kScores + step * 32), 1);
    products_commit();
    // States kept within the chunk; those at its end are what the update leaves.
    const int begun = first - walk.start;
    while (kept < kept_end && static_cast<const int*>(args.kept_tokens)[kept] < begun + count) {
      const int upto = static_cast<const int*>(args.kept_tokens)[kept] - begun;
      const float until = load_one(factors + (upto - 1) * 4);
      uint32_t share[16];
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        float2 factor = load_pair(by_token + tile * 32);
        const float2 norm = load_pair(by_token + 4 * kChunk * 4 + tile * 32);
        const int token = tile * 8 + quad * 2;
        factor.x = token < upto ? exp2_fast((until - factor.x) * kLog2E) * norm.x : 0.f;
        factor.y = token + 1 < upto ? exp2_fast((until - factor.y) * kLog2E) * norm.y : 0.f;
        share[2 * tile] = narrow2(known[4 * tile] * factor.x, known[4 * tile + 1] * factor.y);
        share[2 * tile + 1] = narrow2(known[4 * tile + 2] * factor.x, known[4 * tile + 3] * factor.y);
      }
      const float decay = exp2_fast(until * kLog2E);
      // In halves, which registers are just enough for.
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        float then[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) then[i] = (half ? state[32 + i] : state[i]) * decay;
        products_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step)
          OutputProduct<64, false>::run(then, share + step * 4,
                                        transposed_operand(keys + half * kTile + step * 2048, kTile), 1);
        products_commit();
        products_wait<0>();
        pin(then);
        store_state(args, static_cast<const int*>(args.kept_rows)[kept], at + half * 64 * kDim, then);
      }
      ++kept;
    }
    const float decay = exp2_fast(load_one(factors + (kChunk - 1) * 4) * kLog2E);
    uint32_t update[16];
    narrowed(update, known, by_token + 2 * kChunk * 4);
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] *= decay;
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      OutputProduct<128, false>::run(state, update + step * 4, transposed_operand(keys + step * 2048, kTile),
                                     1);
    products_commit();
    products_wait<1>();
    pin(out);
    // [values, tokens] to [tokens, values]: each warp has 16 values of all tokens, 32 bytes a token.
    const uint32_t mine = own + warp * (kChunk * 32);
    __syncwarp();
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float* o = out + part * 8;
      // Matrices: (tokens, values) = (0, 0), (0, 8), (8, 0), (8, 8) of 16 by 16.
      const int token = part * 16 + lane / 16 * 8 + lane % 8;
      store_transposed(mine + token * 32 + (lane / 8 % 2) * 16, narrow2(o[0], o[1]), narrow2(o[2], o[3]),
                       narrow2(o[4], o[5]), narrow2(o[6], o[7]));
    }
    __syncwarp();
    bf16* to = static_cast<bf16*>(args.out) + static_cast<long long>(head) * kDim + column + warp * 16;
#pragma unroll
    for (int piece = lane; piece < kChunk * 2; piece += 32) {
      uint4 packed;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(packed.x), "=r"(packed.y), "=r"(packed.z), "=r"(packed.w)
                   : "r"(mine + piece * 16));
      const int token = piece / 2;
      if (token < count)
        *reinterpret_cast<uint4*>(to + static_cast<long long>(first + token) * args.heads * kDim +
                                  piece % 2 * 8) = packed;
    }
    products_wait<0>();
    pin(state);
    if (lane == 0) barrier_arrive(empty + stage * 8);
    while (kept < kept_end && static_cast<const int*>(args.kept_tokens)[kept] == begun + count) {
      store_state(args, static_cast<const int*>(args.kept_rows)[kept], at, state);
      ++kept;
    }
  }
  store_state(args, target, at, state);
}

// One warp that loads is enough, but registers are dealt out by warpgroups.
template <int kGroups>
constexpr int kThreads = kGroups * 128 + (kGroups > 1 ? 128 : 32);

// Grid: (parts of a head, heads, rows). The warps past the computing warpgroups load.
template <int kGroups>
__global__ void __launch_bounds__(kThreads<kGroups>, 1)
    gated_delta_scan(const GatedDeltaScanArguments args, const __grid_constant__ Maps maps) {
  extern __shared__ char raw[];
  __shared__ alignas(8) uint64_t barriers[2 * kStages];
  const uint32_t shared = (shared_address(raw) + 1023) / 1024 * 1024;
  const uint32_t full = shared_address(barriers), empty = full + kStages * 8;
  const int head = blockIdx.y, row = blockIdx.z;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full + stage * 8, 1);
      barrier_init(empty + stage * 8, kGroups * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const Walk walk(args.query_start, args.context_lens, row);
  if (walk.chunks == 0 || static_cast<const int*>(args.state_out)[row] < 0) {
    wait_for_predecessors();
    // Padding.
    for (int piece = threadIdx.x; piece < (walk.end - walk.start) * kGroups * 8; piece += blockDim.x) {
      const int token = walk.start + piece / (kGroups * 8), part = piece % (kGroups * 8);
      bf16* to = static_cast<bf16*>(args.out) + (static_cast<long long>(token) * args.heads + head) * kDim +
                 blockIdx.x * kGroups * 64 + part * 8;
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  const int group = threadIdx.x / 128;
  if (group == kGroups) {
    if (kGroups > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x % 128 == 0) produce<kGroups>(args, maps, walk, head, shared, full, empty);
  } else {
    if (kGroups > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume<kGroups>(args, walk, row, head, group, shared, full, empty);
  }
}

template <int kGroups>
cudaError_t launch(const GatedDeltaScanArguments& args, const Maps& maps, cudaStream_t stream) {
  const auto kernel = gated_delta_scan<kGroups>;
  constexpr int kShared = Layout<kGroups>::kTotal;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  // Dependent on the preparation, which was not: what came before that is complete when this starts.
  return launch_dependent(kernel, {dim3(2 / kGroups, args.heads, args.rows), kThreads<kGroups>, kShared},
                          true, stream, args, maps);
}

}  // namespace
}  // namespace quickturn

// groups: warpgroups of a thread block, 1 (half a head's state each) or 2. q, k, v, solved, scores 16-byte
// aligned, pitches multiples of 8. Returns a cudaError_t.
extern "C" int quickturn_gated_delta_scan(const quickturn::GatedDeltaScanArguments* args, int groups,
                                          void* stream) {
  using namespace quickturn;
  Maps maps;
  const long long lines = static_cast<long long>(args->slots) * args->heads * kChunk;
  if (!encode_map(maps.q, args->q, args->tokens, args->key_heads * kDim, args->q_pitch, kChunk, 64) ||
      !encode_map(maps.k, args->k, args->tokens, args->key_heads * kDim, args->k_pitch, kChunk, 64) ||
      !encode_map(maps.v, args->v, args->tokens, args->heads * kDim, args->v_pitch, kChunk, 64) ||
      !encode_map(maps.solved, args->solved, lines, kChunk, kChunk, kChunk, 64) ||
      !encode_map(maps.scores, args->scores, lines, kChunk, kChunk, kChunk, 64))
    return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  if (groups == 1) return launch<1>(*args, maps, on);
  if (groups == 2) return launch<2>(*args, maps, on);
  return cudaErrorInvalidValue;
}
