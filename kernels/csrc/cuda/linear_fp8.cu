// out[M, N] = x[M, K] W[N, K]^T for few rows (M <= 64) of 16-bit floats and a weight in e4m3, at the speed of
// memory.
//
// As in linear.cu the weight is the left operand of a warpgroup product and streams through a ring that one
// warp keeps full. Here it goes on through registers, where each byte becomes a 16-bit float: x isn't
// quantised, and the products are those of the 16-bit kernel. Two warpgroups take the ring's stages in turn,
// so that one converts while the other multiplies. A stage is 128 columns, the width of a scale block: its
// sum is scaled in float32 and added.
//
// The bytes of each 16 columns lie in an order that makes a fragment of what one thread loads; see
// `permute_columns` in ops/linear/hopper_fp8.py.
#include <cuda_runtime.h>

#include "dependent_launch.cuh"
#include "hopper.cuh"
#include "scalars.cuh"
#include "tensor_map.h"
#include "warp_mma.cuh"

namespace quickturn {
namespace {

constexpr int kStageColumns = 128;
constexpr int kStageSteps = kStageColumns / 16;
constexpr int kProductRows = 64;
constexpr int kMaxStages = 24;
constexpr int kMaxSplit = 8;

// Warpgroups that multiply, as many as have room for their sums: the way from a stage's arrival to its sum is
// long, and only other warpgroups fill the waits. One more requests.
__host__ __device__ constexpr int groups_of(int columns, int products) {
  if (columns <= 16) return 4;
  if (columns == 32) return products == 1 ? 4 : 3;
  return products == 1 ? 3 : 2;
}

// Registers of a thread that multiplies. The requesting warpgroup gives up its own for them: together they
// must not be more than all had at the start, or the threads wait forever.
__host__ __device__ constexpr int registers_of(int groups) {
  return groups == 4 ? 104 : groups == 3 ? 152 : 232;
}
constexpr int kRequestingRegisters = 40;

// A block of one warpgroup more than `groups` starts with equal shares of 65,536, in steps of 8.
constexpr bool registers_suffice(int groups) {
  return groups * registers_of(groups) + kRequestingRegisters <=
         (groups + 1) * (65536 / (groups + 1) / 128 / 8 * 8);
}
static_assert(registers_suffice(2) && registers_suffice(3) && registers_suffice(4));

struct Arguments {
  void* out;                  // [rows, features], of x's type or float32
  const uint16_t* bias;       // [features], with `gated` [2 features], of x's type, or null
  const float* block_scales;  // [ceil(weight rows / 128), chunks], rows `scale_pitch` apart, or null
  const float* row_scales;    // [weight rows], or null
  int scale_pitch;
  int rows;      // of x
  int features;  // columns of out
  int chunks;    // stages that all of K takes
  int split;     // blocks that share one tile's K
  int tiles;
  int tile_rows;  // rows of W in a tile
  int tile_step;  // tiles between two tiles of one block
  int stages;     // of the ring, a multiple of the warpgroups that multiply
  int sums;       // bytes from the ring's start to the partial sums
  bool gated;     // half of a tile's rows are gate and half are up: out = silu(gate) * up
  bool wide;      // out is float32
};

template <int kGroups>
__device__ __forceinline__ void sync_multiplying() {
  asm volatile("bar.sync 1, %0;" ::"n"(kGroups * 128) : "memory");
}

// d[64, kColumns] (+)= a[64, 16] b[kColumns, 16]^T, a in registers; `add` 0 starts from zero.
template <typename Type, int kColumns>
struct RegisterProduct;

#define QT_WGMMA(SHAPE, REGISTERS, A, B, P) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " P     \
  ", 0;\n"                                  \
  "wgmma.mma_async.sync.aligned." SHAPE " {" REGISTERS "}, {" A "}, " B ", p, 1, 1, 0;\n}\n"

#define QT_PRODUCTS(TYPE, SUFFIX)                                                                            \
  template <>                                                                                                \
  struct RegisterProduct<TYPE, 8> {                                                                          \
    static __device__ __forceinline__ void run(float (&d)[4], const uint32_t (&a)[4], uint64_t b, int add) { \
      asm volatile(QT_WGMMA("m64n8k16.f32." SUFFIX, "%0, %1, %2, %3", "%4, %5, %6, %7", "%8", "%9")          \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                          \
    }                                                                                                        \
  };                                                                                                         \
  template <>                                                                                                \
  struct RegisterProduct<TYPE, 16> {                                                                         \
    static __device__ __forceinline__ void run(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int add) { \
      asm volatile(QT_WGMMA("m64n16k16.f32." SUFFIX, "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9, %10, %11",   \
                            "%12", "%13")                                                                    \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
                     "+f"(d[7])                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                          \
    }                                                                                                        \
  };                                                                                                         \
  template <>                                                                                                \
  struct RegisterProduct<TYPE, 32> {                                                                         \
    static __device__ __forceinline__ void run(float (&d)[16], const uint32_t (&a)[4], uint64_t b,           \
                                               int add) {                                                    \
      asm volatile(QT_WGMMA("m64n32k16.f32." SUFFIX,                                                         \
                            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",          \
                            "%16, %17, %18, %19", "%20", "%21")                                              \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
                     "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
                     "+f"(d[14]), "+f"(d[15])                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                          \
    }                                                                                                        \
  };                                                                                                         \
  template <>                                                                                                \
  struct RegisterProduct<TYPE, 64> {                                                                         \
    static __device__ __forceinline__ void run(float (&d)[32], const uint32_t (&a)[4], uint64_t b,           \
                                               int add) {                                                    \
      asm volatile(QT_WGMMA("m64n64k16.f32." SUFFIX,                                                         \
                            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "    \
                            "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",     \
                            "%32, %33, %34, %35", "%36", "%37")                                              \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
                     "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
                     "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),           \
                     "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),           \
                     "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                          \
    }                                                                                                        \
  };
QT_PRODUCTS(Bfloat, "bf16.bf16")
QT_PRODUCTS(Half, "f16.f16")
#undef QT_PRODUCTS
#undef QT_WGMMA

template <typename Type>
__device__ __forceinline__ float gate_value(float gate, float up) {
  gate = rounded_to<Type>(gate);
  return rounded_to<Type>(gate / (1.f + __expf(-gate))) * rounded_to<Type>(up);
}

template <typename Type>
__device__ __forceinline__ void store4(const Arguments& args, int row, int feature, const float (&v)[4]) {
  const long long at = static_cast<long long>(row) * args.features + feature;
  const bool whole = feature + 4 <= args.features && args.features % 4 == 0;
  if (args.wide) {
    float* to = static_cast<float*>(args.out) + at;
    if (whole) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (feature + i < args.features) to[i] = v[i];
    }
  } else {
    uint16_t* to = static_cast<uint16_t*>(args.out) + at;
    const uint2 packed = make_uint2(Type::narrow2(v[0], v[1]), Type::narrow2(v[2], v[3]));
    if (whole) {
      *reinterpret_cast<uint2*>(to) = packed;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (feature + i < args.features)
          to[i] = static_cast<uint16_t>((i < 2 ? packed.x : packed.y) >> (16 * (i & 1)));
    }
  }
}

// Adds the partial tiles of all warpgroups of the cluster for this block's share of the features, and stores
// them.
template <typename Type, int kGroups>
__device__ __forceinline__ void finish(const Arguments& args, int tile, uint32_t rank, uint32_t sums) {
  const int pitch = args.tile_rows + 4;
  const int tile_features = args.gated ? args.tile_rows / 2 : args.tile_rows;
  const int share = tile_features / args.split;
  const int quads = share / 4;
  for (int item = threadIdx.x; item < args.rows * quads; item += kGroups * 128) {
    const int row = item / quads;
    const int local = static_cast<int>(rank) * share + (item - row * quads) * 4;
    const int feature = tile * tile_features + local;
    if (feature >= args.features) continue;
    float value[2][4] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 1 && !args.gated) break;
      const uint32_t address = sums + 4u * static_cast<uint32_t>(row * pitch + part * tile_features + local);
      for (int peer = 0; peer < args.split; ++peer) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const uint32_t from = address + 4u * static_cast<uint32_t>(group * args.rows * pitch);
          const float4 piece = load_remote(from, args.split > 1 ? peer : cluster_rank());
          value[part][0] += piece.x;
          value[part][1] += piece.y;
          value[part][2] += piece.z;
          value[part][3] += piece.w;
        }
      }
      const int first = part * args.features + feature;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (feature + i >= args.features) break;
        if (args.row_scales != nullptr) value[part][i] *= args.row_scales[first + i];
        if (args.bias != nullptr) value[part][i] += Type::widen(args.bias[first + i]);
      }
    }
    if (args.gated) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[0][i] = gate_value<Type>(value[0][i], value[1][i]);
    }
    store4<Type>(args, row, feature, value[0]);
  }
}

// Not moved by the compiler towards its use.
__device__ __forceinline__ float load_early(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

// The scales of row `local` of a tile, one for each stage.
__device__ __forceinline__ const float* scales_of(const Arguments& args, int tile, int local) {
  const int box_rows = args.gated ? args.tile_rows / 2 : args.tile_rows;
  const int last = (args.gated ? 2 * args.features : args.features) - 1;
  const int row = tile * box_rows + (local < box_rows ? local : args.features + local - box_rows);
  return args.block_scales + static_cast<long long>(min(row, last) / 128) * args.scale_pitch;
}

// kColumns: rows of x rounded up to 8, 16, 32 or 64. kProducts: products of 64 rows that cover a tile.
template <typename Type, int kColumns, int kProducts>
__global__ void __launch_bounds__(groups_of(kColumns, kProducts) * 128 + 128, 1)
    few_rows_fp8(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                 const Arguments args) {
  constexpr int kGroups = groups_of(kColumns, kProducts), kMultiplying = kGroups * 128;
  constexpr int kSliceBytes = kColumns * kSliceColumns * 2;
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) uint64_t barriers[2 * kMaxStages];

  const int weight_bytes = args.tile_rows * kStageColumns;
  const int stage_bytes = weight_bytes + 2 * kSliceBytes;
  const uint32_t ring = (shared_address(memory) + 1023u) & ~1023u;
  const uint32_t full = shared_address(barriers);
  const uint32_t empty = full + 8 * kMaxStages;
  const uint32_t rank = args.split > 1 ? cluster_rank() : 0;
  const int first_tile = blockIdx.x / args.split;
  const int first_chunk = args.chunks * static_cast<int>(rank) / args.split;
  const int chunks = args.chunks * (static_cast<int>(rank) + 1) / args.split - first_chunk;

  const int boxes = args.gated ? 2 : 1;
  const int box_rows = args.tile_rows / boxes;
  const int own_tiles = (args.tiles - first_tile + args.tile_step - 1) / args.tile_step;
  const int total = own_tiles * chunks;
  const int early = min(args.stages, total);
  int next_tile = first_tile, next_chunk = 0;  // of the producer
  auto advance = [&] {
    if (++next_chunk == chunks) {
      next_chunk = 0;
      next_tile += args.tile_step;
    }
  };
  auto load_weight = [&](int stage) {
    barrier_expect(full + 8 * stage, stage_bytes);
    for (int box = 0; box < boxes; ++box)
      load_box(ring + stage * stage_bytes + box * box_rows * kStageColumns, &weight,
               (first_chunk + next_chunk) * kStageColumns, next_tile * box_rows + box * args.features,
               full + 8 * stage, kEvictFirst);
  };
  auto load_x = [&](int stage, int chunk) {
#pragma unroll
    for (int slice = 0; slice < 2; ++slice)
      load_box(ring + stage * stage_bytes + weight_bytes + slice * kSliceBytes, &x,
               (first_chunk + chunk) * kStageColumns + slice * kSliceColumns, 0, full + 8 * stage,
               kEvictLast);
  };
  if (threadIdx.x == kMultiplying) {
    for (int stage = 0; stage < args.stages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, 4);
    }
    barrier_init_fence();
    for (int i = 0; i < early; ++i, advance()) load_weight(i);
    prefetch_map(&x);
  }
  __syncthreads();

