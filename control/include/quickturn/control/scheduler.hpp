// The scheduler: requests in, plans out. Single-threaded and deterministic; every time comes from the caller.
//
// Its parts, one file each in src/: requests.cpp (add, cancel, end), planner.cpp (a step's rows),
// admission.cpp (who gets a slot), growth.cpp (blocks and states for tokens about to be computed), settle.cpp
// (what a finished step means), publish.cpp (what enters the prefix index), transfers.cpp (tiers),
// promise.cpp (how much prefill a step may carry), pause.cpp (when it may carry more), retraction.cpp,
// sharing.cpp (prefixes computed once), retention.cpp (what stays warm, what goes first), report.cpp (stats
// and audit).
#pragma once

#include <algorithm>
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
#include "quickturn/control/recorded.hpp"
#include "quickturn/control/request.hpp"
#include "quickturn/control/seen_blocks.hpp"
#include "quickturn/control/sessions.hpp"
#include "quickturn/control/slot_pool.hpp"
#include "quickturn/control/step_model.hpp"
#include "quickturn/control/transfers.hpp"

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
  std::int64_t failed = 0;
  std::int64_t pauses = 0;
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
  // What it computed is wrong, and nobody shall start from it. Gives the device's blocks that hold it, by
  // group: before they are given out again, what they hold must go. Nothing for an unknown id.
  std::optional<std::vector<std::vector<BlockId>>> fail(RequestId id);
  // Keeps the session's cache warm while its tool runs, within the policy's bounds.
  bool hold(const std::string& session, double seconds);

  // The next step, nullptr if nothing can run and nothing changed. The plan is the caller's; it is reused
  // once let go of.
  std::shared_ptr<const StepPlan> plan(double now);
  // Settles the oldest step that is out. `counts` may be empty: one token for each sampled row.
  Applied apply(StepId step, std::span<const std::int32_t> tokens, std::span<const std::int32_t> counts,
                double elapsed_us);
  // What a step took that was settled without its time: ranks that plan alike learn it from the one that
  // measures. Throws std::invalid_argument for a step that isn't one of the last few such.
  void timed(StepId step, double elapsed_us);

  // These copies are complete. Throws std::invalid_argument for one that isn't in progress.
  void transfers_done(std::span<const TransferId> ids);

  std::int32_t match(std::span<const std::int32_t> tokens, const std::string& adapter,
                     const std::string& cache_salt) const;
  // Identities of the full blocks of a prompt, for a router that follows the stream of events.
  std::vector<Hash128> prefix_hashes(std::span<const std::int32_t> tokens, const std::string& adapter,
                                     const std::string& cache_salt) const;
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
    StepLoad load;
    std::vector<Row> rows;
  };
  struct HashKey {
    std::size_t operator()(const Hash128& hash) const { return static_cast<std::size_t>(hash.lo); }
  };

  // requests.cpp
  void check_spec(const RequestSpec& spec) const;
  void hash_prompt(Request& request, std::span<const std::int32_t> tokens) const;
  void hash_tail(Request& request);
  void fetch_ahead(const Request& request) const;
  // Tokens of its prompt that aren't cached.
  std::int32_t count_uncached(const Request& request) const;
  double head_start(const Request& request) const;
  Hash128 before_block(const Request& request, std::size_t block, const Hash128& before) const;
  void want_checkpoints(Request& request, const RequestSpec& spec) const;
  void want_checkpoint(Request& request, std::uint32_t boundary) const;
  Need need_of(const Request& request, std::uint32_t cached) const;
  std::unique_ptr<Request> take_out(Request& request);
  template <class Event>
  void end(Request& request, Event event, Reason reason, EndedRows& report);
  void retire(StepId last_step, Remains&& remains, std::unique_ptr<Request> request);
  void expire(double now);
  static void list_private(const Holding& cache, std::vector<std::vector<BlockId>>& blocks);

  // planner.cpp
  std::int32_t decode_query(const Request& request) const;
  void grow_decodes();
  void plan_decodes();
  void plan_prefills();
  void emit(Request& request, std::int32_t query, bool sampled, bool decode);
  void enlist(Request& request);
  void unlist(Request& request);
  std::shared_ptr<StepPlan> fresh_plan();

  // admission.cpp
  enum class Admission { admitted, follows, no_room };
  void admit();
  Admission admit_one(Request& request);
  // What it and everybody who was admitted before may still take, if it goes on from there.
  Need need_with(const Request& request, const Match& match, std::span<const Cached> missing);
  // Whether steps stay as short as promised with its row and those of who is done before it.
  bool promise_allows(const Request& request) const;
  Need committed() const;
  // Nobody has a slot, and nothing is on its way back.
  bool alone();
  void pin_prefix(Holding& cache, const Match& match);
  void tell_prefix(const Holding& cache, SlotId slot, const Match& match);
  // Index of the first block of the group that a query at `position` sees.
  std::uint32_t first_seen(std::uint32_t position, GroupId group) const;

  // growth.cpp
  std::int32_t grow(Request& request, std::int32_t tokens);
  std::int32_t until_checkpoint(const Request& request, std::int32_t tokens) const;
  std::int32_t until_boundary(const Request& request, std::int32_t tokens) const;
  bool wants_snapshot(const Request& request, std::uint32_t boundary, bool& keep) const;
  bool take_snapshot(Request& request, std::uint32_t boundary, bool keep, std::vector<BlockRef>& next);
  void states_for_row(Request& request);

  // settle.cpp
  void settle_row(const Row& row, std::span<const std::int32_t> tokens, Applied& applied);
  void learn(const StepLoad& load, double elapsed_us);
  std::int32_t accept(Request& request, std::span<const std::int32_t> tokens, std::optional<Reason>& over);
  bool is_stop(const Request& request, std::int32_t token) const;
  void settle_blocks(Request& request);
  void publish_blocks(Request& request);
  void publish_windows(Request& request, NodeId node);
  void leave_windows(Request& request);
  void publish_snapshots(Request& request);
  void publish_snapshot(Request& request, Snapshot&& snapshot);
  void publish_end(Request& request);

  // sharing.cpp
  bool follow(Request& request, const Match& match);
  std::uint32_t shared_target(Request& leader, const Request& request, const Match& match,
                              std::uint32_t limit) const;
  void lead(Request& request);
  void wake_followers(Request& request, bool all);
  void stop_following(Request& request);
  void leave_sharing(Request& request);
  void end_waits();

  // retention.cpp
  Tick tick(double time) const;
  void note_turn(Request& request);
  bool keep_warm(const Session& session, double seconds);
  double capacity_blocks() const;
  void end_holds();

  // transfers.cpp
  TransferJob& start_job(const Cached& what, TierId from, TierId to, std::vector<BlockRef>&& blocks,
                         TransferRows& rows);
  TransferJob* load_of(const Cached& what);
  bool on_device(const Cached& what) const;
  std::vector<Cached> missing_on_device(const Match& match);
  bool start_load(const Cached& what);
  BlockId device_block(const Cached& what, int ordinal);
  void queue_demotion(const Hash128& hash, std::int32_t side_group);
  void queue_demotions(const Request& request);
  BlockRef room_below(TierId tier, GroupId group, std::uint32_t key);
  bool demote(const Demotion& demotion, TierId from);
  void plan_demotions();
  void finish_job(TransferJob& job);

  // promise.cpp
  // Prompt tokens of this step, and whether they are to be of one prompt.
  struct Allowance {
    std::int32_t tokens = 0;
    bool one_prompt = false;
    double pause = 0.0;  // seconds, if they take longer than is promised
  };
  Allowance prefill_budget() const;
  double step_limit(double decode_time) const;
  // Seconds between the steps, which users wait for as well.
  double between() const { return std::max(0.0, between_); }
  void note_between();
  bool decodes_are_known() const;
  // The prompt that gets the first of them.
  const Request& next_prompt() const;
  // So many prompt tokens as they are computed: in a recorded step, or in whole tiles.
  std::int32_t padded(std::int32_t tokens, bool recorded) const;
  // Seconds of this step with so many prompt tokens, in a recorded step that holds them or in another.
  double time_with(std::int32_t tokens, bool recorded) const;
  // Whether more prompt tokens are computed a second by a step with `any`, launched kernel by kernel, than by
  // a recorded one with `one`.
  bool launching_pays(std::int32_t one, std::int32_t any, double limit) const;
  // The most tokens that such steps are known to have had, or may be guessed from.
  std::int32_t known_beside(bool recorded) const;
  // Prompt tokens that fit into what is allowed; 0: not even the least does.
  std::int32_t in_one_step(double decode_time, double limit, bool recorded) const;
  std::int32_t over_several_steps(double decode_time, double limit, bool recorded) const;
  // So many prompt tokens or fewer, at least a few, that fill a recorded step or end at whole tiles.
  std::int32_t whole_tiles(std::int32_t tokens, bool recorded) const;
  std::int32_t a_little_more(std::int32_t tokens, bool recorded) const;
  // Prompt tokens that are to be computed, counted up to more than `enough`.
  std::int32_t left_to_prefill(std::int32_t enough) const;
  void note_prefills(std::int32_t budget);

  // starts.cpp
  // Seconds of a step of so many decoding rows with so much context in all.
  double time_of_rows(double rows, double context) const;
  void note_rows(const StepLoad& load, double seconds);
  // How many prompts may end in this step, so that they decode in the next.
  std::int32_t starts_allowed() const;
  // Whether a prompt may not end in this step, since with its row steps would take longer than promised.
  bool is_held(const Request& request) const { return starts_left_ == 0 && request.left > 1; }
  bool somebody_may_end() const;
  void note_held();
  // Tokens of its prompt that this step may compute.
  std::int32_t open_tokens(const Request& request) const;

  // turns.cpp
  // Of prompts that had no turn in this step, whose is next, and the first in queue order; null: nobody's.
  Request* next_in_turn() const;
  Request* first_in_turn() const;
  bool has_turn(const Request& request) const;
  // Whether it passes one that stands before it; of either the tokens that are left to compute.
  static bool may_pass(const Request& request, std::int32_t tokens, const Request& other,
                       std::int32_t other_tokens);
  void note_turn(Request& request, std::int32_t tokens);

  // pause.cpp
  // What promise.cpp allows, or more, or nothing if more in a later step brings prompts on faster.
  Allowance with_pauses(const Allowance& allowed) const;
  // Seconds of this step with so many prompt tokens, of several prompts.
  double pause_with(std::int32_t tokens) const;
  void note_pause(const Allowance& allowed);

  // retraction.cpp
  // What came of it: try again, wait for what is on its way back, or the request itself is gone from the
  // list.
  enum class Room { again, wait, gone };
  Room make_room(Request& request);
  static bool gives_way_before(const Request& a, const Request& b);
  void retract(Request& request);
  bool break_standstill();

  const SchedulerConfig config_;
  PrefixHasher hasher_;
  SlotPool slots_;
  Cache cache_;
  std::vector<GroupId> window_groups_;
  std::vector<GroupId> state_groups_;

  std::unordered_map<RequestId, std::unique_ptr<Request>>
      requests_;  // looked up only: its order must not matter
  std::set<Request*, ByOrder> waiting_;
  std::vector<Request*> decoding_;    // have a row in each step
  std::vector<Request*> prefilling_;  // by order
  std::set<std::pair<double, RequestId>> deadlines_;
  std::deque<Flight> flights_;
  std::vector<Flight> spare_flights_;
  static constexpr std::size_t kUntimed = 8;
  std::deque<std::pair<StepId, StepLoad>> untimed_;  // settled lately, by ranks that measure nothing
  std::shared_ptr<StepPlan> draft_;                  // collects what the next plan must say
  std::vector<std::shared_ptr<StepPlan>> plans_;

  std::unordered_map<Hash128, Request*, HashKey>
      frontiers_;  // next block that a prefilling request computes; looked up only
  std::deque<std::pair<double, RequestId>> share_ends_;
  Sessions sessions_;
  std::multimap<double, double> holds_;  // end, blocks
  double held_blocks_ = 0.0;
  TransferBook book_;
  SeenBlocks seen_;
  StepModel model_;
  const RecordedSteps recorded_;
  double last_predicted_ = 0.0;  // seconds, before the step was learned from
  double last_measured_ = 0.0;
  double planned_at_ = 0.0;  // the step before
  double spent_ = 0.0;       // in steps since then
  double between_ = 0.0;
  bool was_passed_ = false;          // the last place went to somebody behind whom the promise kept out
  bool promise_holds_ = false;       // somebody waits for a slot because more would break the promise
  std::int32_t starved_steps_ = 0;   // in a row, in which prefills got nothing
  std::int32_t mixed_steps_ = 0;     // in a row, with decoding rows and prompts
  std::int32_t larger_prompts_ = 0;  // steps in a row of them, with more prompt tokens than the least
  std::int64_t pieces_ = 0;          // of prompts beside decoding rows
  std::int32_t pause_credit_ = 0;    // steps of decoding rows, less what pauses cost
  std::int32_t pause_age_ = 0;       // of them since the last pause
  double pause_debt_ = 0.0;          // seconds that users are behind what is promised
  double lone_decodes_ = 0.0;        // tokens of the last step of decoding rows alone
  std::uint64_t round_ = 0;          // of planning prompts
  std::int64_t passed_tokens_ = 0;   // that short prompts got before the first, less what the first got
  struct RowsTime {
    double tokens = 0.0;
    double context = 0.0;
    double seconds = 0.0;
  };
  RowsTime rows_;                 // the last step of decoding rows alone that was measured
  RowsTime rows_before_;          // the last one with another number of them
  std::int32_t starts_left_ = 0;  // prompts that may still end in this step
  std::int32_t held_steps_ = 0;   // beside which somebody had to wait for the promise
  std::int32_t held_for_ = 0;     // so many of them, before what more rows take is measured again
  double held_tokens_ = 0.0;      // the most that any of them decoded

  Flight* building_ = nullptr;
  StepId next_step_ = 0;
  StepId applied_step_ = -1;
  std::uint64_t next_serial_ = 0;
  std::uint32_t runs_ = 0;
  std::uint64_t epoch_ = 1;          // grows when something was freed
  std::uint64_t blocked_epoch_ = 0;  // when the head of the queue last found no room
  double now_ = 0.0;
  std::optional<double> time_base_;
  Counters counters_;
};

}  // namespace quickturn::control
