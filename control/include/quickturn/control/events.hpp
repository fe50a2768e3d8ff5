// The stream of what entered and left the prefix index, for a router that wants to know where a prefix lies.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "quickturn/control/hash.hpp"
#include "quickturn/control/types.hpp"

namespace quickturn::control {

enum class EventKind : std::uint8_t { removed = 0, stored = 1 };

struct KvEvent {
  EventKind kind;
  TierId tier;
  GroupId group;
  std::uint32_t depth;
  Hash128 hash;
  Hash128 parent;
};

class EventLog {
 public:
  explicit EventLog(bool enabled) : enabled_(enabled) {}
  bool enabled() const { return enabled_; }
  void record(const KvEvent& event) {
    if (enabled_) events_.push_back(event);
  }
  std::vector<KvEvent> take() { return std::exchange(events_, {}); }

 private:
  bool enabled_;
  std::vector<KvEvent> events_;
};

}  // namespace quickturn::control
