// Figures for the metrics page, and the audit of every invariant.
#include <algorithm>
#include <stdexcept>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

std::vector<std::pair<std::string, double>> Scheduler::stats() const {
  const Arena& arena = cache_.storage().device();
  std::int64_t evictable = 0;
  for (GroupId g = 0; g < config_.groups.size(); ++g) evictable += arena.evictable(g);
  const auto number = [](auto value) { return static_cast<double>(value); };
  const auto held = [this](const Request* one) { return is_held(*one); };
  std::vector<std::pair<std::string, double>> figures{
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
      {"requests_failed", number(counters_.failed)},
      {"shared_prefixes", number(counters_.shared_prefixes)},
      {"sessions", number(sessions_.size())},
      {"blocks_held", held_blocks_},
      {"evictions", number(cache_.evictions())},
      {"slabs_total", number(arena.num_slabs())},
      {"slabs_free", number(arena.free_slabs())},
      {"free_share", cache_.free_share(kDevice)},
      {"blocks_evictable", number(evictable)},
      {"index_nodes", number(cache_.index().num_nodes())},
      {"index_bytes", number(cache_.index().bytes())},
      {"index_entries", number(cache_.index().num_sides())},
      {"min_cacheable_tokens", number(config_.block_tokens)},
      {"pauses", number(counters_.pauses)},
      {"requests_held_by_promise", promise_holds_ ? number(waiting_.size()) : 0.0},
      {"prompts_held_by_promise", number(std::count_if(prefilling_.begin(), prefilling_.end(), held))},
      {"step_us_predicted", last_predicted_ * 1e6},
      {"step_us_measured", last_measured_ * 1e6},
      {"transfers_in_progress", number(book_.job_of.size())},
      {"loads", number(book_.loads)},
      {"demotes", number(book_.demotes)},
  };
  for (GroupId g = 0; g < config_.groups.size(); ++g) {
    const std::string& name = config_.groups[g].name;
    const std::string group = "group_" + (name.empty() ? std::to_string(g) : name);
    figures.emplace_back(group + "_slabs", number(arena.slabs_of(g)));
    figures.emplace_back(group + "_blocks", number(arena.out(g)));
    figures.emplace_back(group + "_blocks_evictable", number(arena.evictable(g)));
    figures.emplace_back(group + "_evictions", number(cache_.evictions(g)));
  }
  for (TierId t = 1; t <= config_.tiers.size(); ++t) {
    std::int64_t out = 0;
    for (GroupId g = 0; g < config_.groups.size(); ++g) out += cache_.storage().out(t, g);
    figures.emplace_back("tier_" + std::to_string(t) + "_blocks", number(out));
    figures.emplace_back("tier_" + std::to_string(t) + "_free_share", cache_.free_share(t));
  }
  return figures;
}

void Scheduler::check() const {
  cache_.storage().check();
  cache_.index().check();
  const auto require = [](bool good, const std::string& what) {
    if (!good) throw std::logic_error("scheduler: " + what);
  };
  std::size_t listed = 0;
  for (std::size_t i = 0; i < decoding_.size(); ++i) {
    require(decoding_[i]->decoding() && decoding_[i]->list_at == static_cast<std::int32_t>(i),
            "list of decoding requests");
  }
  for (const Request* request : prefilling_) {
    require(std::holds_alternative<Prefilling>(request->state), "list of prefilling requests");
    require(request->planned < request->known, "a prefill with nothing to compute");
  }
  for (const auto& [id, owned] : requests_) {
    const Request& request = *owned;
    require(request.id == id, "id of a request");
    require(request.queued() != request.running(), "slot of a request");
    if (request.queued()) {
      require((request.leader != nullptr) != (waiting_.count(const_cast<Request*>(&request)) == 1),
              "a queued request is lost");
      ++listed;
    } else {
      require(
          request.computed <= request.planned && request.planned <= std::max(request.edge, request.planned),
          "lengths of a request");
      require(
          !request.hashing || request.cache().published * static_cast<std::uint32_t>(config_.block_tokens) <=
                                  static_cast<std::uint32_t>(request.computed),
          "something was published before it was computed");
    }
  }
  require(listed >= waiting_.size(), "the queue holds requests that are over");
}

}  // namespace quickturn::control
