// How long a step takes, learned from the steps that ran.
//
//     time = base(tokens) + a * decode_context + b * prefill_work
//
// `base` is piecewise linear over powers of two: flat while weights are streamed, linear when arithmetic
// binds. The two slopes are the cache read by decoding rows and the attention of prefill rows (query x keys).
// Each measured step moves the few numbers it depends on by its error (normalised least mean squares), so
// learning costs the same for any batch.
#pragma once

#include <array>
#include <cstdint>

namespace quickturn::control {

struct StepLoad {
  double tokens = 0;
  double decode_context = 0;  // cached tokens that decoding rows read
  double prefill_work = 0;    // sum over prefill rows of tokens x (context + tokens / 2)
};

class StepModel {
 public:
  // Seconds; 0 while nothing was measured.
  double predict(const StepLoad& load) const;
  void learn(const StepLoad& load, double seconds);
  // More tokens than this would be a guess: twice what was measured so far.
  double trusted_tokens() const { return 2.0 * largest_; }
  bool knows() const { return samples_ > 0; }
  // Seconds that one more prompt token takes in a large step.
  double seconds_per_token() const;

 private:
  static constexpr int kKnots = 18;  // 1, 2, 4, ... 131,072 tokens
  struct Place {
    int low;
    double share;  // of the knot above
  };
  static Place place(double tokens);
  double base(double tokens) const;

  std::array<double, kKnots> time_{};
  std::array<bool, kKnots> seen_{};
  double per_context_ = 0;
  double per_work_ = 0;
  double largest_ = 0;
  std::int64_t samples_ = 0;
};

}  // namespace quickturn::control
