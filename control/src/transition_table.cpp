#include "quickturn/control/states.hpp"

namespace quickturn::control {

namespace {

template <class From, class Event, class To>
TransitionName names(Edge<From, Event, To>) {
  return {From::name, Event::name, To::name};
}

template <class... E>
std::vector<TransitionName> table(Table<E...>) {
  return {names(E{})...};
}

}  // namespace

std::vector<TransitionName> transition_table() { return table(Edges{}); }

}  // namespace quickturn::control
