#include "quickturn/control/step_model.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace quickturn::control {

namespace {

constexpr double kRate = 0.3;
constexpr double kForget = 0.999;  // of the largest feature, a step
// Of what prompts add: units of the terms, how much a step counts when the next one is there, and what keeps
// costs small that the steps don't tell apart.
constexpr double kTokens = 64.0;
constexpr double kContext = 4096.0;
constexpr double kFirstBend = 32.0;
constexpr double kMemory = 0.98;
constexpr int kSweeps = 24;
constexpr double kShrink = 0.001;
// A step that takes longer than this many times what was expected is an accident (a compile, a stall), not
// news; of one that takes half as long again, no more is believed.
constexpr double kAccident = 8.0;
constexpr std::int32_t kAccidents = 4;  // in a row are no accident
constexpr double kBelieved = 1.5;
// What decoding takes says how long any step may be, so that one late step must not change it: until so many
// in a row are off the same way by more than is usual, hardly anything of it is believed.
constexpr double kUsual = 0.08;
constexpr double kAlone = 0.02;
constexpr int kUnusual = 3;
constexpr std::int64_t kYoung = 4;
// Of two kinds of steps, what the one cost is forgotten when it wasn't used for so many of the other: if it
// was slow by accident, it would never be tried again.
constexpr std::int32_t kStale = 256;
constexpr double kFarBelow = 0.7;
constexpr double kFarAbove = 1.4;
// So many of the last ones may be later than the margin: one in a hundred of all steps, when as many again
// are late by more than any margin would hold. While fewer were seen than that, the margin is careful.
constexpr std::size_t kMayBeLate = 1;
constexpr double kMostMargin = 1.3;

}  // namespace

TimeCurve::Place TimeCurve::place(double tokens) {
  const double at = std::clamp(std::log2(std::max(tokens, 1.0)), 0.0, static_cast<double>(kKnots - 1));
  const auto low = std::min(static_cast<std::size_t>(at), kKnots - 2);
  const double from = std::ldexp(1.0, static_cast<int>(low));
  return {low, std::clamp((tokens - from) / from, 0.0, 1.0)};
}

double TimeCurve::at(double tokens) const {
  const Place place = TimeCurve::place(tokens);
  const auto knot = [](int k) { return std::ldexp(1.0, k); };
  const auto seen = [this](int k) { return seen_[static_cast<std::size_t>(k)]; };
  const auto value = [this](int k) { return time_[static_cast<std::size_t>(k)]; };
  int below = static_cast<int>(place.low);
  while (below >= 0 && !seen(below)) --below;
  int above = static_cast<int>(place.low) + 1;
  while (above < static_cast<int>(kKnots) && !seen(above)) ++above;
  if (below >= 0 && above < static_cast<int>(kKnots)) {
    return value(below) +
           (value(above) - value(below)) * (tokens - knot(below)) / (knot(above) - knot(below));
  }
  if (below < 0) return above < static_cast<int>(kKnots) ? value(above) : 0.0;
  int before = below - 1;
  while (before >= 0 && !seen(before)) --before;
  const double slope =
      before < 0 ? 0.0 : std::max(0.0, (value(below) - value(before)) / (knot(below) - knot(before)));
  return value(below) + slope * std::max(0.0, tokens - knot(below));
}

double TimeCurve::learn(double tokens, double seconds, double other) {
  const Place at = place(tokens);
  const std::array<double, 2> share{1.0 - at.share, at.share};
  const std::array<double, 2> guess{
      largest_ == 0.0 ? seconds : this->at(std::ldexp(1.0, static_cast<int>(at.low))),
      largest_ == 0.0 ? seconds : this->at(std::ldexp(1.0, static_cast<int>(at.low) + 1))};
  for (std::size_t k = 0; k < 2; ++k) {
    if (share[k] > 0.0 && !seen_[at.low + k]) {
      time_[at.low + k] = guess[k];
      seen_[at.low + k] = true;
    }
  }
  largest_ = std::max(largest_, tokens);
  const double norm = share[0] * share[0] + share[1] * share[1] + other * other;
  const double step = kRate * (seconds - this->at(tokens)) / norm;
  for (std::size_t k = 0; k < 2; ++k) time_[at.low + k] = std::max(0.0, time_[at.low + k] + step * share[k]);
  return step;
}

