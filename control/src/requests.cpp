// Requests come and go.
#include <algorithm>
#include <stdexcept>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

Scheduler::Scheduler(SchedulerConfig config)
    : config_((validate(config), std::move(config))),
      hasher_(config_.hash_key, config_.block_tokens, config_.model_salt),
      slots_(std::min(config_.max_requests, config_.max_step_tokens / (1 + config_.draft_tokens))),
      cache_(config_),
      recorded_(config_.recorded) {
  for (GroupId g = 0; g < config_.groups.size(); ++g) {
    if (config_.groups[g].kind == GroupKind::window) window_groups_.push_back(g);
    if (config_.groups[g].kind == GroupKind::state) state_groups_.push_back(g);
  }
  draft_ = fresh_plan();
  book_.demotions.resize(config_.tiers.size());
}

void Scheduler::check_spec(const RequestSpec& spec) const {
  const auto require = [&spec](bool good, const std::string& what) {
    if (!good) throw std::invalid_argument("request " + std::to_string(spec.id) + ": " + what);
  };
  require(!requests_.contains(spec.id), "the id is in use");
  require(!spec.tokens.empty(), "the prompt is empty");
  require(spec.max_tokens >= 1, "max_tokens must be at least 1, got " + std::to_string(spec.max_tokens));
  const auto prompt = static_cast<std::int64_t>(spec.tokens.size());
  require(prompt < config_.max_context, "a prompt of " + std::to_string(prompt) +
                                            " tokens leaves no room for an answer in max_context " +
                                            std::to_string(config_.max_context));
  Request measure;
  measure.known = static_cast<std::int32_t>(prompt);
  Need need = need_of(measure, 0);
  // A window that moves on has its blocks begin anywhere in a slab.
  const std::int64_t blocks = ceil_div(prompt + 1, config_.block_tokens);
  for (GroupId g = 0; g < config_.groups.size(); ++g) {
    const bool moves = config_.groups[g].kind == GroupKind::window && need[g] < blocks;
    need[g] += moves ? config_.groups[g].blocks_per_slab - 1 : 0;
  }
  if (cache_.fits_empty(need)) return;
  std::string numbers;
  for (GroupId g = 0; g < config_.groups.size(); ++g) {
    numbers += (g > 0 ? ", " : "") + std::to_string(need[g]) + " " +
               std::string(name_of(config_.groups[g].kind)) + " blocks (" +
               std::to_string(config_.groups[g].blocks_per_slab) + " a slab)";
  }
  require(false, "a prompt of " + std::to_string(prompt) + " tokens needs " + numbers +
                     ", but the whole cache has " + std::to_string(config_.num_slabs) + " slabs");
}

Need Scheduler::need_of(const Request& request, std::uint32_t cached) const {
  Need need{};
  const std::int64_t blocks = ceil_div(std::int64_t{request.known} + 1, config_.block_tokens);
  for (GroupId g = 0; g < config_.groups.size(); ++g) {
    const auto& group = config_.groups[g];
    switch (group.kind) {
      case GroupKind::full:
        need[g] = blocks - cached;
        break;
      // The window itself, and a block on either side that it only partly covers.
      case GroupKind::window:
        need[g] = std::min<std::int64_t>(blocks, ceil_div(group.window, config_.block_tokens) + 2);
        break;
      case GroupKind::state:
        need[g] = 1;
        break;
    }
  }
  return need;
}

Hash128 Scheduler::before_block(const Request& request, std::size_t block, const Hash128& before) const {
  Hash128 hash = before;
  const auto unit = static_cast<std::int64_t>(config_.block_tokens);
  const auto first = static_cast<std::int64_t>(block) * unit;
  for (const auto& [position, digest] : request.content) {
    if (position >= first && position < first + unit) {
      hash = hasher_.with_content(hash, static_cast<std::uint64_t>(position), digest);
    }
  }
  return hash;
}

void Scheduler::hash_prompt(Request& request, std::span<const std::int32_t> tokens) const {
  const auto unit = static_cast<std::size_t>(config_.block_tokens);
  const std::size_t blocks = tokens.size() / unit;
  request.hashes.reserve(blocks +
                         std::min<std::size_t>(256, static_cast<std::size_t>(request.max_tokens) / unit) + 2);
  Hash128 hash = request.root;
  for (std::size_t block = 0; block < blocks; ++block) {
    if (!request.content.empty()) hash = before_block(request, block, hash);
    hash = hasher_.next(hash, tokens.subspan(block * unit, unit));
    request.hashes.push_back(hash);
  }
  request.tail.reserve(unit + static_cast<std::size_t>(config_.draft_tokens) + 1);
  request.tail.assign(tokens.begin() + static_cast<std::ptrdiff_t>(blocks * unit), tokens.end());
}

