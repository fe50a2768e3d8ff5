// Who may begin to decode: prompts end in a step only as far as the steps after it, with their rows, are
// still as short as promised. Until then a prompt keeps its last token. Admission can't see to that alone:
// when many are admitted at once, what so many rows will take has never been measured.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

namespace {

// What so many times more rows than were measured take follows from the two last numbers of rows; of more
// than that, each counts for as much as one of those measured: rows cost no more than in proportion.
constexpr double kNear = 1.25;
// What more rows take is forgotten when somebody had to wait because of it for so many steps: what once took
// long by accident is found out again. Each time after twice as many, up to so many: where it was no
// accident, those who are answered then are slower than promised.
constexpr std::int32_t kHeldFor = 256;
constexpr std::int32_t kMostHeldFor = 64 * kHeldFor;

}  // namespace

void Scheduler::note_rows(const StepLoad& load, double seconds) {
  if (load.decode_tokens != rows_.tokens) rows_before_ = rows_;
  rows_ = {load.decode_tokens, load.decode_context, seconds};
}

double Scheduler::time_of_rows(double rows, double context) const {
  const double each = 1 + config_.draft_tokens;
  StepLoad load;
  load.decode_tokens = rows * each;
  load.decode_context = context;
  if (rows_.tokens == 0.0) return model_.predict(load);
  // The model follows what is new by and by; the last step says how far it is behind.
  StepLoad last;
  last.decode_tokens = rows_.tokens;
  last.decode_context = rows_.context;
  const double expected = model_.predict(last);
  const double late = expected > 0.0 ? std::max(1.0, rows_.seconds / expected) : 1.0;
  const double predicted = late * model_.predict(load);
  const double more = load.decode_tokens - rows_.tokens;
  if (more <= 0.0) return predicted;
  last.decode_context = context * rows_.tokens / load.decode_tokens;
  const double now = late * model_.predict(last);
  const double in_proportion = load.decode_tokens / rows_.tokens * now;
  if (load.decode_tokens <= model_.most_decodes()) return std::min(predicted, in_proportion);
  if (more > std::max(each, (kNear - 1.0) * rows_.tokens)) return in_proportion;
  const double step = rows_.tokens - rows_before_.tokens;
  const double slope =
      rows_before_.tokens > 0.0 && step != 0.0 ? (rows_.seconds - rows_before_.seconds) / step : 0.0;
  return std::min(std::max(predicted, now + slope * more), in_proportion);
}

std::int32_t Scheduler::starts_allowed() const {
  const auto all = static_cast<std::int32_t>(prefilling_.size());
  if (all == 0 || config_.policy.min_tps_per_user <= 0.0) return all;
  // Of a machine that has just started nobody knows what a row takes: one finds out.
  if (!model_.knows_decodes()) return decoding_.empty() ? 1 : 0;
  const double limit = 1.0 / config_.policy.min_tps_per_user - between();
  double rows = static_cast<double>(decoding_.size());
  double context = 0.0;
  for (const Request* request : decoding_) context += request->known;
  std::int32_t starts = 0;
  for (const Request* request : prefilling_) {
    context += request->known;
    if (time_of_rows(++rows, context) > limit) break;
    ++starts;
  }
  // Somebody is always answered.
  return std::max(starts, decoding_.empty() ? 1 : 0);
}

bool Scheduler::somebody_may_end() const {
  return std::any_of(prefilling_.begin(), prefilling_.end(),
                     [this](const Request* request) { return request->loads == 0 && !is_held(*request); });
}

void Scheduler::note_held() {
  const double tokens = building_->load.decode_tokens;
  const auto held = [this](const Request* request) { return is_held(*request); };
  if (tokens == 0.0 || !(promise_holds_ || std::any_of(prefilling_.begin(), prefilling_.end(), held))) return;
  held_tokens_ = std::max(held_tokens_, tokens);
  if (++held_steps_ < std::max(held_for_, kHeldFor)) return;
  held_for_ = std::clamp(2 * held_for_, 2 * kHeldFor, kMostHeldFor);
  model_.forget_decodes_above(held_tokens_);
  rows_before_ = {};
  held_steps_ = 0;
  held_tokens_ = 0.0;
}

std::int32_t Scheduler::open_tokens(const Request& request) const {
  if (request.loads > 0) return 0;
  return request.known - request.planned - (is_held(request) ? 1 : 0);
}

}  // namespace quickturn::control
