// The scheduler from C++: the shortest lives, and what it refuses. The long random ones are in tests/control,
// in Python.
#include <doctest/doctest.h>

#include <numeric>
#include <stdexcept>

#include "quickturn/control/scheduler.hpp"

using namespace quickturn::control;

namespace {

SchedulerConfig small() {
  SchedulerConfig config;
  config.groups = {{GroupKind::full, 2, 0, ""}};
  config.num_slabs = 8;
  config.block_tokens = 4;
  config.max_requests = 4;
  config.max_step_tokens = 16;
  return config;
}

RequestSpec ask(RequestId id, const std::vector<std::int32_t>& tokens, std::int32_t max_tokens) {
  RequestSpec spec;
  spec.id = id;
  spec.tokens = tokens;
  spec.max_tokens = max_tokens;
  return spec;
}

}  // namespace

TEST_CASE("a request's whole life") {
  Scheduler scheduler(small());
  std::vector<std::int32_t> tokens(20);
  std::iota(tokens.begin(), tokens.end(), 0);
  scheduler.add(ask(1, tokens, 3));

  auto plan = scheduler.plan(0.0);
  REQUIRE(plan != nullptr);
  CHECK(plan->admitted.ids == std::vector<std::int64_t>{1});
  CHECK(plan->query_lens == std::vector<std::int32_t>{16});
  CHECK(plan->samples == std::vector<std::uint8_t>{0});
  CHECK(plan->block_updates[0].indexes == std::vector<std::int32_t>{0, 1, 2, 3});

  // Overlap: the next two steps are planned before the first is applied.
  auto second = scheduler.plan(0.1);
  REQUIRE(second != nullptr);
  CHECK(second->context_lens == std::vector<std::int32_t>{16});
  CHECK(second->samples == std::vector<std::uint8_t>{1});
  CHECK(scheduler.plan(0.1) == nullptr);  // two are out
  CHECK_THROWS_AS(scheduler.apply(second->step, std::array{7}, {}, 0), std::invalid_argument);
  CHECK(scheduler.apply(plan->step, {}, {}, 0).ended.ids.empty());

  auto third = scheduler.plan(0.2);
  CHECK(third->num_decode_rows == 1);
  CHECK(scheduler.apply(second->step, std::array{7}, {}, 0).accepted == std::vector<std::int32_t>{1});
  auto fourth = scheduler.plan(0.3);
  scheduler.apply(third->step, std::array{8}, {}, 0);
  CHECK(scheduler.plan(0.4) == nullptr);  // its last token is on the way
  const Applied done = scheduler.apply(fourth->step, std::array{9}, {}, 0);
  CHECK(done.ended.ids == std::vector<std::int64_t>{1});
  CHECK(done.ended.reasons == std::vector<std::int32_t>{static_cast<std::int32_t>(Reason::length)});
  CHECK(!scheduler.has_unfinished());
  scheduler.check();
  // 22 tokens were computed: five blocks can be reused, of which a prompt of 21 may take all five.
  tokens.push_back(7);
  CHECK(scheduler.match(tokens, "", "") == 20);
  CHECK(scheduler.match(tokens, "", "other tenant") == 0);
}

TEST_CASE("what can never run is refused with the numbers") {
  Scheduler scheduler(small());
  const std::vector<std::int32_t> long_prompt(64, 1);
  try {
    scheduler.add(ask(1, long_prompt, 1));
    FAIL("accepted");
  } catch (const std::invalid_argument& refused) {
    CHECK(std::string(refused.what())
              .find("needs 17 full blocks (2 a slab), but the whole cache has 8 slabs") != std::string::npos);
  }
  CHECK_THROWS_AS(scheduler.add(ask(1, {}, 1)), std::invalid_argument);
  scheduler.add(ask(1, {1, 2, 3}, 1));
  CHECK_THROWS_WITH(scheduler.add(ask(1, {1}, 1)), "request 1: the id is in use");
  CHECK(!scheduler.cancel(2));
  SchedulerConfig broken = small();
  broken.block_tokens = 48;
  CHECK_THROWS_AS(Scheduler{broken}, std::invalid_argument);
}

TEST_CASE("a cancelled request's blocks wait for the step that is out") {
  Scheduler scheduler(small());
  const std::vector<std::int32_t> tokens(10, 3);
  scheduler.add(ask(1, tokens, 5));
  const auto plan = scheduler.plan(0.0);
  CHECK(scheduler.cancel(1));
  const auto slabs_free = [&scheduler] {
    for (const auto& [name, value] : scheduler.stats()) {
      if (name == "slabs_free") return value;
    }
    return -1.0;
  };
  CHECK(slabs_free() == 6);
  CHECK(scheduler.plan(0.1)->ended.ids == std::vector<std::int64_t>{1});
  CHECK(scheduler.apply(plan->step, std::array{4}, {}, 0).accepted == std::vector<std::int32_t>{0});
  CHECK(slabs_free() == 8);
}

TEST_CASE("what a failed request computed is not found again, nor what others computed behind it") {
  Scheduler scheduler(small());
  const std::vector<std::int32_t> shared(4, 3);
  std::vector<std::int32_t> tokens(8, 3);
  const auto run = [&scheduler](double now, std::vector<std::int32_t> sampled) {
    const auto plan = scheduler.plan(now);
    scheduler.apply(plan->step, sampled, {}, 0);
  };
  scheduler.add(ask(1, shared, 1));
  run(0.0, {9});
  scheduler.add(ask(2, tokens, 5));
  run(0.1, {9});
  std::vector<std::int32_t> longer(13, 3);
  CHECK(scheduler.match(longer, "", "") == 8);
  scheduler.add(ask(3, longer, 8));
  run(0.2, {9, 9});
  CHECK(scheduler.match(longer, "", "") == 12);

  const auto bad = scheduler.fail(2);
  // Its own second block, the third request's third behind it, and the one that the second decodes into.
  REQUIRE(bad.has_value());
  CHECK(bad->at(0).size() == 3);
  CHECK(!scheduler.fail(2));
  CHECK(scheduler.match(longer, "", "") == 4);
  const auto ended = scheduler.plan(0.3);
  CHECK(ended->ended.ids == std::vector<std::int64_t>{2});
  CHECK(ended->ended.reasons == std::vector<std::int32_t>{static_cast<std::int32_t>(Reason::error)});
  scheduler.check();
  // The third goes on behind blocks that nobody else finds, and computes more of them.
  scheduler.apply(ended->step, std::array{9}, {}, 0);
  for (double now = 0.4; scheduler.has_unfinished(); now += 0.1) {
    run(now, {9});
    scheduler.check();
  }
  longer.insert(longer.end(), 9, 9);
  CHECK(scheduler.match(longer, "", "") == 4);
  // The same tokens again, computed anew, are found as ever.
  scheduler.add(ask(4, std::vector<std::int32_t>(13, 3), 1));
  run(2.0, {9});
  CHECK(scheduler.match(longer, "", "") == 12);
  CHECK(scheduler.reset_prefix_cache() > 0);
  scheduler.check();
}
