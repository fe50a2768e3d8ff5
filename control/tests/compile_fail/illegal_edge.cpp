// What is over stays over: there is no way from Finished back to a slot.
#include "quickturn/control/states.hpp"

using namespace quickturn::control;

#ifdef MUST_NOT_COMPILE
Prefilling revive(Finished&& state, Admit&& event) { return on(std::move(state), std::move(event)); }
#else
Prefilling revive(Retracted&& state, Admit&& event) { return on(std::move(state), std::move(event)); }
#endif
