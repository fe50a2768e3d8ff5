#include <doctest/doctest.h>

#include <array>
#include <random>
#include <set>

#include "quickturn/control/arena.hpp"

using namespace quickturn::control;

TEST_CASE("blocks of one context fill slab after slab") {
  Arena arena(4, std::array<std::int32_t, 1>{4});
  std::vector<BlockRef> blocks;
  for (BlockId expected = 0; expected < 16; ++expected) {
    blocks.push_back(arena.allocate(0, blocks.empty() ? kNoBlock : blocks.back().id()));
    CHECK(blocks.back().id() == expected);
  }
  CHECK(!arena.allocate(0, 15));
  CHECK(arena.free_slabs() == 0);
  blocks.clear();
  CHECK(arena.free_slabs() == 4);
  arena.check();
}

TEST_CASE("a slab moves to another group once it is empty, not before") {
  Arena arena(1, std::array<std::int32_t, 2>{4, 2});
  BlockRef first = arena.allocate(0, kNoBlock);
  CHECK(!arena.allocate(1, kNoBlock));
  first.reset();
  BlockRef second = arena.allocate(1, kNoBlock);
  CHECK(second.id() == 0);
  CHECK(!arena.allocate(0, kNoBlock));
}

TEST_CASE("moving a reference moves the ownership") {
  Arena arena(1, std::array<std::int32_t, 1>{2});
  BlockRef a = arena.allocate(0, kNoBlock);
  BlockRef b = std::move(a);
  CHECK(arena.out(0) == 1);
  b = arena.allocate(0, kNoBlock);  // gives the first one back
  CHECK(arena.out(0) == 1);
  CHECK(b.id() == 1);
}

TEST_CASE("what only the index keeps is evictable, and whole slabs of it are counted") {
  Arena arena(2, std::array<std::int32_t, 1>{2});
  BlockRef a = arena.allocate(0, kNoBlock);
  BlockRef b = arena.allocate(0, a.id());
  const BlockId id = arena.adopt(std::move(a), 7);
  CHECK(arena.owner(0, id) == 7);
  arena.unfix(0, id);
  CHECK(arena.evictable(0) == 1);
  CHECK(arena.reclaimable_slabs(0) == 0);
  b.reset();
  CHECK(arena.reclaimable_slabs(0) == 1);
  arena.fix(0, id);
  arena.surrender(0, id).reset();
  CHECK(arena.free_slabs() == 2);
  arena.check();
}

TEST_CASE("random allocation never gives a block twice") {
  const std::uint64_t seed = 20260930;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  Arena arena(16, std::array<std::int32_t, 3>{8, 3, 1});
  std::array<std::vector<BlockRef>, 3> held;
  for (int i = 0; i < 20000; ++i) {
    const auto group = static_cast<GroupId>(random() % 3);
    auto& mine = held[group];
    if (random() % 2 == 0 || mine.empty()) {
      BlockRef block = arena.allocate(group, mine.empty() ? kNoBlock : mine[random() % mine.size()].id());
      if (block) mine.push_back(std::move(block));
    } else {
      std::swap(mine[random() % mine.size()], mine.back());
      mine.pop_back();
    }
    if (i % 500 != 0) continue;
    arena.check();
    std::set<std::uint32_t> slabs;
    for (GroupId g = 0; g < 3; ++g) {
      std::set<BlockId> ids;
      std::set<std::uint32_t> of_group;
      for (const BlockRef& block : held[g]) {
        CHECK(ids.insert(block.id()).second);
        of_group.insert(arena.slab_of(g, block.id()));
      }
      for (const std::uint32_t slab : of_group) CHECK(slabs.insert(slab).second);
    }
  }
}
