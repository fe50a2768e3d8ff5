// All-reduce over memory that the GPUs of one host map into each other, for messages so small that latency is
// all: with the addition to the residual stream and the norm behind it in the same kernel.
//
// Every rank has an area of its own, which all ranks see: flags, and two slots of two halves, taken in turn.
// Block b of every rank carries the rows b, b + blocks, ...; it copies them to the first half of its slot,
// tells block b of the other ranks, and waits for theirs. Then, in one shot, it adds up its rows from all
// ranks; or, in two, each rank adds up its share of them, puts the sums in the second half of its slot, and
// all fetch the sums after they met again. Summands are added in the order of the ranks, in float32, and
// rounded once: every rank gets the same bits, in one shot or two.
//
// What ranks have is gathered in the same way, without the sums.
//
// A slot is written anew two calls later. A block that has met the others once in the call between knows that
// their kernels of this call have ended: nobody still reads. Nothing is sent back to the host, and how often
// blocks met is counted on the device, so that a graph can be replayed.
//
// A rank that never comes is waited for only so long. Then the kernel says on the host whom it missed, and
// ends with an error: nothing that it might have computed is ever seen.
#include <cuda_runtime.h>

#include <cstring>

#include "hopper.cuh"
#include "norm.cuh"

namespace quickturn {
namespace {

constexpr int kMaxRanks = 8;
constexpr int kBlocks = 64;   // all at once on any Hopper, beside what else may run
constexpr int kAhead = 4;     // ranks, or rows, whose elements are on their way at once
constexpr int kPolls = 4096;  // of a flag, between two looks at the clock
constexpr size_t kFlagBytes = kBlocks * kMaxRanks * sizeof(uint32_t);

struct Counters {
  uint32_t calls, meetings;
};

struct Arguments {
  unsigned char* area[kMaxRanks];  // of every rank, as this one sees it
  Counters* counters;              // [kBlocks], this rank's own
  long long half;                  // vectors
  int rank, ranks;
  const uint4* x;
  uint4* residual;
  const void* weight;  // null: neither residual stream nor norm
  uint4* out;
  long long x_pitch, residual_pitch;  // in vectors
  int rows, vectors;
  float width, eps;
  unsigned long long patience;  // nanoseconds
  int* missed;                  // on the host; not 0: wait no longer
};

__device__ __forceinline__ void store_release(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Thread i waits until rank i has come to this meeting. The counter may run over: what counts is the
// difference.
__device__ __forceinline__ void wait_for(const Arguments& args, const uint32_t* theirs, uint32_t meeting) {
  unsigned long long begun = 0;
  for (uint32_t polls = 1; static_cast<int32_t>(load_acquire(theirs) - meeting) < 0; ++polls) {
    if (polls % kPolls) continue;
    volatile int* missed = args.missed;
    const unsigned long long now = nanoseconds();
    if (begun == 0) begun = now;
    if (*missed == 0) {
      if (now - begun <= args.patience) continue;
      *missed = 1 + static_cast<int>(threadIdx.x);
    }
    __threadfence_system();
    __trap();
  }
}

__device__ __forceinline__ uint32_t* flag(const Arguments& args, int of, int from) {
  return reinterpret_cast<uint32_t*>(args.area[of]) + blockIdx.x * kMaxRanks + from;
}

__device__ __forceinline__ uint4* half_slot(const Arguments& args, int of, uint32_t call, int half) {
  return reinterpret_cast<uint4*>(args.area[of] + kFlagBytes) + (2 * (call & 1) + half) * args.half;
}

// Block b of every rank: all that it wrote before is seen behind this.
__device__ __forceinline__ void meet(const Arguments& args, uint32_t meeting) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < args.ranks) {
    store_release(flag(args, threadIdx.x, args.rank), meeting);
    wait_for(args, flag(args, args.rank, threadIdx.x), meeting);
  }
  __syncthreads();
}

// 8 elements of a row summed over the ranks, in their order.
__device__ __forceinline__ uint4 summed(const Arguments& args, uint32_t call, long long at) {
  float total[8] = {};
#pragma unroll
  for (int first = 0; first < kMaxRanks; first += kAhead) {
    if (first >= args.ranks) break;
    uint4 parts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i < args.ranks) parts[i] = __ldcg(half_slot(args, first + i, call, 0) + at);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= args.ranks) break;
      float value[8];
      unpack(parts[i], value);
#pragma unroll
      for (int e = 0; e < 8; ++e) total[e] += value[e];
    }
  }
  return pack(total);
}