void Scheduler::fetch_ahead(const Request& request) const {
  // The block is published a step later; what that touches is far from the processor by now when the index is
  // large.
  if (!request.running()) return;
  const Holding& cache = request.cache();
  cache_.index().prefetch(request.hashes.back(), cache.tip.node());
  for (const auto& fresh : cache.full) {
    if (!fresh.empty()) cache_.storage().device().prefetch(fresh.front().group(), fresh.front().id());
  }
}

void Scheduler::hash_tail(Request& request) {
  const auto unit = static_cast<std::size_t>(config_.block_tokens);
  while (request.tail.size() >= unit) {
    const Hash128 before = request.hashes.empty() ? request.root : request.hashes.back();
    const Hash128 start =
        request.content.empty() ? before : before_block(request, request.hashes.size(), before);
    request.hashes.push_back(hasher_.next(start, std::span(request.tail).first(unit)));
    fetch_ahead(request);
    request.tail.erase(request.tail.begin(), request.tail.begin() + static_cast<std::ptrdiff_t>(unit));
  }
}

void Scheduler::want_checkpoints(Request& request, const RequestSpec& spec) const {
  if (state_groups_.empty() || !request.hashing) return;
  const auto last = static_cast<std::uint32_t>(request.prompt / config_.block_tokens);
  want_checkpoint(request, last);
  // A prompt that ends on a boundary is resumed one boundary earlier when it comes again: one token must be
  // computed.
  if (request.prompt % config_.block_tokens == 0 && last > 1) want_checkpoint(request, last - 1);
  for (const std::int64_t position : spec.boundaries) {
    if (position > 0 && position <= request.prompt)
      want_checkpoint(request, static_cast<std::uint32_t>(position / config_.block_tokens));
  }
  const std::int32_t tail = config_.policy.checkpoint_tail;
  if (tail > 0 && request.prompt > tail)
    want_checkpoint(request, static_cast<std::uint32_t>((request.prompt - tail) / config_.block_tokens));
  const std::int64_t stride = config_.policy.checkpoint_stride;
  for (std::int64_t at = stride; stride > 0 && at < request.prompt; at += stride) {
    want_checkpoint(request, static_cast<std::uint32_t>(at / config_.block_tokens));
  }
}

void Scheduler::want_checkpoint(Request& request, std::uint32_t boundary) const {
  auto& wanted = request.wanted;
  const auto at = std::lower_bound(wanted.begin(), wanted.end(), boundary);
  if (boundary > 0 && (at == wanted.end() || *at != boundary)) wanted.insert(at, boundary);
}

std::int32_t Scheduler::count_uncached(const Request& request) const {
  std::int32_t cached = 0;
  if (request.hashing && !request.fresh) {
    const auto limit = static_cast<std::uint32_t>((request.prompt - 1) / config_.block_tokens);
    cached =
        static_cast<std::int32_t>(cache_.index().match(request.hashes, limit).resume) * config_.block_tokens;
  }
  return request.prompt - cached;
}

double Scheduler::head_start(const Request& request) const {
  // Short prefills first: a request counts as arrived later by the time that its prefill takes, within the
  // fairness bound.
  constexpr double kGuess = 1e-4;
  const double per_token = model_.seconds_per_token() > 0.0 ? model_.seconds_per_token() : kGuess;
  return std::min(config_.policy.fairness, per_token * request.uncached);
}

void Scheduler::add(const RequestSpec& spec) {
  check_spec(spec);
  auto owned = std::make_unique<Request>();
  Request& request = *owned;
  request.id = spec.id;
  request.run = ++runs_;
  request.prompt = request.known = static_cast<std::int32_t>(spec.tokens.size());
  request.max_tokens = std::min(spec.max_tokens, config_.max_context - request.prompt);
  request.left = request.max_tokens;
  request.min_left = spec.min_tokens;
  if (spec.stop_token_ids.size() <= request.stops.size()) {
    std::copy(spec.stop_token_ids.begin(), spec.stop_token_ids.end(), request.stops.begin());
    request.num_stops = static_cast<std::uint8_t>(spec.stop_token_ids.size());
  } else {
    request.more_stops = spec.stop_token_ids;
    std::sort(request.more_stops.begin(), request.more_stops.end());
    request.num_stops = 255;
  }
  request.arrival = spec.arrival;
  request.deadline = spec.deadline;
  request.retention = spec.retention;
  request.content = spec.content;
  request.hashing = config_.prefix_cache;
  request.fresh = spec.fresh;
  if (request.hashing) {
    request.root = hasher_.root(spec.adapter, spec.cache_salt);
    hash_prompt(request, spec.tokens);
    const auto seen = static_cast<std::int32_t>(seen_.see(request.hashes));
    request.ceiling = request.fresh ? 0 : std::min(request.prompt - 1, seen * config_.block_tokens);
  }
  want_checkpoints(request, spec);
  request.session = spec.session;
  request.uncached = count_uncached(request);
  request.order = {spec.priority, spec.arrival + head_start(request), next_serial_++};
  if (request.deadline != kNever) deadlines_.emplace(request.deadline, request.id);
  waiting_.insert(&request);
  requests_.emplace(request.id, std::move(owned));
  ++epoch_;
}

