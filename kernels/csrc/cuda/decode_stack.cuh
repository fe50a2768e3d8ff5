// The parts of decode_stack.cu: what blocks send each other, the ring of weights, and one product.
#pragma once
#include "hopper.cuh"
#include "warp_mma.cuh"

namespace quickturn {

// The weights of one decoder layer. Matrices [N, K] row-major; biases, q_norm and k_norm may be null.
struct StackLayer {
  const bf16 *qkv, *o, *gate_up, *down;
  const bf16 *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
  const bf16 *attn_norm, *mlp_norm, *q_norm, *k_norm;
  bf16 *k_cache, *v_cache;
};

struct StackArguments {
  const StackLayer* layers;  // [layer_count], device memory
  const TensorMap* maps;     // [layer_count, 2]: keys, values
  const bf16 *x, *norm, *head;
  float* logits;  // [rows, vocab]
  const int *tables, *lens;
  const float* cos_sin;
  unsigned* epoch;  // grows by layer_count a launch
  // Packets, see below: [rows, features / 4] each; parts: [rows, blocks, 2, group, head_dim / 2 + 1].
  uint4 *qkv, *parts, *attended, *branch, *activated, *mlp;
  long long x_pitch, table_pitch, cos_sin_pitch, k_block_pitch, k_row_pitch, v_block_pitch, v_row_pitch;
  float eps, scale_log2;
  int layer_count, rows, hidden, heads, kv_heads, inner, vocab, block_tokens, window, stages;
};

namespace stack {

constexpr int kWarps = 8;  // that compute; one more requests weights and keys
constexpr int kComputing = kWarps * 32;
constexpr int kMaxRows = 8;
constexpr int kDim = 128;  // of a head
constexpr int kHeadBytes = kDim * 2;
constexpr int kGranule = 8;      // rows of a weight in one product, the N of the matrix instruction
constexpr int kMaxChunk = 1024;  // columns of a granule that come together
constexpr int kSlotBytes =
    17408;  // of the ring: a granule's chunk, its rows padded; or a tile of keys and values
constexpr int kMinStages = 3, kMaxStages = 13;
constexpr int kBatch = 8;   // granules whose sums are finished together
constexpr int kShares = 5;  // a layer's four matrices, and the head
constexpr int kPatience = 1 << 21;

// Byte offsets in dynamic shared memory; the ring lies at its start.
struct Layout {
  int barriers, x, residual, sums, squares, angles, head_norms, fresh, zeros, layers, pieces, shares, bytes;
};

// What the kernel is given. All of it lies in constant memory, and what follows from it is worked out where
// it's needed: kept through all phases it would cost the registers that they need.
struct Plan {
  StackArguments args;
  Layout at;
};

// The thread's index, read anew by every phase, for the same reason.
__device__ __forceinline__ int this_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ void sync_computing() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// ---- Packets: 8 bytes of data that carry their own flag, so that a block learns of another's result by
// reading the result. A buffer is written once a layer, with the layer's flag; each half of a packet is one
// 64-bit access and so never torn.

__device__ __forceinline__ void store_packet(uint4* to, uint32_t first, uint32_t second, unsigned flag) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%1, %3};\nmov.b64 b, {%2, %3};\n"
      "st.relaxed.gpu.global.v2.b64 [%0], {a, b};\n}\n" ::"l"(to),
      "r"(first), "r"(second), "r"(flag)
      : "memory");
}

__device__ __forceinline__ uint4 load_packet(const uint4* from) {
  uint4 packet;
  asm volatile(
      "{\n.reg .b64 a, b;\nld.relaxed.gpu.global.v2.b64 {a, b}, [%4];\n"
      "mov.b64 {%0, %1}, a;\nmov.b64 {%2, %3}, b;\n}\n"
      : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
      : "l"(from)
      : "memory");
  return packet;
}

