// Hopper's asynchronous machinery as plain functions: mbarriers, bulk tensor copies, warpgroup products,
// dependent launch. No header of the toolkit is needed by device code.
#pragma once
#include <cstdint>

namespace quickturn {

// A CUtensorMap: opaque, encoded by the driver, read by the copy engine.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Cache policies of the copy engine, as the createpolicy instruction would make them.
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Programmatic dependent launch: the next kernel may start early, and waits for our results itself.

__device__ __forceinline__ void let_dependents_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns once every kernel before this one has finished and its writes are visible.
__device__ __forceinline__ void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- mbarriers

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- The bulk tensor copy engine

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box of a matrix to shared memory; `column` and `row` count elements, the barrier is told the bytes of
// the whole box.
__device__ __forceinline__ void load_box(uint32_t to, const TensorMap* map, int column, int row,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// ---- Clusters

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Reads four floats at `address` of our own shared memory layout in block `rank` of the cluster.
__device__ __forceinline__ float4 load_remote(uint32_t address, uint32_t rank) {
  uint32_t remote;
  float4 value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(remote)
               : "memory");
  return value;
}

// ---- Warpgroup products

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Descriptor of a K-major operand of 128-byte rows, swizzled in groups of eight rows as the copy engine's
// 128-byte mode writes.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (1ull << 16) |
         (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 62);
}

// d[64, kColumns] (+)= a[64, 16] b[kColumns, 16]^T in float32; `add` 0 starts from zero.
template <int kColumns>
struct Product;

#define QT_WGMMA(SHAPE, REGISTERS, A, B, P) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " P     \
  ", 0;\n"                                  \
  "wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" REGISTERS "}, " A ", " B ", p, 1, 1, 0, 0;\n}\n"

template <>
struct Product<8> {
  static __device__ __forceinline__ void run(float (&d)[4], uint64_t a, uint64_t b, int add) {
    asm volatile(QT_WGMMA("m64n8k16", "%0, %1, %2, %3", "%4", "%5", "%6")
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a), "l"(b), "r"(add));
  }
};

template <>
struct Product<16> {
  static __device__ __forceinline__ void run(float (&d)[8], uint64_t a, uint64_t b, int add) {
    asm volatile(QT_WGMMA("m64n16k16", "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10")
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                   "+f"(d[7])
                 : "l"(a), "l"(b), "r"(add));
  }
};

template <>
struct Product<32> {
  static __device__ __forceinline__ void run(float (&d)[16], uint64_t a, uint64_t b, int add) {
    asm volatile(QT_WGMMA("m64n32k16", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                          "%16", "%17", "%18")
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                   "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
                   "+f"(d[14]), "+f"(d[15])
                 : "l"(a), "l"(b), "r"(add));
  }
};

template <>
struct Product<64> {
  static __device__ __forceinline__ void run(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile(QT_WGMMA("m64n64k16",
                          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                          "%18, %19, %20, %21, "
                          "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                          "%32", "%33", "%34")
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                   "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
                   "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
                   "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                   "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add));
  }
};
#undef QT_WGMMA

// ---- bfloat16

using bf16 = unsigned short;

__device__ __forceinline__ float widen(bf16 value) {
  return __uint_as_float(static_cast<uint32_t>(value) << 16);
}

// Two floats rounded to nearest even, `low` in the low half.
__device__ __forceinline__ uint32_t narrow2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float rounded(float value) {
  return __uint_as_float(narrow2(0.f, value) & 0xFFFF0000u);
}

// silu(gate) * up, with gate, silu(gate) and up rounded to bfloat16 as separate kernels would leave them.
__device__ __forceinline__ float gate_value(float gate, float up) {
  gate = rounded(gate);
  return rounded(gate / (1.f + __expf(-gate))) * rounded(up);
}

}  // namespace quickturn
