// A transition consumes the state it starts from: an lvalue would still be there afterwards.
#include "quickturn/control/states.hpp"

using namespace quickturn::control;

Decoding start(Prefilling& state) {
#ifdef MUST_NOT_COMPILE
  return on(state, PromptPlanned{});
#else
  return on(std::move(state), PromptPlanned{});
#endif
}
