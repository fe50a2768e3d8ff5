// From private to shared: blocks and states enter the prefix index once the step that wrote them was applied.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

void Scheduler::settle_blocks(Request& request) {
  request.publish_at = (request.computed / config_.block_tokens + 1) * config_.block_tokens;
  if (request.hashing) {
    publish_blocks(request);
    if (!request.cache().snapshots.empty()) publish_snapshots(request);
    if (request.leads) lead(request);
    if (!request.followers.empty()) wake_followers(request, false);
  }
  if (!window_groups_.empty()) leave_windows(request);
}

void Scheduler::publish_blocks(Request& request) {
  Holding& cache = request.cache();
  PrefixIndex& index = cache_.index();
  const auto& full_groups = index.full_groups();
  const auto complete = static_cast<std::uint32_t>(request.computed / config_.block_tokens);
  std::array<BlockRef, kMaxGroups> blocks;
  std::size_t done = 0;
  for (; cache.published < complete; ++done) {
    for (std::size_t f = 0; f < full_groups.size(); ++f) blocks[f] = std::move(cache.full[f][done]);
    NodePin tip = index.publish(cache.tip, request.hashes[cache.published],
                                std::span(blocks).first(full_groups.size()));
    for (std::size_t f = 0; f < full_groups.size(); ++f) {
      if (!blocks[f]) continue;
      // Another request computed the same block first: use that one from the next step on, and free ours
      // after this one.
      const BlockId shared = index.block(tip.node(), kDevice, static_cast<int>(f));
      draft_->block_updates[full_groups[f]].add(request.slot, cache.published, shared);
      cache_.limbo().keep(request.last_step, std::move(blocks[f]));
    }
    cache.tip = std::move(tip);
    ++cache.published;
    if (!window_groups_.empty()) publish_windows(request, cache.tip.node());
  }
  for (auto& fresh : cache.full)
    fresh.erase(fresh.begin(), fresh.begin() + static_cast<std::ptrdiff_t>(done));
}

void Scheduler::publish_windows(Request& request, NodeId node) {
  Holding& cache = request.cache();
  const std::uint32_t at = cache.published - 1;
  for (std::size_t w = 0; w < window_groups_.size(); ++w) {
    WindowHolding& window = cache.windows[w];
    WindowBlock& block = window.blocks[at - window.first];
    const SideId side = cache_.index().publish_side(node, window_groups_[w], block.fresh,
                                                    static_cast<std::uint32_t>(config_.block_tokens));
    // If somebody else's block is there already, ours stays private until it leaves the window.
    if (!block.fresh) block.kept = cache_.index().pin_side(side);
  }
}

void Scheduler::leave_windows(Request& request) {
  // Steps that are out begin at `computed` or later: what a query there can't see is of no use to them.
  Holding& cache = request.cache();
  for (std::size_t w = 0; w < window_groups_.size(); ++w) {
    WindowHolding& window = cache.windows[w];
    const std::uint32_t first = first_seen(static_cast<std::uint32_t>(request.computed), window_groups_[w]);
    if (first <= window.first) continue;
    window.blocks.erase(window.blocks.begin(), window.blocks.begin() + (first - window.first));
    window.first = first;
    ++epoch_;
  }
}

void Scheduler::publish_snapshots(Request& request) {
  Holding& cache = request.cache();
  auto& snapshots = cache.snapshots;
  // A snapshot at a boundary was written by the step that ended there.
  std::size_t valid = 0;
  while (valid < snapshots.size() && snapshots[valid].boundary <= cache.published) ++valid;
  for (std::size_t i = 0; i < valid; ++i) {
    Snapshot& snapshot = snapshots[i];
    if (snapshot.keep) {
      publish_snapshot(request, std::move(snapshot));
    } else if (i + 1 < valid) {
      for (auto& block : snapshot.blocks) cache_.limbo().keep(request.last_step, std::move(block));
    }
  }
  const bool newest_stays = valid > 0 && !snapshots[valid - 1].keep;
  snapshots.erase(snapshots.begin(),
                  snapshots.begin() + static_cast<std::ptrdiff_t>(valid - (newest_stays ? 1 : 0)));
}

void Scheduler::publish_snapshot(Request& request, Snapshot&& snapshot) {
  Holding& cache = request.cache();
  const auto prompt_end = static_cast<std::uint32_t>(request.prompt / config_.block_tokens);
  const bool spare = snapshot.keep && snapshot.boundary != prompt_end;
  NodeId node = cache.tip.node();
  for (std::uint32_t depth = cache.published; depth > snapshot.boundary; --depth)
    node = cache_.index().parent(node);
  for (std::size_t s = 0; s < state_groups_.size(); ++s) {
    const SideId side =
        cache_.index().publish_side(node, state_groups_[s], snapshot.blocks[s], snapshot.cost, spare);
    // The step that starts at the boundary reads it, and may be out.
    cache_.limbo().keep(request.last_step, cache_.index().pin_side(side, false));
    queue_demotion(cache_.index().hash(node), state_groups_[s]);
    if (snapshot.blocks[s]) cache_.limbo().keep(request.last_step, std::move(snapshot.blocks[s]));
  }
}

void Scheduler::publish_end(Request& request) {
  if (!request.hashing || state_groups_.empty()) return;
  Holding& cache = request.cache();
  if (cache.started && request.in_flight == 0 && request.planned == request.computed &&
      request.computed % config_.block_tokens == 0 && cache.published > 0) {
    // It ends on a boundary: the state it was writing is the one there.
    Snapshot last{
        cache.published,
        false,
        (cache.published - cache.last_checkpoint) * static_cast<std::uint32_t>(config_.block_tokens),
        {}};
    for (auto& state : cache.states) last.blocks.push_back(std::move(state.working));
    cache.snapshots.push_back(std::move(last));
  }
  for (auto snapshot = cache.snapshots.rbegin(); snapshot != cache.snapshots.rend(); ++snapshot) {
    if (snapshot->boundary > cache.published) continue;
    publish_snapshot(request, std::move(*snapshot));
    break;
  }
  cache.snapshots.erase(std::remove_if(cache.snapshots.begin(), cache.snapshots.end(),
                                       [](const Snapshot& s) { return !s.blocks[0]; }),
                        cache.snapshots.end());
}

}  // namespace quickturn::control
