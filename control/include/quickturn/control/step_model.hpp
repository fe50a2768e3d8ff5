// How long a step takes, learned from the steps that ran.
//
//     decoding rows alone     curve(tokens) + slope * decode_context
//     prompts alone           curve(tokens) + slope * prompt_work
//     prompts beside rows     the first, and f + s * tokens + a * prompt_context + b * prompt_work on top;
//                             of recorded steps and of others for themselves
//
// Curves are piecewise linear over powers of two: flat while weights are streamed, linear when arithmetic
// binds. The kinds are told apart because the same number of tokens takes different times: a decode step may
// be one recorded graph, and a prompt beside it shares its reading of weights. What prompts add to it is what
// the promise hangs on: a fixed cost, tokens, the cache that a prompt's row reads however few its tokens are,
// and its attention (query x keys), by least squares over the last such steps, none of them negative. A step
// that is launched kernel by kernel may take three times as long as a recorded one with as many tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace quickturn::control {

struct StepLoad {
  double decode_tokens = 0;
  double decode_context = 0;  // cached tokens that decoding rows read
  double prompt_tokens = 0;
  double prompt_context = 0;  // cached tokens that prompts' rows read
  double prompt_work = 0;     // sum over prompts' rows of tokens x (context + tokens / 2)
  bool recorded = false;      // one prompt's piece beside decoding rows, padded to a recorded step
  double pause = 0;           // seconds expected of a step that is longer than promised; 0: of others
};

class TimeCurve {
 public:
  // Beyond what was seen: along the line through the two last knots, never downwards.
  double at(double tokens) const;
  // `other`: a term beside the curve that takes its share of the error. Gives that step: what the term moves
  // by for each unit.
  double learn(double tokens, double seconds, double other);
  double largest() const { return largest_; }
  // What more than so many tokens take.
  void forget_above(double tokens);

 private:
  static constexpr std::size_t kKnots = 18;  // 1, 2, 4, ... 131,072 tokens
  struct Place {
    std::size_t low;
    double share;  // of the knot above
  };
  static Place place(double tokens);

  std::array<double, kKnots> time_{};
  std::array<bool, kKnots> seen_{};
  double largest_ = 0;  // most tokens that were seen
};

// What prompts add to a step of decoding rows. Least squares that forgets; each update costs the same.
class PromptCost {
 public:
  double at(const StepLoad& load) const;
  // `step`: seconds of all of the step.
  void learn(const StepLoad& load, double seconds, double step);
  void forget();
  // The most prompt tokens that were measured.
  double most() const { return most_; }

 private:
  static constexpr std::size_t kBends = 7;  // at 32, 64, ... 2048 tokens the cost of one may rise
  static constexpr std::size_t kTerms = 4 + kBends;
  using Terms = std::array<double, kTerms>;
  static Terms terms(const StepLoad& load);

  std::array<Terms, kTerms> products_{};  // of terms with terms, the last steps counting most
  Terms targets_{};                       // of terms with seconds
  Terms cost_{};
  double most_ = 0;
};

// How late steps are: what they took as a multiple of what was predicted. Its tail is long and not that of
// any simple distribution, so it is looked up among the last ones.
class Lateness {
 public:
  void note(double ratio);
  // Few steps are later than that; some that nobody could have held are left out.
  double margin() const { return margin_; }
  bool knows() const { return seen_ >= kFew; }

 private:
  static constexpr std::size_t kLast = 256;
  static constexpr std::size_t kFew = 24;

  std::array<float, kLast> ratios_{};
  std::size_t seen_ = 0;
  double margin_ = kCareful;

  // While little was seen.
  static constexpr double kCareful = 1.12;
};

class StepModel {
 public:
  // Seconds; 0 while nothing of its kind was measured.
  double predict(const StepLoad& load) const;
  void learn(const StepLoad& load, double seconds);
  bool knows() const { return samples_ > 0; }
  bool knows_decodes() const { return decode_.largest() > 0; }
  // The most decoding rows' tokens that were measured.
  double most_decodes() const { return decode_.largest(); }
  // What steps with more than so many take.
  void forget_decodes_above(double tokens) { decode_.forget_above(tokens); }
  // The most prompt tokens that were measured beside decoding rows, in recorded steps or in others.
  double most_beside(bool recorded) const { return beside(recorded).cost.most(); }
  // Of a hundred such steps, no more than one should take longer than this times what was predicted.
  double margin(bool recorded) const;
  // Seconds that one more prompt token takes in a large step.
  double seconds_per_token() const;

 private:
  // A linear term: seconds of its feature's unit count. The unit follows the largest that was met, so that
  // none weighs more than a curve's knots; no less than `least_unit`, so that small ones say little.
  struct Slope {
    double least_unit;
    double value = 0;
    double unit = 0;
    double meet(double feature);
    void move(double feature, double step);
  };
  // Steps with prompts beside decoding rows.
  struct Beside {
    PromptCost cost;
    Lateness late;
    std::int64_t steps = 0;
    std::int32_t far_off = 0;  // in a row
    std::int32_t unused = 0;   // steps of the other kind, in a row
  };
  const Beside& beside(bool recorded) const { return beside_[recorded ? 1 : 0]; }
  double decodes(const StepLoad& load) const;
  double prompts_add(const StepLoad& load) const;
  // Seconds of a step of decoding rows, or hardly more or less than expected if it is alone in being so.
  double unless_alone(double seconds, double expected);
  void learn_decodes(const StepLoad& load, double seconds);
  void learn_prompts(const StepLoad& load, double seconds);
  void learn_mixed(const StepLoad& load, double seconds, double expected);

  TimeCurve decode_;
  TimeCurve alone_;
  Lateness decodes_late_;
  std::array<Beside, 2> beside_;  // launched kernel by kernel, recorded
  Slope per_decode_context_{4096.0};
  Slope per_work_{4096.0 * 256.0};
  std::int64_t samples_ = 0;
  std::int32_t accidents_ = 0;  // in a row
  int unusual_ = 0;             // steps of decoding rows in a row, late or (negative) early
};

}  // namespace quickturn::control
