// The small parts: heap, node table, step model, seen blocks, the state machine.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>

#include "quickturn/control/indexed_heap.hpp"
#include "quickturn/control/node_table.hpp"
#include "quickturn/control/recorded.hpp"
#include "quickturn/control/seen_blocks.hpp"
#include "quickturn/control/states.hpp"
#include "quickturn/control/step_model.hpp"

using namespace quickturn::control;

TEST_CASE("the heap gives the least key, and forgets what is removed") {
  std::mt19937 random(7);
  IndexedHeap heap;
  std::vector<std::uint32_t> places(200, kNone);
  const auto place = [&places](std::uint32_t id) -> std::uint32_t& { return places[id]; };
  std::map<std::uint32_t, std::uint32_t> keys;
  for (int i = 0; i < 20000; ++i) {
    const auto id = static_cast<std::uint32_t>(random() % places.size());
    if (places[id] == kNone) {
      keys[id] = static_cast<std::uint32_t>(random() % 50);
      heap.push(keys[id], id, place);
    } else {
      heap.remove(id, place);
      keys.erase(id);
    }
    CHECK(heap.size() == keys.size());
    if (keys.empty()) continue;
    std::pair<std::uint32_t, std::uint32_t> least{kNone, kNone};
    for (const auto& [other, key] : keys) least = std::min(least, {key, other});
    CHECK(heap.top().key == least.first);
    CHECK(heap.top().id == least.second);
  }
}

TEST_CASE("the node table finds what is in it, through growth and deletion") {
  std::mt19937_64 random(11);
  std::vector<Hash128> hashes(3000);
  // Crowded homes: few different high bits.
  for (auto& hash : hashes) hash = {(random() % 64) << 58 | (random() & 0xff), random()};
  const auto hash_of = [&hashes](NodeId id) -> const Hash128& { return hashes[id]; };
  NodeTable table(10);
  std::vector<bool> in(hashes.size(), false);
  for (int i = 0; i < 60000; ++i) {
    const auto id = static_cast<NodeId>(random() % hashes.size());
    if (in[id]) {
      table.erase(id, hash_of);
    } else if (table.size() < 1500) {
      table.insert(id, hash_of);
    } else {
      continue;
    }
    in[id] = !in[id];
    if (i % 1000 != 0) continue;
    for (NodeId other = 0; other < hashes.size(); ++other)
      CHECK(table.find(hashes[other], hash_of) == (in[other] ? other : kNone));
  }
}

// A device where weights or arithmetic bind, and where a prompt in the step costs something by itself.
double device(const StepLoad& load) {
  const double tokens = load.decode_tokens + load.prompt_tokens;
  const double fixed = load.decode_tokens > 0 && load.prompt_tokens > 0 ? 0.002 : 0.0;
  return std::max(0.004, tokens / 25000.0) + fixed + load.decode_context * 5e-9 + load.prompt_context * 1e-8 +
         load.prompt_work * 2e-11;
}

TEST_CASE("the step model learns the three kinds of steps") {
  StepModel model;
  std::mt19937 random(3);
  const auto below = [&random](int bound) {
    return static_cast<double>(random() % static_cast<unsigned>(bound));
  };
  CHECK(model.predict({64, 0, 0, 0, 0}) == 0.0);
  CHECK(!model.knows());
  for (int i = 0; i < 4000; ++i) {
    StepLoad load;
    if (i % 3 != 1) {
      load.decode_tokens = 1 + below(64);
      load.decode_context = below(400000);
    }
    if (i % 3 != 0) {
      load.prompt_tokens = 1 + below(i % 3 == 1 ? 4096 : 512);
      load.prompt_context = i % 3 == 1 ? 0 : below(30000);
      load.prompt_work = load.prompt_tokens * (load.prompt_context + load.prompt_tokens / 2);
    }
    model.learn(load, device(load));
  }
  for (const StepLoad load :
       {StepLoad{32, 200000, 0, 0, 0}, StepLoad{48, 100000, 42, 10000, 42.0 * 10000},
        StepLoad{8, 50000, 400, 20000, 400.0 * 20000}, StepLoad{0, 0, 3000, 0, 3000.0 * 1500}}) {
    CAPTURE(load.decode_tokens);
    CAPTURE(load.prompt_tokens);
    CHECK(model.predict(load) == doctest::Approx(device(load)).epsilon(0.15));
  }
  CHECK(model.most_beside(false) > 500);
  CHECK(model.most_beside(false) <= 512);
}