// Waits for the packets at `from[at[i]]`. All are loaded each time, without a condition: whoever wants fewer
// names one twice.
template <int kCount>
__device__ __forceinline__ void await(uint2 (&data)[kCount], const uint4* from, const int (&at)[kCount],
                                      unsigned flag) {
#pragma unroll 1
  for (int tries = 0; tries < kPatience; ++tries) {
    uint4 packet[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) packet[i] = load_packet(from + at[i]);
    unsigned wrong = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      wrong |= (packet[i].y ^ flag) | (packet[i].w ^ flag);
      data[i] = make_uint2(packet[i].x, packet[i].z);
    }
    if (wrong == 0) return;
  }
  __trap();  // after seconds: better an error than a GPU that never answers
}

__device__ __forceinline__ void unpack4(const uint2& packed, float (&value)[4]) {
  value[0] = __uint_as_float(packed.x << 16);
  value[1] = __uint_as_float(packed.x & 0xFFFF0000u);
  value[2] = __uint_as_float(packed.y << 16);
  value[3] = __uint_as_float(packed.y & 0xFFFF0000u);
}

__device__ __forceinline__ uint2 pack4(const float (&value)[4]) {
  return make_uint2(narrow2(value[0], value[1]), narrow2(value[2], value[3]));
}

// ---- The ring of slots in shared memory, walked alike by who fills and who reads it

struct Ring {
  uint32_t slots, barriers;
  int stage;
  uint32_t parity;

  __device__ __forceinline__ uint32_t slot() const { return slots + stage * kSlotBytes; }
  __device__ __forceinline__ uint32_t full() const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty() const { return barriers + (kMaxStages + stage) * 8; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), parity); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), parity); }
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void release(int stages) {
    __syncwarp();
    if (this_thread() % 32 == 0) barrier_arrive(empty());
    advance(stages);
  }
};

__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// c[8, 8] += a[8, 16] b[16, 8] in float32: the matrix instruction with the lower half of its rows left out.
__device__ __forceinline__ void multiply_eight(float (&c)[2], uint32_t a0, uint32_t a1, uint32_t b0,
                                               uint32_t b1) {
  asm volatile(
      "{\n.reg .f32 u, v;\n"
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, u, v}, {%2, %4, %3, %4}, {%5, %6}, "
      "{%0, %1, %7, %7};\n}\n"
      : "+f"(c[0]), "+f"(c[1])
      : "r"(a0), "r"(a1), "r"(0), "r"(b0), "r"(b1), "f"(0.f));
}

struct Range {
  int begin, end;
};

// Of `granules`, those of this block.
__device__ __forceinline__ Range own_share(int granules) {
  const int block = blockIdx.x, blocks = gridDim.x;
  return {granules * block / blocks, granules * (block + 1) / blocks};
}

__host__ __device__ constexpr int chunk_of(int columns) {
  return columns % 1024 == 0 ? 1024 : columns % 768 == 0 ? 768 : columns % 512 == 0 ? 512 : 256;
}

__host__ __device__ constexpr int row_bytes(int columns) { return columns * 2 + 16; }

constexpr int kMatrices = 4;  // of a layer: q|k|v, output, gate|up, down; attention follows the first

// Which of a block's shares is that of matrix `index`, in the order of a step: four a layer, then the head.
__device__ __forceinline__ int share_of(const Plan& plan, int index) {
  return index == kMatrices * plan.args.layer_count ? kMatrices : index % kMatrices;
}

// Gated: a granule is four rows of the gate and the matching four of up, and the features of the result,
// silu(gate) * up, are half the matrix's rows.
__device__ __forceinline__ bool is_gated(int share) { return share == 2; }
__device__ __forceinline__ bool has_norm(int share) { return share % 2 == 0; }

__device__ __forceinline__ int columns_of(const Plan& plan, int share) {
  return share == 1 ? plan.args.heads * kDim : share == 3 ? plan.args.inner : plan.args.hidden;
}

__device__ __forceinline__ int features_of(const Plan& plan, int share) {
  const StackArguments& args = plan.args;
  switch (share) {
    case 0:
      return (args.heads + 2 * args.kv_heads) * kDim;
    case 2:
      return args.inner;
    case 4:
      return args.vocab;
    default:
      return args.hidden;
  }
}

__device__ __forceinline__ int granules_of(const Plan& plan, int share) {
  return features_of(plan, share) / (is_gated(share) ? kGranule / 2 : kGranule);
}