  if (threadIdx.x >= kMultiplying) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRequestingRegisters));
    if (threadIdx.x == kMultiplying) {
      let_dependents_start();
      wait_for_predecessors();
      for (int i = 0, chunk = 0; i < early; ++i) {
        load_x(i, chunk);
        if (++chunk == chunks) chunk = 0;
      }
      int stage = 0;
      uint32_t parity = 0;
      for (int i = early; i < total; ++i, advance()) {
        barrier_wait(empty + 8 * stage, parity);
        load_weight(stage);
        load_x(stage, next_chunk);
        if (++stage == args.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    __syncwarp();
    if (args.split > 1) {
      cluster_sync();
      cluster_sync();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers_of(kGroups)));
    const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);  // uniform, as the compiler sees it
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int pitch = args.tile_rows + 4;
    float* sums = reinterpret_cast<float*>(memory + (ring - shared_address(memory)) + args.sums);
    // Of a thread's four matrices the rows 0 to 7 and 8 to 15 of two steps of 16 columns.
    const int fragment_row = warp * 16 + (lane & 15);
    const int fragment_half = lane >> 4;
    int turn = 0;  // stages of the tiles before
    for (int tile = first_tile; tile < args.tiles; tile += args.tile_step, turn += chunks) {
      float sum[kProducts][kColumns / 2];
      const float* scales[kProducts][2];
#pragma unroll
      for (int part = 0; part < kProducts; ++part) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) sum[part][i] = 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          scales[part][half] =
              args.block_scales == nullptr
                  ? nullptr
                  : scales_of(args, tile, part * kProductRows + warp * 16 + lane / 4 + half * 8) +
                        first_chunk;
      }
      // A stage is always the same group's, so that no group misses a phase of its barrier.
      const int first = (group + kGroups - turn % kGroups) % kGroups;
      int stage = (turn + first) % args.stages;
      uint32_t parity = (turn + first) / args.stages & 1;
      float scale[kProducts][2];
      auto load_scales = [&](int chunk) {
        if (args.block_scales == nullptr) return;
#pragma unroll
        for (int part = 0; part < kProducts; ++part)
#pragma unroll
          for (int half = 0; half < 2; ++half) scale[part][half] = load_early(scales[part][half] + chunk);
      };
