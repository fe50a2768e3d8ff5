// What of a chunk of a gated delta net's prompt doesn't depend on the state: the inverse of the triangle that
// couples its tokens' corrections, its attention scores, and each token's factors. A thread block has a chunk
// and a k head, and takes that head's v heads two at a time: their triangles differ only in decay and beta.
//
// The inverse is made of 16 x 16 blocks on the diagonal, by substitution in float32, and merged twice by
// products: [[A, 0], [B, C]]^-1 = [[A', 0], [-C' B A', C']]. No number in it is larger than one, so half
// precision has more bits for it than bfloat16.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "attention_prefill_products.cuh"
#include "gated_delta_prefill.cuh"
#include "hopper.cuh"
#include "tensor_map.h"
#include "warp_mma.cuh"

namespace quickturn {
namespace {

constexpr int kBlock = 16;
constexpr int kPitch = kChunk + 8;  // elements from row to row of a triangle in shared memory
constexpr int kPairHeads = 2;
constexpr float kL2Eps = 1e-6f;
constexpr float kLog2E = 1.44269504f;

struct Shared {
  union {
    struct {
      alignas(1024) char keys[2 * kTile];
      alignas(1024) char queries[2 * kTile];
    };
    struct {
      alignas(16) __half lower[kPairHeads][kChunk][kPitch];
      alignas(16) __half inverse[kPairHeads][kChunk][kPitch];
    };
  };
  alignas(16) float diagonal[kPairHeads][kChunk / kBlock][kBlock][kBlock + 4];
  float total[kPairHeads][kChunk];  // cumulative log decay, in units of log 2
  float beta[kPairHeads][kChunk];
  float key_norm[kChunk], query_norm[kChunk];
  alignas(8) uint64_t barrier;
};

// c[16, 8] += a[16, 16] b[16, 8] of half precision in float32.
__device__ __forceinline__ void multiply_half(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t halves(float low, float high) {
  const __half2 packed = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&packed);
}

using Triangle = __half[kChunk][kPitch];

// c[16, kColumns] = a(row0.., k0..)[16, kDepth] b(k1.., column0..)[kDepth, kColumns], a and b in triangles.
template <int kDepth, int kColumns>
__device__ __forceinline__ void multiply_blocks(float (&c)[kColumns / 8][4], const uint32_t (*a)[4],
                                                const Triangle& b, int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < kColumns / 8; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[tile][i] = 0.f;
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair) {
      uint32_t found[4];
      load_transposed(found,
                      shared_address(&b[row + step * 16 + lane % 16][column + pair * 16 + lane / 16 * 8]));
      multiply_half(c[2 * pair], a[step], found[0], found[1]);
      multiply_half(c[2 * pair + 1], a[step], found[2], found[3]);
    }
  }
}

// [16, kDepth] of a triangle as left operands.
template <int kDepth>
__device__ __forceinline__ void load_left(uint32_t (*a)[4], const Triangle& from, int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step)
    load_matrices(a[step], shared_address(&from[row + lane % 16][column + step * 16 + lane / 16 * 8]));
}

// inverse(row.., column..)[16, kSize] = -inverse(row.., row0..) lower(row0.., column..) inverse(column..),
// for a square of kSize below the diagonal whose rows begin at row0 and columns at column.
template <int kSize>
__device__ __forceinline__ void merge(Triangle& inverse, const Triangle& lower, int row, int row0,
                                      int column) {
  const int lane = threadIdx.x % 32;
  uint32_t a[kSize / 16][4];
  float c[kSize / 8][4];
  load_left<kSize>(a, inverse, row, row0);
  multiply_blocks<kSize, kSize>(c, a, lower, row0, column);
#pragma unroll
  for (int step = 0; step < kSize / 16; ++step) {
    a[step][0] = halves(-c[2 * step][0], -c[2 * step][1]);
    a[step][1] = halves(-c[2 * step][2], -c[2 * step][3]);
    a[step][2] = halves(-c[2 * step + 1][0], -c[2 * step + 1][1]);
    a[step][3] = halves(-c[2 * step + 1][2], -c[2 * step + 1][3]);
  }
  multiply_blocks<kSize, kSize>(c, a, inverse, column, column);
#pragma unroll
  for (int tile = 0; tile < kSize / 8; ++tile) {
    __half* to = &inverse[row + lane / 4][column + tile * 8 + lane % 4 * 2];
    *reinterpret_cast<uint32_t*>(to) = halves(c[tile][0], c[tile][1]);
    *reinterpret_cast<uint32_t*>(to + 8 * kPitch) = halves(c[tile][2], c[tile][3]);
  }
}

// Column `column` of the inverse of a unit triangle of 16, whose part below the diagonal is given.
__device__ __forceinline__ void substitute(float (&x)[kBlock], const float (*lower)[kBlock + 4], int column) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float sum = i == column ? 1.f : 0.f;
#pragma unroll
    for (int j4 = 0; j4 < i; j4 += 4) {
      const float4 part = *reinterpret_cast<const float4*>(&lower[i][j4]);
      sum -= part.x * x[j4];
      if (j4 + 1 < i) sum -= part.y * x[j4 + 1];
      if (j4 + 2 < i) sum -= part.z * x[j4 + 2];
      if (j4 + 3 < i) sum -= part.w * x[j4 + 3];
    }
    x[i] = sum;
  }
}

