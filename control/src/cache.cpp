#include "quickturn/control/cache.hpp"

#include <algorithm>

namespace quickturn::control {

void Limbo::keep(StepId until, BlockRef&& block) {
  if (until > applied_) blocks_.push_back({until, std::move(block)});
  block.reset();
}

void Limbo::keep(StepId until, SidePin&& pin) {
  if (until > applied_) pins_.push_back({until, std::move(pin)});
  pin.reset();
}

void Limbo::keep(StepId until, Remains&& remains, std::unique_ptr<Request> request) {
  Rest rest{std::move(remains), std::move(request)};
  if (until > applied_) remains_.push_back({until, std::move(rest)});
}

template <class T>
bool Limbo::drop(std::deque<Kept<T>>& kept, StepId applied) {
  // What is kept until an earlier step can stand behind a later one; it waits for it, at most one step more.
  bool any = false;
  while (!kept.empty() && kept.front().until <= applied) {
    kept.pop_front();
    any = true;
  }
  return any;
}

bool Limbo::release(StepId applied) {
  const bool blocks = drop(blocks_, applied);
  const bool pins = drop(pins_, applied);
  const bool remains = drop(remains_, applied);
  return blocks || pins || remains;
}

Cache::Cache(const SchedulerConfig& config)
    : config_(config),
      events_(config.kv_events),
      storage_(config),
      index_(config_, storage_, events_),
      evictions_by_group_(config.groups.size()) {}

BlockRef Cache::allocate(GroupId group, BlockId near) {
  do {
    if (BlockRef block = storage_.device().allocate(group, near)) return block;
  } while (evict_for(group));
  return {};
}

bool Cache::evict_for(GroupId group) {
  const Arena& arena = storage_.device();
  constexpr std::uint64_t kNothing = ~std::uint64_t{0};
  // Of all that could go: the group's own blocks help at once, another group's only if a whole slab of it can
  // come free.
  std::uint64_t best = kNothing;
  int best_side = -1;
  bool chain_helps = false;
  for (const GroupId full : index_.full_groups())
    chain_helps = chain_helps || full == group || arena.reclaimable_slabs(full) > 0;
  if (chain_helps && index_.chain_victim(kDevice) != kNone)
    best = std::uint64_t{index_.chain_key(kDevice)} << 1;
  for (GroupId g = 0; g < config_.groups.size(); ++g) {
    if (config_.groups[g].kind == GroupKind::full || index_.side_victim(kDevice, g) == kNone) continue;
    if (g != group && arena.reclaimable_slabs(g) == 0) continue;
    const std::uint64_t key = std::uint64_t{index_.side_key(kDevice, g)} << 1 | (g != group ? 1 : 0);
    if (key < best) {
      best = key;
      best_side = g;
    }
  }
  if (best == kNothing) return false;
  ++evictions_;
  if (best_side >= 0) {
    ++evictions_by_group_[static_cast<std::size_t>(best_side)];
    index_.evict_side(kDevice, static_cast<GroupId>(best_side));
  } else {
    for (const GroupId full : index_.full_groups()) ++evictions_by_group_[full];
    index_.evict_chain(kDevice);
  }
  return true;
}

bool Cache::fits(const Need& need) const {
  const Arena& arena = storage_.device();
  std::int64_t spare = arena.free_slabs();
  std::int64_t missing = 0;
  for (GroupId g = 0; g < config_.groups.size(); ++g) {
    const std::int64_t per = arena.blocks_per_slab(g);
    const std::int64_t own = arena.free_in_slabs(g) + arena.evictable(g);
    if (need[g] > own) {
      missing += ceil_div(need[g] - own, per);
    } else {
      spare += std::min<std::int64_t>(arena.reclaimable_slabs(g), (own - need[g]) / per);
    }
  }
  return missing <= spare;
}

bool Cache::fits_empty(const Need& need) const {
  std::int64_t slabs = 0;
  for (GroupId g = 0; g < config_.groups.size(); ++g)
    slabs += ceil_div(need[g], config_.groups[g].blocks_per_slab);
  return slabs <= config_.num_slabs;
}

double Cache::free_share(TierId tier) const {
  if (tier != kDevice) {
    double share = 1.0;
    for (GroupId g = 0; g < config_.groups.size(); ++g) {
      const auto all = static_cast<double>(storage_.capacity(tier, g));
      if (all > 0) share = std::min(share, 1.0 - static_cast<double>(storage_.out(tier, g)) / all);
    }
    return share;
  }
  const Arena& arena = storage_.device();
  double free = arena.free_slabs();
  for (GroupId g = 0; g < config_.groups.size(); ++g) {
    free += static_cast<double>(arena.free_in_slabs(g)) / static_cast<double>(arena.blocks_per_slab(g));
  }
  return free / arena.num_slabs();
}

std::size_t Cache::reset() {
  std::size_t count = 0;
  for (TierId t = 0; t < storage_.num_tiers(); ++t) {
    for (GroupId g = 0; g < config_.groups.size(); ++g) {
      for (; index_.side_victim(t, g) != kNone; ++count) index_.evict_side(t, g);
    }
  }
  for (bool any = true; any;) {
    any = false;
    for (TierId t = 0; t < storage_.num_tiers(); ++t) {
      for (; index_.chain_victim(t) != kNone; ++count, any = true) index_.evict_chain(t);
    }
  }
  return count;
}

}  // namespace quickturn::control
