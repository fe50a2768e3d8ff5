#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace qt {
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

uint64_t enabled_state() {
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool bit(unsigned word, int index) { return ((word >> index) & 1U) != 0; }

bool request_tile_permission() {
#ifdef SYS_arch_prctl
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

Isa detect_isa() {
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
  const bool fma = bit(basic.ecx, 12), osxsave = bit(basic.ecx, 27), f16c = bit(basic.ecx, 29);
  if (!osxsave || !fma || !f16c || !bit(extended.ebx, 5)) return Isa::kBase;
  const uint64_t state = enabled_state();
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  if ((state & kYmm) != kYmm) return Isa::kBase;
  // AVX512 F, DQ, BW, VL: what -march=x86-64-v4 lets the compiler use (with CD).
  const bool avx512 = bit(extended.ebx, 16) && bit(extended.ebx, 17) && bit(extended.ebx, 28) &&
                      bit(extended.ebx, 30) && bit(extended.ebx, 31);
  if (!avx512 || (state & kZmm) != kZmm) return Isa::kAvx2;
  const bool amx = bit(extended.edx, 22) && bit(extended.edx, 24) && bit(more.eax, 5);
  if (!amx || (state & kTiles) != kTiles || !request_tile_permission()) return Isa::kAvx512;
  return Isa::kAmx;
}

}  // namespace qt
