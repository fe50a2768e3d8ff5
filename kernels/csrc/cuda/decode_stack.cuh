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
constexpr int kBatch = 8;    // granules whose sums are finished together
constexpr int kPackets = 8;  // that a thread waits for at a time
constexpr int kPatience = 1 << 21;

// The thread's index, read anew by every phase: what follows from it is cheap to work out, but kept through
// all phases it would cost the registers that they need.
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

// Waits for the packets at `from[at[i]]`, none where at[i] is negative.
template <int kCount>
__device__ __forceinline__ void await(uint2 (&data)[kCount], const uint4* from, const int (&at)[kCount],
                                      unsigned flag) {
#pragma unroll 1
  for (int tries = 0;; ++tries) {
    bool ready = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (at[i] < 0) continue;
      const uint4 packet = load_packet(from + at[i]);
      data[i] = make_uint2(packet.x, packet.z);
      ready &= packet.y == flag && packet.w == flag;
    }
    if (ready) return;
    if (tries > kPatience) __trap();  // seconds: better an error than a GPU that never answers
  }
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
  uint32_t slots, full, empty;
  int stages, stage;
  uint32_t parity;

  __device__ __forceinline__ uint32_t slot() const { return slots + stage * kSlotBytes; }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (this_thread() % 32 == 0) barrier_arrive(empty + stage * 8);
    advance();
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

// One matrix of the stack. Gated: a granule is four rows of the gate and the matching four of up, and
// `features` counts those of the result, silu(gate) * up. Wide: the result goes to `logits` as float32.
struct Matrix {
  const bf16 *weight, *bias;
  const bf16* norm;             // of its input; null: the input is multiplied as it comes
  const bf16 *q_norm, *k_norm;  // of the heads of its result, or null
  const uint4* input;           // packets; null: args.x
  uint4* output;
  unsigned input_flag, output_flag;
  int features, columns;
  bool gated, wide;

  __device__ __forceinline__ int quads() const { return gated ? 1 : 2; }  // results of a granule, in fours
  __device__ __forceinline__ int granules() const { return features / (quads() * 4); }
};

constexpr int kMatrices = 4;  // of a layer; attention follows the first
constexpr int kShares = kMatrices + 1;

// Which of a block's shares is that of matrix `index`.
__device__ __forceinline__ int share_of(const StackArguments& args, int index) {
  return index == kMatrices * args.layer_count ? kMatrices : index % kMatrices;
}

// Matrix `index` in the order of a step: four a layer, then the head. `before`: the epoch.
__device__ __forceinline__ Matrix matrix_of(const StackArguments& args, const StackLayer* layers, int index,
                                            unsigned before) {
  const int l = min(index / kMatrices, args.layer_count - 1);
  const StackLayer& layer = layers[l];
  Matrix matrix{};
  matrix.output_flag = matrix.input_flag = before + l + 1;
  matrix.features = matrix.columns = args.hidden;
  switch (share_of(args, index)) {
    case 0:
      matrix.weight = layer.qkv, matrix.bias = layer.qkv_bias;
      matrix.norm = layer.attn_norm, matrix.q_norm = layer.q_norm, matrix.k_norm = layer.k_norm;
      matrix.input = index > 0 ? args.mlp : nullptr, matrix.output = args.qkv;
      --matrix.input_flag;
      matrix.features = (args.heads + 2 * args.kv_heads) * kDim;
      break;
    case 1:
      matrix.weight = layer.o, matrix.bias = layer.o_bias;
      matrix.input = args.attended, matrix.output = args.branch;
      matrix.columns = args.heads * kDim;
      break;
    case 2:
      matrix.weight = layer.gate_up, matrix.bias = layer.gate_up_bias;
      matrix.norm = layer.mlp_norm;
      matrix.input = args.branch, matrix.output = args.activated;
      matrix.features = args.inner;
      matrix.gated = true;
      break;
    case 3:
      matrix.weight = layer.down, matrix.bias = layer.down_bias;
      matrix.input = args.activated, matrix.output = args.mlp;
      matrix.columns = args.inner;
      break;
    default:
      matrix.weight = args.head, matrix.norm = args.norm, matrix.input = args.mlp;
      matrix.features = args.vocab;
      matrix.wide = true;
  }
  return matrix;
}

// Requests the norms that stand before and behind a matrix, in one slot; one warp.
__device__ __forceinline__ void request_norms(Ring& ring, const Matrix& matrix) {
  const int lane = this_thread() % 32, bytes = matrix.columns * 2;
  const uint32_t full = ring.full + ring.stage * 8;
  barrier_wait(ring.empty + ring.stage * 8, ring.parity);
  if (lane == 0) {
    barrier_expect(full, bytes + (matrix.q_norm != nullptr ? kHeadBytes : 0) +
                             (matrix.k_norm != nullptr ? kHeadBytes : 0));
    copy_bytes(ring.slot(), matrix.norm, bytes, full, kEvictFirst);
    if (matrix.q_norm != nullptr)
      copy_bytes(ring.slot() + bytes, matrix.q_norm, kHeadBytes, full, kEvictFirst);
    if (matrix.k_norm != nullptr)
      copy_bytes(ring.slot() + bytes + kHeadBytes, matrix.k_norm, kHeadBytes, full, kEvictFirst);
  }
  ring.advance();
}

