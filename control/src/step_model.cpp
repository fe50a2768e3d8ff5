#include "quickturn/control/step_model.hpp"

#include <algorithm>
#include <cmath>

namespace quickturn::control {

namespace {

// Units that bring the three terms to the same order of size, so that one error is shared out sensibly.
constexpr double kContextUnit = 1.0 / 65536.0;
constexpr double kWorkUnit = 1.0 / (2048.0 * 32768.0);
constexpr double kRate = 0.3;
// A step that takes longer than this many times what was expected is an accident (a compile, a stall), not
// news.
constexpr double kAccident = 8.0;

}  // namespace

StepModel::Place StepModel::place(double tokens) {
  const double at = std::clamp(std::log2(std::max(tokens, 1.0)), 0.0, static_cast<double>(kKnots - 1));
  const int low = std::min(static_cast<int>(at), kKnots - 2);
  const double from = std::ldexp(1.0, low);
  return {low, std::clamp((tokens - from) / from, 0.0, 1.0)};
}

double StepModel::base(double tokens) const {
  const Place at = place(tokens);
  const auto low = static_cast<std::size_t>(at.low);
  if (seen_[low] && seen_[low + 1]) return time_[low] + at.share * (time_[low + 1] - time_[low]);
  // Beyond what was seen: along the line through the two nearest knots, never downwards.
  int below = at.low;
  while (below >= 0 && !seen_[static_cast<std::size_t>(below)]) --below;
  int above = at.low + 1;
  while (above < kKnots && !seen_[static_cast<std::size_t>(above)]) ++above;
  const auto knot = [](int k) { return std::ldexp(1.0, k); };
  const auto value = [this](int k) { return time_[static_cast<std::size_t>(k)]; };
  if (below >= 0 && above < kKnots) {
    return value(below) +
           (value(above) - value(below)) * (tokens - knot(below)) / (knot(above) - knot(below));
  }
  if (below < 0) return above < kKnots ? value(above) : 0.0;
  int before = below - 1;
  while (before >= 0 && !seen_[static_cast<std::size_t>(before)]) --before;
  const double slope =
      before < 0 ? 0.0 : std::max(0.0, (value(below) - value(before)) / (knot(below) - knot(before)));
  return value(below) + slope * std::max(0.0, tokens - knot(below));
}

double StepModel::predict(const StepLoad& load) const {
  if (samples_ == 0) return 0.0;
  return base(load.tokens) + per_context_ * load.decode_context * kContextUnit +
         per_work_ * load.prefill_work * kWorkUnit;
}

double StepModel::seconds_per_token() const {
  if (largest_ < 16) return 0.0;
  return base(largest_) / largest_;
}

void StepModel::learn(const StepLoad& load, double seconds) {
  if (!(seconds > 0.0)) return;
  const double expected = predict(load);
  if (samples_ >= 8 && load.tokens <= largest_ && seconds > kAccident * expected) return;
  const Place at = place(load.tokens);
  const auto low = static_cast<std::size_t>(at.low);
  const double context = load.decode_context * kContextUnit;
  const double work = load.prefill_work * kWorkUnit;
  // Knots that this step touches start from what is believed there, so that the first step sets the level.
  const double level = samples_ == 0 ? seconds : 0.0;
  const std::array<double, 2> guess{samples_ == 0 ? level : base(std::ldexp(1.0, at.low)),
                                    samples_ == 0 ? level : base(std::ldexp(1.0, at.low + 1))};
  const std::array<double, 2> share{1.0 - at.share, at.share};
  for (std::size_t k = 0; k < 2; ++k) {
    if (share[k] > 0.0 && !seen_[low + k]) {
      time_[low + k] = guess[k];
      seen_[low + k] = true;
    }
  }
  ++samples_;
  largest_ = std::max(largest_, load.tokens);
  const double error = seconds - predict(load);
  const double norm = share[0] * share[0] + share[1] * share[1] + context * context + work * work;
  const double step = kRate * error / norm;
  for (std::size_t k = 0; k < 2; ++k) time_[low + k] = std::max(0.0, time_[low + k] + step * share[k]);
  per_context_ = std::max(0.0, per_context_ + step * context);
  per_work_ = std::max(0.0, per_work_ + step * work);
}

}  // namespace quickturn::control
