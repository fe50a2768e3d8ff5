// Who gets a slot: the head of the queue, once all of its prompt and the first block of its answer would fit.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

Need Scheduler::committed() const {
  // What admitted prompts still need, and a block for each that decodes: its next one may be due any time.
  Need sum{};
  for (const Request* request : prefilling_) {
    const Need need = need_of(*request, 0);
    const Holding& cache = request->cache();
    std::size_t full = 0;
    std::size_t window = 0;
    std::size_t state = 0;
    for (GroupId g = 0; g < config_.groups.size(); ++g) {
      std::int64_t held = 0;
      switch (config_.groups[g].kind) {
        case GroupKind::full:
          held = cache.published + static_cast<std::int64_t>(cache.full[full++].size());
          break;
        case GroupKind::window:
          held = static_cast<std::int64_t>(cache.windows[window++].blocks.size());
          break;
        case GroupKind::state:
          held = cache.states[state++].working ? 1 : 0;
          break;
      }
      sum[g] += std::max<std::int64_t>(0, need[g] - held);
    }
  }
  for (GroupId g = 0; g < config_.groups.size(); ++g) {
    if (config_.groups[g].kind != GroupKind::state) sum[g] += static_cast<std::int64_t>(decoding_.size());
  }
  return sum;
}

void Scheduler::admit() {
  promise_holds_ = false;
  if (blocked_epoch_ == epoch_) return;
  blocked_epoch_ = epoch_;
  // The last one whom the promise kept out. It is passed by who has much less to compute: at every second
  // place that comes free.
  const Request* held = nullptr;
  for (auto next = waiting_.begin(); next != waiting_.end() && slots_.free() > 0;) {
    Request& request = **next;
    // A retracted request first hears of the token that is still on its way.
    if (request.in_flight > 0 ||
        (held != nullptr && !may_pass(request, request.uncached, *held, held->uncached))) {
      ++next;
      continue;
    }
    if (!promise_allows(request)) {
      promise_holds_ = true;
      blocked_epoch_ = 0;  // what steps take is learned all the time: ask again
      if (was_passed_) return;
      held = &request;
      ++next;
      continue;
    }
    const Admission came = admit_one(request);
    if (came == Admission::no_room) {
      if (!alone() || !std::holds_alternative<Retracted>(request.state)) return;
      // With its answer so far it is longer than the whole cache.
      ++counters_.finished;
      end(request, End{Reason::length}, Reason::length, draft_->ended);
      next = waiting_.begin();
      continue;
    }
    next = waiting_.erase(next);
    if (came == Admission::follows) continue;
    was_passed_ = held != nullptr;
    if (was_passed_) return;
  }
}

bool Scheduler::promise_allows(const Request& request) const {
  if (config_.policy.min_tps_per_user <= 0.0 || !model_.knows_decodes()) return true;
  StepLoad now;
  double running = 0.0;
  const auto count = [&](const Request& other) {
    running += 1.0;
    now.decode_context += other.known;
  };
  for (const Request* other : decoding_) count(*other);
  // Of prompts those that are done before its own. How many may then begin to decode is seen to once more.
  for (const Request* other : prefilling_) {
    if (other->known - other->planned <= request.uncached) count(*other);
  }
  if (running == 0.0) return true;
  const double growth = (running + 1.0) / running;
  now.decode_tokens = running * (1 + config_.draft_tokens);
  StepLoad load;
  load.decode_tokens = growth * now.decode_tokens;
  load.decode_context = growth * now.decode_context;
  // A row more takes no larger a share than the others do: what once took long by accident keeps nobody out.
  return std::min(model_.predict(load), growth * model_.predict(now)) + between() <=
         1.0 / config_.policy.min_tps_per_user;
}

bool Scheduler::alone() {
  return slots_.free() == slots_.capacity() && cache_.limbo().empty() && book_.jobs.empty();
}

Need Scheduler::need_with(const Request& request, const Match& match, std::span<const Cached> missing) {
  const PrefixIndex& index = cache_.index();
  Need need = need_of(request, match.resume);
  const Need others = committed();
  for (std::size_t g = 0; g < need.size(); ++g) need[g] += others[g];
  // Cached blocks that nobody else uses can't be evicted any more once this request uses them.
  for (NodeId node = match.resume_node; node != kNone && !index.is_protected(node);
       node = index.parent(node)) {
    if (!index.has_copy(node, kDevice)) continue;
    for (const GroupId full : index.full_groups()) ++need[full];
  }
  for (const GroupId group : state_groups_) {
    need[group] += match.resume > 0 && on_device({kNone, index.side(match.resume_node, group)}) ? 1 : 0;
  }
  // And those that aren't on the device need room there. Of a window they are counted already.
  for (const Cached& what : missing) {
    if (load_of(what) != nullptr) continue;
    if (what.side == kNone) {
      for (const GroupId full : index.full_groups()) ++need[full];
    } else if (const GroupId group = index.side_group(what.side);
               config_.groups[group].kind == GroupKind::state) {
      ++need[group];
    }
  }
  return need;
}