// Requests a matrix's granules of this block; one warp.
__device__ __forceinline__ void request(Ring& ring, const Matrix& matrix, const Range& own) {
  const int lane = this_thread() % 32, columns = matrix.columns, chunk = chunk_of(columns);
#pragma unroll 1
  for (int granule = own.begin; granule < own.end; ++granule) {
    int row = granule * kGranule + lane;
    if (matrix.gated)
      row = granule * (kGranule / 2) + lane + (lane < kGranule / 2 ? 0 : matrix.features - kGranule / 2);
    const bf16* from = matrix.weight + static_cast<long long>(row) * columns;
#pragma unroll 1
    for (int column = 0; column < columns; column += chunk) {
      barrier_wait(ring.empty + ring.stage * 8, ring.parity);
      if (lane == 0) barrier_expect(ring.full + ring.stage * 8, kGranule * chunk * 2);
      __syncwarp();
      if (lane < kGranule)
        copy_bytes(ring.slot() + lane * row_bytes(chunk), from + column, chunk * 2,
                   ring.full + ring.stage * 8, kEvictFirst);
      ring.advance();
    }
  }
}

// The product of all rows with this block's granules: each warp takes an eighth of every chunk's columns, and
// the warps' sums meet in shared memory. x: [rows][row_bytes(columns)] bfloat16; `zeros`: 16 bytes of them.
// sums: two buffers of kBatch * kWarps * rows * kGranule floats, used in turn.
__device__ __forceinline__ void product(Ring& ring, const Matrix& matrix, const Range& own, uint32_t x,
                                        uint32_t zeros, float* sums, int rows, float* logits) {
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32;
  const int columns = matrix.columns, chunk = chunk_of(columns), share = chunk / kWarps;
  const int matrix_row = lane % 8, matrix_column = warp * share + lane / 8 * 8;
  const uint32_t weight_at = matrix_row * row_bytes(chunk) + matrix_column * 2;
  const uint32_t x_at = matrix_row < rows ? x + matrix_row * row_bytes(columns) + matrix_column * 2 : zeros;
  const uint32_t x_step = matrix_row < rows ? 2 : 0;
  // What this thread finishes: four results of one row and one granule of a batch.
  const int quads = matrix.quads();
  const int quad = matrix.gated ? 0 : thread % 2, item = matrix.gated ? thread : thread / 2;
  const int row = item % rows, mine = item / rows;
  int buffer = 0;
#pragma unroll 1
  for (int first = own.begin; first < own.end; first += kBatch) {
    const int count = min(kBatch, own.end - first);
    const int feature = (first + mine) * (quads * 4) + quad * 4;
    float value[2][4] = {};
    if (matrix.bias != nullptr && mine < count) {
      unpack4(__ldg(reinterpret_cast<const uint2*>(matrix.bias + feature)), value[0]);
      if (matrix.gated)
        unpack4(__ldg(reinterpret_cast<const uint2*>(matrix.bias + matrix.features + feature)), value[1]);
    }
    float* batch = sums + buffer * (kBatch * kWarps * rows * kGranule);
#pragma unroll 1
    for (int granule = 0; granule < count; ++granule) {
      float sum[4][2] = {};  // short chains of products
#pragma unroll 1
      for (int column = 0; column < columns; column += chunk) {
        constexpr int kSteps = kMaxChunk / kWarps / 32;
        uint32_t a[kSteps][4], b[kSteps][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          if (step * 32 < share) load_matrices(a[step], x_at + (column + step * 32) * x_step);
        barrier_wait(ring.full + ring.stage * 8, ring.parity);
        const uint32_t weights = ring.slot() + weight_at;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          if (step * 32 < share) load_matrices(b[step], weights + step * 64);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (step * 32 >= share) break;
          multiply_eight(sum[step % 2 * 2], a[step][0], a[step][1], b[step][0], b[step][1]);
          multiply_eight(sum[step % 2 * 2 + 1], a[step][2], a[step][3], b[step][2], b[step][3]);
        }
        ring.release();
      }
      if (lane / 4 < rows)
        *reinterpret_cast<float2*>(batch + ((warp * kBatch + granule) * rows + lane / 4) * kGranule +
                                   lane % 4 * 2) =
            make_float2(sum[0][0] + sum[1][0] + (sum[2][0] + sum[3][0]),
                        sum[0][1] + sum[1][1] + (sum[2][1] + sum[3][1]));
    }
    sync_computing();
    if (mine < count) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        if (part == 1 && !matrix.gated) break;
        const float* from = batch + (mine * rows + row) * kGranule + (part + quad) * 4;
        float4 piece[kWarps];
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
          piece[w] = *reinterpret_cast<const float4*>(from + w * kBatch * rows * kGranule);
        float total[4] = {};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          total[0] += piece[w].x;
          total[1] += piece[w].y;
          total[2] += piece[w].z;
          total[3] += piece[w].w;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) value[part][i] += total[i];
      }
      if (matrix.gated) {
#pragma unroll
        for (int i = 0; i < 4; ++i) value[0][i] = gate_value(value[0][i], value[1][i]);
      }
      const long long at = static_cast<long long>(row) * matrix.features + feature;
      if (matrix.wide) {
        *reinterpret_cast<float4*>(logits + at) =
            make_float4(value[0][0], value[0][1], value[0][2], value[0][3]);
      } else {
        const uint2 packed = pack4(value[0]);
        store_packet(matrix.output + at / 4, packed.x, packed.y, matrix.output_flag);
      }
    }
    buffer ^= 1;
  }
}