void TimeCurve::forget_above(double tokens) {
  // So many have a share of the next knot.
  for (std::size_t k = 0; k < kKnots; ++k) {
    if (std::ldexp(1.0, static_cast<int>(k)) >= 2.0 * tokens) seen_[k] = false;
  }
  largest_ = std::min(largest_, tokens);
}

double StepModel::Slope::meet(double feature) {
  unit = std::max({unit * kForget, feature, least_unit});
  return feature / unit;
}

void StepModel::Slope::move(double feature, double step) {
  if (feature > 0.0) value = std::max(0.0, value + step * feature / unit);
}

PromptCost::Terms PromptCost::terms(const StepLoad& load) {
  Terms x{1.0, load.prompt_tokens / kTokens, load.prompt_context / kContext,
          load.prompt_work / (kTokens * kContext)};
  double bend = kFirstBend;
  for (std::size_t i = kTerms - kBends; i < kTerms; ++i, bend *= 2) {
    x[i] = std::max(0.0, load.prompt_tokens / bend - 1.0);
  }
  return x;
}

double PromptCost::at(const StepLoad& load) const {
  const Terms x = terms(load);
  double sum = 0.0;
  for (std::size_t i = 0; i < kTerms; ++i) sum += cost_[i] * x[i];
  return sum;
}

void PromptCost::learn(const StepLoad& load, double seconds, double step) {
  // Noise grows with the time of the whole step: a second that was lost once says little about milliseconds.
  Terms x = terms(load);
  for (double& term : x) term /= step;
  const double target = seconds / step;
  for (std::size_t i = 0; i < kTerms; ++i) {
    for (std::size_t j = 0; j < kTerms; ++j) products_[i][j] = kMemory * products_[i][j] + x[i] * x[j];
    targets_[i] = kMemory * targets_[i] + x[i] * target;
  }
  most_ = std::max(most_, load.prompt_tokens);
  // Coordinate descent from where it was.
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (std::size_t i = 0; i < kTerms; ++i) {
      double rest = targets_[i];
      for (std::size_t j = 0; j < kTerms; ++j) rest -= products_[i][j] * cost_[j];
      const double own = products_[i][i];
      cost_[i] = std::max(0.0, (rest + own * cost_[i]) / (own + kShrink * products_[0][0]));
    }
  }
}

void PromptCost::forget() { *this = PromptCost{}; }

double StepModel::decodes(const StepLoad& load) const {
  return decode_.at(load.decode_tokens) + per_decode_context_.value * load.decode_context;
}

double StepModel::prompts_add(const StepLoad& load) const {
  // Of a kind that hasn't run lately, the other says what can be said; and none takes less than recorded.
  const double recorded = beside(true).cost.at(load);
  const double launched = beside(false).cost.at(load);
  if (load.recorded) return most_beside(true) > 0 ? recorded : launched;
  return std::max(launched, recorded);
}

double StepModel::predict(const StepLoad& load) const {
  if (load.decode_tokens == 0) {
    return load.prompt_tokens > 0 ? alone_.at(load.prompt_tokens) + per_work_.value * load.prompt_work : 0.0;
  }
  return decodes(load) + (load.prompt_tokens > 0 ? prompts_add(load) : 0.0);
}

double StepModel::seconds_per_token() const {
  return alone_.largest() < 16 ? 0.0 : alone_.at(alone_.largest()) / alone_.largest();
}

