// A mixture of bfloat16 experts over a few tokens of a decode step, at the speed of memory, in three
// dependent launches:
//
//   1. moe_few_route.cuh
//   2. the choice (each block for itself), gate and up of the chosen experts
//   3. the choice again, down, the weighted sum and the residual additions
//
// The second and the third go through shared memory: a warp has a ring of its own, which the copy engine
// fills with whole rows of weights, and multiplies them with all tokens that want them, so that a weight is
// read once. The rings are filled as soon as the choice is known. The choice costs each block less than
// waiting for another one to publish it would; the third launch makes it, and fills its rings, while the
// second still runs.
#include <cuda_runtime.h>

#include "hopper.cuh"
#include "moe_activation.cuh"
#include "moe_few.cuh"
#include "moe_few_route.cuh"
#include "moe_route.cuh"

namespace quickturn {
namespace {

constexpr int kMostWarps = 8;       // of a block with rings
constexpr int kMostStages = 4;      // of one warp's ring
constexpr int kMemory = 219 << 10;  // of a block, beside what the kernels declare
constexpr int kLongRow = 2048;      // columns of down

// Neighbouring bytes to shared memory; addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Rows of weights on their way to one warp: as many stages as fit, each filled by copies that its own barrier
// counts. No other warp is waited for.
struct Ring {
  unsigned char* memory;
  uint32_t barriers;
  int stages, bytes;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ Ring(unsigned char* memory, uint64_t* barriers, int stages, int bytes)
      : memory(memory), barriers(shared_address(barriers)), stages(stages), bytes(bytes) {
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < stages; ++i) barrier_init(this->barriers + 8 * i, 1);
      barrier_init_fence();
    }
    __syncwarp();
  }

  // By one lane: kCount pieces of so many bytes, `apart` elements from one to the next, to a stage.
  template <int kCount>
  __device__ __forceinline__ void request(int to, const bf16* from, int piece_bytes, long long apart) const {
    barrier_expect(barriers + 8 * to, kCount * piece_bytes);
    const uint32_t at = shared_address(memory + to * bytes);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      load_bytes(at + i * piece_bytes, from + i * apart, piece_bytes, barriers + 8 * to, kEvictFirst);
  }

  // What lies in the oldest stage, once it is there.
  __device__ __forceinline__ const unsigned char* wait() const {
    barrier_wait(barriers + 8 * stage, parity);
    return memory + stage * bytes;
  }

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// sum[r] += row r . x of a lane's columns. memory: kRows rows, one behind the other; kColumns at a time.
template <int kRows, int kColumns>
__device__ __forceinline__ void multiply(float (&sum)[kRows], const unsigned char* memory, const uint4* x,
                                         int lane, int columns) {
  constexpr int kHeld = kColumns / 256;
  const uint4* w = reinterpret_cast<const uint4*>(memory);
  const int vectors = columns / 8;
  auto add = [&](int at) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] += PlainWeight::dot(w[r * vectors + at], x + at, false);
  };
  int first = lane;
  for (; first - lane + 32 * kHeld <= vectors; first += 32 * kHeld) {
    // All of it on its way before the first is looked at.
#pragma unroll
    for (int v = 0; v < kHeld; ++v) add(first + v * 32);
  }
  for (; first < vectors; first += 32) add(first);
}

// ---- 2: gate and up of the chosen experts

