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
                case GroupKind::full: held = cache.published + static_cast<std::int64_t>(cache.full[full++].size()); break;
                case GroupKind::window: held = static_cast<std::int64_t>(cache.windows[window++].blocks.size()); break;
                case GroupKind::state: held = cache.states[state++].working ? 1 : 0; break;
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
    if (blocked_epoch_ == epoch_) return;
    for (auto next = waiting_.begin(); next != waiting_.end() && slots_.free() > 0;) {
        Request& request = **next;
        // A retracted request first hears of the token that is still on its way.
        if (request.in_flight > 0) {
            ++next;
            continue;
        }
        if (!admit_one(request)) break;
        next = waiting_.erase(next);
    }
    blocked_epoch_ = epoch_;
}

bool Scheduler::admit_one(Request& request) {
    Match match;
    if (request.hashing) {
        const auto limit = static_cast<std::uint32_t>((request.known - 1) / config_.block_tokens);
        match = cache_.index().match(request.hashes, limit);
    }
    Need need = need_of(request, match.resume);
    const Need others = committed();
    for (std::size_t g = 0; g < need.size(); ++g) need[g] += others[g];
    // Cached blocks that nobody else uses can't be evicted any more once this request uses them.
    for (NodeId node = match.resume_node; node != kNone && !cache_.index().is_protected(node); node = cache_.index().parent(node)) {
        for (const GroupId full : cache_.index().full_groups()) ++need[full];
    }
    if (!cache_.fits(need)) return false;

    SlotRef slot = slots_.take();
    Holding cache;
    take_prefix(request, cache, slot.id(), match);
    request.slot = slot.id();
    request.planned = request.computed = request.edge = static_cast<std::int32_t>(match.resume) * config_.block_tokens;
    request.publish_at = request.computed + config_.block_tokens;
    draft_->admitted.ids.push_back(request.id);
    draft_->admitted.slots.push_back(request.slot);
    draft_->admitted.cached_tokens.push_back(request.computed);
    draft_->admitted.known_tokens.push_back(request.known);
    if (request.retractions == 0) {
        counters_.prompt_tokens += request.prompt;
        counters_.cached_tokens += request.computed;
    }
    Admit event{std::move(slot), std::move(cache)};
    if (std::holds_alternative<Submitted>(request.state)) {
        move_on<Submitted>(request, std::move(event));
    } else {
        move_on<Retracted>(request, std::move(event));
    }
    enlist(request);
    return true;
}

void Scheduler::take_prefix(Request& request, Holding& cache, SlotId slot, const Match& match) {
    (void)request;
    PrefixIndex& index = cache_.index();
    cache.tip = index.pin(match.resume_node);
    cache.published = match.resume;
    cache.full.resize(index.full_groups().size());
    cache.windows.resize(window_groups_.size());
    cache.states.resize(state_groups_.size());
    cache.last_checkpoint = match.resume;
    for (std::size_t f = 0; f < cache.full.size(); ++f) {
        BlockUpdates& updates = draft_->block_updates[index.full_groups()[f]];
        NodeId node = match.resume_node;
        for (std::uint32_t depth = match.resume; depth > 0; --depth, node = index.parent(node)) {
            updates.add(slot, depth - 1, index.block(node, kDevice, static_cast<int>(f)));
        }
    }
}

}  // namespace quickturn::control
