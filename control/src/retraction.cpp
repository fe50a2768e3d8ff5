// When the pool is short: the request whose return is cheapest gives way, one at a time.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

Scheduler::Room Scheduler::make_room(Request& request) {
  // Something is on its way back already: wait for that before taking more.
  if (!cache_.limbo().empty()) return Room::wait;
  Request* first = &request;
  Request* victim = nullptr;
  for (const auto* list : {&decoding_, &prefilling_}) {
    for (Request* candidate : *list) {
      if (candidate->order < first->order) first = candidate;
    }
  }
  for (const auto* list : {&decoding_, &prefilling_}) {
    for (Request* candidate : *list) {
      // The one that came first always goes on, so that there is always progress.
      if (candidate != first && (victim == nullptr || gives_way_before(*candidate, *victim)))
        victim = candidate;
    }
  }
  if (victim != nullptr) {
    retract(*victim);
    if (victim == &request) return Room::gone;
    return cache_.limbo().empty() ? Room::again : Room::wait;
  }
  if (!flights_.empty() || !book_.jobs.empty()) return Room::wait;
  // It has the whole pool and needs more: that is as long as an answer can be here.
  ++counters_.finished;
  end(request, End{Reason::length}, Reason::length, draft_->ended);
  return Room::gone;
}

bool Scheduler::gives_way_before(const Request& a, const Request& b) {
  if (a.order.priority != b.order.priority) return a.order.priority < b.order.priority;
  // Cheapest return: the least to compute again. Among equals the one that came last.
  if (a.planned != b.planned) return a.planned < b.planned;
  return b.order < a.order;
}

void Scheduler::retract(Request& request) {
  draft_->released.ids.push_back(request.id);
  draft_->released.slots.push_back(request.slot);
  publish_end(request);
  queue_demotions(request);
  leave_sharing(request);
  unlist(request);
  request.slot = kNoSlot;
  request.run = ++runs_;
  ++request.retractions;
  ++counters_.retractions;
  // An answer token on its way still counts; tokens planned beyond it were never sampled.
  request.left = request.max_tokens - request.generated;
  Remains remains =
      request.decoding() ? move_on<Decoding>(request, Retract{}) : move_on<Prefilling>(request, Retract{});
  waiting_.insert(&request);
  retire(request.last_step, std::move(remains), nullptr);
}

bool Scheduler::break_standstill() {
  if (!flights_.empty() || !cache_.limbo().empty() || !book_.jobs.empty()) return false;
  if (prefilling_.empty()) return false;
  Request& last = *prefilling_.back();
  // Who reads the plan hears of a slot before it hears that the slot is free: the next plan will do.
  const auto& admitted = draft_->admitted.ids;
  if (std::find(admitted.begin(), admitted.end(), last.id) != admitted.end()) return false;
  if (prefilling_.size() > 1) {
    retract(last);
  } else if (!last.clean_start) {
    // Its blocks lie in slabs of which others' cached ones, or its own scattered ones, leave it too few: into
    // an empty arena it fits.
    retract(last);
    last.clean_start = true;
    cache_.reset();
  } else {
    ++counters_.finished;
    end(last, End{Reason::length}, Reason::length, draft_->ended);
  }
  return true;
}

}  // namespace quickturn::control