__device__ __forceinline__ float square_sum(uint4 packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = __uint_as_float(words[i] << 16), high = __uint_as_float(words[i] & 0xFFFF0000u);
    sum += low * low + high * high;
  }
  return sum;
}

struct PrepareMaps {
  TensorMap q, k;
};

// Grid: (slots, k heads).
__global__ void __launch_bounds__(128, 4)
    gated_delta_prepare(const GatedDeltaPrepareArguments args, const __grid_constant__ PrepareMaps maps) {
  extern __shared__ char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw + ((1024 - shared_address(raw) % 1024) % 1024));
  const int slot = blockIdx.x, key_head = blockIdx.y;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane % 4;
  let_dependents_start();

  // The row whose slots hold ours: the last that begins at or before it.
  const int* starts = static_cast<const int*>(args.query_start);
  int low = 0, high = args.rows;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] / kChunk + kSpare * middle <= slot)
      low = middle;
    else
      high = middle;
  }
  const Walk walk(args.query_start, args.context_lens, low);
  const int chunk = slot - static_cast<int>(walk.slot);
  if (chunk >= walk.chunks) return;
  const int first = walk.first(chunk), count = walk.last(chunk) - first;

  const uint32_t barrier = shared_address(&shared.barrier);
  const uint32_t keys = shared_address(shared.keys), queries = shared_address(shared.queries);
  if (thread == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, 4 * kTile);
    for (int slice = 0; slice < 2; ++slice) {
      load_box(keys + slice * kTile, &maps.k, key_head * kDim + slice * 64, first, barrier, kEvictLast);
      load_box(queries + slice * kTile, &maps.q, key_head * kDim + slice * 64, first, barrier, kEvictLast);
    }
  }
  __syncthreads();
  barrier_wait(barrier, 0);

  float overlap[32], attention[32];
  products_begin();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t at = step / 4 * kTile + step % 4 * 32;
    ScoreProduct<64, false>::run(overlap, operand(keys + at), operand(keys + at), step > 0);
  }
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t at = step / 4 * kTile + step % 4 * 32;
    ScoreProduct<64, false>::run(attention, operand(queries + at), operand(keys + at), step > 0);
  }
  products_commit();
  {
    // Norms meanwhile: two threads a token, one slice each.
    const int token = thread / 2;
    float key_sum = 0.f, query_sum = 0.f;
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
      const int at = thread % 2 * kTile + token * 128 + (piece ^ (token & 7)) * 16;
      key_sum += square_sum(*reinterpret_cast<const uint4*>(shared.keys + at));
      query_sum += square_sum(*reinterpret_cast<const uint4*>(shared.queries + at));
    }
    key_sum += __shfl_xor_sync(0xFFFFFFFFu, key_sum, 1);
    query_sum += __shfl_xor_sync(0xFFFFFFFFu, query_sum, 1);
    // Of tokens that aren't ours nothing may remain, not even NaN.
    if (thread % 2 == 0) {
      shared.key_norm[token] = token < count ? rsqrtf(key_sum + kL2Eps) : 0.f;
      shared.query_norm[token] = token < count ? rsqrtf(query_sum + kL2Eps) * args.scale : 0.f;
    }
  }
  products_wait<0>();
  pin(overlap);
  pin(attention);

  const int group = args.heads / args.key_heads;
  const int top = warp * 16 + lane / 4;  // the thread's first row of the products, and 8 further
  for (int pair = 0; pair < group; pair += kPairHeads) {
    const int here = min(kPairHeads, group - pair);
    {
      // Gates: a thread a token and head.
      const int member = thread / kChunk, token = thread % kChunk;
      const int head = key_head * group + pair + min(member, here - 1);
      float decay = 0.f, beta = 0.f;
      if (token < count) {
        const long long at = first + token;
        const float x = widen(static_cast<const bf16*>(args.a)[at * args.a_pitch + head]) +
                        static_cast<const float*>(args.dt_bias)[head];
        const float softplus = fmaxf(x, 0.f) + log1pf(__expf(-fabsf(x)));
        decay = -__expf(static_cast<const float*>(args.a_log)[head]) * softplus * kLog2E;
        beta = 1.f / (1.f + __expf(-widen(static_cast<const bf16*>(args.b)[at * args.b_pitch + head])));
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float before = __shfl_up_sync(0xFFFFFFFFu, decay, step);
        if (lane >= step) decay += before;
      }
      __syncthreads();  // The pair before is done with total, beta and the triangles; K and Q with the
                        // products.
      shared.total[member][token] = decay;
      shared.beta[member][token] = beta;
      __syncthreads();
      if (token >= 32) {
        decay += shared.total[member][31];
        shared.total[member][token] = decay;
      }
      __syncthreads();
      if (member < here) {
        const float last = shared.total[member][kChunk - 1];
        float* line = static_cast<float*>(args.factors) +
                      (static_cast<long long>(slot) * args.heads + head) * (kFactors * kChunk) + token;
        const float forward = exp2_fast(decay);
        line[0] = decay / kLog2E;
        line[kChunk] = forward * shared.key_norm[token];
        line[2 * kChunk] = exp2_fast(last - decay) * shared.key_norm[token];
        line[3 * kChunk] = forward * shared.query_norm[token];
        line[4 * kChunk] = shared.key_norm[token];
      }
    }
    // The triangles: below the diagonal to shared memory, scores to device memory.
    for (int member = 0; member < here; ++member) {
      const float* total = shared.total[member];
      const long long place =
          (static_cast<long long>(slot) * args.heads + key_head * group + pair + member) * (kChunk * kChunk);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = top + half * 8;
        const float here_total = total[row], beta = shared.beta[member][row];
        const float key_norm = shared.key_norm[row], query_norm = shared.query_norm[row];
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
          const int column = tile * 8 + quad * 2;
          uint32_t* const to =
              reinterpret_cast<uint32_t*>(static_cast<bf16*>(args.scores) + place + row * kChunk + column);
          if (tile / 2 > warp) {
            *to = 0;
            continue;
          }
          float below[2], seen[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int j = column + i;
            const bool living = row < count;
            const float between = exp2_fast(here_total - total[j]) * shared.key_norm[j];
            below[i] = living && j < row ? overlap[tile * 4 + half * 2 + i] * key_norm * beta * between : 0.f;
            seen[i] = living && j <= row ? attention[tile * 4 + half * 2 + i] * query_norm * between : 0.f;
          }
          if (tile / 2 == warp)
            *reinterpret_cast<float2*>(&shared.diagonal[member][warp][row % 16][column % 16]) =
                make_float2(below[0], below[1]);
          *reinterpret_cast<uint32_t*>(&shared.lower[member][row][column]) = halves(below[0], below[1]);
          *to = narrow2(seen[0], seen[1]);
        }
      }
    }
    __syncthreads();
    {
      // A warp inverts its 16 x 16 block of both heads, half a warp each, and clears what is above it.
      const int member = lane / 16, column = lane % 16;
      float x[kBlock];
      substitute(x, shared.diagonal[member][warp], column);
#pragma unroll
      for (int i = 0; i < kBlock; ++i)
        shared.inverse[member][warp * kBlock + i][warp * kBlock + column] = __float2half_rn(x[i]);
      for (int piece = lane; piece < kPairHeads * kBlock * (kChunk / 8); piece += 32) {
        const int row = warp * kBlock + piece / (kChunk / 8) % kBlock, eight = piece % (kChunk / 8);
        if (eight * 8 >= (warp + 1) * kBlock)
          *reinterpret_cast<uint4*>(&shared.inverse[piece / (kChunk / 8 * kBlock)][row][eight * 8]) =
              make_uint4(0, 0, 0, 0);
      }
    }
    __syncthreads();
    {
      const int member = warp / 2, half = warp % 2;
      merge<16>(shared.inverse[member], shared.lower[member], half * 32 + 16, half * 32 + 16, half * 32);
      __syncthreads();
      merge<32>(shared.inverse[member], shared.lower[member], 32 + half * 16, 32, 0);
    }
    __syncthreads();
    for (int piece = thread; piece < here * kChunk * (kChunk / 8); piece += 128) {
      const int member = piece / (kChunk * kChunk / 8), row = piece / (kChunk / 8) % kChunk;
      const int column = piece % (kChunk / 8) * 8;
      const uint4 packed = *reinterpret_cast<const uint4*>(&shared.inverse[member][row][column]);
      const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
      uint32_t result[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        result[i] = narrow2(two.x * shared.beta[member][column + 2 * i],
                            two.y * shared.beta[member][column + 2 * i + 1]);
      }
      const long long place =
          (static_cast<long long>(slot) * args.heads + key_head * group + pair + member) * (kChunk * kChunk);
      *reinterpret_cast<uint4*>(static_cast<bf16*>(args.solved) + place + row * kChunk + column) =
          make_uint4(result[0], result[1], result[2], result[3]);
    }
  }
}

}  // namespace
}  // namespace quickturn

// q, k 16-byte aligned, pitches multiples of 8. Returns a cudaError_t.
extern "C" int quickturn_gated_delta_prepare(const quickturn::GatedDeltaPrepareArguments* args,
                                             void* stream) {
  using namespace quickturn;
  PrepareMaps maps;
  if (!encode_map(maps.q, args->q, args->tokens, args->key_heads * kDim, args->q_pitch, kChunk, 64) ||
      !encode_map(maps.k, args->k, args->tokens, args->key_heads * kDim, args->k_pitch, kChunk, 64))
    return cudaErrorInvalidValue;
  constexpr int kBytes = sizeof(Shared) + 1024;
  const cudaError_t error =
      cudaFuncSetAttribute(gated_delta_prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  gated_delta_prepare<<<dim3(args->slots, args->key_heads), 128, kBytes, static_cast<cudaStream_t>(stream)>>>(
      *args, maps);
  return cudaGetLastError();
}
