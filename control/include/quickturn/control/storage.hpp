// The block pools of all tiers. The device's is the slab arena; each lower tier has a fixed number of blocks
// for each group.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "quickturn/control/arena.hpp"
#include "quickturn/control/config.hpp"

namespace quickturn::control {

class Storage {
 public:
  explicit Storage(const SchedulerConfig& config);

  int num_tiers() const { return static_cast<int>(tiers_.size()) + 1; }
  Arena& device() { return device_; }
  const Arena& device() const { return device_; }

  // A free block, empty if there is none. `near` matters on the device only (see Arena::allocate).
  BlockRef allocate(TierId tier, GroupId group, BlockId near);
  BlockId adopt(TierId tier, GroupId group, BlockRef&& block, std::uint32_t owner);
  BlockRef surrender(TierId tier, GroupId group, BlockId block);

  // Blocks of a lower tier.
  std::int64_t capacity(TierId tier, GroupId group) const;
  std::int64_t out(TierId tier, GroupId group) const;

  std::size_t bytes() const;
  void check() const;

 private:
  Arena* lower(TierId tier, GroupId group) const { return tiers_[tier - 1u][group].get(); }

  Arena device_;
  std::vector<std::array<std::unique_ptr<Arena>, kMaxGroups>> tiers_;
};

}  // namespace quickturn::control