// The packets that come in and those that go out.
__device__ __forceinline__ const uint4* input_of(const Plan& plan, int share) {
  const StackArguments& args = plan.args;
  return share == 1 ? args.attended : share == 2 ? args.branch : share == 3 ? args.activated : args.mlp;
}

__device__ __forceinline__ uint4* output_of(const Plan& plan, int share) {
  const StackArguments& args = plan.args;
  return share == 0 ? args.qkv : share == 1 ? args.branch : share == 2 ? args.activated : args.mlp;
}

struct Norms {
  const bf16 *input, *q, *k;  // of a matrix's input; of the heads of its result, or null
};

__device__ __forceinline__ Norms norms_of(const Plan& plan, const StackLayer& layer, int share) {
  if (share == 0) return {layer.attn_norm, layer.q_norm, layer.k_norm};
  return {share == 2 ? layer.mlp_norm : plan.args.norm, nullptr, nullptr};
}

__device__ __forceinline__ const bf16* weight_of(const Plan& plan, const StackLayer& layer, int share) {
  switch (share) {
    case 0:
      return layer.qkv;
    case 1:
      return layer.o;
    case 2:
      return layer.gate_up;
    case 3:
      return layer.down;
    default:
      return plan.args.head;
  }
}

__device__ __forceinline__ const bf16* bias_of(const StackLayer& layer, int share) {
  switch (share) {
    case 0:
      return layer.qkv_bias;
    case 1:
      return layer.o_bias;
    case 2:
      return layer.gate_up_bias;
    case 3:
      return layer.down_bias;
    default:
      return nullptr;
  }
}

// Requests the norms that stand before and behind a matrix, in one slot; one warp.
__device__ __forceinline__ void request_norms(const Plan& plan, Ring& ring, const StackLayer& layer,
                                              int share) {
  const int bytes = plan.args.hidden * 2;
  const Norms norms = norms_of(plan, layer, share);
  ring.wait_empty();
  if (this_thread() % 32 == 0) {
    const int heads = (norms.q != nullptr) + (norms.k != nullptr);
    barrier_expect(ring.full(), bytes + heads * kHeadBytes);
    copy_bytes(ring.slot(), norms.input, bytes, ring.full(), kEvictFirst);
    if (norms.q != nullptr) copy_bytes(ring.slot() + bytes, norms.q, kHeadBytes, ring.full(), kEvictFirst);
    if (norms.k != nullptr)
      copy_bytes(ring.slot() + bytes + kHeadBytes, norms.k, kHeadBytes, ring.full(), kEvictFirst);
  }
  ring.advance(plan.args.stages);
}

// Requests a matrix's granules of this block; one warp.
__device__ __forceinline__ void request(const Plan& plan, Ring& ring, const StackLayer& layer, int share,
                                        const Range& own) {
  const int lane = this_thread() % 32, columns = columns_of(plan, share), chunk = chunk_of(columns);
#pragma unroll 1
  for (int granule = own.begin; granule < own.end; ++granule) {
    int row = granule * kGranule + lane;
    if (is_gated(share))
      row = granule * (kGranule / 2) + lane + (lane < kGranule / 2 ? 0 : plan.args.inner - kGranule / 2);
    const bf16* from = weight_of(plan, layer, share) + static_cast<long long>(row) * columns;
#pragma unroll 1
    for (int column = 0; column < columns; column += chunk) {
      ring.wait_empty();
      if (lane == 0) barrier_expect(ring.full(), kGranule * chunk * 2);
      __syncwarp();
      if (lane < kGranule)
        copy_bytes(ring.slot() + lane * row_bytes(chunk), from + column, chunk * 2, ring.full(), kEvictFirst);
      ring.advance(plan.args.stages);
    }
  }
}