__global__ void __launch_bounds__(32 * kMostWarps, 3) few_gate_up(const __grid_constant__ FewArguments args) {
  extern __shared__ uint4 rows[];
  __shared__ alignas(8) uint64_t barriers[kMostWarps * kMostStages + 1];
  __shared__ FewChoice choice;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int row_bytes = args.hidden * 2, rows_bytes = args.tokens * args.hidden * 2;
  const int stages = args.gate_stages, slots = args.rules.top + 1, vectors = args.hidden / 8;
  Ring ring(reinterpret_cast<unsigned char*>(rows) + rows_bytes + warp * stages * 2 * row_bytes,
            barriers + warp * stages, stages, 2 * row_bytes);
  const uint32_t rows_there = shared_address(barriers + warps * stages);
  if (threadIdx.x == 0) {
    barrier_init(rows_there, 1);
    barrier_init_fence();
  }
  const int step = gridDim.x * warps, begin = blockIdx.x + gridDim.x * warp;
  const int step_members = step / args.inner, step_features = step - step_members * args.inner;
  // A pair of rows: a member's, for one feature.
  struct Task {
    int number, member, feature;
  };
  auto advance = [&](Task& task) {
    task.number += step;
    task.member += step_members;
    task.feature += step_features;
    if (task.feature >= args.inner) {
      task.feature -= args.inner;
      ++task.member;
    }
  };
  Task task{begin, begin / args.inner, begin % args.inner}, next = task;
  choice.clear();
  __syncthreads();
  wait_for_predecessors();
  // Not before: who starts behind this may count on the first launch having finished.
  let_dependents_start();
  if (threadIdx.x == blockDim.x - 1) {
    barrier_expect(rows_there, rows_bytes);
    load_bytes(shared_address(rows), args.normed, rows_bytes, rows_there, kEvictLast);
  }
  choice.choose<false>(args);

  const int total = choice.active * args.inner;
  auto first_row = [&](const Task& task) {
    return 2ll * choice.member[task.member] * args.inner + task.feature;
  };
  auto request = [&](int stage) {
    if (next.number < total) {
      if (lane == 0)
        ring.request<2>(stage, static_cast<const bf16*>(args.gate_up) + first_row(next) * args.hidden,
                        row_bytes, static_cast<long long>(args.inner) * args.hidden);
      advance(next);
    }
  };
  for (int stage = 0; stage < stages; ++stage) request(stage);
  barrier_wait(rows_there, 0);
  for (; task.number < total; advance(task)) {
    const int member = task.member, feature = task.feature;
    const long long first = first_row(task);
    float bias[2] = {};
    if (args.gate_up_bias != nullptr) {
      bias[0] = widen(args.gate_up_bias[first]);
      bias[1] = widen(args.gate_up_bias[first + args.inner]);
    }
    unsigned takers = choice.takers[member];
    const unsigned char* stage = ring.wait();
    while (takers != 0) {
      const int t = __ffs(takers) - 1;
      takers &= takers - 1;
      float sum[2] = {};
      multiply<2, 1024>(sum, stage, rows + t * vectors, lane, args.hidden);
      if (takers == 0) {
        __syncwarp();
        request(ring.stage);
      }
      const float gate = warp_sum(sum[0]) + bias[0], up = warp_sum(sum[1]) + bias[1];
      if (lane == 0)
        args.between[(t * slots + choice.slot(member, t)) * args.pitch + feature] =
            static_cast<bf16>(narrow2(activated(gate, up, args.oss), 0.f));
    }
    ring.advance();
  }
}

// ---- 3: down and the sum

// A warp has kRows features of all tokens at a time: kRows rows of each expert in turn.
template <int kTokens, int kRows>
__global__ void __launch_bounds__(32 * kMostWarps, 3) few_down(const __grid_constant__ FewArguments args) {
  extern __shared__ uint4 between[];
  __shared__ alignas(8) uint64_t barriers[kMostWarps * kMostStages + 1];
  __shared__ FewChoice choice;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int top = args.rules.top, slots = top + 1, stages = args.down_stages;
  const int between_bytes = args.tokens * slots * args.pitch * 2;
  const int stage_bytes = kRows * args.pitch * 2;
  Ring ring(reinterpret_cast<unsigned char*>(between) + between_bytes + warp * stages * stage_bytes,
            barriers + warp * stages, stages, stage_bytes);
  const uint32_t between_there = shared_address(barriers + warps * stages);
  if (threadIdx.x == 0) {
    barrier_init(between_there, 1);
    barrier_init_fence();
  }
  const int units = args.hidden / kRows, step = gridDim.x * warps;
  const int begin = blockIdx.x + gridDim.x * warp;
  choice.clear();
  __syncthreads();
  // The launch before lets this one start when it has seen the first one's end.
  choice.choose<true>(args);

  const int active = choice.active, members = active + (args.shared_inner > 0);
  auto width = [&](int member) { return member < active ? args.inner : args.shared_inner; };
  int next_unit = members > 0 ? begin : units, next_member = 0;
  auto request = [&](int stage) {
    if (next_unit >= units) return;
    if (lane == 0) {
      const bool routed = next_member < active;
      const long long row = static_cast<long long>(next_unit) * kRows +
                            (routed ? static_cast<long long>(choice.member[next_member]) * args.hidden : 0);
      const int columns = width(next_member);
      ring.request<1>(stage, static_cast<const bf16*>(routed ? args.down : args.shared_down) + row * columns,
                      kRows * columns * 2, 0);
    }
    if (++next_member == members) {
      next_member = 0;
      next_unit += step;
    }
  };
  for (int stage = 0; stage < stages; ++stage) request(stage);
  let_dependents_start();
  // The launch ahead doesn't change what is read here.
  auto before = [&](int unit) {
    const int t = lane / kRows, feature = unit * kRows + lane % kRows;
    if (t >= args.tokens || args.residual == nullptr) return 0.f;
    const float value = widen(args.residual[t * args.residual_pitch + feature]);
    return args.x == nullptr ? value : rounded(value + widen(args.x[t * args.x_pitch + feature]));
  };
  float stream = begin < units ? before(begin) : 0.f;
  wait_for_predecessors();
  if (threadIdx.x == 0) {
    barrier_expect(between_there, between_bytes);
    load_bytes(shared_address(between), args.between, between_bytes, between_there, kEvictLast);
  }
  barrier_wait(between_there, 0);
  for (int unit = begin; unit < units; unit += step) {
    if (unit != begin) stream = before(unit);
    float sum[kTokens][kRows] = {};
    if (args.down_bias != nullptr && lane < top) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const int expert = choice.expert[t][lane];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (expert >= 0)
            sum[t][r] =
                choice.weight[t][lane] *
                widen(args.down_bias[static_cast<long long>(expert) * args.hidden + unit * kRows + r]);
      }
    }
    for (int member = 0; member < members; ++member) {
      const bool routed = member < active;
      const int columns = width(member);
      const unsigned takers = routed ? choice.takers[member] : (1u << args.tokens) - 1;
      const unsigned char* stage = ring.wait();
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if ((takers >> t & 1) == 0) continue;
        const int slot = routed ? choice.slot(member, t) : top;
        float found[kRows] = {};
        multiply<kRows, 512>(found, stage, between + (t * slots + slot) * args.pitch / 8, lane, columns);
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[t][r] = fmaf(choice.weight[t][slot], found[r], sum[t][r]);
      }
      __syncwarp();
      request(ring.stage);
      ring.advance();
    }
    float mine = 0.f;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float total = warp_sum(sum[t][r]);
        if (lane == t * kRows + r) mine = total;
      }
    }
    const int t = lane / kRows, feature = unit * kRows + lane % kRows;
    if (t < args.tokens) {
      if (args.residual != nullptr)
        args.residual[t * args.residual_pitch + feature] =
            static_cast<bf16>(narrow2(stream + rounded(mine), 0.f));
      else
        args.out[static_cast<long long>(t) * args.hidden + feature] = static_cast<bf16>(narrow2(mine, 0.f));
    }
  }
}

