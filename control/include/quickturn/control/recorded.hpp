// Which recorded step a piece of a prompt runs in, beside so many decoding rows.
#pragma once

#include <cstdint>
#include <vector>

#include "quickturn/control/config.hpp"

namespace quickturn::control {

class RecordedSteps {
 public:
  explicit RecordedSteps(std::vector<RecordedStep> steps);
  // Tokens in all of the smallest that holds them, padding with them; 0: none does.
  std::int32_t tokens_for(std::int32_t rows, std::int32_t prompt) const;
  // Prompt tokens that fill a recorded step beside the rows: the most up to `tokens`, or the least there are;
  // 0: no step holds the rows.
  std::int32_t fill(std::int32_t rows, std::int32_t tokens) const;
  // The next larger ones than `tokens`, or the most there are.
  std::int32_t next(std::int32_t rows, std::int32_t tokens) const;
  // The most.
  std::int32_t most(std::int32_t rows) const { return fill(rows, kAny); }

 private:
  static constexpr std::int32_t kAny = 1 << 30;
  // Prompt tokens that fill the recorded steps which hold the rows, by tokens in all.
  template <class Take>
  void each_room(std::int32_t rows, const Take& take) const;

  std::vector<RecordedStep> steps_;  // by tokens, then by rows: a runner takes the first that holds a step
};

}  // namespace quickturn::control