TEST_CASE("recorded steps and others are told apart by the step model") {
  // Launched kernel by kernel, nothing takes less than 11 ms; recorded, it takes as long as the device does.
  const auto seconds = [](const StepLoad& load) {
    const double busy = 0.004 + load.prompt_tokens / 60000.0;
    return load.recorded ? busy : std::max(0.011, busy);
  };
  const auto step = [](double tokens, bool recorded) {
    return StepLoad{1, 1000, tokens, 500, tokens * (500 + tokens / 2), recorded};
  };
  StepModel model;
  for (int i = 0; i < 20; ++i) model.learn({1, 1000, 0, 0, 0}, 0.004);
  for (int i = 0; i < 40; ++i) {
    const double tokens = 31 + 32 * (i % 4);
    model.learn(step(tokens, true), seconds(step(tokens, true)));
  }
  CHECK(model.most_beside(false) == 0);
  CHECK(model.predict(step(60, false)) == doctest::Approx(model.predict(step(60, true))));
  for (int i = 0; i < 40; ++i) {
    const double tokens = 10 + 7 * (i % 11);
    model.learn(step(tokens, i % 2 == 0), seconds(step(tokens, i % 2 == 0)));
  }
  for (const double tokens : {31.0, 63.0}) {
    CAPTURE(tokens);
    for (const bool recorded : {true, false})
      CHECK(model.predict(step(tokens, recorded)) ==
            doctest::Approx(seconds(step(tokens, recorded))).epsilon(0.05));
  }
  // None takes less than a recorded one with as many tokens.
  for (const double tokens : {120.0, 600.0})
    CHECK(model.predict(step(tokens, false)) >= model.predict(step(tokens, true)));
  // What wasn't used for long is forgotten.
  for (int i = 0; i < 300; ++i) model.learn(step(60, true), seconds(step(60, true)));
  CHECK(model.most_beside(false) == 0);
  CHECK(model.most_beside(true) > 120);
}

TEST_CASE("pieces of prompts find the recorded steps that hold them") {
  const RecordedSteps none({});
  CHECK(none.most(1) == 0);
  CHECK(none.fill(1, 100) == 0);
  CHECK(none.tokens_for(1, 1) == 0);
  CHECK(none.next(1, 10) == 0);
  std::vector<RecordedStep> steps;
  for (const std::int32_t tokens : {64, 16, 32})
    for (const std::int32_t rows : {8, 1, 4}) steps.push_back({rows, tokens});
  steps.push_back({8, 128});
  steps.push_back({32, 48});  // recording ended before those of fewer rows
  const RecordedSteps recorded(steps);
  for (const std::int32_t rows : {1, 2, 3, 4, 5, 8, 9, 32, 33}) {
    for (std::int32_t tokens = 0; tokens <= 140; ++tokens) {
      CAPTURE(rows);
      CAPTURE(tokens);
      // Beside each number of tokens in all: the most room for a prompt there is.
      std::map<std::int32_t, std::int32_t> rooms;
      for (const auto& step : steps)
        if (step.rows >= rows) rooms[step.tokens] = std::max(rooms[step.tokens], step.tokens - step.rows);
      const std::int32_t first = rooms.empty() ? 0 : rooms.begin()->second;
      std::int32_t fill = 0;
      std::int32_t next = 0;
      std::int32_t held = 0;
      for (const auto& [in_all, room] : rooms) {
        if (room <= tokens) fill = std::max(fill, room);
        if (next <= tokens) next = room;
        if (held == 0 && room >= tokens) held = in_all;
      }
      CHECK(recorded.fill(rows, tokens) == (fill > 0 ? fill : first));
      CHECK(recorded.next(rows, tokens) == next);
      CHECK(recorded.tokens_for(rows, tokens) == held);
    }
  }
  CHECK(recorded.most(1) == 120);
}

TEST_CASE("one stall is no news to the step model, four are") {
  StepModel model;
  const StepLoad load{64, 0, 0, 0, 0};
  for (int i = 0; i < 20; ++i) model.learn(load, 0.004);
  const double before = model.predict(load);
  for (int i = 0; i < 3; ++i) model.learn(load, 5.0);
  CHECK(model.predict(load) == before);
  model.learn(load, 5.0);
  CHECK(model.predict(load) > before);
}

TEST_CASE("one late decode step doesn't change what decoding takes, three in a row do") {
  StepModel model;
  const StepLoad load{1, 1000, 0, 0, 0};
  for (int i = 0; i < 60; ++i) model.learn(load, 0.0100);
  for (int i = 0; i < 60; ++i) model.learn(load, i % 3 == 0 ? 0.0160 : 0.0100);
  CHECK(model.predict(load) == doctest::Approx(0.0100).epsilon(0.03));
  for (int i = 0; i < 20; ++i) model.learn(load, 0.0130);
  CHECK(model.predict(load) == doctest::Approx(0.0130).epsilon(0.03));
  for (int i = 0; i < 20; ++i) model.learn(load, 0.0090);
  CHECK(model.predict(load) == doctest::Approx(0.0090).epsilon(0.03));
}

