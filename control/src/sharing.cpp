// Prefixes that are being computed are computed once: a request whose next unknown block is the one that
// another request computes waits for it, for a bounded time, and then starts from what was published.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

bool Scheduler::follow(Request& request, const Match& match) {
  if (config_.policy.share_wait <= 0.0 || request.fresh || match.shared >= request.hashes.size())
    return false;
  if (request.share_until != 0.0 && now_ >= request.share_until) return false;
  const auto limit = static_cast<std::uint32_t>((request.known - 1) / config_.block_tokens);
  const auto found = frontiers_.find(request.hashes[match.shared]);
  if (found == frontiers_.end() || match.shared >= limit) return false;
  Request& leader = *found->second;
  const std::uint32_t shared = shared_target(leader, request, match, limit);
  if (shared <= match.resume) return false;

  request.leader = &leader;
  request.shared_with_leader = shared;
  if (request.share_until == 0.0) {
    request.share_until = now_ + config_.policy.share_wait;
    share_ends_.emplace_back(request.share_until, request.id);
  }
  leader.followers.push_back(&request);
  ++counters_.shared_prefixes;
  return true;
}

std::uint32_t Scheduler::shared_target(Request& leader, const Request& request, const Match& match,
                                       std::uint32_t limit) const {
  // Chained hashes: equal at one place means equal before it.
  std::uint32_t same = match.shared + 1;
  std::uint32_t differs = std::min(leader.lead_until, limit) + 1;
  while (differs - same > 1) {
    const std::uint32_t middle = same + (differs - same) / 2;
    (leader.hashes[middle - 1] == request.hashes[middle - 1] ? same : differs) = middle;
  }
  if (state_groups_.empty()) return same;
  if (leader.planned <= static_cast<std::int32_t>(same) * config_.block_tokens) {
    want_checkpoint(leader, same);
    return same;
  }
  // The leader is past the parting already: only a checkpoint that it makes anyway helps.
  const auto after = std::upper_bound(leader.wanted.begin(), leader.wanted.end(), same);
  return after == leader.wanted.begin() ? 0 : *std::prev(after);
}

void Scheduler::lead(Request& request) {
  const std::uint32_t at = request.cache().published;
  if (request.leads) {
    frontiers_.erase(request.frontier);
    request.leads = false;
  }
  if (at >= request.lead_until) return;
  request.frontier = request.hashes[at];
  request.leads = frontiers_.emplace(request.frontier, &request).second;
}

void Scheduler::wake_followers(Request& request, bool all) {
  auto& followers = request.followers;
  const std::uint32_t published = all ? 0 : request.cache().published;
  for (std::size_t i = 0; i < followers.size();) {
    Request& follower = *followers[i];
    bool ready = all;
    if (!all && follower.shared_with_leader <= published) {
      const NodeId node = cache_.index().find(request.hashes[follower.shared_with_leader - 1]);
      // A state arrives a step after its boundary; once the leader is a block further, it won't. What was
      // forgotten never comes.
      ready = node == kNone || state_groups_.empty() || published > follower.shared_with_leader ||
              cache_.index().side(node, state_groups_[0]) != kNone;
    }
    if (!ready) {
      ++i;
      continue;
    }
    followers.erase(followers.begin() + static_cast<std::ptrdiff_t>(i));
    follower.leader = nullptr;
    waiting_.insert(&follower);
    ++epoch_;
  }
}

void Scheduler::stop_following(Request& request) {
  if (request.leader == nullptr) return;
  auto& followers = request.leader->followers;
  followers.erase(std::find(followers.begin(), followers.end(), &request));
  request.leader = nullptr;
}

void Scheduler::leave_sharing(Request& request) {
  stop_following(request);
  if (request.leads) frontiers_.erase(request.frontier);
  request.leads = false;
  wake_followers(request, true);
}

void Scheduler::end_waits() {
  for (; !share_ends_.empty() && share_ends_.front().first <= now_; share_ends_.pop_front()) {
    const auto found = requests_.find(share_ends_.front().second);
    if (found == requests_.end() || found->second->leader == nullptr || found->second->share_until > now_)
      continue;
    stop_following(*found->second);
    waiting_.insert(found->second.get());
    ++epoch_;
  }
}

}  // namespace quickturn::control