std::unique_ptr<Request> Scheduler::take_out(Request& request) {
  // An infinite cache keeps answers, too: the next turn has this one's tokens in its prompt.
  const auto blocks = static_cast<std::size_t>(request.computed / config_.block_tokens);
  if (blocks > 0) seen_.see(std::span(request.hashes).first(std::min(blocks, request.hashes.size())));
  auto node = requests_.extract(request.id);
  if (request.deadline != kNever) deadlines_.erase({request.deadline, request.id});
  if (request.queued()) waiting_.erase(&request);  // not there while it follows another
  unlist(request);
  return std::move(node.mapped());
}

void Scheduler::retire(StepId last_step, Remains&& remains, std::unique_ptr<Request> request) {
  ++epoch_;
  cache_.limbo().keep(last_step, std::move(remains), std::move(request));
}

template <class Event>
void Scheduler::end(Request& request, Event event, Reason reason, EndedRows& report) {
  report.add(request.id, request.slot, reason);
  if (request.running()) {
    if constexpr (std::is_same_v<Event, End>) {
      publish_end(request);
      note_turn(request);
    }
    queue_demotions(request);
  }
  leave_sharing(request);
  std::unique_ptr<Request> owned = take_out(request);
  request.slot = kNoSlot;
  request.run = ++runs_;
  Remains remains = leave(request, std::move(event));
  retire(request.last_step, std::move(remains), std::move(owned));
}

template void Scheduler::end(Request&, End, Reason, EndedRows&);

bool Scheduler::cancel(RequestId id) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return false;
  ++counters_.cancelled;
  end(*found->second, Cancel{}, Reason::cancelled, draft_->ended);
  return true;
}

bool Scheduler::finish(RequestId id) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return false;
  Request& request = *found->second;
  if (std::holds_alternative<Submitted>(request.state)) return cancel(id);
  ++counters_.finished;
  end(request, End{Reason::stop}, Reason::stop, draft_->ended);
  return true;
}

std::optional<std::vector<std::vector<BlockId>>> Scheduler::fail(RequestId id) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return std::nullopt;
  Request& request = *found->second;
  ++counters_.failed;
  std::vector<std::vector<BlockId>> blocks(config_.groups.size());
  if (request.found < request.hashes.size()) {
    const NodeId first = cache_.index().find(request.hashes[request.found]);
    if (first != kNone) cache_.index().forget(first, blocks);
  }
  if (request.running()) list_private(request.cache(), blocks);
  // As a cancelled one it leaves no checkpoint and no trace in its session.
  end(request, Cancel{}, Reason::error, draft_->ended);
  return blocks;
}

void Scheduler::list_private(const Holding& cache, std::vector<std::vector<BlockId>>& blocks) {
  const auto add = [&blocks](const BlockRef& block) {
    if (block) blocks[block.group()].push_back(block.id());
  };
  for (const auto& fresh : cache.full) {
    for (const BlockRef& block : fresh) add(block);
  }
  for (const WindowHolding& window : cache.windows) {
    for (const WindowBlock& block : window.blocks) add(block.fresh);
  }
  for (const StateHolding& state : cache.states) add(state.working);
  for (const Snapshot& snapshot : cache.snapshots) {
    for (const BlockRef& block : snapshot.blocks) add(block);
  }
}

void Scheduler::expire(double now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Request& request = *requests_.at(deadlines_.begin()->second);
    ++counters_.timed_out;
    end(request, Expire{}, Reason::timeout, draft_->ended);
  }
}

std::vector<Hash128> Scheduler::prefix_hashes(std::span<const std::int32_t> tokens,
                                              const std::string& adapter,
                                              const std::string& cache_salt) const {
  Request probe;
  probe.root = hasher_.root(adapter, cache_salt);
  hash_prompt(probe, tokens);
  return std::move(probe.hashes);
}

std::int32_t Scheduler::match(std::span<const std::int32_t> tokens, const std::string& adapter,
                              const std::string& cache_salt) const {
  if (!config_.prefix_cache || tokens.empty()) return 0;
  const auto limit =
      static_cast<std::uint32_t>((tokens.size() - 1) / static_cast<std::size_t>(config_.block_tokens));
  const auto hashes = prefix_hashes(tokens, adapter, cache_salt);
  return static_cast<std::int32_t>(cache_.index().match(hashes, limit).resume) * config_.block_tokens;
}

}  // namespace quickturn::control
