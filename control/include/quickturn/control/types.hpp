// The words of the control plane as types. See docs/control-plane.md for what they mean.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

namespace quickturn::control {

using BlockId = std::int32_t;
using GroupId = std::uint8_t;
using TierId = std::uint8_t;
using NodeId = std::uint32_t;
using SideId = std::uint32_t;
using SlotId = std::int32_t;
using StepId = std::int64_t;
using RequestId = std::int64_t;
using TransferId = std::int64_t;
using RequestIndex = std::uint32_t;

inline constexpr BlockId kNoBlock = -1;
inline constexpr SlotId kNoSlot = -1;
inline constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
inline constexpr TierId kDevice = 0;
inline constexpr int kMaxTiers = 3;
inline constexpr int kMaxGroups = 8;

// Times inside the cache are counted in ticks of 10 ms since the first time that the scheduler was told: 32
// bits last 497 days. They start well above zero: what is worth less than anything in use has the numbers
// below.
using Tick = std::uint32_t;
inline constexpr double kTicksPerSecond = 100.0;
inline constexpr Tick kFirstTick = 1u << 20;

enum class GroupKind : std::uint8_t { full, window, state };

enum class Reason : std::int32_t { stop = 0, length = 1, cancelled = 2, timeout = 3, error = 4 };

constexpr std::int32_t ceil_div(std::int64_t a, std::int64_t b) {
  return static_cast<std::int32_t>((a + b - 1) / b);
}

constexpr std::string_view name_of(GroupKind kind) {
  switch (kind) {
    case GroupKind::full:
      return "full";
    case GroupKind::window:
      return "window";
    case GroupKind::state:
      return "state";
  }
  return "?";
}

}  // namespace quickturn::control
