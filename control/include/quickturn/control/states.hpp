// The life of a request. Each state is a move-only type that owns what the request holds in that state; a
// transition takes the old state by rvalue and returns the new one. A transition that gives up resources
// returns them beside the new state, and ignoring them doesn't compile: they go to the limbo, where a step or
// transfer that still uses them can finish.
//
// `Edges` below is the whole machine. The static_asserts at the end hold the functions to it, and the diagram
// in docs/control-plane.md is printed from it.
#pragma once

#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "quickturn/control/holding.hpp"
#include "quickturn/control/slot_pool.hpp"
#include "quickturn/control/types.hpp"

namespace quickturn::control {

// ---- states

struct Submitted {
  static constexpr std::string_view name = "Submitted";
  Submitted() = default;
  Submitted(Submitted&&) = default;
  Submitted& operator=(Submitted&&) = default;
};
struct Prefilling {
  static constexpr std::string_view name = "Prefilling";
  SlotRef slot;
  Holding cache;
};
struct Decoding {
  static constexpr std::string_view name = "Decoding";
  SlotRef slot;
  Holding cache;
};
struct Retracted {
  static constexpr std::string_view name = "Retracted";
  Retracted() = default;
  Retracted(Retracted&&) = default;
  Retracted& operator=(Retracted&&) = default;
};
// Disaggregation, decode side: blocks are reserved, the peer writes them.
struct AwaitingRemote {
  static constexpr std::string_view name = "AwaitingRemote";
  SlotRef slot;
  Holding cache;
};
// Disaggregation, prefill side: the prompt is computed, the peer reads the blocks; the slot is free already.
struct HandingOver {
  static constexpr std::string_view name = "HandingOver";
  Holding cache;
};
struct Finished {
  static constexpr std::string_view name = "Finished";
  Reason reason;
  explicit Finished(Reason why) : reason(why) {}
  Finished(Finished&&) = default;
  Finished& operator=(Finished&&) = default;
};
struct Cancelled {
  static constexpr std::string_view name = "Cancelled";
  Cancelled() = default;
  Cancelled(Cancelled&&) = default;
  Cancelled& operator=(Cancelled&&) = default;
};
struct TimedOut {
  static constexpr std::string_view name = "TimedOut";
  TimedOut() = default;
  TimedOut(TimedOut&&) = default;
  TimedOut& operator=(TimedOut&&) = default;
};

using State = std::variant<Submitted, Prefilling, Decoding, Retracted, AwaitingRemote, HandingOver, Finished,
                           Cancelled, TimedOut>;

// ---- events

struct Admit {
  static constexpr std::string_view name = "admit";
  SlotRef slot;
  Holding cache;
};
struct PromptPlanned {
  static constexpr std::string_view name = "prompt planned";
};
struct Retract {
  static constexpr std::string_view name = "retract";
};
struct End {
  static constexpr std::string_view name = "end";
  Reason reason;
};
struct Cancel {
  static constexpr std::string_view name = "cancel";
};
struct Expire {
  static constexpr std::string_view name = "expire";
};
struct Reserve {
  static constexpr std::string_view name = "reserve for peer";
  SlotRef slot;
  Holding cache;
};
struct RemoteArrived {
  static constexpr std::string_view name = "peer's cache arrived";
};
struct RemoteLost {
  static constexpr std::string_view name = "peer lost";
};
struct HandOver {
  static constexpr std::string_view name = "hand over";
};

// ---- transitions

// What a state leaves behind. Dropping it while a step is in flight would free blocks that are being written.
struct [[nodiscard]] Remains {
  SlotRef slot;
  Holding cache;
};

template <class To>
struct [[nodiscard]] Left {
  To state;
  Remains remains;
};

template <class S>
concept Running =
    std::is_same_v<S, Prefilling> || std::is_same_v<S, Decoding> || std::is_same_v<S, AwaitingRemote>;

template <class S>
concept Queued = std::is_same_v<S, Submitted> || std::is_same_v<S, Retracted>;

template <Queued S>
[[nodiscard]] Prefilling on(S&&, Admit&& event) {
  return {std::move(event.slot), std::move(event.cache)};
}
[[nodiscard]] inline Decoding on(Prefilling&& from, PromptPlanned&&) {
  return {std::move(from.slot), std::move(from.cache)};
}

template <Running S>
  requires(!std::is_same_v<S, AwaitingRemote>)
[[nodiscard]] Left<Retracted> on(S&& from, Retract&&) {
  return {Retracted{}, {std::move(from.slot), std::move(from.cache)}};
}
[[nodiscard]] inline AwaitingRemote on(Submitted&&, Reserve&& event) {
  return {std::move(event.slot), std::move(event.cache)};
}
[[nodiscard]] inline Decoding on(AwaitingRemote&& from, RemoteArrived&&) {
  return {std::move(from.slot), std::move(from.cache)};
}
[[nodiscard]] inline Left<Submitted> on(AwaitingRemote&& from, RemoteLost&&) {
  return {Submitted{}, {std::move(from.slot), std::move(from.cache)}};
}
[[nodiscard]] inline Left<HandingOver> on(Decoding&& from, HandOver&&) {
  return {HandingOver{std::move(from.cache)}, {std::move(from.slot), Holding{}}};
}

template <class S>
[[nodiscard]] Remains remains_of(S&& from) {
  if constexpr (Running<S>) {
    return {std::move(from.slot), std::move(from.cache)};
  } else if constexpr (std::is_same_v<S, HandingOver>) {
    return {SlotRef{}, std::move(from.cache)};
  } else {
    return {};
  }
}

template <class S>
concept Live = Running<S> || Queued<S> || std::is_same_v<S, HandingOver>;

// A retracted request may still hear of its last token, and end with it.
template <Live S>
  requires(!std::is_same_v<S, Submitted>)
[[nodiscard]] Left<Finished> on(S&& from, End&& event) {
  return {Finished{event.reason}, remains_of(std::move(from))};
}
template <Live S>
[[nodiscard]] Left<Cancelled> on(S&& from, Cancel&&) {
  return {Cancelled{}, remains_of(std::move(from))};
}
template <Live S>
[[nodiscard]] Left<TimedOut> on(S&& from, Expire&&) {
  return {TimedOut{}, remains_of(std::move(from))};
}

// ---- the table

template <class From, class Event, class To>
struct Edge {};
template <class... E>
struct Table {};

using Edges = Table<
    Edge<Submitted, Admit, Prefilling>, Edge<Submitted, Reserve, AwaitingRemote>,
    Edge<Submitted, Cancel, Cancelled>, Edge<Submitted, Expire, TimedOut>,
    Edge<Prefilling, PromptPlanned, Decoding>, Edge<Prefilling, Retract, Retracted>,
    Edge<Prefilling, End, Finished>, Edge<Prefilling, Cancel, Cancelled>, Edge<Prefilling, Expire, TimedOut>,
    Edge<Decoding, Retract, Retracted>, Edge<Decoding, HandOver, HandingOver>, Edge<Decoding, End, Finished>,
    Edge<Decoding, Cancel, Cancelled>, Edge<Decoding, Expire, TimedOut>, Edge<Retracted, Admit, Prefilling>,
    Edge<Retracted, End, Finished>, Edge<Retracted, Cancel, Cancelled>, Edge<Retracted, Expire, TimedOut>,
    Edge<AwaitingRemote, RemoteArrived, Decoding>, Edge<AwaitingRemote, RemoteLost, Submitted>,
    Edge<AwaitingRemote, End, Finished>, Edge<AwaitingRemote, Cancel, Cancelled>,
    Edge<AwaitingRemote, Expire, TimedOut>, Edge<HandingOver, End, Finished>,
    Edge<HandingOver, Cancel, Cancelled>, Edge<HandingOver, Expire, TimedOut>>;

struct TransitionName {
  std::string_view from;
  std::string_view event;
  std::string_view to;
};
// The machine as names, in the order of `Edges`.
std::vector<TransitionName> transition_table();

namespace detail {

template <class... T>
struct List {};
using Events =
    List<Admit, PromptPlanned, Retract, End, Cancel, Expire, Reserve, RemoteArrived, RemoteLost, HandOver>;

template <class From, class Event>
concept Moves = requires(From from, Event event) { on(std::move(from), std::move(event)); };

template <class Result>
struct Target {
  using type = Result;
};
template <class To>
struct Target<Left<To>> {
  using type = To;
};

template <class From, class Event, class... Known>
constexpr bool agrees(Table<Known...>) {
  if constexpr (Moves<From, Event>) {
    using To = typename Target<decltype(on(std::declval<From>(), std::declval<Event>()))>::type;
    return (std::is_same_v<Known, Edge<From, Event, To>> || ...);
  } else {
    return true;
  }
}
template <class From, class Event, class To>
constexpr bool exists(Edge<From, Event, To>) {
  return Moves<From, Event>;
}
template <class... Known>
constexpr bool all_exist(Table<Known...>) {
  return (exists(Known{}) && ...);
}
template <class From, class... Event>
constexpr bool all_listed_from(List<Event...>) {
  return (agrees<From, Event>(Edges{}) && ...);
}
template <class... From>
constexpr bool all_listed(std::variant<From...>*) {
  return (all_listed_from<From>(Events{}) && ...);
}
template <class... S>
constexpr bool all_move_only(std::variant<S...>*) {
  return ((!std::is_copy_constructible_v<S> && !std::is_copy_assignable_v<S> &&
           std::is_nothrow_move_constructible_v<S>) &&
          ...);
}

}  // namespace detail

static_assert(detail::all_move_only(static_cast<State*>(nullptr)),
              "a state that can be copied would own its blocks twice");
static_assert(detail::all_exist(Edges{}), "an edge of the table has no function");
static_assert(detail::all_listed(static_cast<State*>(nullptr)),
              "a transition function isn't in the table, or leads elsewhere");

}  // namespace quickturn::control
