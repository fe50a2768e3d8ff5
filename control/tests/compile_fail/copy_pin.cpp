// A pin is let go of once.
#include "quickturn/control/prefix_index.hpp"

using namespace quickturn::control;

NodePin pass(NodePin& pin) {
#ifdef MUST_NOT_COMPILE
  return pin;
#else
  return std::move(pin);
#endif
}
