// The scheduler: requests in, plans out. Single-threaded and deterministic; every time comes from the caller.
//
// Its parts, one file each in src/: requests.cpp (add, cancel, end), planner.cpp (a step's rows), admission.cpp (who gets a slot),
// growth.cpp (blocks and states for tokens about to be computed), settle.cpp (what a finished step means), retraction.cpp, sharing.cpp
// (prefixes computed once), report.cpp (stats and audit).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "quickturn/control/cache.hpp"
#include "quickturn/control/config.hpp"
#include "quickturn/control/hash.hpp"
#include "quickturn/control/plan.hpp"
#include "quickturn/control/request.hpp"
#include "quickturn/control/slot_pool.hpp"

namespace quickturn::control {

struct Counters {
    std::int64_t steps = 0;
    std::int64_t prompt_tokens = 0;
    std::int64_t cached_tokens = 0;
    std::int64_t ceiling_tokens = 0;
    std::int64_t computed_tokens = 0;
    std::int64_t generated_tokens = 0;
    std::int64_t retractions = 0;
    std::int64_t shared_prefixes = 0;
    std::int64_t finished = 0;
    std::int64_t cancelled = 0;
    std::int64_t timed_out = 0;
};

class Scheduler {
   public:
    explicit Scheduler(SchedulerConfig config);
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    // Throws std::invalid_argument for a request that can never run.
    void add(const RequestSpec& spec);
    bool cancel(RequestId id);
    bool finish(RequestId id);

    // The next step, nullptr if nothing can run and nothing changed. The plan is the caller's; it is reused once let go of.
    std::shared_ptr<const StepPlan> plan(double now);
    // Settles the oldest step that is out. `counts` may be empty: one token for each sampled row.
    Applied apply(StepId step, std::span<const std::int32_t> tokens, std::span<const std::int32_t> counts, double elapsed_us);

    std::int32_t match(std::span<const std::int32_t> tokens, const std::string& adapter, const std::string& cache_salt) const;
    bool has_unfinished() const { return !requests_.empty(); }
    std::vector<std::pair<std::string, double>> stats() const;
    std::vector<KvEvent> take_events() { return cache_.events().take(); }
    std::size_t reset_prefix_cache() { return cache_.reset(); }
    // Throws std::logic_error with what is broken. O(everything).
    void check() const;

   private:
    struct ByOrder {
        bool operator()(const Request* a, const Request* b) const { return a->order < b->order; }
    };
    struct Row {
        Request* request;
        std::uint32_t run;
        std::int32_t query;
        bool sampled;
        bool decode;
    };
    struct Flight {
        StepId step = -1;
        std::int32_t samples = 0;
        std::vector<Row> rows;
    };
    struct HashKey {
        std::size_t operator()(const Hash128& hash) const { return static_cast<std::size_t>(hash.lo); }
    };

    // requests.cpp
    void check_spec(const RequestSpec& spec) const;
    void hash_prompt(Request& request, std::span<const std::int32_t> tokens) const;
    void hash_tail(Request& request) const;
    Hash128 before_block(const Request& request, std::size_t block, const Hash128& before) const;
    void want_checkpoints(Request& request, const RequestSpec& spec) const;
    Need need_of(const Request& request, std::uint32_t cached) const;
    std::unique_ptr<Request> take_out(Request& request);
    template <class Event>
    void end(Request& request, Event event, Reason reason, EndedRows& report);
    void retire(StepId last_step, Remains&& remains, std::unique_ptr<Request> request);
    void expire(double now);

    // planner.cpp
    void plan_decodes();
    void plan_prefills();
    void emit(Request& request, std::int32_t query, bool sampled, bool decode);
    void enlist(Request& request);
    void unlist(Request& request);
    std::shared_ptr<StepPlan> fresh_plan();

    // admission.cpp
    void admit();
    bool admit_one(Request& request);
    Need committed() const;
    void take_prefix(Request& request, Holding& cache, SlotId slot, const Match& match);

    // growth.cpp
    std::int32_t grow(Request& request, std::int32_t tokens);
    void states_for_row(Request& request, bool decode);

    // settle.cpp
    void settle_row(const Row& row, std::span<const std::int32_t> tokens, Applied& applied);
    std::int32_t accept(Request& request, std::span<const std::int32_t> tokens, std::optional<Reason>& over);
    bool is_stop(const Request& request, std::int32_t token) const;
    void settle_blocks(Request& request);

    // retraction.cpp
    bool make_room(Request& request);
    void retract(Request& request);
    bool break_standstill();

    const SchedulerConfig config_;
    PrefixHasher hasher_;
    SlotPool slots_;
    Cache cache_;
    std::vector<GroupId> window_groups_;
    std::vector<GroupId> state_groups_;

    std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;  // looked up only: its order must not matter
    std::set<Request*, ByOrder> waiting_;
    std::vector<Request*> decoding_;    // have a row in each step
    std::vector<Request*> prefilling_;  // by order
    std::set<std::pair<double, RequestId>> deadlines_;
    std::deque<Flight> flights_;
    std::vector<Flight> spare_flights_;
    std::shared_ptr<StepPlan> draft_;  // collects what the next plan must say
    std::vector<std::shared_ptr<StepPlan>> plans_;

    Flight* building_ = nullptr;
    StepId next_step_ = 0;
    StepId applied_step_ = -1;
    std::uint64_t next_serial_ = 0;
    std::uint64_t epoch_ = 1;          // grows when something was freed
    std::uint64_t blocked_epoch_ = 0;  // when the head of the queue last found no room
    double now_ = 0.0;
    std::optional<double> time_base_;
    Counters counters_;
};

}  // namespace quickturn::control
