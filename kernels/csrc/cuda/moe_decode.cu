// A mixture of experts over few tokens (up to 64), bfloat16, in one launch at the speed of memory: router,
// choice, gate and up with their activation, down, weighted sum, and the shared expert.
//
// One block a multiprocessor. A warp streams weights through a ring in shared memory, 16 rows at a time (8 of
// the gate and the matching 8 of up, or 16 of down), and never waits for results: when gate and up are
// through, the first weights of down have long been asked for. Eight warps multiply; weights are the left
// operand, so that the tokens of an expert, mostly one or two, cost a padding to 8 columns only. A block has
// rows of down for itself and goes through all experts for them: no sum crosses blocks, and every sum has one
// order, whatever else is in the batch.
#include <cuda_runtime.h>

#include "hopper.cuh"
#include "moe_activation.cuh"
#include "moe_route.cuh"
#include "warp_mma.cuh"

namespace quickturn {
namespace {

constexpr int kWarps = 8;
constexpr int kConsumers = kWarps * 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kRows = 16;      // of weights in a stage
constexpr int kColumns = 512;  // of weights in a stage, at most
constexpr int kChunk = 32;     // columns that one warp takes at a time
constexpr int kWarpChunks = kColumns / kChunk / kWarps;
constexpr int kPitch = kColumns * 2 + 64;  // bytes; of any two rows in turn one has the other 16 banks
constexpr int kStageBytes = kRows * kPitch;
constexpr int kMaxStages = 16;
constexpr int kRouterRows = 4;  // of the router in one block

}  // namespace

struct MoeArguments {
  const bf16* x;
  const bf16* router;          // [rules.experts, hidden], or null: chosen and weights are given
  const bf16* router_bias;     // [rules.experts] or null
  const long long* positions;  // [tokens] or null; negative ones are padding
  const int* chosen;           // [tokens, top]
  const float* weights;
  const bf16* gate_up;  // [experts, 2 inner, hidden]
  const bf16* down;     // [experts, hidden, inner]
  const bf16* gate_up_bias;
  const bf16* down_bias;
  const bf16* shared_gate_up;  // [2 shared_inner, hidden] or null
  const bf16* shared_down;     // [hidden, shared_inner]
  const bf16* shared_gate;     // [hidden] or null
  float* logits;               // [tokens, rules.experts + 1], to write and read
  bf16* between;               // [tokens, top + 1, inner_pitch], to write and read
  bf16* out;                   // [tokens, hidden]
  int* counters;               // two zeros, left as zeros
  RoutingRules rules;
  long long x_pitch;
  int tokens, hidden, inner, shared_inner, inner_pitch, stages, oss;
};

namespace {

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Blocks meet twice at most. What the consumers wrote before `arrive` is seen by all after `wait`.
__device__ __forceinline__ void grid_arrive(int* counter) {
  consumers_sync();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1);
  }
}
__device__ __forceinline__ void grid_wait(const int* counter, int goal) {
  if (threadIdx.x == 0) {
    int seen;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < goal);
    __threadfence();
  }
  consumers_sync();
}

// The first of the granules of 8 gate rows (of all routed experts in turn) that a block takes, so dealt that
// with its rows of down and its part of the shared expert every block has as many bytes as any other.
__device__ __forceinline__ int first_granule(const MoeArguments& args, int active, int block) {
  const int blocks = gridDim.x, busier = args.hidden / kRows % blocks;
  const int granules = active * (args.inner / 8), shared = args.shared_inner / 8;
  if (block == blocks) return granules;
  const double down = static_cast<double>(active) * args.inner + args.shared_inner;
  const double all = static_cast<double>(granules) * args.hidden;
  const double fair = (all + busier * down + static_cast<double>(shared) * args.hidden) / blocks;
  if (fair < down + (shared / blocks + 1.) * args.hidden)
    return static_cast<int>(static_cast<long long>(granules) * block / blocks);
  const double before =
      block * fair - min(block, busier) * down - static_cast<double>(shared * block / blocks) * args.hidden;
  return min(granules, static_cast<int>(before / args.hidden));
}

