// A request: what was asked, how far it is, and its state.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "quickturn/control/hash.hpp"
#include "quickturn/control/states.hpp"
#include "quickturn/control/types.hpp"

namespace quickturn::control {

inline constexpr double kNever = std::numeric_limits<double>::infinity();

// What `add` is told. The spans are read during the call only.
struct RequestSpec {
  RequestId id = 0;
  std::span<const std::int32_t> tokens;
  std::int32_t max_tokens = 16;
  std::int32_t min_tokens = 0;
  std::vector<std::int32_t> stop_token_ids;
  double arrival = 0.0;
  std::int32_t priority = 0;
  std::string session;
  double deadline = kNever;
  std::string cache_salt;
  std::string adapter;
  std::vector<std::pair<std::int64_t, std::uint64_t>> content;
  std::vector<std::int64_t> boundaries;
  double retention = 0.0;
  // Computes every token itself, because the logits of each are wanted: nothing that others cached is used.
  bool fresh = false;
};

// The order in which requests are admitted and prefilled: priority, then the virtual arrival, then the order
// of `add`.
struct OrderKey {
  std::int32_t priority = 0;
  double virtual_arrival = 0.0;
  std::uint64_t serial = 0;
  friend bool operator<(const OrderKey& a, const OrderKey& b) {
    if (a.priority != b.priority) return a.priority > b.priority;
    if (a.virtual_arrival != b.virtual_arrival) return a.virtual_arrival < b.virtual_arrival;
    return a.serial < b.serial;
  }
};

struct Request {
  // Touched in every step: kept together.
  std::int32_t planned =
      0;  // tokens in the cache once every planned step ran; with drafts on their way, at most
  std::int32_t edge = 0;        // `planned` may grow to this without a new block
  std::int32_t known = 0;       // prompt and answer tokens that the host has seen
  std::int32_t computed = 0;    // tokens in the cache, by applied steps
  std::int32_t publish_at = 0;  // `computed` at which there is something to publish
  std::int32_t left = 0;        // answer tokens that may still be planned
  std::int32_t min_left = 0;    // answer tokens before a stop id counts
  std::int32_t in_flight = 0;   // planned steps that weren't applied
  std::uint32_t run = 0;        // no two are alike: a row or copy of an earlier one is recognised
  std::int32_t list_at = -1;    // place in the decoding or prefilling list
  SlotId slot = kNoSlot;
  std::uint8_t num_stops = 0;  // of `stops`, 255: look in `more_stops`
  bool hashing = false;
  bool fresh = false;
  std::array<std::int32_t, 4> stops{};
  StepId last_step = -1;
  std::uint64_t round = 0;         // of planning prompts, the last in which it had its turn
  std::vector<std::int32_t> tail;  // known tokens after the last hashed block

  State state = Submitted{};

  RequestId id = 0;
  OrderKey order;
  std::int32_t uncached = 0;  // of its prompt when it came: what had to be computed
  std::int32_t prompt = 0;
  std::int32_t generated = 0;
  std::int32_t max_tokens = 0;
  std::vector<std::int32_t> more_stops;
  double arrival = 0.0;
  double deadline = kNever;
  double retention = 0.0;
  std::string session;
  std::uint32_t retractions = 0;
  std::uint32_t found = ~std::uint32_t{0};  // blocks that were cached when it first got a slot
  std::vector<Hash128> hashes;              // of the full blocks of known tokens
  std::vector<std::uint32_t> wanted;        // boundaries where a checkpoint is wanted, ascending
  std::vector<std::pair<std::int64_t, std::uint64_t>> content;
  Hash128 root;

  // Prefixes computed once: whom this request waits for, and who waits for it.
  Request* leader = nullptr;
  std::uint32_t shared_with_leader = 0;
  double share_until = 0.0;
  std::vector<Request*> followers;
  Hash128 frontier{};
  bool leads = false;
  std::uint32_t lead_until =
      0;  // blocks of the prompt (or of what is computed again) that it computes for all

  std::int32_t ceiling = 0;  // prompt tokens that an infinite cache would have had
  std::int32_t loads = 0;    // transfers to the device that it waits for
  bool clean_start = false;  // all that was cached went so that it could go on

  Holding& cache() {
    if (auto* prefilling = std::get_if<Prefilling>(&state)) return prefilling->cache;
    if (auto* decoding = std::get_if<Decoding>(&state)) return decoding->cache;
    return std::get<AwaitingRemote>(state).cache;
  }
  const Holding& cache() const { return const_cast<Request*>(this)->cache(); }
  bool running() const { return slot != kNoSlot; }
  bool decoding() const { return std::holds_alternative<Decoding>(state); }
  bool queued() const {
    return std::holds_alternative<Submitted>(state) || std::holds_alternative<Retracted>(state);
  }
};

// One transition of a request whose state is known to be `From`. Gives what the old state leaves behind, if
// anything.
template <class From, class Event>
auto move_on(Request& request, Event event) {
  auto result = on(std::move(std::get<From>(request.state)), std::move(event));
  if constexpr (requires { result.remains; }) {
    request.state = std::move(result.state);
    return std::move(result.remains);
  } else {
    request.state = std::move(result);
  }
}

// The same for an event that leads out of whatever live state the request is in.
template <class Event>
Remains leave(Request& request, Event event) {
  return std::visit(
      [&]<class S>(S& state) -> Remains {
        if constexpr (detail::Moves<S, Event>) {
          auto left = on(std::move(state), std::move(event));
          Remains remains = std::move(left.remains);
          request.state = std::move(left.state);
          return remains;
        } else {
          return {};
        }
      },
      request.state);
}

}  // namespace quickturn::control