// The product of all rows with this block's granules: each warp takes an eighth of every chunk's columns, and
// the warps' sums meet in shared memory, in two buffers that are used in turn.
__device__ __forceinline__ void product(const Plan& plan, Ring& ring, unsigned char* shared,
                                        const StackLayer& layer, int share, const Range& own, unsigned flag) {
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32, rows = plan.args.rows;
  const int columns = columns_of(plan, share), chunk = chunk_of(columns), warp_columns = chunk / kWarps;
  const int matrix_row = lane % 8, matrix_column = warp * warp_columns + lane / 8 * 8;
  const uint32_t weight_at = matrix_row * row_bytes(chunk) + matrix_column * 2;
  const bool real = matrix_row < rows;
  const uint32_t x_at =
      shared_address(shared) +
      (real ? plan.at.x + matrix_row * row_bytes(columns) + matrix_column * 2 : plan.at.zeros);
  // What this thread finishes: four results of one row and one granule of a batch.
  const bool gated = is_gated(share);
  const int quad = gated ? 0 : thread % 2, item = gated ? thread : thread / 2;
  const int row = item % rows, mine = item / rows;
  int buffer = 0;
#pragma unroll 1
  for (int first = own.begin; first < own.end; first += kBatch) {
    const int count = min(kBatch, own.end - first);
    float* batch =
        reinterpret_cast<float*>(shared + plan.at.sums) + buffer * (kBatch * kWarps * rows * kGranule);
#pragma unroll 1
    for (int granule = 0; granule < count; ++granule) {
      float sum[4][2] = {};  // short chains of products
#pragma unroll 1
      for (int column = 0; column < columns; column += chunk) {
        constexpr int kSteps = kMaxChunk / kWarps / 32;
        uint32_t a[kSteps][4], b[kSteps][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          if (step * 32 < warp_columns) load_matrices(a[step], real ? x_at + (column + step * 32) * 2 : x_at);
        ring.wait_full();
        const uint32_t weights = ring.slot() + weight_at;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          if (step * 32 < warp_columns) load_matrices(b[step], weights + step * 64);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (step * 32 >= warp_columns) break;
          multiply_eight(sum[step % 2 * 2], a[step][0], a[step][1], b[step][0], b[step][1]);
          multiply_eight(sum[step % 2 * 2 + 1], a[step][2], a[step][3], b[step][2], b[step][3]);
        }
        ring.release(plan.args.stages);
      }
      if (lane / 4 < rows)
        *reinterpret_cast<float2*>(batch + ((warp * kBatch + granule) * rows + lane / 4) * kGranule +
                                   lane % 4 * 2) =
            make_float2(sum[0][0] + sum[1][0] + (sum[2][0] + sum[3][0]),
                        sum[0][1] + sum[1][1] + (sum[2][1] + sum[3][1]));
    }
    sync_computing();
    if (mine < count) {
      const int features = features_of(plan, share);
      const int feature = (first + mine) * (gated ? 4 : 8) + quad * 4;
      float value[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        if (part == 1 && !gated) break;
        const float* from = batch + (mine * rows + row) * kGranule + (part + quad) * 4;
        float4 piece[kWarps];
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
          piece[w] = *reinterpret_cast<const float4*>(from + w * kBatch * rows * kGranule);
        float(&total)[4] = value[part];
        total[0] = piece[0].x, total[1] = piece[0].y, total[2] = piece[0].z, total[3] = piece[0].w;
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
          total[0] += piece[w].x;
          total[1] += piece[w].y;
          total[2] += piece[w].z;
          total[3] += piece[w].w;
        }
        const bf16* bias = bias_of(layer, share);
        if (bias != nullptr) {
          float added[4];
          unpack4(__ldg(reinterpret_cast<const uint2*>(bias + part * features + feature)), added);
#pragma unroll
          for (int i = 0; i < 4; ++i) total[i] += added[i];
        }
      }
      if (gated) {
#pragma unroll
        for (int i = 0; i < 4; ++i) value[0][i] = gate_value(value[0][i], value[1][i]);
      }
      const long long at = static_cast<long long>(row) * features + feature;
      if (share == kMatrices) {
        *reinterpret_cast<float4*>(plan.args.logits + at) =
            make_float4(value[0][0], value[0][1], value[0][2], value[0][3]);
      } else {
        const uint2 packed = pack4(value[0]);
        store_packet(output_of(plan, share) + at / 4, packed.x, packed.y, flag);
      }
    }
    buffer ^= 1;
  }
}

