// What this processor can run, found once when the module is loaded.
#pragma once

namespace qt {

// Each level includes the ones before it. kAmx also means AVX512-BF16.
enum class Isa : int { kBase = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// The best level of this processor and operating system. Asks the kernel for AMX tile state where the
// processor has AMX: without that permission the first tile instruction would be a fault.
Isa detect_isa();

}  // namespace qt