// ---- The streaming warp

struct Producer {
  uint32_t ring, full, empty;
  int stages, stage = 0;
  uint32_t parity = 1;  // a ring that nobody used yet is empty

  // 16 rows of `columns`: 8 from `first` and 8 from `second`, in stages.
  __device__ __forceinline__ void push(const bf16* first, const bf16* second, int columns) {
    const int lane = threadIdx.x % 32;
    const bf16* row = (lane < 8 ? first : second) + static_cast<long long>(lane % 8) * columns;
    for (int at = 0; at < columns; at += kColumns) {
      const uint32_t bytes = 2 * min(kColumns, columns - at);
      barrier_wait(empty + 8 * stage, parity);
      if (lane == 0) barrier_expect(full + 8 * stage, kRows * bytes);
      __syncwarp();
      if (lane < kRows)
        copy_bytes(ring + stage * kStageBytes + lane * kPitch, row + at, bytes, full + 8 * stage);
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
};

// ---- The multiplying warps

// The rows of x, or of what lies between the products, that are this lane's columns.
struct Columns {
  const bf16* base;
  long long pitch;   // elements between tokens
  int choice_pitch;  // elements between a token's choices; 0 for x
  const short* pairs;
  int count;

  __device__ __forceinline__ const bf16* row(int column) const {
    if (column >= count) return nullptr;
    const int pair = pairs[column];
    return base + (pair & 255) * pitch + (pair >> 8) * choice_pitch;
  }
};

struct Consumer {
  uint32_t ring, full, empty;
  float4* partial;  // [2][kWarps][32]
  int stages, stage = 0, turn = 0;
  uint32_t parity = 0;
  uint4 next[kWarpChunks];  // the first columns of the unit to come, of its first eight tokens

  __device__ __forceinline__ static uint4 load(const bf16* row, int column, int columns) {
    return row != nullptr && column < columns ? *reinterpret_cast<const uint4*>(row + column)
                                              : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ static int column_of(int chunk) {
    return (chunk * kWarps + threadIdx.x / 32) * kChunk + threadIdx.x % 4 * 8;
  }
  __device__ __forceinline__ void prefetch(const Columns& unit, int columns) {
    const bf16* row = unit.row(threadIdx.x % 32 / 4);
#pragma unroll
    for (int c = 0; c < kWarpChunks; ++c) next[c] = load(row, column_of(c), columns);
  }

  // One unit: 16 weight rows times all its tokens. `after`: the unit to come, to be asked for early.
  // finish(tile, sums of this lane's fragment) runs in one warp for each eight tokens.
  template <int kTiles, class Finish>
  __device__ __forceinline__ void run(const Columns& unit, int columns, const Columns& after,
                                      int after_columns, const Finish& finish) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bf16* row[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) row[tile] = unit.row(tile * 8 + lane / 4);
    float sum[kTiles][4] = {};
    for (int at = 0; at < columns; at += kColumns) {
      uint4 b[kTiles][kWarpChunks];
#pragma unroll
      for (int c = 0; c < kWarpChunks; ++c) b[0][c] = next[c];
#pragma unroll
      for (int tile = 1; tile < kTiles; ++tile)
#pragma unroll
        for (int c = 0; c < kWarpChunks; ++c) b[tile][c] = load(row[tile], at + column_of(c), columns);
      if (at + kColumns < columns) {
#pragma unroll
        for (int c = 0; c < kWarpChunks; ++c) next[c] = load(row[0], at + kColumns + column_of(c), columns);
      } else {
        prefetch(after, after_columns);
      }
      barrier_wait(full + 8 * stage, parity);
      const uint32_t from = ring + stage * kStageBytes + lane / 4 * kPitch;
#pragma unroll
      for (int c = 0; c < kWarpChunks; ++c) {
        if (at + (c * kWarps + warp) * kChunk >= columns) break;
        const uint4 low = load_shared(from + 2 * column_of(c));
        const uint4 high = load_shared(from + 8 * kPitch + 2 * column_of(c));
        // Which column of K is which doesn't matter, as long as both operands agree.
        const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply(sum[tile], a[0], b[tile][c].x, b[tile][c].y);
          multiply(sum[tile], a[1], b[tile][c].z, b[tile][c].w);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * stage);
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile * 8 >= unit.count) break;
      float4* buffer = partial + turn % 2 * kConsumers;
      buffer[threadIdx.x] = make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]);
      consumers_sync();
      if (warp == turn % kWarps) {
        float4 total = buffer[lane];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
          const float4 one = buffer[w * 32 + lane];
          total.x += one.x, total.y += one.y, total.z += one.z, total.w += one.w;
        }
        finish(tile * 8 + lane % 4 * 2, total);
      }
      ++turn;
    }
  }

  template <class Finish>
  __device__ __forceinline__ void run(const Columns& unit, int columns, const Columns& after,
                                      int after_columns, const Finish& finish) {
    if (unit.count <= 8)
      run<1>(unit, columns, after, after_columns, finish);
    else if (unit.count <= 16)
      run<2>(unit, columns, after, after_columns, finish);
    else if (unit.count <= 32)
      run<4>(unit, columns, after, after_columns, finish);
    else
      run<8>(unit, columns, after, after_columns, finish);
  }
};

