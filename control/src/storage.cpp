#include "quickturn/control/storage.hpp"

#include <span>
#include <utility>

namespace quickturn::control {

namespace {

std::vector<std::int32_t> blocks_per_slab(const SchedulerConfig& config) {
  std::vector<std::int32_t> counts;
  for (const auto& group : config.groups) counts.push_back(group.blocks_per_slab);
  return counts;
}

}  // namespace

Storage::Storage(const SchedulerConfig& config)
    : device_(config.num_slabs, blocks_per_slab(config)), tiers_(config.tiers.size()) {
  for (std::size_t t = 0; t < tiers_.size(); ++t) {
    for (std::size_t g = 0; g < config.groups.size(); ++g) {
      const std::int32_t blocks = config.tiers[t].blocks[g];
      if (blocks > 0) tiers_[t][g] = std::make_unique<Arena>(1, std::span(&blocks, 1));
    }
  }
}

BlockRef Storage::allocate(TierId tier, GroupId group, BlockId near) {
  if (tier == kDevice) return device_.allocate(group, near);
  Arena* arena = lower(tier, group);
  return arena != nullptr ? arena->allocate(0, kNoBlock) : BlockRef{};
}

BlockId Storage::adopt(TierId tier, GroupId group, BlockRef&& block, std::uint32_t owner) {
  return tier == kDevice ? device_.adopt(std::move(block), owner)
                         : lower(tier, group)->adopt(std::move(block), owner);
}

BlockRef Storage::surrender(TierId tier, GroupId group, BlockId block) {
  return tier == kDevice ? device_.surrender(group, block) : lower(tier, group)->surrender(0, block);
}

std::int64_t Storage::capacity(TierId tier, GroupId group) const {
  const Arena* arena = lower(tier, group);
  return arena != nullptr ? arena->blocks_per_slab(0) : 0;
}

std::int64_t Storage::out(TierId tier, GroupId group) const {
  const Arena* arena = lower(tier, group);
  return arena != nullptr ? arena->out(0) : 0;
}

std::size_t Storage::bytes() const {
  std::size_t total = device_.bytes();
  for (const auto& tier : tiers_) {
    for (const auto& arena : tier) total += arena != nullptr ? arena->bytes() : 0;
  }
  return total;
}

void Storage::check() const {
  device_.check();
  for (const auto& tier : tiers_) {
    for (const auto& arena : tier) {
      if (arena != nullptr) arena->check();
    }
  }
}

}  // namespace quickturn::control
