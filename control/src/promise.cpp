// Throughput under a latency promise: how many prompt tokens a step may carry beside its decoding rows.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

namespace {

constexpr double kNoLimit = 1e9;
// While decoding alone takes all that was promised, prefills still get a block in every so many steps.
constexpr std::int32_t kStarvedSteps = 8;

}  // namespace

double Scheduler::step_limit(double decode_time) const {
  const Policy& policy = config_.policy;
  if (policy.min_tps_per_user > 0.0) return 1.0 / policy.min_tps_per_user;
  if (policy.max_ttft > 0.0) {
    for (const Request* request : prefilling_) {
      const double rest = model_.seconds_per_token() * (request->known - request->planned);
      if (request->generated == 0 && now_ - request->arrival + rest >= policy.max_ttft) return kNoLimit;
    }
  }
  return policy.max_gap_factor > 0.0 ? policy.max_gap_factor * decode_time : kNoLimit;
}

std::int32_t Scheduler::prefill_budget() const {
  const std::int32_t most = config_.max_step_tokens - draft_->num_tokens;
  if (building_->rows.empty() || !model_.knows()) return most;
  const StepLoad decodes = building_->load;
  const double limit = step_limit(model_.predict(decodes));
  if (limit >= kNoLimit) return most;
  const double context = prefilling_.front()->planned;
  const auto time_with = [&](std::int32_t tokens) {
    StepLoad load = decodes;
    load.tokens += tokens;
    load.prefill_work += tokens * (context + 0.5 * tokens);
    return model_.predict(load);
  };
  const auto trusted =
      static_cast<std::int32_t>(std::max(model_.trusted_tokens(), 2.0 * config_.block_tokens));
  std::int32_t good = 0;
  std::int32_t bad = std::min(most, trusted) + 1;
  while (bad - good > 1) {
    const std::int32_t middle = good + (bad - good) / 2;
    (time_with(middle) <= limit ? good : bad) = middle;
  }
  if (good < config_.block_tokens && starved_steps_ >= kStarvedSteps)
    return std::min(most, config_.block_tokens);
  return good;
}

}  // namespace quickturn::control