#pragma unroll
      for (int part = 0; part < kProducts; ++part) scale[part][0] = scale[part][1] = 1.f;
      if (first < chunks) load_scales(first);
      for (int chunk = first; chunk < chunks; chunk += kGroups) {
        const uint32_t at = ring + stage * stage_bytes;
        barrier_wait(full + 8 * stage, parity);
#pragma unroll
        for (int part = 0; part < kProducts; ++part) {
          const int row = part * kProductRows + fragment_row;
          uint32_t a[kStageSteps][4];
#pragma unroll
          for (int pair = 0; pair < kStageSteps / 2; ++pair) {
            uint32_t bytes[4];
            load_matrices(bytes, at + row * kStageColumns + (((pair * 2 + fragment_half) ^ (row & 7)) << 4));
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              uint32_t(&to)[4] = a[pair * 2 + step];
              to[0] = even_bytes<Type>(bytes[step * 2]);
              to[1] = even_bytes<Type>(bytes[step * 2 + 1]);
              to[2] = odd_bytes<Type>(bytes[step * 2]);
              to[3] = odd_bytes<Type>(bytes[step * 2 + 1]);
            }
          }
          float product[kColumns / 2];
          products_begin();
          const uint64_t x_at = operand(at + weight_bytes);
#pragma unroll
          for (int step = 0; step < kStageSteps; ++step)
            RegisterProduct<Type, kColumns>::run(
                product, a[step], x_at + (step / 4 * kSliceBytes + step % 4 * 32) / 16, step > 0);
          products_commit();
          products_wait<0>();
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i) {
            asm volatile("" : "+f"(product[i])::"memory");
            sum[part][i] += product[i] * scale[part][i / 2 % 2];
          }
        }
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        if (chunk + kGroups < chunks) load_scales(chunk + kGroups);
        stage += kGroups;
        if (stage >= args.stages) {
          stage -= args.stages;
          parity ^= 1;
        }
      }

      // The groups' sums meet in shared memory, where the ring may have been: everybody has to be done with
      // it. A thread holds two weight rows (eight apart) of two columns in each group of eight columns.
      sync_multiplying<kGroups>();
      float* own = sums + group * args.rows * pitch;
