// Throughput under a latency promise: how many prompt tokens a step may carry beside its decoding rows.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

namespace {

constexpr double kNoLimit = 1e9;
// The first prompt tokens beside decoding rows are so few: what they take is news. Kernels work in tiles of
// so many rows, so that a step isn't made a row longer than some.
constexpr std::int32_t kTile = 16;
// Beyond so many times the largest recorded piece the device is busy for longer than the host.
constexpr std::int32_t kLaunchHidden = 2;
// Where even the least prompt takes longer than promised, it may take so many times the least, ...
constexpr double kOverdrawn = 1.5;
// ... once the steps before it have saved the time, or after so many: nobody starves.
constexpr std::int32_t kStarvedSteps = 8;
// What the least takes is measured again after so many larger ones.
constexpr std::int32_t kLeastKnownFor = 8;
// One piece in so many is a little larger than that: what once took long by accident is found out again.
constexpr std::int32_t kMoreTriedEvery = 8;
// What decoding alone takes is measured again after so many steps with prompts, and when rows have grown by
// so much.
constexpr std::int32_t kDecodesKnownFor = 64;
constexpr double kDecodesKnownTo = 1.5;

// The most of (0, most] for which it holds, if it holds up to somewhere; 0: for none.
template <class Holds>
std::int32_t most_that(std::int32_t most, const Holds& holds) {
  std::int32_t good = 0;
  std::int32_t bad = most + 1;
  while (bad - good > 1) {
    const std::int32_t middle = good + (bad - good) / 2;
    (holds(middle) ? good : bad) = middle;
  }
  return good;
}

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

bool Scheduler::decodes_are_known() const {
  return model_.knows_decodes() && mixed_steps_ < kDecodesKnownFor &&
         building_->load.decode_tokens <= kDecodesKnownTo * lone_decodes_;
}

std::int32_t Scheduler::recorded_room(std::int32_t tokens) const {
  std::int32_t room = 0;
  for (const RecordedStep& step : config_.recorded) {
    if (step.tokens == tokens && step.rows >= draft_->num_tokens)
      room = std::max(room, step.tokens - step.rows);
  }
  return room;
}

std::int32_t Scheduler::most_recorded() const {
  std::int32_t most = 0;
  for (const RecordedStep& step : config_.recorded) most = std::max(most, recorded_room(step.tokens));
  return most;
}

std::int32_t Scheduler::whole_tiles(std::int32_t tokens) const {
  // A recorded step is filled up: what it has room for costs no more than less.
  const std::int32_t most = most_recorded();
  if (most > 0 && tokens < kLaunchHidden * most) {
    std::int32_t best = 0;
    std::int32_t least = most;
    for (const RecordedStep& step : config_.recorded) {
      const std::int32_t room = recorded_room(step.tokens);
      if (room == 0) continue;
      least = std::min(least, room);
      if (room <= tokens) best = std::max(best, room);
    }
    return best > 0 ? best : least;
  }
  const std::int32_t others = draft_->num_tokens;
  std::int32_t least = kTile - others % kTile;
  if (least < kTile / 2) least += kTile;
  return tokens <= least ? least : (others + tokens) / kTile * kTile - others;
}

double Scheduler::time_with(std::int32_t tokens) const {
  const double context = prefilling_.front()->planned;
  StepLoad load = building_->load;
  load.prompt_tokens = tokens;
  load.prompt_context = context;
  load.prompt_work = tokens * (context + 0.5 * tokens);
  return model_.predict(load);
}

std::int32_t Scheduler::prefill_budget() const {
  const std::int32_t most = config_.max_step_tokens - draft_->num_tokens;
  if (building_->rows.empty() || !model_.knows()) return most;
  const double decode_time = model_.predict(building_->load);
  const double limit = step_limit(decode_time);
  if (limit >= kNoLimit) return most;
  if (!decodes_are_known() && starved_steps_ + 1 < kStarvedSteps) return 0;
  const std::int32_t least = std::min(most, whole_tiles(0));
  const auto known = static_cast<std::int32_t>(model_.most_beside());
  if (known == 0) return least;

  // More than ever: a little on trust, twice as many if that fits even when none of the cost is fixed.
  const std::int32_t little = std::min(most, known + std::max(kTile, known / 4));
  const double each = (time_with(known) - decode_time) / known;
  const double allowed = limit / model_.margin();
  const std::int32_t fits = most_that(std::max(little, std::min(most, 2 * known)), [&](std::int32_t tokens) {
    return time_with(tokens) <= allowed && (tokens <= little || decode_time + each * tokens <= allowed);
  });
  if (fits >= least && left_to_prefill(fits) <= fits) return fits;
  // What should just fit may be a little late now and then: better than what comes next.
  const std::int32_t within = fits >= least               ? std::min(most, whole_tiles(fits))
                              : time_with(least) <= limit ? least
                                                          : 0;
  return within > 0 ? within : several_steps(decode_time, allowed, little);
}

// Not in one step: then in several together, on average within what is allowed.
std::int32_t Scheduler::several_steps(double decode_time, double allowed, std::int32_t most) const {
  const std::int32_t least = std::min(most, whole_tiles(0));
  std::int32_t tokens = least;
  if (larger_prompts_ < kLeastKnownFor) {
    const double enough = kOverdrawn * (time_with(least) - decode_time);
    tokens = whole_tiles(
        most_that(most, [&](std::int32_t many) { return time_with(many) - decode_time <= enough; }));
    if (pieces_ % kMoreTriedEvery == kMoreTriedEvery - 1)
      tokens = whole_tiles(tokens + std::max(kTile, tokens / 4));
  }
  const std::int32_t steps = starved_steps_ + 1;
  const double spare = std::max(0.0, allowed - decode_time);
  const bool saved = steps * spare >= time_with(tokens) - decode_time;
  return saved || steps >= kStarvedSteps ? std::min(most, tokens) : 0;
}

std::int32_t Scheduler::left_to_prefill(std::int32_t enough) const {
  std::int32_t left = 0;
  for (const Request* request : prefilling_) {
    left += request->known - request->planned;
    if (left > enough) break;
  }
  return left;
}

void Scheduler::note_prefills(std::int32_t budget) {
  const StepLoad& load = building_->load;
  if (load.decode_tokens > 0 && load.prompt_tokens == 0) {
    mixed_steps_ = 0;
    lone_decodes_ = load.decode_tokens;
  } else if (load.decode_tokens > 0) {
    ++mixed_steps_;
    ++pieces_;
    larger_prompts_ = load.prompt_tokens < 2 * kTile ? 0 : larger_prompts_ + 1;
  }
  starved_steps_ = budget > 0 ? 0 : starved_steps_ + 1;
}

}  // namespace quickturn::control
