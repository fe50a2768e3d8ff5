// Throughput under a latency promise: how many prompt tokens a step may carry beside its decoding rows.
#include <algorithm>
#include <utility>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

namespace {

constexpr double kNoLimit = 1e9;
// The first prompt tokens beside decoding rows are so few: what they take is news. Kernels work in tiles of
// so many rows, so that a step isn't made a row longer than some.
constexpr std::int32_t kTile = 16;
// Steps aren't launched kernel by kernel for less than so many times as many tokens a second; if none was so
// far, for less than so many.
constexpr double kWorthLaunching = 1.1;
constexpr double kWorthTrying = 2.0;
// What passes between steps is learned so fast, and is no more than so much of a step.
constexpr double kBetweenRate = 0.05;
constexpr double kMostBetween = 0.25;
// Where even the least prompt takes longer than promised, it may take so many times the least, ...
constexpr double kOverdrawn = 1.5;
// ... once the steps before it have saved the time, or after so many: nobody starves who might be answered.
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
  if (policy.min_tps_per_user > 0.0) return 1.0 / policy.min_tps_per_user - between();
  if (policy.max_ttft > 0.0) {
    for (const Request* request : prefilling_) {
      const double rest = model_.seconds_per_token() * (request->known - request->planned);
      if (request->generated == 0 && now_ - request->arrival + rest >= policy.max_ttft) return kNoLimit;
    }
  }
  const double steady = decode_time + between();
  return policy.max_gap_factor > 0.0 ? policy.max_gap_factor * steady - between() : kNoLimit;
}

void Scheduler::note_between() {
  // Of one plan to the next, what no step took, while somebody was being answered.
  const double whole = now_ - std::exchange(planned_at_, now_);
  const double spent = std::exchange(spent_, 0.0);
  const double most = kMostBetween * spent;
  if (spent > 0.0 && !decoding_.empty())
    between_ += kBetweenRate * (std::clamp(whole - spent, -most, most) - between_);
}

bool Scheduler::decodes_are_known() const {
  return model_.knows_decodes() && mixed_steps_ < kDecodesKnownFor &&
         building_->load.decode_tokens <= kDecodesKnownTo * lone_decodes_;
}

std::int32_t Scheduler::whole_tiles(std::int32_t tokens, bool recorded) const {
  const std::int32_t others = draft_->num_tokens;
  // A recorded step is filled up: what it has room for costs no more than less.
  if (recorded) return recorded_.fill(others, tokens);
  std::int32_t least = kTile - others % kTile;
  if (least < kTile / 2) least += kTile;
  return tokens <= least ? least : (others + tokens) / kTile * kTile - others;
}

std::int32_t Scheduler::a_little_more(std::int32_t tokens, bool recorded) const {
  return recorded ? recorded_.next(draft_->num_tokens, tokens) : tokens + std::max(kTile, tokens / 4);
}

const Request& Scheduler::next_prompt() const {
  const Request* next = next_in_turn();
  return next == nullptr ? *prefilling_.front() : *next;
}

std::int32_t Scheduler::padded(std::int32_t tokens, bool recorded) const {
  const auto others = static_cast<std::int32_t>(building_->load.decode_tokens);
  if (recorded) return recorded_.tokens_for(others, tokens) - others;
  return (others + tokens + kTile - 1) / kTile * kTile - others;
}

double Scheduler::time_with(std::int32_t tokens, bool recorded) const {
  const double context = next_prompt().planned;
  StepLoad load = building_->load;
  load.recorded = recorded;
  load.prompt_tokens = padded(tokens, recorded);
  load.prompt_context = context;
  load.prompt_work = load.prompt_tokens * (context + 0.5 * load.prompt_tokens);
  return model_.predict(load);
}

Scheduler::Allowance Scheduler::prefill_budget() const {
  const std::int32_t most = config_.max_step_tokens - draft_->num_tokens;
  if (building_->rows.empty() || !model_.knows()) return {most};
  const double decode_time = model_.predict(building_->load);
  const double limit = step_limit(decode_time);
  if (limit >= kNoLimit) return {most};
  if (!decodes_are_known() && starved_steps_ + 1 < kStarvedSteps) return {0};
  const std::int32_t others = draft_->num_tokens;
  // A prompt whose tokens are scored is launched kernel by kernel.
  if (recorded_.most(others) == 0 || next_prompt().fresh) {
    const std::int32_t tokens = in_one_step(decode_time, limit, false);
    return {tokens > 0 ? tokens : over_several_steps(decode_time, limit, false)};
  }
  const std::int32_t one = in_one_step(decode_time, limit, true);
  if (one == 0) return {over_several_steps(decode_time, limit, true), true};
  const std::int32_t any = in_one_step(decode_time, limit, false);
  return launching_pays(one, any, limit) ? Allowance{any} : Allowance{one, true};
}