void StepModel::learn(const StepLoad& load, double seconds) {
  if (!(seconds > 0.0)) return;
  const bool prompts = load.prompt_tokens > 0;
  const bool mixed = prompts && load.decode_tokens > 0;
  const double most = mixed ? most_beside(load.recorded) : prompts ? alone_.largest() : decode_.largest();
  const double expected = predict(load);
  // Of no time at all, which is what a machine that got much faster may leave, nothing follows.
  const bool known =
      samples_ >= 8 && expected > 0.0 && (prompts ? load.prompt_tokens : load.decode_tokens) <= most;
  if (known && seconds > kAccident * expected && ++accidents_ < kAccidents) return;
  accidents_ = 0;
  ++samples_;
  const double believed = known ? std::min(seconds, kBelieved * expected) : seconds;
  if (mixed) {
    learn_mixed(load, believed, expected);
  } else if (prompts) {
    learn_prompts(load, believed);
  } else {
    if (known) decodes_late_.note(seconds / expected);
    learn_decodes(load, known ? unless_alone(believed, expected) : believed);
  }
}

double StepModel::unless_alone(double seconds, double expected) {
  const int way = seconds > (1.0 + kUsual) * expected ? 1 : seconds < (1.0 - kUsual) * expected ? -1 : 0;
  unusual_ = way * unusual_ > 0 ? unusual_ + way : way;
  if (way == 0) return seconds;
  return std::abs(unusual_) >= kUnusual
             ? seconds
             : std::clamp(seconds, (1.0 - kAlone) * expected, (1.0 + kAlone) * expected);
}

void StepModel::learn_decodes(const StepLoad& load, double seconds) {
  const double context = per_decode_context_.meet(load.decode_context);
  const double error =
      decode_.learn(load.decode_tokens, seconds - per_decode_context_.value * load.decode_context, context);
  per_decode_context_.move(context, error);
}

void StepModel::learn_prompts(const StepLoad& load, double seconds) {
  const double work = per_work_.meet(load.prompt_work);
  const double error = alone_.learn(load.prompt_tokens, seconds - per_work_.value * load.prompt_work, work);
  per_work_.move(work, error);
}

void StepModel::learn_mixed(const StepLoad& load, double seconds, double expected) {
  // Decoding alone takes no longer than with a prompt beside it.
  if (seconds < decodes(load)) learn_decodes(load, seconds);
  // Two in a row that are far off: what was learned is of another time. Among the first, one may have had a
  // compile in it.
  const double ratio = seconds / expected;
  Beside& own = beside_[load.recorded ? 1 : 0];
  own.far_off = ratio < kFarBelow || ratio > kFarAbove ? own.far_off + 1 : 0;
  if (own.far_off >= 2 || (own.steps < kYoung && ratio < kFarBelow)) {
    own.cost.forget();
    own.far_off = 0;
  } else if (own.steps >= kYoung) {
    own.late.note(ratio);
  }
  ++own.steps;
  own.unused = 0;
  Beside& other = beside_[load.recorded ? 0 : 1];
  if (++other.unused == kStale) other.cost.forget();
  own.cost.learn(load, std::max(0.0, seconds - decodes(load)), seconds);
}

double StepModel::margin(bool recorded) const {
  const Lateness& own = beside(recorded).late;
  // Steps of decoding rows are late by what the machine does to any step.
  return own.knows() ? own.margin() : std::max(own.margin(), decodes_late_.margin());
}

void Lateness::note(double ratio) {
  // No piece of a prompt is small enough for what comes later than that.
  if (ratio > kMostMargin) return;
  ratios_[seen_++ % kLast] = static_cast<float>(ratio);
  std::array<float, kLast> sorted = ratios_;
  std::nth_element(sorted.begin(), sorted.begin() + kMayBeLate, sorted.end(), std::greater<>());
  const double found = std::max(1.0, static_cast<double>(sorted[kMayBeLate]));
  margin_ = knows() ? found : std::max(found, kCareful);
}

}  // namespace quickturn::control
