#include "dispatch.h"

namespace qt {

namespace base {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace amx {
extern const Kernels table;
}

const Kernels& kernels_of(Isa isa) {
  switch (isa) {
    case Isa::kAmx:
      return amx::table;
    case Isa::kAvx512:
      return avx512::table;
    case Isa::kAvx2:
      return avx2::table;
    case Isa::kBase:
      break;
  }
  return base::table;
}

}  // namespace qt
