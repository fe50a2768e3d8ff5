// A step's rows: decodes first, then prefills in what is left.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

std::shared_ptr<StepPlan> Scheduler::fresh_plan() {
  for (auto& plan : plans_) {
    if (plan.use_count() == 1) {
      plan->clear();
      return plan;
    }
  }
  auto plan = std::make_shared<StepPlan>();
  plan->block_updates.resize(config_.groups.size());
  plan->states.resize(config_.groups.size());
  plans_.push_back(plan);
  return plan;
}

std::shared_ptr<const StepPlan> Scheduler::plan(double now) {
  if (flights_.size() >= static_cast<std::size_t>(config_.pipeline_depth)) return nullptr;
  if (!time_base_) time_base_ = now;
  now_ = std::max(now_, now);
  cache_.index().set_now(tick(now_));
  note_between();
  expire(now_);
  end_waits();
  end_holds();

  if (spare_flights_.empty()) spare_flights_.emplace_back();
  Flight flight = std::move(spare_flights_.back());
  spare_flights_.pop_back();
  flight.rows.clear();
  flight.samples = 0;
  flight.load = {};
  flight.step = next_step_;
  building_ = &flight;

  plan_decodes();
  admit();
  plan_prefills();
  // Who gives way here isn't let in again before those whom it stood in the way had their turn.
  while (flight.rows.empty() && break_standstill()) plan_prefills();

  if (!config_.tiers.empty()) plan_demotions();

  building_ = nullptr;
  StepPlan& plan = *draft_;
  if (!flight.rows.empty()) {
    plan.step = next_step_++;
    plan.num_samples = flight.samples;
    flights_.push_back(std::move(flight));
  } else {
    spare_flights_.push_back(std::move(flight));
  }
  if (!plan.says_something()) return nullptr;
  std::shared_ptr<const StepPlan> done = std::move(draft_);
  draft_ = fresh_plan();
  return done;
}

std::int32_t Scheduler::decode_query(const Request& request) const {
  if (config_.draft_tokens == 0) return std::min(1, request.left);
  // Drafts on their way count as accepted here: no row reaches beyond prompt + max_tokens, however it turns
  // out.
  const std::int32_t room = request.prompt + request.max_tokens - request.planned;
  const std::int32_t query = std::min({1 + config_.draft_tokens, request.left, room});
  return state_groups_.empty() ? query : until_boundary(request, query);
}

void Scheduler::grow_decodes() {
  // Blocks first, while no row is planned yet: whoever has to give way has none in this step.
  for (std::size_t i = 0; i < decoding_.size();) {
    Request& request = *decoding_[i];
    const std::int32_t query = decode_query(request);
    if (request.planned + query <= request.edge || grow(request, query) > 0) {
      ++i;
    } else if (const Room room = make_room(request); room == Room::wait) {
      ++i;
    }
  }
}

void Scheduler::plan_decodes() {
  grow_decodes();
  for (std::size_t i = 0; i < decoding_.size();) {
    Request& request = *decoding_[i];
    const std::int32_t query = std::min(decode_query(request), request.edge - request.planned);
    if (query <= 0) {
      ++i;  // it waits where it is
      continue;
    }
    const bool last = request.left == 1;
    emit(request, query, true, true);
    if (last) {
      unlist(request);  // its last token is on the way
    } else {
      ++i;
    }
  }
  draft_->num_decode_rows = draft_->num_rows();
}

void Scheduler::plan_prefills() {
  ++round_;
  starts_left_ = starts_allowed();
  const Allowance allowed = first_in_turn() == nullptr ? Allowance{} : with_pauses(prefill_budget());
  std::int32_t budget = allowed.tokens;
  for (Request* next = next_in_turn(); next != nullptr && budget > 0; next = next_in_turn()) {
    Request& request = *next;
    const std::int32_t query =
        grow(request, until_checkpoint(request, std::min(budget, open_tokens(request))));
    note_turn(request, query);
    if (query <= 0) continue;
    const bool sampled = request.planned + query == request.known;
    emit(request, query, sampled, false);
    budget = allowed.one_prompt ? 0 : budget - query;
    if (!sampled) continue;
    unlist(request);
    move_on<Prefilling>(request, PromptPlanned{});
    if (request.left > 0) {
      enlist(request);
      --starts_left_;
    }
  }
  note_held();
  note_prefills(allowed.tokens);
  note_pause(allowed);
}

void Scheduler::emit(Request& request, std::int32_t query, bool sampled, bool decode) {
  StepPlan& plan = *draft_;
  plan.slots.push_back(request.slot);
  plan.query_lens.push_back(query);
  plan.context_lens.push_back(request.planned);
  plan.samples.push_back(sampled ? 1 : 0);
  plan.num_tokens += query;
  plan.max_context_len = std::max(plan.max_context_len, request.planned + query);
  if (!state_groups_.empty()) states_for_row(request);
  building_->rows.push_back({&request, request.run, query, sampled, decode});
  building_->samples += sampled ? 1 : 0;
  StepLoad& load = building_->load;
  if (decode) {
    load.decode_tokens += query;
    load.decode_context += request.planned;
  } else {
    load.prompt_tokens += query;
    load.prompt_context += request.planned;
    load.prompt_work += query * (request.planned + 0.5 * query);
  }
  request.planned += query;
  request.last_step = building_->step;
  ++request.in_flight;
  if (sampled) --request.left;
}

void Scheduler::enlist(Request& request) {
  if (request.decoding()) {
    request.list_at = static_cast<std::int32_t>(decoding_.size());
    decoding_.push_back(&request);
  } else {
    const auto at = std::lower_bound(prefilling_.begin(), prefilling_.end(), &request, ByOrder{});
    request.list_at = 0;
    prefilling_.insert(at, &request);
  }
}

void Scheduler::unlist(Request& request) {
  if (request.list_at < 0) return;
  if (request.decoding()) {
    Request* last = decoding_.back();
    decoding_[static_cast<std::size_t>(request.list_at)] = last;
    last->list_at = request.list_at;
    decoding_.pop_back();
  } else {
    prefilling_.erase(std::lower_bound(prefilling_.begin(), prefilling_.end(), &request, ByOrder{}));
  }
  request.list_at = -1;
}

}  // namespace quickturn::control