template <bool kNorm, bool kWide, bool kTwoShots>
__global__ void __launch_bounds__(1024) all_reduce_rows(const Arguments args) {
  __shared__ float partial[32];
  NormedRow<kWide> normed;
  if constexpr (kNorm) normed.load_weight(args.weight, args.vectors);
  const Counters before = args.counters[blockIdx.x];
  const uint32_t call = before.calls;
  uint4* mine = half_slot(args, args.rank, call, 0);
  for (long long first = blockIdx.x; first < args.rows; first += kAhead * kBlocks)
    for (int at = threadIdx.x; at < args.vectors; at += blockDim.x) {
      uint4 part[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i * kBlocks < args.rows) part[i] = args.x[(first + i * kBlocks) * args.x_pitch + at];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i * kBlocks < args.rows) mine[(first + i * kBlocks) * args.vectors + at] = part[i];
    }
  meet(args, before.meetings + 1);
  if constexpr (kTwoShots) {
    uint4* sums = half_slot(args, args.rank, call, 1);
    for (long long row = blockIdx.x; row < args.rows; row += kBlocks) {
      if (row / kBlocks % args.ranks != args.rank) continue;
      for (int at = threadIdx.x; at < args.vectors; at += blockDim.x)
        sums[row * args.vectors + at] = summed(args, call, row * args.vectors + at);
    }
    meet(args, before.meetings + 2);
  }
  for (long long row = blockIdx.x; row < args.rows; row += kBlocks) {
    const long long start = row * args.vectors;
    const uint4* owner = half_slot(args, kTwoShots ? row / kBlocks % args.ranks : 0, call, 1);
    const auto sum = [&](int at) {
      return kTwoShots ? __ldcg(owner + start + at) : summed(args, call, start + at);
    };
    if constexpr (kNorm) {
      normed.run([&](int at, float(&value)[8]) { unpack(sum(at), value); },
                 args.residual + row * args.residual_pitch, args.out + start, partial, args.vectors,
                 args.width, args.eps);
      __syncthreads();  // before the next row's sums of squares
    } else {
      for (int at = threadIdx.x; at < args.vectors; at += blockDim.x) args.out[start + at] = sum(at);
    }
  }
  if (threadIdx.x == 0)
    args.counters[blockIdx.x] = {before.calls + 1, before.meetings + (kTwoShots ? 2u : 1u)};
}

// What every rank has, `count` units each, one behind the other.
template <typename Unit>
__global__ void __launch_bounds__(1024)
    all_gather_units(const Arguments args, const Unit* x, Unit* out, int count) {
  const Counters before = args.counters[blockIdx.x];
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = kBlocks * blockDim.x;
  Unit* mine = reinterpret_cast<Unit*>(half_slot(args, args.rank, before.calls, 0));
  for (int at = first; at < count; at += step) mine[at] = x[at];
  meet(args, before.meetings + 1);
  for (int of = 0; of < args.ranks; ++of) {
    const Unit* theirs = reinterpret_cast<const Unit*>(half_slot(args, of, before.calls, 0));
    Unit* there = out + static_cast<long long>(of) * count;
    for (int at = first; at < count; at += step) there[at] = __ldcg(theirs + at);
  }
  if (threadIdx.x == 0) args.counters[blockIdx.x] = {before.calls + 1, before.meetings + 1};
}

template <typename Unit>
cudaError_t gather(const Arguments& args, const void* x, void* out, long long bytes, cudaStream_t stream) {
  const int count = static_cast<int>(bytes / sizeof(Unit));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(count > kBlocks * 256 ? 1024 : 256);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, all_gather_units<Unit>, args, static_cast<const Unit*>(x),
                            static_cast<Unit*>(out), count);
}

template <bool kTwoShots>
auto choose(bool norm, bool wide) {
  if (!norm) return all_reduce_rows<false, false, kTwoShots>;
  return wide ? all_reduce_rows<true, true, kTwoShots> : all_reduce_rows<true, false, kTwoShots>;
}

Arguments among(void* const* areas, void* counters, long long capacity, int rank, int ranks,
                long long patience, int* missed) {
  Arguments args{};
  for (int of = 0; of < ranks; ++of) args.area[of] = static_cast<unsigned char*>(areas[of]);
  args.counters = static_cast<Counters*>(counters);
  args.half = capacity / 16;
  args.rank = rank;
  args.ranks = ranks;
  args.patience = static_cast<unsigned long long>(patience);
  args.missed = missed;
  return args;
}

}  // namespace
}  // namespace quickturn

