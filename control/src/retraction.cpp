// When the pool is short: the request whose return is cheapest gives way, one at a time.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

bool Scheduler::make_room(Request& request) {
    // Something is on its way back already, or a step that is out may end a request: wait for that before taking more.
    if (!cache_.limbo().empty()) return false;
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
            if (candidate == first) continue;
            if (victim == nullptr || candidate->order.priority < victim->order.priority ||
                (candidate->order.priority == victim->order.priority &&
                 (candidate->planned < victim->planned || (candidate->planned == victim->planned && victim->order < candidate->order)))) {
                victim = candidate;
            }
        }
    }
    if (victim != nullptr) {
        retract(*victim);
        // Blocks that no step uses are free at once: try again. Its row of this very step is still to run: wait.
        return cache_.limbo().empty() && victim != &request;
    }
    if (flights_.empty() && building_->rows.empty()) {
        // It has the whole pool and needs more: that is as long as an answer can be here.
        ++counters_.finished;
        end(request, End{Reason::length}, Reason::length, draft_->ended);
    }
    return false;
}

void Scheduler::retract(Request& request) {
    draft_->released.ids.push_back(request.id);
    draft_->released.slots.push_back(request.slot);
    unlist(request);
    request.slot = kNoSlot;
    ++request.run;
    ++request.retractions;
    ++counters_.retractions;
    // An answer token on its way still counts; tokens planned beyond it were never sampled.
    request.left = request.max_tokens - request.generated;
    Remains remains = request.decoding() ? move_on<Decoding>(request, Retract{}) : move_on<Prefilling>(request, Retract{});
    waiting_.insert(&request);
    retire(request.last_step, std::move(remains), nullptr);
}

bool Scheduler::break_standstill() {
    if (!flights_.empty() || !cache_.limbo().empty()) return false;
    if (prefilling_.size() < 2) return false;
    retract(*prefilling_.back());
    return true;
}

}  // namespace quickturn::control