// Waits for [rows, columns] as packets and lays them down as the operand of a product.
__device__ __forceinline__ void stage_rows(const Matrix& matrix, unsigned char* x, int rows) {
  const int thread = this_thread();
  const int columns = matrix.columns;
  const int width = columns / 4, runs = (width + kComputing - 1) / kComputing;
  int row = 0, run = 0;
#pragma unroll 1
  while (row < rows) {
    int from[kPackets], to[kPackets];
    uint2 data[kPackets];
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const int at = run * kComputing + thread;
      from[i] = row < rows && at < width ? row * width + at : -1;
      to[i] = row * row_bytes(columns) + at * 8;
      if (++run == runs) run = 0, ++row;
    }
    await(data, matrix.input, from, matrix.input_flag);
#pragma unroll
    for (int i = 0; i < kPackets; ++i)
      if (from[i] >= 0) *reinterpret_cast<uint2*>(x + to[i]) = data[i];
  }
}

// residual += the matrix's input, or residual = `first` where that has none; and the norm of it as the
// operand of the product. The norm's weight is the ring's next slot; what else that holds goes to
// `head_norms`. squares: [kMaxRows, kWarps] in shared memory.
__device__ __forceinline__ void norm_rows(Ring& ring, const Matrix& matrix, unsigned char* shared,
                                          unsigned char* x, bf16* residual, float* squares,
                                          unsigned char* head_norms, const bf16* first, long long first_pitch,
                                          float eps, int rows) {
  const int columns = matrix.columns;
  const bool adds = matrix.input != nullptr;
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32;
  const int width = columns / 4, runs = (width + kComputing - 1) / kComputing;
  uint2* kept = reinterpret_cast<uint2*>(residual);
  int next_row = 0, next_run = 0;
#pragma unroll 1
  while (next_row < rows) {
    int from[kPackets / 2];
    uint2 data[kPackets / 2];
    int row = next_row, run = next_run;
#pragma unroll
    for (int i = 0; i < kPackets / 2; ++i) {
      const int at = next_run * kComputing + thread;
      const bool inside = next_row < rows && at < width;
      from[i] = inside && adds ? next_row * width + at : -1;
      if (inside && !adds)
        data[i] = __ldcg(reinterpret_cast<const uint2*>(first + next_row * first_pitch) + at);
      if (++next_run == runs) next_run = 0, ++next_row;
    }
    await(data, matrix.input, from, matrix.input_flag);
#pragma unroll
    for (int i = 0; i < kPackets / 2; ++i) {
      if (row >= rows) break;
      const int at = run * kComputing + thread;
      float sum = 0.f;
      if (at < width) {
        float value[4];
        unpack4(data[i], value);
        if (adds) {
          float before[4];
          unpack4(kept[row * width + at], before);
#pragma unroll
          for (int k = 0; k < 4; ++k) value[k] = rounded(value[k] + before[k]);
        }
        kept[row * width + at] = pack4(value);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum += value[k] * value[k];
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        float* to = squares + row * kWarps + warp;
        *to = run == 0 ? sum : *to + sum;
      }
      if (++run == runs) run = 0, ++row;
    }
  }
  sync_computing();
  barrier_wait(ring.full + ring.stage * 8, ring.parity);
  const unsigned char* slot = shared + ring.stage * kSlotBytes;
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += squares[row * kWarps + w];
    const float scale = rsqrtf(sum / static_cast<float>(columns) + eps);
#pragma unroll 2
    for (int at = thread; at < width; at += kComputing) {
      float value[4], factor[4];
      unpack4(kept[row * width + at], value);
      unpack4(reinterpret_cast<const uint2*>(slot)[at], factor);
#pragma unroll
      for (int k = 0; k < 4; ++k) value[k] = rounded(value[k] * scale) * factor[k];
      *reinterpret_cast<uint2*>(x + row * row_bytes(columns) + at * 8) = pack4(value);
    }
  }
  if (thread < 2 * kHeadBytes / 16)
    reinterpret_cast<uint4*>(head_norms)[thread] = reinterpret_cast<const uint4*>(slot + columns * 2)[thread];
  ring.release();
}

}  // namespace stack
}  // namespace quickturn