// The logits of this block's rows of the router for every token; row `rules.experts` is the shared gate.
// `early` holds the first columns of those rows.
__device__ __forceinline__ void write_logits(const MoeArguments& args, const bf16* const (&rows)[kRouterRows],
                                             const uint4 (&early)[kRouterRows], float* partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kAtOnce = 4;
  for (int start = 0; start < args.tokens; start += kAtOnce) {
    float sum[kAtOnce][kRouterRows] = {};
    for (int at = threadIdx.x * 8; at < args.hidden; at += kConsumers * 8) {
      uint4 value[kAtOnce];
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t)
        if (start + t < args.tokens)
          value[t] = __ldcg(reinterpret_cast<const uint4*>(args.x + (start + t) * args.x_pitch + at));
#pragma unroll
      for (int r = 0; r < kRouterRows; ++r) {
        if (rows[r] == nullptr) break;
        const uint4 weight =
            at < kConsumers * 8 ? early[r] : __ldg(reinterpret_cast<const uint4*>(rows[r] + at));
        const uint32_t w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
        for (int t = 0; t < kAtOnce; ++t) {
          if (start + t >= args.tokens) break;
          const uint32_t v[4] = {value[t].x, value[t].y, value[t].z, value[t].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[t][r] += __uint_as_float(w[i] << 16) * __uint_as_float(v[i] << 16);
            sum[t][r] += __uint_as_float(w[i] & 0xFFFF0000u) * __uint_as_float(v[i] & 0xFFFF0000u);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kAtOnce; ++t)
#pragma unroll
      for (int r = 0; r < kRouterRows; ++r) {
        if (rows[r] == nullptr || start + t >= args.tokens) break;
        const float whole = warp_sum(sum[t][r]);
        if (lane == 0) partial[(warp * kMaxTokens + start + t) * kRouterRows + r] = whole;
      }
  }
  consumers_sync();
  for (int i = threadIdx.x; i < args.tokens * kRouterRows; i += kConsumers) {
    const int row = blockIdx.x + i % kRouterRows * gridDim.x, token = i / kRouterRows;
    if (rows[i % kRouterRows] == nullptr) continue;
    float whole = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      whole += partial[(w * kMaxTokens + token) * kRouterRows + i % kRouterRows];
    const int column = args.router != nullptr ? row : args.rules.experts;
    if (args.router_bias != nullptr && column < args.rules.experts) whole += widen(args.router_bias[column]);
    args.logits[token * (args.rules.experts + 1) + column] = whole;
  }
}

__global__ void __launch_bounds__(kThreads, 1) moe_few_tokens(const __grid_constant__ MoeArguments args) {
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) uint64_t barriers[2 * kMaxStages];
  __shared__ float4 partial[2 * kConsumers];
  __shared__ Choice choice;
  static_assert(sizeof(partial) >= kWarps * kMaxTokens * kRouterRows * sizeof(float));

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, blocks = gridDim.x;
  const int top = args.rules.top, slots = top + 1;
  const uint32_t ring = shared_address(memory);
  const uint32_t full = shared_address(barriers), empty = full + 8 * kMaxStages;
  float* results = reinterpret_cast<float*>(memory + args.stages * kStageBytes);  // [tokens, slots, kRows]
  const int shared_granules = args.shared_inner / 8;
  const int shared_begin = shared_granules * block / blocks;
  const int shared_end = shared_granules * (block + 1) / blocks;
  const int row_granules = args.hidden / kRows;

  if (threadIdx.x == kConsumers) {
    for (int stage = 0; stage < args.stages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // Every block of this grid is there when the first of the next comes: none can take another's place.
  let_dependents_start();

  if (warp == kWarps) {
    Producer producer{ring, full, empty, args.stages};
    for (int g = shared_begin; g < shared_end; ++g)
      producer.push(args.shared_gate_up + static_cast<long long>(g) * 8 * args.hidden,
                    args.shared_gate_up + static_cast<long long>(args.shared_inner + g * 8) * args.hidden,
                    args.hidden);
    asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");  // the choice is made
    const int end = first_granule(args, choice.count, block + 1);
    const int of_expert = args.inner / 8;
    for (int g = first_granule(args, choice.count, block); g < end; ++g) {
      const long long expert = choice.active[g / of_expert];
      const bf16* first = args.gate_up + (expert * 2 * args.inner + g % of_expert * 8) * args.hidden;
      producer.push(first, first + static_cast<long long>(args.inner) * args.hidden, args.hidden);
    }
    for (int r = block; r < row_granules; r += blocks) {
      for (int i = 0; i < choice.count; ++i) {
        const bf16* first =
            args.down + (static_cast<long long>(choice.active[i]) * args.hidden + r * kRows) * args.inner;
        producer.push(first, first + 8ll * args.inner, args.inner);
      }
      if (args.shared_inner > 0) {
        const bf16* first = args.shared_down + static_cast<long long>(r) * kRows * args.shared_inner;
        producer.push(first, first + 8ll * args.shared_inner, args.shared_inner);
      }
    }
    return;
  }

  // ---- Router
  const int router_rows = (args.router != nullptr ? args.rules.experts : 0) + (args.shared_gate != nullptr);
  const bf16* rows[kRouterRows];
  uint4 early[kRouterRows];
#pragma unroll
  for (int r = 0; r < kRouterRows; ++r) {
    const int row = block + r * blocks;
    rows[r] = row >= router_rows ? nullptr
              : args.router != nullptr && row < args.rules.experts
                  ? args.router + static_cast<long long>(row) * args.hidden
                  : args.shared_gate;
    if (rows[r] != nullptr && threadIdx.x * 8 < args.hidden)
      early[r] = __ldg(reinterpret_cast<const uint4*>(rows[r] + threadIdx.x * 8));
  }
  wait_for_predecessors();
  int goal = 0;
  if (router_rows > 0) write_logits(args, rows, early, reinterpret_cast<float*>(partial));
  if (args.router != nullptr) {
    grid_arrive(args.counters);
    goal += blocks;
    grid_wait(args.counters, goal);
  }

  // ---- Choice
  unsigned long long real = args.tokens == 64 ? ~0ull : (1ull << args.tokens) - 1;
  if (args.router != nullptr) {
    if (args.positions != nullptr) {
      unsigned padding[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        padding[i] =
            __ballot_sync(0xFFFFFFFFu, i * 32 + lane < args.tokens && args.positions[i * 32 + lane] < 0);
      real &= ~(static_cast<unsigned long long>(padding[1]) << 32 | padding[0]);
    }
    for (int t = warp; t < args.tokens; t += kWarps) {
      float weight = 0.f;
      int expert = -1;
      if (real >> t & 1)
        choose_experts(args.rules, args.logits + t * (args.rules.experts + 1), weight, expert);
      if (lane < top) {
        choice.weight[t][lane] = weight;
        choice.chosen[t][lane] = static_cast<short>(expert);
      }
    }
  } else {
    for (int i = threadIdx.x; i < args.tokens * top; i += kConsumers) {
      const int expert = args.chosen[i];
      const bool inside = expert >= 0 && expert < args.rules.experts;
      choice.chosen[i / top][i % top] = static_cast<short>(inside ? expert : -1);
      choice.weight[i / top][i % top] = args.weights[i];
    }
  }
  make_lists<kConsumers>(choice, args.tokens, top, args.rules.experts, args.shared_inner > 0 ? real : 0);
  asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory");

  // ---- Gate and up
  Consumer consumer{ring, full, empty, partial, args.stages};
  const int active = choice.count;
  const auto inputs = [&](int i, bool some) {
    return Columns{args.x, args.x_pitch, 0, choice.pairs + choice.first[i],
                   some ? choice.first[i + 1] - choice.first[i] : 0};
  };
  const long long between_pitch = static_cast<long long>(slots) * args.inner_pitch;
  const auto gate_up_done = [&](const Columns& unit, int expert, int inner, int feature) {
    return [&args, unit, expert, inner, feature, between_pitch, lane](int column, const float4& total) {
      const float sums[2][2] = {{total.x, total.z}, {total.y, total.w}};
      const int at = feature + lane / 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i >= unit.count) break;
        float gate = sums[i][0], up = sums[i][1];
        if (args.gate_up_bias != nullptr && expert >= 0) {
          gate += widen(args.gate_up_bias[expert * 2ll * inner + at]);
          up += widen(args.gate_up_bias[(expert * 2ll + 1) * inner + at]);
        }
        const int pair = unit.pairs[column + i];
        const float value = activated(gate, up, args.oss && expert >= 0);
        args.between[(pair & 255) * between_pitch + (pair >> 8) * args.inner_pitch + at] =
            static_cast<bf16>(narrow2(value, 0.f) & 0xFFFFu);
      }
    };
  };
  const int of_expert = args.inner / 8;
  const int begin = first_granule(args, active, block), end = first_granule(args, active, block + 1);
  const int first = begin / of_expert;
  consumer.prefetch(
      inputs(shared_begin < shared_end ? active : first, shared_begin < shared_end || begin < end),
      args.hidden);
  for (int g = shared_begin; g < shared_end; ++g) {
    const bool more = g + 1 < shared_end;
    const Columns unit = inputs(active, true);
    consumer.run(unit, args.hidden, inputs(more ? active : first, more || begin < end), args.hidden,
                 gate_up_done(unit, -1, args.shared_inner, g * 8));
  }
  for (int g = begin; g < end; ++g) {
    const Columns unit = inputs(g / of_expert, true);
    consumer.run(unit, args.hidden, inputs(min(g + 1, end - 1) / of_expert, g + 1 < end), args.hidden,
                 gate_up_done(unit, choice.active[g / of_expert], args.inner, g % of_expert * 8));
  }
  grid_arrive(args.counters);
  goal += blocks;
  if (args.shared_gate != nullptr && args.router != nullptr) {
    // Seen since the first meeting.
    for (int t = threadIdx.x; t < args.tokens; t += kConsumers)
      choice.weight[t][top] =
          1.f / (1.f + __expf(-__ldcg(args.logits + t * (args.rules.experts + 1) + args.rules.experts)));
  }
  grid_wait(args.counters, goal);
  if (threadIdx.x == 0 && atomicAdd(args.counters + 1, 1) == blocks - 1) {
    args.counters[0] = 0;
    args.counters[1] = 0;
  }
  if (args.shared_gate == nullptr || args.router == nullptr) {
    for (int t = threadIdx.x; t < args.tokens; t += kConsumers)
      choice.weight[t][top] =
          args.shared_gate == nullptr
              ? 1.f
              : 1.f /
                    (1.f + __expf(-__ldcg(args.logits + t * (args.rules.experts + 1) + args.rules.experts)));
  }
  consumers_sync();

  // ---- Down
  const int units = active + (args.shared_inner > 0);
  const auto inner_of = [&](int i) { return i < active ? args.inner : args.shared_inner; };
  const auto halfway = [&](int i) {
    return Columns{args.between, between_pitch, args.inner_pitch, choice.pairs + choice.first[i],
                   choice.first[i + 1] - choice.first[i]};
  };
  if (units > 0 && block < row_granules) consumer.prefetch(halfway(0), inner_of(0));
  for (int r = block; r < row_granules; r += blocks) {
    for (int i = 0; i < units; ++i) {
      const Columns unit = halfway(i);
      const int following = i + 1 < units ? i + 1 : 0;
      const int expert = i < active ? choice.active[i] : -1;
      const auto finish = [&](int column, const float4& total) {
        const float sums[2][2] = {{total.x, total.z}, {total.y, total.w}};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (column + c >= unit.count) break;
          const int pair = unit.pairs[column + c], token = pair & 255, slot = pair >> 8;
          float* to = results + (token * slots + slot) * kRows + lane / 4;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float value = sums[c][half];
            if (args.down_bias != nullptr && expert >= 0)
              value += widen(args.down_bias[static_cast<long long>(expert) * args.hidden + r * kRows +
                                            half * 8 + lane / 4]);
            to[half * 8] = value * choice.weight[token][slot];
          }
        }
      };
      consumer.run(unit, inner_of(i), halfway(following), inner_of(following), finish);
    }
    consumers_sync();
    for (int item = threadIdx.x; item < args.tokens * kRows; item += kConsumers) {
      const int token = item / kRows, row = item % kRows;
      float total = 0.f;
      for (int slot = 0; slot < top; ++slot)
        if (choice.chosen[token][slot] >= 0) total += results[(token * slots + slot) * kRows + row];
      if (args.shared_inner > 0 && real >> token & 1) total += results[(token * slots + top) * kRows + row];
      args.out[static_cast<long long>(token) * args.hidden + r * kRows + row] =
          static_cast<bf16>(narrow2(total, 0.f) & 0xFFFFu);
    }
    consumers_sync();
  }
}

}  // namespace
}  // namespace quickturn