// Waits for the input of a matrix and lays it down as the operand of the product, kCount packets a thread at
// a time.
template <int kCount>
__device__ __forceinline__ void stage_rows(const Plan& plan, unsigned char* shared, int share,
                                           unsigned flag) {
  const int thread = this_thread(), rows = plan.args.rows, columns = columns_of(plan, share);
  const int width = columns / 4;
  int row = 0, column = thread;
#pragma unroll 1
  while (row < rows) {
    int from[kCount], to[kCount];
    uint2 data[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool inside = row < rows && column < width;
      from[i] = inside ? row * width + column : 0;
      to[i] = inside ? plan.at.x + row * row_bytes(columns) + column * 8 : -1;
      column += kComputing;
      if (column - thread >= width) column = thread, ++row;
    }
    await(data, input_of(plan, share), from, flag);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (to[i] >= 0) *reinterpret_cast<uint2*>(shared + to[i]) = data[i];
  }
}

// residual += the input of a matrix, or residual = the embeddings ahead of the first one; and the norm of it
// as the operand of the product. The norm's weight is the ring's next slot; the heads' norms are kept from
// it.
__device__ __forceinline__ void norm_rows(const Plan& plan, Ring& ring, unsigned char* shared, int share,
                                          bool embedded, unsigned flag) {
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32;
  const int rows = plan.args.rows, columns = plan.args.hidden;
  const int width = columns / 4;
  uint2* kept = reinterpret_cast<uint2*>(shared + plan.at.residual);
  float* squares = reinterpret_cast<float*>(shared + plan.at.squares);
  constexpr int kCount = 4;
  int next_row = 0, next_column = thread;
#pragma unroll 1
  while (next_row < rows) {
    int from[kCount];
    uint2 data[kCount];
    int row = next_row, column = next_column;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      from[i] = next_row < rows && next_column < width ? next_row * width + next_column : 0;
      next_column += kComputing;
      if (next_column - thread >= width) next_column = thread, ++next_row;
    }
    if (embedded) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        data[i] = __ldcg(reinterpret_cast<const uint2*>(plan.args.x + from[i] / width * plan.args.x_pitch) +
                         from[i] % width);
    } else {
      await(data, input_of(plan, share), from, flag);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row >= rows) break;
      float sum = 0.f;
      if (column < width) {
        float value[4];
        unpack4(data[i], value);
        if (!embedded) {
          float before[4];
          unpack4(kept[from[i]], before);
#pragma unroll
          for (int k = 0; k < 4; ++k) value[k] = rounded(value[k] + before[k]);
        }
        kept[from[i]] = pack4(value);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum += value[k] * value[k];
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        float* to = squares + row * kWarps + warp;
        *to = column == thread ? sum : *to + sum;
      }
      column += kComputing;
      if (column - thread >= width) column = thread, ++row;
    }
  }
  sync_computing();
  ring.wait_full();
  const unsigned char* slot = shared + ring.stage * kSlotBytes;
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    const float4 low = *reinterpret_cast<const float4*>(squares + row * kWarps);
    const float4 high = *reinterpret_cast<const float4*>(squares + row * kWarps + 4);
    const float sum = (low.x + low.y + (low.z + low.w)) + (high.x + high.y + (high.z + high.w));
    const float scale = rsqrtf(sum / static_cast<float>(columns) + plan.args.eps);
#pragma unroll 2
    for (int at = thread; at < width; at += kComputing) {
      float value[4], factor[4];
      unpack4(kept[row * width + at], value);
      unpack4(reinterpret_cast<const uint2*>(slot)[at], factor);
#pragma unroll
      for (int k = 0; k < 4; ++k) value[k] = rounded(value[k] * scale) * factor[k];
      *reinterpret_cast<uint2*>(shared + plan.at.x + row * row_bytes(columns) + at * 8) = pack4(value);
    }
  }
  if (share == 0 && thread < 2 * kHeadBytes / 16)
    reinterpret_cast<uint4*>(shared + plan.at.head_norms)[thread] =
        reinterpret_cast<const uint4*>(slot + columns * 2)[thread];
  ring.release(plan.args.stages);
}

}  // namespace stack
}  // namespace quickturn
