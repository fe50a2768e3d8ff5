#include "quickturn/control/recorded.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace quickturn::control {

RecordedSteps::RecordedSteps(std::vector<RecordedStep> steps) : steps_(std::move(steps)) {
  std::sort(steps_.begin(), steps_.end(), [](const RecordedStep& a, const RecordedStep& b) {
    return std::tie(a.tokens, a.rows) < std::tie(b.tokens, b.rows);
  });
}

std::int32_t RecordedSteps::tokens_for(std::int32_t rows, std::int32_t prompt) const {
  for (const RecordedStep& step : steps_) {
    if (step.rows >= rows && step.tokens - step.rows >= prompt) return step.tokens;
  }
  return 0;
}

std::int32_t RecordedSteps::fill(std::int32_t rows, std::int32_t tokens) const {
  std::int32_t best = 0;
  each_room(rows, [&](std::int32_t room) {
    if (best == 0 || (room <= tokens && room > best)) best = room;
  });
  return best;
}

std::int32_t RecordedSteps::next(std::int32_t rows, std::int32_t tokens) const {
  std::int32_t found = 0;
  each_room(rows, [&](std::int32_t room) {
    if (found <= tokens) found = room;
  });
  return found;
}

template <class Take>
void RecordedSteps::each_room(std::int32_t rows, const Take& take) const {
  std::int32_t in_all = 0;
  for (const RecordedStep& step : steps_) {
    // Of steps with as many tokens, the first that holds the rows has the most room.
    if (step.rows < rows || step.tokens == in_all) continue;
    in_all = step.tokens;
    take(step.tokens - step.rows);
  }
}

}  // namespace quickturn::control
