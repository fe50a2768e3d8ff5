// The parts of decode_stack.cu: what blocks send each other, the ring of weights, and one product.
#pragma once
#include "hopper.cuh"
#include "warp_mma.cuh"

namespace quickturn {

// Of one decoder layer: small weights, and where its keys and values lie. Biases, q_norm and k_norm may be
// null.
struct StackLayer {
  const bf16 *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
  const bf16 *attn_norm, *mlp_norm, *q_norm, *k_norm;
  bf16 *k_cache, *v_cache;
};

struct StackArguments {
  const StackLayer* layers;  // [layer_count], device memory
  const TensorMap* maps;     // [layer_count, 6]: q|k|v, output, gate|up, down, keys, values; then the head
  const bf16 *x, *norm;
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
constexpr int kPairs = kWarps / 2;  // of warps: each takes a slot of the ring, and each warp half of it
constexpr int kMaxRows = 8;
constexpr int kDim = 128;  // of a head
constexpr int kHeadBytes = kDim * 2;
constexpr int kGranule = 8;        // rows of a weight in one product, the N of the matrix instruction
constexpr int kMaxChunk = 1024;    // columns of a granule that come together
constexpr int kSlotBytes = 16384;  // of the ring: a granule's chunk, or a tile of keys and values
// A multiple of the pairs, so that a stage is always the same pair's within a batch: a pair that waited for a
// stage's next turn before another's had come would take the turn before that for it.
constexpr int kMinStages = kPairs, kMaxStages = 3 * kPairs;
constexpr int kBatchSlots = 32;  // whose sums are finished together
constexpr int kMatrices = 4;     // of a layer: q|k|v, output, gate|up, down; attention follows the first
constexpr int kMaps = 6;         // of a layer
constexpr int kPatience = 1 << 21;

// Byte offsets in dynamic shared memory; the ring lies at its start.
struct Layout {
  int barriers, x, residual, sums, squares, angles, head_norms, zeros, layers, shares, segments, units, work;
  int bytes;
};

// One of the step's matrices: the four of a layer, and the head.
struct Part {
  const uint4* input;  // packets
  uint4* output;
  int columns, features, granules;
  int chunk, chunks;  // columns of a slot, and slots of a granule
  int batch;          // granules whose sums are finished together, a power of two
  int shift;          // log2 of the results of a row and batch
  bool gated;         // a granule is four rows of the gate and the matching four of up
};

// What the kernel is given. All of it lies in constant memory, and what follows from it is worked out where
// it's needed: kept through all phases it would cost the registers that they need.
struct Plan {
  StackArguments args;
  Layout at;
  Part parts[kMatrices + 1];
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

// ---- The ring of slots in shared memory, walked alike by who fills and who reads it. Two warps read a slot.

struct Ring {
  uint32_t slots, barriers;
  int stage;
  uint32_t parity;

  __device__ __forceinline__ uint32_t slot() const { return slots + stage * kSlotBytes; }
  __device__ __forceinline__ uint32_t full() const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty() const { return barriers + (kMaxStages + stage) * 8; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), parity); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), parity); }
  // Up to `stages` slots on.
  __device__ __forceinline__ void advance(int slots_on, int stages) {
    stage += slots_on;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
  __device__ __forceinline__ void skip(int slots_on, int stages) {
    stage += slots_on;
    const int turns = stage / stages;
    stage -= turns * stages;
    parity ^= turns & 1;
  }
};

// Four dims of a matrix to a slot: 64 columns, rows, halves (gate and up), then the next 64 columns.
__device__ __forceinline__ void load_granule(uint32_t to, const TensorMap* map, int row, int block,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %2, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(row), "r"(block), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}

__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
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

__host__ __device__ constexpr int row_bytes(int columns) { return columns * 2 + 16; }

// Which of the plan's parts is matrix `index` of the step: four a layer, then the head.
__device__ __forceinline__ int part_of(const Plan& plan, int index) {
  return index == kMatrices * plan.args.layer_count ? kMatrices : index % kMatrices;
}

__device__ __forceinline__ bool has_norm(int part) { return part % 2 == 0; }