bool Scheduler::launching_pays(std::int32_t one, std::int32_t any, double limit) const {
  const Request& next = next_prompt();
  const std::int32_t rest = next.known - next.planned;
  // One prompt's piece that a recorded step holds runs in that.
  if (any == 0 || (rest >= any && any <= recorded_.most(draft_->num_tokens))) return false;
  const double allowed = limit / model_.margin(false);
  // As many as would fit, once that many have been tried.
  const std::int32_t fits =
      std::max(any, most_that(config_.max_step_tokens - draft_->num_tokens,
                              [&](std::int32_t tokens) { return time_with(tokens, false) <= allowed; }));
  const double of_any = std::min(fits, left_to_prefill(fits));
  const double of_one = std::min(one, rest);
  const double worth = model_.most_beside(false) > 0 ? kWorthLaunching : kWorthTrying;
  return of_any * time_with(one, true) > worth * of_one * time_with(fits, false);
}

std::int32_t Scheduler::known_beside(bool recorded) const {
  // What recorded steps took says enough to try others.
  const bool guess = !recorded && recorded_.most(draft_->num_tokens) > 0;
  const double own = model_.most_beside(recorded);
  return static_cast<std::int32_t>(guess ? std::max(own, model_.most_beside(true)) : own);
}

std::int32_t Scheduler::in_one_step(double decode_time, double limit, bool recorded) const {
  const std::int32_t most =
      recorded ? recorded_.most(draft_->num_tokens) : config_.max_step_tokens - draft_->num_tokens;
  const std::int32_t least = std::min(most, whole_tiles(0, recorded));
  const std::int32_t known = known_beside(recorded);
  if (known == 0) return least;
  // More than ever: a little on trust, twice as many if that fits even when none of the cost is fixed.
  const std::int32_t little = std::min(most, a_little_more(known, recorded));
  const double each = (time_with(std::min(most, known), recorded) - decode_time) / known;
  const double allowed = limit / model_.margin(recorded);
  const std::int32_t fits = most_that(std::max(little, std::min(most, 2 * known)), [&](std::int32_t tokens) {
    return time_with(tokens, recorded) <= allowed &&
           (tokens <= little || decode_time + each * tokens <= allowed);
  });
  if (fits < least) {
    // What should just fit may be a little late now and then: better than what comes next.
    return time_with(least, recorded) <= limit ? least : 0;
  }
  if (!recorded && left_to_prefill(fits) <= fits) return fits;
  return std::min(most, whole_tiles(fits, recorded));
}

// Not in one step: then in several together, on average within what is allowed.
std::int32_t Scheduler::over_several_steps(double decode_time, double limit, bool recorded) const {
  const double allowed = limit / model_.margin(recorded);
  const std::int32_t room =
      recorded ? recorded_.most(draft_->num_tokens) : config_.max_step_tokens - draft_->num_tokens;
  const std::int32_t most = std::min(room, a_little_more(known_beside(recorded), recorded));
  const std::int32_t least = std::min(most, whole_tiles(0, recorded));
  std::int32_t tokens = least;
  if (larger_prompts_ < kLeastKnownFor) {
    const double enough = kOverdrawn * (time_with(least, recorded) - decode_time);
    tokens = whole_tiles(
        most_that(most, [&](std::int32_t many) { return time_with(many, recorded) - decode_time <= enough; }),
        recorded);
    if (pieces_ % kMoreTriedEvery == kMoreTriedEvery - 1)
      tokens = whole_tiles(a_little_more(tokens, recorded), recorded);
  }
  const std::int32_t steps = starved_steps_ + 1;
  const double spare = std::max(0.0, allowed - decode_time);
  const bool saved = steps * spare >= time_with(tokens, recorded) - decode_time;
  return saved || (steps >= kStarvedSteps && somebody_may_end()) ? std::min(most, tokens) : 0;
}

std::int32_t Scheduler::left_to_prefill(std::int32_t enough) const {
  std::int32_t left = 0;
  for (const Request* request : prefilling_) {
    left += open_tokens(*request);
    if (left > enough) break;
  }
  return left;
}

void Scheduler::note_prefills(std::int32_t budget) {
  StepLoad& load = building_->load;
  if (load.decode_tokens > 0 && load.prompt_tokens > 0) {
    const auto others = static_cast<std::int32_t>(load.decode_tokens);
    const auto tokens = static_cast<std::int32_t>(load.prompt_tokens);
    load.recorded = draft_->num_rows() == draft_->num_decode_rows + 1 &&
                    !building_->rows.back().request->fresh && recorded_.tokens_for(others, tokens) > 0;
    load.prompt_tokens = padded(tokens, load.recorded);
  }
  if (load.decode_tokens > 0 && load.prompt_tokens == 0) {
    mixed_steps_ = 0;
    lone_decodes_ = load.decode_tokens;
  } else if (load.decode_tokens > 0) {
    ++mixed_steps_;
    ++pieces_;
    larger_prompts_ = load.prompt_tokens < 2 * kTile ? 0 : larger_prompts_ + 1;
  }
  starved_steps_ = budget > 0 ? 0 : std::min(starved_steps_ + 1, kDecodesKnownFor);
}

}  // namespace quickturn::control
