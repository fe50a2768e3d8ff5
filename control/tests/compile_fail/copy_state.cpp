// A state owns its slot and blocks: two of it would free them twice.
#include "quickturn/control/states.hpp"

using namespace quickturn::control;

#ifdef MUST_NOT_COMPILE
Decoding pass(const Decoding& state) { return state; }
#else
Decoding pass(Decoding&& state) { return std::move(state); }
#endif
