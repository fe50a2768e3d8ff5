// Whose prompt is next. Two claims share each step's prompt tokens in equal parts: the first in queue order,
// so that nobody starves, and the shortest, so that a session's next turn, nearly all of it cached, doesn't
// wait for everybody's cold prompts.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

namespace {

// Only who has so many times less to compute passes another.
constexpr std::int32_t kMuchShorter = 2;

}  // namespace

bool Scheduler::has_turn(const Request& request) const {
  return request.round != round_ && open_tokens(request) > 0;
}

Request* Scheduler::first_in_turn() const {
  const auto found = std::find_if(prefilling_.begin(), prefilling_.end(),
                                  [this](const Request* request) { return has_turn(*request); });
  return found == prefilling_.end() ? nullptr : *found;
}

Request* Scheduler::next_in_turn() const {
  Request* first = first_in_turn();
  if (first == nullptr || passed_tokens_ > 0) return first;
  Request* shortest = first;
  for (Request* request : prefilling_) {
    if (has_turn(*request) && may_pass(*request, open_tokens(*request), *shortest, open_tokens(*shortest))) {
      shortest = request;
    }
  }
  return shortest;
}

bool Scheduler::may_pass(const Request& request, std::int32_t tokens, const Request& other,
                         std::int32_t other_tokens) {
  return request.order.priority == other.order.priority && kMuchShorter * tokens < other_tokens;
}

void Scheduler::note_turn(Request& request, std::int32_t tokens) {
  const std::int64_t change = first_in_turn() == &request ? -tokens : tokens;
  passed_tokens_ = std::max<std::int64_t>(passed_tokens_ + change, -config_.max_step_tokens);
  request.round = round_;
}

}  // namespace quickturn::control