#pragma unroll
      for (int part = 0; part < kProducts; ++part) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
          const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
          const int row = part * kProductRows + warp * 16 + lane / 4 + (i / 2 % 2) * 8;
          if (column < args.rows && row < args.tile_rows) own[column * pitch + row] = sum[part][i];
        }
      }
      if (args.split > 1) {
        cluster_sync();
        finish<Type, kGroups>(args, tile, rank, ring + args.sums);
        cluster_sync();  // the sums must outlive the reads of the other blocks
      } else {
        sync_multiplying<kGroups>();
        finish<Type, kGroups>(args, tile, 0, ring + args.sums);
      }
    }
  }
}

using Kernel = void (*)(TensorMap, TensorMap, Arguments);

template <typename Type, int kColumns>
Kernel pick_products(int tile_rows) {
  if (tile_rows <= kProductRows) return few_rows_fp8<Type, kColumns, 1>;
  return tile_rows <= 2 * kProductRows ? few_rows_fp8<Type, kColumns, 2> : few_rows_fp8<Type, kColumns, 3>;
}

template <typename Type>
Kernel pick(int padded, int tile_rows) {
  if (padded == 8) return pick_products<Type, 8>(tile_rows);
  if (padded == 16) return pick_products<Type, 16>(tile_rows);
  return padded == 32 ? pick_products<Type, 32>(tile_rows) : pick_products<Type, 64>(tile_rows);
}

}  // namespace
}  // namespace quickturn

