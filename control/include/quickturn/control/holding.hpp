// What a request holds of the cache while it has a slot. Move-only, as everything in it is: whoever has the
// holding owns the blocks.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "quickturn/control/arena.hpp"
#include "quickturn/control/prefix_index.hpp"
#include "quickturn/control/types.hpp"

namespace quickturn::control {

// A block of a window group: private until its step was applied, then an entry of the index that this request
// keeps.
struct WindowBlock {
  BlockRef fresh;
  SidePin kept;
};

// The blocks of one window group, a run of consecutive block indexes that starts at `first`.
struct WindowHolding {
  std::uint32_t first = 0;
  std::vector<WindowBlock> blocks;
};

// One state group: the block that the request writes, and the checkpoint it starts from (until its first step
// is planned).
struct StateHolding {
  BlockRef working;
  SidePin source;
};

// A state left behind at a boundary, one block for each state group. `keep` ones are published as soon as
// their step was applied; the others only if the request ends before it reaches the next boundary.
struct Snapshot {
  std::uint32_t boundary = 0;
  bool keep = false;
  std::uint32_t cost = 0;  // tokens since the checkpoint before it
  std::vector<BlockRef> blocks;
};

struct Holding {
  NodePin tip;                              // the published part of the context, all of it
  std::uint32_t published = 0;              // its blocks
  std::vector<std::vector<BlockRef>> full;  // by full group: blocks after the published ones
  std::vector<WindowHolding> windows;       // by window group
  std::vector<StateHolding> states;         // by state group
  std::vector<Snapshot> snapshots;          // ascending boundaries
  std::uint32_t last_checkpoint = 0;        // boundary of the newest checkpoint before `planned`
  bool started = false;                     // a row was planned since the slot was given
};

static_assert(std::is_nothrow_move_constructible_v<Holding> && !std::is_copy_constructible_v<Holding>);

}  // namespace quickturn::control