// Stages that fit into shared memory beside the results of so many tokens.
extern "C" int quickturn_moe_stages(int tokens, int top) {
  using namespace quickturn;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, moe_few_tokens) != cudaSuccess) return 0;
  const int limit = (227 << 10) - static_cast<int>(attributes.sharedSizeBytes);
  const int stages = (limit - tokens * (top + 1) * kRows * 4) / kStageBytes;
  return stages < kMaxStages ? stages : kMaxStages;
}

// See MoeArguments. hidden and inner sizes are multiples of 32, rows 16-byte aligned, 1 to 64 tokens, at most
// 512 experts and 16 choices. `blocks` must fit on the device at once. Returns a cudaError_t; launches on
// `stream` and does not wait.
extern "C" int quickturn_moe_few_tokens(const quickturn::MoeArguments* arguments, int blocks, int early,
                                        void* stream) {
  using namespace quickturn;
  const MoeArguments& args = *arguments;
  const int router_rows = (args.router != nullptr ? args.rules.experts : 0) + (args.shared_gate != nullptr);
  if (args.tokens < 1 || args.tokens > kMaxTokens || args.hidden % kChunk || args.inner % kChunk ||
      args.shared_inner % kChunk || args.rules.experts > kMaxExperts || args.rules.top > kMaxTop ||
      args.rules.top < 1 || router_rows > kRouterRows * blocks || args.stages < 2 || args.stages > kMaxStages)
    return cudaErrorInvalidValue;
  const int shared = args.stages * kStageBytes + args.tokens * (args.rules.top + 1) * kRows * 4;
  cudaError_t error =
      cudaFuncSetAttribute(moe_few_tokens, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(moe_few_tokens, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, moe_few_tokens, args);
}
