// What stays warm and what goes first: sessions that wait for a tool, and tails that a session has left
// behind.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

Tick Scheduler::tick(double time) const {
  return kFirstTick + static_cast<Tick>(std::max(0.0, time - *time_base_) * kTicksPerSecond);
}

void Scheduler::note_turn(Request& request) {
  const Holding& cache = request.cache();
  if (!request.hashing || request.session.empty() || cache.published == 0) return;
  PrefixIndex& index = cache_.index();
  Session& session = sessions_.use(request.session);
  std::vector<Hash128> checkpoints;
  const auto prompt_end = static_cast<std::uint32_t>(request.prompt / config_.block_tokens);
  const auto tail = static_cast<std::uint32_t>(std::max(0, request.prompt - config_.policy.checkpoint_tail) /
                                               config_.block_tokens);
  for (const std::uint32_t depth : {tail, prompt_end, cache.published}) {
    if (depth > 0 && depth <= cache.published) checkpoints.push_back(request.hashes[depth - 1]);
  }
  for (const Hash128& old : session.checkpoints) {
    const NodeId node = index.find(old);
    if (node == kNone || std::find(checkpoints.begin(), checkpoints.end(), old) != checkpoints.end())
      continue;
    for (const GroupId group : state_groups_) {
      const SideId side = index.side(node, group);
      if (side != kNone) index.supersede_side(side);
    }
  }
  const bool extends = session.depth <= cache.published &&
                       (session.depth == 0 || request.hashes[session.depth - 1] == session.tip);
  if (!extends) {
    const NodeId tail = index.find(session.tip);
    if (tail != kNone) index.supersede_tail(tail);
  }
  session.checkpoints = std::move(checkpoints);
  session.tip = request.hashes[cache.published - 1];
  session.depth = cache.published;
  const double seconds = std::max(std::exchange(session.hold_seconds, 0.0), request.retention);
  if (seconds > 0.0) keep_warm(session, seconds);
}

bool Scheduler::hold(const std::string& name, double seconds) {
  Session* session = sessions_.find(name);
  for (const auto& [id, request] : requests_) {
    // Asked for before the turn is over: it counts from its end. Any running turn of the session will do, so
    // order is no matter.
    if (request->session == name && request->running()) {
      Session& running = sessions_.use(name);
      running.hold_seconds = std::max(running.hold_seconds, seconds);
      return true;
    }
  }
  return session != nullptr && session->depth > 0 && keep_warm(*session, seconds);
}

bool Scheduler::keep_warm(const Session& session, double seconds) {
  PrefixIndex& index = cache_.index();
  const NodeId node = index.find(session.tip);
  const double until = now_ + std::min(seconds, config_.policy.max_hold);
  if (node == kNone || until <= now_) return false;
  // Shared prefixes are counted once for each session: the bound errs on the safe side.
  const double blocks =
      std::max<double>(1.0, static_cast<double>(session.depth) *
                                static_cast<double>(std::max<std::size_t>(1, index.full_groups().size())));
  const double room = config_.policy.max_hold_share * capacity_blocks();
  if (held_blocks_ + blocks > room) return false;
  held_blocks_ += blocks;
  holds_.emplace(until, blocks);
  index.keep_until(node, tick(until));
  for (const Hash128& hash : session.checkpoints) {
    const NodeId at = index.find(hash);
    for (std::size_t s = 0; at != kNone && s < state_groups_.size(); ++s) {
      const SideId side = index.side(at, state_groups_[s]);
      if (side != kNone) index.keep_side_until(side, tick(until));
    }
  }
  NodeId at = node;
  for (const GroupId group : window_groups_) {
    at = node;
    for (std::uint32_t depth = session.depth;
         at != kNone &&
         depth > first_seen(session.depth * static_cast<std::uint32_t>(config_.block_tokens), group);
         --depth) {
      const SideId side = index.side(at, group);
      if (side != kNone) index.keep_side_until(side, tick(until));
      at = index.parent(at);
    }
  }
  return true;
}

double Scheduler::capacity_blocks() const {
  for (const auto& group : config_.groups) {
    if (group.kind == GroupKind::full) return static_cast<double>(config_.num_slabs) * group.blocks_per_slab;
  }
  return static_cast<double>(config_.num_slabs) * config_.groups[0].blocks_per_slab;
}

void Scheduler::end_holds() {
  for (; !holds_.empty() && holds_.begin()->first <= now_; holds_.erase(holds_.begin()))
    held_blocks_ -= holds_.begin()->second;
}

}  // namespace quickturn::control