TEST_CASE("the step model allows for how late steps are, now and then by much") {
  const StepLoad load{1, 1000, 32, 2000, 32.0 * 2000};
  const auto margin_of = [&](const auto& late) {
    StepModel model;
    for (int i = 0; i < 600; ++i) {
      model.learn({1, 1000, 0, 0, 0}, 0.01);
      model.learn(load, 0.02 * late(i));
    }
    return model.margin(false);
  };
  CHECK(margin_of([](int) { return 1.0; }) < 1.02);
  CHECK(margin_of([](int i) { return i % 2 == 0 ? 0.9 : 1.1; }) > 1.08);
  CHECK(margin_of([](int i) { return i % 2 == 0 ? 0.9 : 1.1; }) < 1.2);
  // One step in thirty is a fifth late: that counts. One in three hundred doesn't, ...
  CHECK(margin_of([](int i) { return i % 30 == 7 ? 1.2 : 1.0; }) > 1.15);
  CHECK(margin_of([](int i) { return i % 300 == 7 ? 1.2 : 1.0; }) < 1.05);
  // ... nor what nobody could have held.
  CHECK(margin_of([](int i) { return i % 30 == 7 ? 1.9 : 1.0; }) < 1.06);
  CHECK(StepModel().margin(false) > 1.1);
  // At first, what the machine does to decoding rows alone.
  StepModel shaken;
  for (int i = 0; i < 100; ++i) shaken.learn({1, 1000, 0, 0, 0}, i % 10 == 9 ? 0.0125 : 0.0100);
  CHECK(shaken.margin(false) > 1.2);
  CHECK(shaken.margin(true) > 1.2);
}

TEST_CASE("what was seen before is the longest known prefix") {
  SeenBlocks seen;
  std::vector<Hash128> chain;
  for (std::uint64_t i = 1; i <= 3000; ++i) chain.push_back({i * 0x9e3779b97f4a7c15ULL, i});
  CHECK(seen.see(std::span(chain).first(10)) == 0);
  CHECK(seen.see(std::span(chain).first(2500)) == 10);
  CHECK(seen.see(chain) == 2500);
  CHECK(seen.see(chain) == 3000);
  CHECK(seen.see({}) == 0);
}

TEST_CASE("the table of transitions is complete: nothing leaves an end, everything else can be cancelled") {
  std::map<std::string_view, int> leaving;
  for (const auto& row : transition_table()) ++leaving[row.from];
  for (const std::string_view over : {"Finished", "Cancelled", "TimedOut"}) CHECK(leaving.count(over) == 0);
  for (const std::string_view live :
       {"Submitted", "Prefilling", "Decoding", "Retracted", "AwaitingRemote", "HandingOver"}) {
    CAPTURE(live);
    const auto table = transition_table();
    CHECK(std::any_of(table.begin(), table.end(),
                      [&](const auto& row) { return row.from == live && row.to == "Cancelled"; }));
  }
}

TEST_CASE(
    "disaggregation: the peer's cache arrives, is lost, or is handed over, and nothing is left behind") {
  SlotPool slots(2);
  Arena arena(1, std::array<std::int32_t, 1>{4});
  const auto holding = [&arena] {
    Holding cache;
    cache.full.resize(1);
    cache.full[0].push_back(arena.allocate(0, kNoBlock));
    return cache;
  };
  AwaitingRemote waiting = on(Submitted{}, Reserve{slots.take(), holding()});
  CHECK(arena.out(0) == 1);
  SUBCASE("lost: the blocks outlive the state until whoever gets the remains lets go") {
    Left<Submitted> left = on(std::move(waiting), RemoteLost{});
    CHECK(arena.out(0) == 1);
    {
      const Remains gone = std::move(left.remains);
    }
    CHECK(arena.out(0) == 0);
  }
  SUBCASE("arrived, decoded, handed over: the slot is free while the peer reads the blocks") {
    Decoding decoding = on(std::move(waiting), RemoteArrived{});
    Left<HandingOver> left = on(std::move(decoding), HandOver{});
    {
      const Remains gone = std::move(left.remains);
    }
    CHECK(slots.free() == 2);
    CHECK(arena.out(0) == 1);
    {
      const Remains gone = on(std::move(left.state), End{Reason::stop}).remains;
    }
  }
  SUBCASE("cancelled") {
    const Remains gone = on(std::move(waiting), Cancel{}).remains;
    CHECK(slots.free() == 1);
  }
  waiting = AwaitingRemote{};
  CHECK(arena.out(0) == 0);
  CHECK(slots.free() == 2);
}