Scheduler::Admission Scheduler::admit_one(Request& request) {
  Match match;
  if (request.hashing) {
    // A fresh one that returns from a retraction goes on from what it computed itself.
    const std::int32_t most =
        request.fresh ? std::min(request.computed, request.known - 1) : request.known - 1;
    const auto limit = static_cast<std::uint32_t>(most / config_.block_tokens);
    match = cache_.index().match(request.hashes, limit);
    if (follow(request, match)) return Admission::follows;
  }
  std::vector<Cached> missing = missing_on_device(match);
  if (!cache_.fits(need_with(request, match, missing))) {
    if (match.resume == 0 || !alone()) return Admission::no_room;
    // Nothing will come free any more, and what is cached takes room beside the prompt: it goes, rather than
    // keep the request from ever running.
    match.resume = 0;
    match.resume_node = kNone;
    missing.clear();
    if (!cache_.fits(need_with(request, match, missing))) return Admission::no_room;
  }

  // A prefix known beyond the resume point is where two prompts part: the next one that shares it shall find
  // a state there.
  if (!state_groups_.empty() && match.shared > match.resume) want_checkpoint(request, match.shared);
  Holding cache;
  pin_prefix(cache, match);
  for (const Cached& what : missing) {
    // What was started goes on by itself if the rest finds no room.
    if (load_of(what) == nullptr && !start_load(what)) return Admission::no_room;
  }
  SlotRef slot = slots_.take();
  tell_prefix(cache, slot.id(), match);
  request.loads = static_cast<std::int32_t>(missing.size());
  for (const Cached& what : missing) load_of(what)->waiters.emplace_back(request.id, request.run);
  request.slot = slot.id();
  request.planned = request.computed = request.edge =
      static_cast<std::int32_t>(match.resume) * config_.block_tokens;
  request.publish_at = request.computed + config_.block_tokens;
  draft_->admitted.ids.push_back(request.id);
  draft_->admitted.slots.push_back(request.slot);
  draft_->admitted.cached_tokens.push_back(request.computed);
  draft_->admitted.known_tokens.push_back(request.known);
  if (request.retractions == 0) {
    request.found = match.resume;
    counters_.prompt_tokens += request.prompt;
    counters_.cached_tokens += request.computed;
    counters_.ceiling_tokens += request.ceiling;
  }
  Admit event{std::move(slot), std::move(cache)};
  if (std::holds_alternative<Submitted>(request.state)) {
    move_on<Submitted>(request, std::move(event));
  } else {
    move_on<Retracted>(request, std::move(event));
  }
  enlist(request);
  if (request.hashing) {
    request.lead_until = static_cast<std::uint32_t>(request.hashes.size());
    lead(request);
  }
  return Admission::admitted;
}

void Scheduler::pin_prefix(Holding& cache, const Match& match) {
  PrefixIndex& index = cache_.index();
  cache.tip = index.pin(match.resume_node);
  cache.published = match.resume;
  cache.full.resize(index.full_groups().size());
  cache.windows.resize(window_groups_.size());
  cache.states.resize(state_groups_.size());
  cache.last_checkpoint = match.resume;
  for (std::size_t w = 0; w < window_groups_.size(); ++w) {
    WindowHolding& window = cache.windows[w];
    window.first =
        first_seen(match.resume * static_cast<std::uint32_t>(config_.block_tokens), window_groups_[w]);
    window.blocks.resize(match.resume - window.first);
    NodeId node = match.resume_node;
    for (auto block = window.blocks.rbegin(); block != window.blocks.rend();
         ++block, node = index.parent(node)) {
      block->kept = index.pin_side(index.side(node, window_groups_[w]));
    }
  }
  for (std::size_t s = 0; s < state_groups_.size() && match.resume > 0; ++s) {
    cache.states[s].source = index.pin_side(index.side(match.resume_node, state_groups_[s]));
  }
}

void Scheduler::tell_prefix(const Holding& cache, SlotId slot, const Match& match) {
  const PrefixIndex& index = cache_.index();
  for (std::size_t f = 0; f < cache.full.size(); ++f) {
    BlockUpdates& updates = draft_->block_updates[index.full_groups()[f]];
    NodeId node = match.resume_node;
    for (std::uint32_t depth = match.resume; depth > 0; --depth, node = index.parent(node)) {
      updates.add(slot, depth - 1, device_block({node, kNone}, static_cast<int>(f)));
    }
  }
  for (std::size_t w = 0; w < window_groups_.size(); ++w) {
    std::uint32_t at = cache.windows[w].first;
    for (const WindowBlock& block : cache.windows[w].blocks) {
      draft_->block_updates[window_groups_[w]].add(slot, at++, device_block({kNone, block.kept.side()}, 0));
    }
  }
}

std::uint32_t Scheduler::first_seen(std::uint32_t position, GroupId group) const {
  const auto window = static_cast<std::uint32_t>(config_.groups[group].window);
  return (position < window ? 0 : position - window + 1) / static_cast<std::uint32_t>(config_.block_tokens);
}

}  // namespace quickturn::control
