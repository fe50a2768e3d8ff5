// What a finished step means: tokens are known, blocks are full, requests are over.
#include <algorithm>
#include <stdexcept>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

Applied Scheduler::apply(StepId step, std::span<const std::int32_t> tokens,
                         std::span<const std::int32_t> counts, double elapsed_us) {
  if (flights_.empty() || flights_.front().step != step) {
    throw std::invalid_argument(
        "step " + std::to_string(step) + " isn't the oldest that is out (" +
        (flights_.empty() ? std::string("none is") : std::to_string(flights_.front().step)) + ")");
  }
  const auto samples = static_cast<std::size_t>(flights_.front().samples);
  if (!counts.empty() && counts.size() != samples) {
    throw std::invalid_argument("counts has " + std::to_string(counts.size()) + " entries for " +
                                std::to_string(samples) + " sampled rows");
  }
  std::size_t total = samples;
  if (!counts.empty()) {
    total = 0;
    std::size_t row = 0;
    for (const Row& planned : flights_.front().rows) {
      if (!planned.sampled) continue;
      const std::int32_t most = planned.decode ? planned.query : 1;
      const std::int32_t count = counts[row++];
      if (count < 1 || count > most) {
        throw std::invalid_argument("a count of " + std::to_string(count) + " for a row that can give 1 to " +
                                    std::to_string(most));
      }
      total += static_cast<std::size_t>(count);
    }
  }
  if (tokens.size() != total) {
    throw std::invalid_argument("tokens has " + std::to_string(tokens.size()) +
                                " entries, the sampled rows have " + std::to_string(total));
  }

  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  applied_step_ = step;
  cache_.limbo().set_applied(step);
  ++counters_.steps;
  if (elapsed_us > 0) {
    learn(flight.load, elapsed_us);
  } else {
    untimed_.emplace_back(step, flight.load);
    if (untimed_.size() > kUntimed) untimed_.pop_front();
  }
  Applied applied;
  applied.accepted.reserve(samples);
  std::size_t row = 0;
  std::size_t at = 0;
  for (const Row& planned : flight.rows) {
    std::size_t count = 0;
    if (planned.sampled) {
      count = counts.empty() ? 1 : static_cast<std::size_t>(counts[row]);
      ++row;
    }
    settle_row(planned, tokens.subspan(at, count), applied);
    at += count;
  }
  if (cache_.limbo().release(applied_step_)) ++epoch_;
  spare_flights_.push_back(std::move(flight));
  return applied;
}

void Scheduler::timed(StepId step, double elapsed_us) {
  const auto found = std::find_if(untimed_.begin(), untimed_.end(),
                                  [step](const auto& settled) { return settled.first == step; });
  if (found == untimed_.end()) {
    throw std::invalid_argument("step " + std::to_string(step) +
                                " isn't one that was settled lately without its time");
  }
  learn(found->second, elapsed_us);
  untimed_.erase(found);
}

void Scheduler::learn(const StepLoad& load, double elapsed_us) {
  last_predicted_ = model_.predict(load);
  last_measured_ = elapsed_us * 1e-6;
  spent_ += last_measured_;
  model_.learn(load, last_measured_);
  if (load.prompt_tokens == 0.0 && load.decode_tokens > 0.0) note_rows(load, last_measured_);
  // Users are behind by what a pause took, not by what was expected of it; but a compile is none of theirs.
  if (load.pause > 0.0) {
    const double more = std::min(last_measured_, 2 * load.pause) - load.pause;
    pause_debt_ = std::max(0.0, pause_debt_ + more);
  }
}

void Scheduler::settle_row(const Row& row, std::span<const std::int32_t> tokens, Applied& applied) {
  Request& request = *row.request;
  --request.in_flight;
  const bool live = request.run == row.run;
  if (!live && !std::holds_alternative<Retracted>(request.state)) {
    if (row.sampled) applied.accepted.push_back(0);  // over since: the one token too many
    return;
  }
  std::optional<Reason> over;
  if (row.sampled) {
    const std::int32_t accepted = accept(request, tokens, over);
    applied.accepted.push_back(accepted);
    // Planning the row took one off; drafts that were accepted, or tokens of a row planned before a
    // retraction, take the rest.
    request.left -= accepted - (live ? 1 : 0);
    if (live && request.left <= 0) unlist(request);
    if (live) {
      request.computed += row.decode ? accepted : row.query;
      if (row.decode) request.planned -= row.query - static_cast<std::int32_t>(tokens.size());
    }
  } else if (live) {
    request.computed += row.query;
  }
  if (!live) ++epoch_;  // it may return now
  counters_.computed_tokens += row.query;
  if (live && request.computed >= request.publish_at) settle_blocks(request);
  if (over) {
    ++counters_.finished;
    end(request, End{*over}, *over, applied.ended);
  }
}

std::int32_t Scheduler::accept(Request& request, std::span<const std::int32_t> tokens,
                               std::optional<Reason>& over) {
  std::int32_t accepted = 0;
  for (const std::int32_t token : tokens) {
    ++accepted;
    ++request.known;
    ++request.generated;
    if (request.hashing) {
      request.tail.push_back(token);
      if (static_cast<std::int32_t>(request.tail.size()) == config_.block_tokens) hash_tail(request);
    }
    if (request.min_left > 0) --request.min_left;
    if (request.min_left == 0 && is_stop(request, token)) {
      over = Reason::stop;
      break;
    }
    if (request.generated == request.max_tokens) {
      over = Reason::length;
      break;
    }
  }
  counters_.generated_tokens += accepted;
  return accepted;
}

bool Scheduler::is_stop(const Request& request, std::int32_t token) const {
  if (request.num_stops == 255)
    return std::binary_search(request.more_stops.begin(), request.more_stops.end(), token);
  for (std::uint8_t i = 0; i < request.num_stops; ++i) {
    if (request.stops[i] == token) return true;
  }
  return false;
}

}  // namespace quickturn::control
