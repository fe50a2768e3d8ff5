// Element types of the CPU kernels, and the codes by which Python names them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qt {

using std::size_t;

struct bf16 {
  uint16_t bits;
};

enum class DType : int { kFloat32 = 0, kBFloat16 = 1 };

}  // namespace qt
