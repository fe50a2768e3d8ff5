// Figures for the metrics page, and the audit of every invariant.
#include <stdexcept>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

std::vector<std::pair<std::string, double>> Scheduler::stats() const {
    const Arena& arena = const_cast<Scheduler*>(this)->cache_.storage().device();
    std::int64_t evictable = 0;
    for (GroupId g = 0; g < config_.groups.size(); ++g) evictable += arena.evictable(g);
    const auto number = [](auto value) { return static_cast<double>(value); };
    return {
        {"requests_waiting", number(waiting_.size())},
        {"requests_running", number(slots_.capacity() - slots_.free())},
        {"requests_decoding", number(decoding_.size())},
        {"requests_prefilling", number(prefilling_.size())},
        {"steps", number(counters_.steps)},
        {"prompt_tokens", number(counters_.prompt_tokens)},
        {"cached_tokens", number(counters_.cached_tokens)},
        {"ceiling_tokens", number(counters_.ceiling_tokens)},
        {"computed_tokens", number(counters_.computed_tokens)},
        {"generated_tokens", number(counters_.generated_tokens)},
        {"retractions", number(counters_.retractions)},
        {"requests_finished", number(counters_.finished)},
        {"requests_cancelled", number(counters_.cancelled)},
        {"requests_timed_out", number(counters_.timed_out)},
        {"shared_prefixes", number(counters_.shared_prefixes)},
        {"sessions", number(sessions_.size())},
        {"blocks_held", held_blocks_},
        {"evictions", number(cache_.evictions())},
        {"slabs_total", number(arena.num_slabs())},
        {"slabs_free", number(arena.free_slabs())},
        {"free_share", cache_.free_share()},
        {"blocks_evictable", number(evictable)},
        {"index_nodes", number(cache_.index().num_nodes())},
        {"index_bytes", number(cache_.index().bytes())},
        {"min_cacheable_tokens", number(config_.block_tokens)},
    };
}

void Scheduler::check() const {
    auto& cache = const_cast<Cache&>(cache_);
    cache.storage().check();
    cache.index().check();
}

}  // namespace quickturn::control
