// Copies between tiers that the runtime has been told to make. A job owns the blocks that are written and
// pins those that are read, until the runtime says that it is done: whoever is cancelled meanwhile, nothing
// touches either side.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "quickturn/control/arena.hpp"
#include "quickturn/control/hash.hpp"
#include "quickturn/control/prefix_index.hpp"
#include "quickturn/control/types.hpp"

namespace quickturn::control {

// What is copied: the full groups' blocks of a node, or one side entry.
struct Cached {
  NodeId node = kNone;
  SideId side = kNone;
};

struct TransferJob {
  Cached what;
  TierId to = 0;
  std::int32_t left = 0;         // transfers that aren't done
  std::vector<BlockRef> blocks;  // written, by full group (one for a side entry)
  NodePin pin;                   // read
  SidePin side_pin;
  std::vector<std::pair<RequestId, std::uint32_t>> waiters;  // request, run
};

// A wish to copy something to the next lower tier, by name: it may be gone when its turn comes.
struct Demotion {
  Hash128 hash;
  std::int32_t side_group = -1;  // -1: the node's own blocks
};

struct TransferBook {
  static std::uint64_t key(const Cached& what, TierId to) {
    const bool side = what.side != kNone;
    return std::uint64_t{to} << 33 | std::uint64_t{side} << 32 | (side ? what.side : what.node);
  }
  TransferJob* find(const Cached& what, TierId to) {
    const auto found = job_for.find(key(what, to));
    return found == job_for.end() ? nullptr : &jobs.at(found->second);
  }

  std::unordered_map<TransferId, std::uint64_t> job_of;
  std::unordered_map<std::uint64_t, TransferJob> jobs;
  std::unordered_map<std::uint64_t, std::uint64_t> job_for;  // by what is copied and where to
  std::vector<std::deque<Demotion>> demotions;               // by tier that is left
  TransferId next_id = 0;
  std::uint64_t next_job = 0;
  std::int64_t loads = 0;
  std::int64_t demotes = 0;
};

}  // namespace quickturn::control
