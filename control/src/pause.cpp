// Pauses: now and then a step that carries much more of prompts than the promise leaves room for.
//
// Small pieces of prompts can cost many times what their tokens cost in a large step: of a mixture of experts
// each token reads others. Where that is so, one long step and many of decoding rows alone bring prompts on
// faster than a piece in every step, and leave users more tokens a second. The promise then holds on average,
// and but for one in `pause_every` of the gaps between a user's tokens.
#include <algorithm>
#include <cmath>
#include <limits>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

namespace {

// So many pauses may be saved up, since a prompt whose states are kept on the way needs several steps.
constexpr std::int32_t kMostSaved = 3;
// What the steps until the next pause save pays for it, if a little is left over.
constexpr double kPaidBack = 0.9;
// Predictions are as exact as that.
constexpr double kJust = 1.02;
// Pieces that are nearly as fast go before a pause.
constexpr double kWorthPausing = 2.0;
// Where steps come to leave next to nothing, what users are behind by is forgotten after so many pauses'
// time: nobody starves.
constexpr std::int32_t kForgotten = 2;

}  // namespace

double Scheduler::pause_with(std::int32_t tokens) const {
  StepLoad mixed = building_->load;
  for (const Request* request : prefilling_) {
    const double query = std::min(tokens, open_tokens(*request));
    if (query <= 0) continue;
    mixed.prompt_tokens += query;
    mixed.prompt_context += request->planned;
    mixed.prompt_work += query * (request->planned + 0.5 * query);
    tokens -= static_cast<std::int32_t>(query);
  }
  StepLoad prompts = mixed;
  prompts.decode_tokens = prompts.decode_context = 0.0;
  double least = model_.predict(building_->load) + model_.predict(prompts);
  if (mixed.prompt_tokens <= model_.most_beside(false)) least = std::min(least, model_.predict(mixed));
  return least;
}

Scheduler::Allowance Scheduler::with_pauses(const Allowance& allowed) const {
  if (config_.policy.max_pause <= 0.0 || building_->rows.empty()) return allowed;
  if (!decodes_are_known() || model_.seconds_per_token() <= 0.0) return allowed;
  const double decode_time = model_.predict(building_->load);
  const double limit = step_limit(decode_time);
  const double spare = limit - decode_time;
  const std::int32_t most = config_.max_step_tokens - draft_->num_tokens;
  if (spare <= 0.0 || allowed.tokens >= most) return allowed;
  // A piece that is allowed on average only would be a pause for little.
  Allowance piece = allowed;
  if (piece.tokens > 0 && time_with(piece.tokens, piece.one_prompt) > kJust * limit) piece = {};

  const double longest =
      std::min(config_.policy.max_pause, limit + kPaidBack * config_.policy.pause_every * spare);
  std::int32_t tokens = std::min(most, left_to_prefill(most));
  double pause = pause_with(tokens);
  while (tokens > piece.tokens && pause > longest) {
    tokens -= std::max(1, tokens / 8);
    pause = pause_with(tokens);
  }
  if (tokens <= piece.tokens) return allowed;

  const double steps_to_pay = std::ceil(pause_debt_ / spare);
  const double wait = std::max<double>(steps_to_pay, config_.policy.pause_every - pause_credit_);
  const double pieces = piece.tokens > 0 ? std::ceil(static_cast<double>(tokens) / piece.tokens) *
                                               time_with(piece.tokens, piece.one_prompt)
                                         : std::numeric_limits<double>::infinity();
  if (wait <= 0.0) return kWorthPausing * pause < pieces ? Allowance{tokens, false, pause} : piece;
  const bool better = wait * decode_time + pause < pieces;
  return better || steps_to_pay > 0.0 ? Allowance{} : piece;
}

void Scheduler::note_pause(const Allowance& allowed) {
  if (config_.policy.max_pause <= 0.0) return;
  const StepLoad& load = building_->load;
  const std::int32_t every = config_.policy.pause_every;
  if (load.decode_tokens == 0) {
    pause_credit_ = std::max(pause_credit_, every);
    pause_debt_ = 0.0;
    return;
  }
  const bool pause = allowed.pause > 0.0 && load.prompt_tokens > 0;
  counters_.pauses += pause ? 1 : 0;
  pause_credit_ = std::min(pause_credit_ + 1, kMostSaved * every) - (pause ? every : 0);
  building_->load.pause = pause ? allowed.pause : 0.0;
  pause_age_ = pause ? 0 : std::min(pause_age_ + 1, kForgotten * every);
  if (!pause && pause_age_ == kForgotten * every) pause_debt_ = 0.0;
  if (!pause && pause_debt_ <= 0.0) return;
  StepLoad decodes = load;
  decodes.prompt_tokens = decodes.prompt_context = decodes.prompt_work = 0.0;
  const double decode_time = model_.predict(decodes);
  pause_debt_ = std::max(0.0, pause_debt_ + (pause ? allowed.pause : decode_time) - step_limit(decode_time));
}

}  // namespace quickturn::control
