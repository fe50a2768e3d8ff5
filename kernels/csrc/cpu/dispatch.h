// The kernels of the level in use.
#pragma once

#include "isa.h"
#include "kernels.h"

namespace qt {

const Kernels& kernels_of(Isa isa);

}  // namespace qt
