// Tiers: what goes down, what comes back, and when it has arrived.
#include <algorithm>
#include <stdexcept>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

namespace {

TransferRows& add_row(TransferRows& rows, TransferId id, GroupId group, TierId from, BlockId source,
                      TierId to, BlockId target) {
  rows.ids.push_back(id);
  rows.groups.push_back(group);
  rows.src_tiers.push_back(from);
  rows.src_blocks.push_back(source);
  rows.dst_tiers.push_back(to);
  rows.dst_blocks.push_back(target);
  return rows;
}

}  // namespace

TransferJob& Scheduler::start_job(const Cached& what, TierId from, TierId to, std::vector<BlockRef>&& blocks,
                                  TransferRows& rows) {
  PrefixIndex& index = cache_.index();
  const std::uint64_t number = book_.next_job++;
  TransferJob& job = book_.jobs[number];
  job.what = what;
  job.to = to;
  job.blocks = std::move(blocks);
  for (std::size_t i = 0; i < job.blocks.size(); ++i) {
    const bool side = what.side != kNone;
    const GroupId group = side ? index.side_group(what.side) : index.full_groups()[i];
    const BlockId source =
        side ? index.side_block(what.side, from) : index.block(what.node, from, static_cast<int>(i));
    book_.job_of.emplace(book_.next_id, number);
    add_row(rows, book_.next_id++, group, from, source, to, job.blocks[i].id());
    ++job.left;
  }
  book_.job_for.emplace(TransferBook::key(what, to), number);
  if (what.side != kNone) {
    job.side_pin = index.pin_side(what.side, false);
  } else {
    job.pin = index.pin(what.node, false);
  }
  (to == kDevice ? book_.loads : book_.demotes) += 1;
  return job;
}

// ---- back to the device

TransferJob* Scheduler::load_of(const Cached& what) { return book_.find(what, kDevice); }

bool Scheduler::on_device(const Cached& what) const {
  const PrefixIndex& index = cache_.index();
  if (what.side != kNone) return index.side_block(what.side, kDevice) != kNoBlock;
  return index.full_groups().empty() || index.has_copy(what.node, kDevice);
}

std::vector<Cached> Scheduler::missing_on_device(const Match& match) {
  std::vector<Cached> missing;
  if (config_.tiers.empty()) return missing;
  const PrefixIndex& index = cache_.index();
  const auto look = [&](const Cached& what) {
    if (!on_device(what)) missing.push_back(what);
  };
  for (NodeId node = match.resume_node; node != kNone; node = index.parent(node)) look({node, kNone});
  for (const GroupId group : window_groups_) {
    const std::uint32_t first =
        first_seen(match.resume * static_cast<std::uint32_t>(config_.block_tokens), group);
    NodeId node = match.resume_node;
    for (std::uint32_t depth = match.resume; depth > first; --depth, node = index.parent(node))
      look({kNone, index.side(node, group)});
  }
  for (const GroupId group : state_groups_) {
    if (match.resume > 0) look({kNone, index.side(match.resume_node, group)});
  }
  std::reverse(missing.begin(), missing.end());
  return missing;
}

bool Scheduler::start_load(const Cached& what) {
  PrefixIndex& index = cache_.index();
  TierId from = 1;
  std::vector<BlockRef> blocks;
  if (what.side != kNone) {
    while (index.side_block(what.side, from) == kNoBlock) ++from;
    blocks.push_back(cache_.allocate(index.side_group(what.side), kNoBlock));
    if (!blocks.back()) return false;
  } else {
    while (!index.has_copy(what.node, from)) ++from;
    const NodeId parent = index.parent(what.node);
    for (std::size_t f = 0; f < index.full_groups().size(); ++f) {
      const BlockId near = parent == kNone ? kNoBlock : index.block(parent, kDevice, static_cast<int>(f));
      blocks.push_back(cache_.allocate(index.full_groups()[f], near));
      if (!blocks.back()) return false;
    }
  }
  start_job(what, from, kDevice, std::move(blocks), draft_->transfers_before);
  return true;
}

BlockId Scheduler::device_block(const Cached& what, int ordinal) {
  if (TransferJob* job = on_device(what) ? nullptr : load_of(what))
    return job->blocks[static_cast<std::size_t>(ordinal)].id();
  if (what.side != kNone) return cache_.index().side_block(what.side, kDevice);
  return cache_.index().block(what.node, kDevice, ordinal);
}

// ---- down

void Scheduler::queue_demotion(const Hash128& hash, std::int32_t side_group) {
  if (!config_.tiers.empty()) book_.demotions[kDevice].push_back({hash, side_group});
}

void Scheduler::queue_demotions(const Request& request) {
  if (config_.tiers.empty() || !request.hashing) return;
  const PrefixIndex& index = cache_.index();
  const Holding& cache = request.cache();
  std::uint32_t first = cache.published;
  if (!index.full_groups().empty()) {
    for (NodeId node = cache.tip.node(); node != kNone && !index.has_copy(node, 1); node = index.parent(node))
      --first;
  }
  for (std::uint32_t depth = first; depth < cache.published; ++depth)
    queue_demotion(request.hashes[depth], -1);
  for (const GroupId group : window_groups_) {
    const std::uint32_t seen =
        first_seen(cache.published * static_cast<std::uint32_t>(config_.block_tokens), group);
    for (std::uint32_t depth = seen; depth < cache.published; ++depth)
      queue_demotion(request.hashes[depth], group);
  }
}

