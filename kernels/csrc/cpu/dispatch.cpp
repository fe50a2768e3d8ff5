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
#ifdef QT_HAS_AMX
namespace amx {
extern const Kernels table;
}
#endif

const Kernels& kernels_of(Isa isa) {
  switch (isa) {
#ifdef QT_HAS_AMX
    case Isa::kAmx:
      return amx::table;
#else
    case Isa::kAmx:
#endif
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