// Bytes of an area for messages of up to `bytes`, and of the counters.
extern "C" int quickturn_peer_bytes(long long bytes, long long* area, long long* counters) {
  using namespace quickturn;
  *area = static_cast<long long>(kFlagBytes) + 4 * bytes;
  *counters = kBlocks * sizeof(Counters);
  return cudaSuccess;
}

// An area of `bytes` zeros on the current device, and what lets another process of this host map it.
extern "C" int quickturn_peer_make(long long bytes, void** area, void* handle) {
  cudaError_t error = cudaMalloc(area, bytes);
  if (error != cudaSuccess) return error;
  error = cudaMemset(*area, 0, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  cudaIpcMemHandle_t made;
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&made, *area);
  if (error == cudaSuccess) {
    std::memcpy(handle, &made, sizeof(made));
    return cudaSuccess;
  }
  cudaFree(*area);
  *area = nullptr;
  return error;
}

// Maps the area that another process made.
extern "C" int quickturn_peer_open(const void* handle, void** area) {
  cudaIpcMemHandle_t made;
  std::memcpy(&made, handle, sizeof(made));
  return cudaIpcOpenMemHandle(area, made, cudaIpcMemLazyEnablePeerAccess);
}

// Ends both: `mapped` areas of others, and the own one.
extern "C" int quickturn_peer_close(void* area, int mapped) {
  return mapped ? cudaIpcCloseMemHandle(area) : cudaFree(area);
}

// areas: [ranks] pointers, this rank's own among them; capacity: the bytes that the areas were made for.
// x: [rows, width] bfloat16, pitch in elements; out [rows, width], which may be x where the pitch is the
// width. weight null: out is the sum. Else [width] bfloat16, or float32 with `wide`: residual [rows, width]
// bfloat16 has the sum added to it, and out is its norm. Width and pitches are multiples of 8, width at most
// 16,384, pointers 16-byte aligned, rows * width at most capacity / 2. Every rank calls this with the same
// sizes, in the same order. A rank that doesn't for `patience` nanoseconds makes the kernel write 1 + its
// number to `missed`, which lies on the host, and trap. Returns a cudaError_t.
extern "C" int quickturn_all_reduce(void* const* areas, void* counters, long long capacity, int rank,
                                    int ranks, const void* x, long long x_pitch, void* residual,
                                    long long residual_pitch, const void* weight, int wide, void* out,
                                    int rows, int width, float eps, int two_shots, long long patience,
                                    int* missed, void* stream) {
  using namespace quickturn;
  if (width % 8 || x_pitch % 8 || residual_pitch % 8 || width > 8 * kMaxVectors * 1024 || ranks > kMaxRanks ||
      static_cast<long long>(rows) * width * 2 > capacity || capacity % 16)
    return cudaErrorInvalidValue;
  Arguments args = among(areas, counters, capacity, rank, ranks, patience, missed);
  args.x = static_cast<const uint4*>(x);
  args.residual = static_cast<uint4*>(residual);
  args.weight = weight;
  args.out = static_cast<uint4*>(out);
  args.x_pitch = x_pitch / 8;
  args.residual_pitch = residual_pitch / 8;
  args.rows = rows;
  args.vectors = width / 8;
  args.width = static_cast<float>(width);
  args.eps = eps;
  const auto kernel =
      two_shots ? choose<true>(weight != nullptr, wide) : choose<false>(weight != nullptr, wide);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(norm_threads(args.vectors) < 64 ? 64 : norm_threads(args.vectors));
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, args);
}

// x: `bytes` bytes, at most capacity; out: what every rank has, one behind the other. The rest as in
// `quickturn_all_reduce`, which may come before and after. Returns a cudaError_t.
extern "C" int quickturn_all_gather(void* const* areas, void* counters, long long capacity, int rank,
                                    int ranks, const void* x, void* out, long long bytes, long long patience,
                                    int* missed, void* stream) {
  using namespace quickturn;
  if (bytes > capacity || capacity % 16 || ranks > kMaxRanks) return cudaErrorInvalidValue;
  const Arguments args = among(areas, counters, capacity, rank, ranks, patience, missed);
  const auto on = static_cast<cudaStream_t>(stream);
  const uintptr_t together = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out) | bytes;
  if (together % sizeof(uint4) == 0) return gather<uint4>(args, x, out, bytes, on);
  if (together % sizeof(uint32_t) == 0) return gather<uint32_t>(args, x, out, bytes, on);
  return gather<unsigned char>(args, x, out, bytes, on);
}