// As many of the warps and of their stages as fit; false if not one does.
bool fit(int& warps, int& stages, int held, long long stage_bytes) {
  while (warps > 0 && held + warps * stages * stage_bytes > kMemory) --(stages > 1 ? stages : warps);
  return warps > 0;
}

template <int kTokens>
cudaError_t run(FewArguments args, int units, int early, cudaStream_t stream) {
  const int rows_bytes = args.tokens * args.hidden * 2;
  const int between_bytes = args.tokens * (args.rules.top + 1) * args.pitch * 2;
  const int down_rows = args.pitch <= kLongRow ? 2 : 1, down_bytes = down_rows * args.pitch * 2;
  // At 2,048 columns and 512 a block of the third launch has room beside one of the second.
  int gate_warps = 8, down_warps = 8;
  args.gate_stages = 2;
  args.down_stages = 4;
  if (!fit(gate_warps, args.gate_stages, rows_bytes, 4 * args.hidden) ||
      !fit(down_warps, args.down_stages, between_bytes, down_bytes))
    return cudaErrorInvalidValue;
  cudaError_t error = route_few<PlainWeight, kTokens>(args, early, stream);
  if (error != cudaSuccess) return error;
  error = launch(few_gate_up,
                 {min(units, args.tokens * args.rules.top * args.inner), 32 * gate_warps,
                  rows_bytes + gate_warps * args.gate_stages * 4 * args.hidden},
                 args, early, stream);
  if (error != cudaSuccess) return error;
  return launch(down_rows == 2 ? few_down<kTokens, 2> : few_down<kTokens, 1>,
                {min(units, args.hidden / down_rows), 32 * down_warps,
                 between_bytes + down_warps * args.down_stages * down_bytes},
                args, early, stream);
}

}  // namespace
}  // namespace quickturn

// See FewArguments: the experts, the shared one too, are bfloat16. Returns a cudaError_t; launches on
// `stream` and does not wait. Unless `early`, each launch begins when the one ahead has finished.
extern "C" int quickturn_moe_few(const quickturn::FewArguments* args, int units, int early, void* stream) {
  using namespace quickturn;
  if (!fits_few(*args, 16)) return cudaErrorInvalidValue;
  const auto s = static_cast<cudaStream_t>(stream);
  return args->tokens == 1 ? run<1>(*args, units, early, s) : run<2>(*args, units, early, s);
}