__device__ __forceinline__ const bf16* bias_of(const StackLayer& layer, int part) {
  switch (part) {
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

// Requests the norms that stand before and behind a matrix, in one slot; one thread.
__device__ __forceinline__ void request_norms(const Plan& plan, Ring& ring, const StackLayer& layer,
                                              int part) {
  const int bytes = plan.args.hidden * 2;
  const bf16* q = part == 0 ? layer.q_norm : nullptr;
  const bf16* k = part == 0 ? layer.k_norm : nullptr;
  ring.wait_empty();
  barrier_expect(ring.full(), bytes + ((q != nullptr) + (k != nullptr)) * kHeadBytes);
  copy_bytes(ring.slot(),
             part == 0   ? layer.attn_norm
             : part == 2 ? layer.mlp_norm
                         : plan.args.norm,
             bytes, ring.full());
  if (q != nullptr) copy_bytes(ring.slot() + bytes, q, kHeadBytes, ring.full());
  if (k != nullptr) copy_bytes(ring.slot() + bytes + kHeadBytes, k, kHeadBytes, ring.full());
  ring.advance(1, plan.args.stages);
}

// Requests a matrix's granules of this block; one thread.
__device__ __forceinline__ void request(const Plan& plan, Ring& ring, const TensorMap* map, const Part& part,
                                        const Range& own) {
  const int rows = part.gated ? kGranule / 2 : kGranule, blocks = part.chunk / kSliceColumns;
  const int bytes = kGranule * part.chunk * 2, chunks = part.chunks, stages = plan.args.stages;
#pragma unroll 1
  for (int granule = own.begin; granule < own.end; ++granule) {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      ring.wait_empty();
      barrier_expect(ring.full(), bytes);
      load_granule(ring.slot(), map, granule * rows, chunk * blocks, ring.full());
      ring.advance(1, stages);
    }
  }
}

// The product of all rows with this block's granules. A pair of warps takes a slot, each warp half of its
// columns; all sums of a batch of granules meet in shared memory, in two buffers that are used in turn.
__device__ __forceinline__ void product(const Plan& plan, Ring& ring, unsigned char* shared,
                                        const StackLayer& layer, int index, const Range& own, unsigned flag) {
  const Part& part = plan.parts[index];
  const int thread = this_thread(), lane = thread % 32, pair = thread / 64, half = thread / 32 % 2;
  const int rows = plan.args.rows, stages = plan.args.stages;
  const int chunks = part.chunks, half_columns = part.chunk / 2;
  const int matrix_row = lane % 8, matrix = lane / 8;
  // The slot's rows of 128 bytes are swizzled; a warp reads 32 columns of all eight at a time.
  const uint32_t even = half * half_columns * 16 + matrix_row * 128 + ((matrix ^ matrix_row) << 4);
  const uint32_t odd = even ^ 64;
  const bool real = matrix_row < rows;
  const uint32_t x_at = shared_address(shared) + (real ? plan.at.x + matrix_row * row_bytes(part.columns) +
                                                             (half * half_columns + matrix * 8) * 2
                                                       : plan.at.zeros);
  const int x_step = real ? 64 : 0, x_chunk = real ? part.chunk * 2 : 0;
  int buffer = 0;
#pragma unroll 1
  for (int first = own.begin; first < own.end; first += part.batch) {
    const int count = min(part.batch, own.end - first), slots = count * chunks;
    float* batch =
        reinterpret_cast<float*>(shared + plan.at.sums) + buffer * (kBatchSlots * 2 * kGranule) * rows;
    Ring mine = ring;
    mine.advance(pair, stages);
    int chunk = pair;
    while (chunk >= chunks) chunk -= chunks;
#pragma unroll 1
    for (int slot = pair; slot < slots; slot += kPairs) {
      float sum[4][2] = {};  // short chains of products
      uint32_t a[2][2][4], b[2][2][4];
      uint32_t x = x_at + chunk * x_chunk, weights = mine.slot();
      const auto load = [&](int to) {
        load_matrices(b[to][0], weights + even);
        load_matrices(b[to][1], weights + odd);
        load_matrices(a[to][0], x);
        load_matrices(a[to][1], x + x_step);
        weights += 1024, x += 2 * x_step;
      };
      const auto multiply_block = [&](int from) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          multiply_eight(sum[step * 2], a[from][step][0], a[from][step][1], b[from][step][0],
                         b[from][step][1]);
          multiply_eight(sum[step * 2 + 1], a[from][step][2], a[from][step][3], b[from][step][2],
                         b[from][step][3]);
        }
      };
      mine.wait_full();
      load(0);
      const int blocks = half_columns / kSliceColumns;
#pragma unroll 1
      for (int block = 0; block < blocks; block += 2) {
        load(1);
        multiply_block(0);
        // One block too far at the end: it lies in shared memory, and nobody multiplies it.
        load(0);
        multiply_block(1);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(mine.empty());
      mine.advance(kPairs, stages);
      if (lane / 4 < rows)
        *reinterpret_cast<float2*>(batch + ((slot * 2 + half) * rows + lane / 4) * kGranule + lane % 4 * 2) =
            make_float2(sum[0][0] + sum[1][0] + (sum[2][0] + sum[3][0]),
                        sum[0][1] + sum[1][1] + (sum[2][1] + sum[3][1]));
      chunk += kPairs;
      while (chunk >= chunks) chunk -= chunks;
    }
    ring.skip(slots, stages);
    sync_computing();
    // A thread finishes one result of a row; four neighbours make a packet.
    const int bits = part.gated ? 2 : 3, within = thread & ((1 << part.shift) - 1), granule = within >> bits;
    const int result = within & ((1 << bits) - 1), feature = ((first + granule) << bits) + result;
#pragma unroll 1
    for (int base = 0; base < rows; base += kComputing >> part.shift) {
      const int row = base + (thread >> part.shift);
      const bool inside = row < rows && granule < count;
      float value = 0.f;
      if (inside) {
        const float* from = batch + (granule * chunks * 2 * rows + row) * kGranule + result;
        float up = 0.f;
#pragma unroll 8
        for (int i = 0; i < chunks * 2; ++i) {
          value += from[i * rows * kGranule];
          if (part.gated) up += from[i * rows * kGranule + kGranule / 2];
        }
        const bf16* bias = bias_of(layer, index);
        if (bias != nullptr) {
          value += widen(__ldg(bias + feature));
          if (part.gated) up += widen(__ldg(bias + part.features + feature));
        }
        if (part.gated) value = gate_value(value, up);
      }
      const long long at = static_cast<long long>(row) * part.features + feature;
      if (index == kMatrices) {
        if (inside) plan.args.logits[at] = value;
      } else {
        const uint32_t low = narrow2(value, __shfl_down_sync(0xFFFFFFFFu, value, 1));
        const uint32_t high = __shfl_down_sync(0xFFFFFFFFu, low, 2);
        if (inside && lane % 4 == 0) store_packet(part.output + at / 4, low, high, flag);
      }
    }
    buffer ^= 1;
  }
}

// Waits for the input of a matrix and lays it down as the operand of the product, kCount packets a thread at
// a time.
template <int kCount>
__device__ __forceinline__ void stage_rows(const Plan& plan, unsigned char* shared, const Part& part,
                                           unsigned flag) {
  const int thread = this_thread(), rows = plan.args.rows, columns = part.columns, width = columns / 4;
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
    await(data, part.input, from, flag);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (to[i] >= 0) *reinterpret_cast<uint2*>(shared + to[i]) = data[i];
  }
}

// residual += the input of a matrix, or residual = the embeddings ahead of the first one; and the norm of it
// as the operand of the product. The norm's weight is the ring's next slot; the heads' norms are kept from
// it.
__device__ __forceinline__ void norm_rows(const Plan& plan, const Ring& ring, unsigned char* shared,
                                          int index, bool embedded, unsigned flag) {
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
      await(data, plan.parts[index].input, from, flag);
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
  if (index == 0 && thread < 2 * kHeadBytes / 16)
    reinterpret_cast<uint4*>(shared + plan.at.head_norms)[thread] =
        reinterpret_cast<const uint4*>(slot + columns * 2)[thread];
}

}  // namespace stack
}  // namespace quickturn