// How one product is spread over the machine. Mirrored by a ctypes structure.
struct Fp8LinearPlan {
  int tile_rows;  // rows of W in a tile: a multiple of 16 (gated: 32) up to 192
  int split;      // blocks that share K: 1, 2, 4 or 8
  int blocks;     // at most this many blocks if split is 1: then each takes several tiles
  int stages;     // of the ring, a multiple of the warpgroups that multiply (groups_of)
  int early;      // 0: an ordinary launch, after everything ahead has finished
};

// x: [rows, columns] bfloat16 (`half`: float16), `x_pitch` elements apart. weight: [features (with `gated` 2
// features), columns] e4m3, permuted, rows adjoining. out: [rows, features] of x's type, float32 if `wide`.
// One of block_scales ([weight rows / 128, columns / 128] rounded up, rows `scale_pitch` apart) and
// row_scales is null. Returns a cudaError_t; launches on `stream` and does not wait.
extern "C" int quickturn_linear_fp8_few_rows(const void* x, long long x_pitch, const void* weight,
                                             const void* block_scales, const void* row_scales,
                                             const void* bias, void* out, int scale_pitch, int rows,
                                             int features, int columns, int gated, int wide, int half,
                                             const Fp8LinearPlan* plan, void* stream) {
  using namespace quickturn;
  const int tile_features = gated ? plan->tile_rows / 2 : plan->tile_rows;
  const int split = plan->split;
  if (rows < 1 || rows > 64 || plan->tile_rows < 16 || plan->tile_rows > 3 * kProductRows ||
      plan->tile_rows % (gated ? 32 : 16) || split < 1 || split > kMaxSplit ||
      tile_features / split % 4 != 0 || plan->stages < 1 || plan->stages > kMaxStages || columns % 16 != 0)
    return cudaErrorInvalidValue;
  const int padded = rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
  const int tiles = (features + tile_features - 1) / tile_features;
  const int slots = split > 1 ? tiles : (tiles < plan->blocks ? tiles : plan->blocks);
  const int stage_bytes = plan->tile_rows * kStageColumns + padded * kStageColumns * 2;
  const int ring_bytes = plan->stages * stage_bytes;
  // The last product of a stage may read beyond the tile, into whatever follows.
  const int overread = (kProductRows - plan->tile_rows % kProductRows) % kProductRows * kStageColumns;
  const int products = (plan->tile_rows + kProductRows - 1) / kProductRows;
  const int groups = groups_of(padded, products);
  const int sums_bytes = groups * rows * (plan->tile_rows + 4) * 4;
  const bool one_tile = slots == tiles;
  Arguments args{};
  args.out = out;
  args.bias = static_cast<const uint16_t*>(bias);
  args.block_scales = static_cast<const float*>(block_scales);
  args.row_scales = static_cast<const float*>(row_scales);
  args.scale_pitch = scale_pitch;
  args.rows = rows;
  args.features = features;
  args.chunks = (columns + kStageColumns - 1) / kStageColumns;
  args.split = split;
  args.tiles = tiles;
  args.tile_rows = plan->tile_rows;
  args.tile_step = slots;
  args.stages = plan->stages;
  args.sums = one_tile ? 0 : ring_bytes;
  args.gated = gated != 0;
  args.wide = wide != 0;
  if (split > args.chunks || plan->stages % groups != 0) return cudaErrorInvalidValue;
  TensorMap weight_map, x_map;
  if (!encode_map(weight_map, weight, gated ? 2ll * features : features, columns, columns,
                  gated ? tile_features : plan->tile_rows, kStageColumns, 1) ||
      !encode_map(x_map, x, rows, columns, x_pitch, padded, kSliceColumns))
    return cudaErrorInvalidValue;
  const Kernel kernel = half ? pick<Half>(padded, plan->tile_rows) : pick<Bfloat>(padded, plan->tile_rows);
  const int behind = one_tile ? sums_bytes - ring_bytes : sums_bytes;
  const int shared = 1024 + ring_bytes + (behind > overread ? behind : overread);
  const cudaError_t error = divide_memory(kernel, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (plan->early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (split > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = split;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(slots * split);
  config.blockDim = dim3(groups * 128 + 128);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, weight_map, x_map, args);
}
