// A transition that gives up resources hands them out. Whoever drops them on the floor frees blocks that a
// step may be writing.
#include "quickturn/control/states.hpp"

using namespace quickturn::control;

Remains stop(Decoding&& state) {
#ifdef MUST_NOT_COMPILE
  on(std::move(state), Cancel{});
  return {};
#else
  return on(std::move(state), Cancel{}).remains;
#endif
}
