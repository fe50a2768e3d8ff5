// Blocks and states for tokens that are about to be computed.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

std::int32_t Scheduler::grow(Request& request, std::int32_t tokens) {
  Holding& cache = request.cache();
  for (std::size_t s = 0; s < state_groups_.size(); ++s) {
    BlockRef& working = cache.states[s].working;
    if (!working) working = cache_.allocate(state_groups_[s], kNoBlock);
    if (!working) return 0;
  }
  const std::int32_t unit = config_.block_tokens;
  std::int32_t edge = ceil_div(std::int64_t{request.planned} + tokens, unit) * unit;
  const auto& full_groups = cache_.index().full_groups();
  for (std::size_t f = 0; f < full_groups.size(); ++f) {
    auto& fresh = cache.full[f];
    BlockId near = kNoBlock;
    if (!fresh.empty()) {
      near = fresh.back().id();
    } else if (cache.published > 0) {
      near = cache_.index().block(cache.tip.node(), kDevice, static_cast<int>(f));
    }
    auto have = cache.published + static_cast<std::uint32_t>(fresh.size());
    for (; static_cast<std::int32_t>(have) * unit < edge; ++have) {
      BlockRef block = cache_.allocate(full_groups[f], near);
      if (!block) {
        edge = static_cast<std::int32_t>(have) * unit;
        break;
      }
      near = block.id();
      draft_->block_updates[full_groups[f]].add(request.slot, have, near);
      fresh.push_back(std::move(block));
    }
  }
  for (std::size_t w = 0; w < window_groups_.size(); ++w) {
    WindowHolding& window = cache.windows[w];
    auto have = window.first + static_cast<std::uint32_t>(window.blocks.size());
    for (; static_cast<std::int32_t>(have) * unit < edge; ++have) {
      BlockId near = kNoBlock;
      if (!window.blocks.empty()) {
        const WindowBlock& last = window.blocks.back();
        near = last.fresh ? last.fresh.id() : cache_.index().side_block(last.kept.side(), kDevice);
      }
      BlockRef block = cache_.allocate(window_groups_[w], near);
      if (!block) {
        edge = static_cast<std::int32_t>(have) * unit;
        break;
      }
      draft_->block_updates[window_groups_[w]].add(request.slot, have, block.id());
      window.blocks.push_back({std::move(block), SidePin{}});
    }
  }
  request.edge = std::max(request.edge, edge);
  return std::min(tokens, edge - request.planned);
}

std::int32_t Scheduler::until_checkpoint(const Request& request, std::int32_t tokens) const {
  // A state is seen at the end of a row only: the row ends where a checkpoint is wanted.
  const auto here = static_cast<std::uint32_t>(request.planned / config_.block_tokens);
  const auto next = std::upper_bound(request.wanted.begin(), request.wanted.end(), here);
  if (next == request.wanted.end()) return tokens;
  return std::min(tokens, static_cast<std::int32_t>(*next) * config_.block_tokens - request.planned);
}

std::int32_t Scheduler::until_boundary(const Request& request, std::int32_t tokens) const {
  // With drafts, `planned` is an upper bound while a step is out. A state can't be taken back to a boundary
  // that it ran over, so no row crosses one, and the next row waits until it is known that the boundary was
  // reached.
  const std::int32_t over = request.planned % config_.block_tokens;
  if (over == 0 && request.in_flight > 0) return 0;
  return std::min(tokens, config_.block_tokens - over);
}

bool Scheduler::wants_snapshot(const Request& request, std::uint32_t boundary, bool& keep) const {
  keep = std::binary_search(request.wanted.begin(), request.wanted.end(), boundary);
  // An answer may end at any boundary: the newest one is kept until the next is reached.
  return request.hashing && (keep || request.decoding());
}

bool Scheduler::take_snapshot(Request& request, std::uint32_t boundary, bool keep,
                              std::vector<BlockRef>& next) {
  Need need = committed();
  for (const GroupId group : state_groups_) ++need[group];
  if (!cache_.fits(need)) return false;
  for (const GroupId group : state_groups_) {
    next.push_back(cache_.allocate(group, kNoBlock));
    if (!next.back()) return false;
  }
  Holding& cache = request.cache();
  Snapshot snapshot{boundary,
                    keep,
                    (boundary - cache.last_checkpoint) * static_cast<std::uint32_t>(config_.block_tokens),
                    {}};
  for (auto& state : cache.states) snapshot.blocks.push_back(std::move(state.working));
  cache.snapshots.push_back(std::move(snapshot));
  if (keep) {
    cache.last_checkpoint = boundary;
    request.publish_at = 0;  // as soon as the step that wrote it was applied
  }
  return true;
}

void Scheduler::states_for_row(Request& request) {
  Holding& cache = request.cache();
  const bool first = !cache.started;
  cache.started = true;
  std::vector<BlockRef> next;
  bool moved = false;
  bool keep = false;
  if (!first && request.planned % config_.block_tokens == 0) {
    const auto boundary = static_cast<std::uint32_t>(request.planned / config_.block_tokens);
    moved = wants_snapshot(request, boundary, keep) && take_snapshot(request, boundary, keep, next);
  }
  for (std::size_t s = 0; s < state_groups_.size(); ++s) {
    StateRows& rows = draft_->states[state_groups_[s]];
    StateHolding& state = cache.states[s];
    const bool zero = first && request.planned == 0;
    BlockId in = kNoBlock;
    if (moved) {
      in = cache.snapshots.back().blocks[s].id();
      state.working = std::move(next[s]);
    } else if (first && !zero) {
      in = cache_.index().side_block(state.source.side(), kDevice);
      cache_.limbo().keep(building_->step, std::move(state.source));
    } else if (!zero) {
      in = state.working.id();
    }
    rows.in.push_back(in);
    rows.out.push_back(state.working.id());
    rows.zero.push_back(zero ? 1 : 0);
  }
}

}  // namespace quickturn::control