BlockRef Scheduler::room_below(TierId tier, GroupId group, std::uint32_t key) {
  PrefixIndex& index = cache_.index();
  const bool full = config_.groups[group].kind == GroupKind::full;
  while (true) {
    if (BlockRef block = cache_.storage().allocate(tier, group, kNoBlock)) return block;
    // Only what is worth less gives way.
    if (full ? index.chain_victim(tier) == kNone || index.chain_key(tier) > key
             : index.side_victim(tier, group) == kNone || index.side_key(tier, group) > key) {
      return {};
    }
    if (full) {
      index.evict_chain(tier);
    } else {
      index.evict_side(tier, group);
    }
  }
}

bool Scheduler::demote(const Demotion& demotion, TierId from) {
  PrefixIndex& index = cache_.index();
  const NodeId node = index.find(demotion.hash);
  if (node == kNone) return false;
  const auto to = static_cast<TierId>(from + 1);
  Cached what{node, kNone};
  std::vector<BlockRef> blocks;
  if (demotion.side_group >= 0) {
    const auto group = static_cast<GroupId>(demotion.side_group);
    what = {kNone, index.side(node, group)};
    if (what.side == kNone || index.side_block(what.side, from) == kNoBlock ||
        index.side_block(what.side, to) != kNoBlock)
      return false;
    if (index.is_side_superseded(what.side)) return false;
    if (book_.find(what, to) != nullptr) return false;
    const SidePin kept =
        index.pin_side(what.side, false);  // making room below must not take what is to be copied
    blocks.push_back(room_below(to, group, index.key_of_side(what.side, to)));
    if (!blocks.back()) return false;
    start_job(what, from, to, std::move(blocks), draft_->transfers_after);
    return true;
  }
  if (index.full_groups().empty() || !index.has_copy(node, from) || index.has_copy(node, to) ||
      index.is_superseded(node))
    return false;
  if (book_.find(what, to) != nullptr) return false;
  // In every tier the end of a chain goes first and comes last: a copy without the one before it would be of
  // no use, and would keep the one before it where it is.
  const NodeId parent = index.parent(node);
  if (parent != kNone && !index.has_copy(parent, to) && book_.find({parent, kNone}, to) == nullptr)
    return false;
  const NodePin kept = index.pin(node, false);
  for (const GroupId group : index.full_groups()) {
    blocks.push_back(room_below(to, group, index.key_of(node, to)));
    if (!blocks.back()) return false;
  }
  start_job(what, from, to, std::move(blocks), draft_->transfers_after);
  return true;
}

void Scheduler::plan_demotions() {
  std::int32_t left = config_.policy.max_demotes_per_step;
  for (TierId tier = 0; tier < config_.tiers.size(); ++tier) {
    auto& queue = book_.demotions[tier];
    if (queue.empty() || cache_.free_share(tier) >= config_.policy.demote_below) continue;
    for (; left > 0 && !queue.empty(); queue.pop_front()) left -= demote(queue.front(), tier) ? 1 : 0;
  }
}

// ---- done

void Scheduler::transfers_done(std::span<const TransferId> ids) {
  for (const TransferId id : ids) {
    if (!book_.job_of.contains(id))
      throw std::invalid_argument("transfer " + std::to_string(id) + " isn't in progress");
  }
  for (const TransferId id : ids) {
    const auto found = book_.job_of.find(id);
    if (found == book_.job_of.end())
      throw std::invalid_argument("transfer " + std::to_string(id) + " is given twice");
    const std::uint64_t number = found->second;
    book_.job_of.erase(found);
    TransferJob& job = book_.jobs.at(number);
    if (--job.left > 0) continue;
    finish_job(job);
    book_.jobs.erase(number);
  }
  ++epoch_;
}

void Scheduler::finish_job(TransferJob& job) {
  PrefixIndex& index = cache_.index();
  const bool side = job.what.side != kNone;
  const NodeId node = side ? index.side_node(job.what.side) : job.what.node;
  if (side) {
    index.install_side(job.what.side, job.to, job.blocks[0]);
  } else {
    index.install(job.what.node, job.to, job.blocks);
  }
  book_.job_for.erase(TransferBook::key(job.what, job.to));
  if (job.to != kDevice) {
    if (job.to < config_.tiers.size()) {
      book_.demotions[job.to].push_back(
          {index.hash(node), side ? std::int32_t{index.side_group(job.what.side)} : -1});
    }
    return;
  }
  for (const auto& [id, run] : job.waiters) {
    const auto found = requests_.find(id);
    if (found == requests_.end() || found->second->run != run) continue;
    Request& request = *found->second;
    --request.loads;
    // Somebody computed the same blocks meanwhile: those are the ones in the index, and ours go.
    for (std::size_t i = 0; i < job.blocks.size(); ++i) {
      if (!job.blocks[i]) continue;
      const GroupId group = side ? index.side_group(job.what.side) : index.full_groups()[i];
      if (config_.groups[group].kind == GroupKind::state) continue;
      draft_->block_updates[group].add(request.slot, index.depth(node) - 1,
                                       device_block(job.what, static_cast<int>(i)));
    }
  }
}

}  // namespace quickturn::control
