#include <doctest/doctest.h>

#include <numeric>
#include <set>
#include <utility>

#include "quickturn/control/hash.hpp"

using namespace quickturn::control;

namespace {

std::vector<std::int32_t> counting(std::size_t count) {
  std::vector<std::int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

}  // namespace

TEST_CASE("every token, every place, the salt, the key and the hash before matter") {
  for (const std::int32_t unit : {1, 2, 4, 16, 64}) {
    CAPTURE(unit);
    const PrefixHasher hasher({}, unit, "model");
    auto tokens = counting(static_cast<std::size_t>(unit));
    std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
    const auto is_new = [&seen](const Hash128& hash) { return seen.insert({hash.lo, hash.hi}).second; };
    const Hash128 root = hasher.root("", "");
    CHECK(is_new(hasher.next(root, tokens)));
    CHECK(is_new(hasher.next(hasher.next(root, tokens), tokens)));
    CHECK(is_new(hasher.next(hasher.root("adapter", ""), tokens)));
    CHECK(is_new(hasher.next(hasher.root("", "adapter"), tokens)));
    CHECK(is_new(hasher.next(hasher.with_content(root, 0, 1), tokens)));
    CHECK(is_new(hasher.next(hasher.with_content(root, 1, 1), tokens)));
    const PrefixHasher other_model({}, unit, "other");
    CHECK(is_new(other_model.next(other_model.root("", ""), tokens)));
    const PrefixHasher other_key({1}, unit, "model");
    CHECK(is_new(other_key.next(other_key.root("", ""), tokens)));
    for (auto& token : tokens) {
      ++token;
      CHECK(is_new(hasher.next(root, tokens)));
    }
    if (unit > 1) {
      std::swap(tokens.front(), tokens.back());
      CHECK(is_new(hasher.next(root, tokens)));
    }
  }
}

TEST_CASE("the same input gives the same hash, wherever it lies in memory") {
  const PrefixHasher hasher({3, 1, 4}, 64, "m");
  const PrefixHasher again({3, 1, 4}, 64, "m");
  const auto tokens = counting(64);
  std::vector<std::int32_t> shifted(65);
  std::copy(tokens.begin(), tokens.end(), shifted.begin() + 1);
  CHECK(hasher.next(hasher.root("a", "s"), tokens) ==
        again.next(again.root("a", "s"), std::span(shifted).subspan(1)));
}

TEST_CASE("flipping any bit flips about half of the result") {
  const PrefixHasher hasher({}, 64, "");
  auto tokens = counting(64);
  const Hash128 base = hasher.next({}, tokens);
  for (std::size_t place = 0; place < 64; place += 7) {
    for (int bit = 0; bit < 32; bit += 5) {
      tokens[place] ^= 1 << bit;
      const Hash128 other = hasher.next({}, tokens);
      tokens[place] ^= 1 << bit;
      const int flipped = __builtin_popcountll(base.lo ^ other.lo) + __builtin_popcountll(base.hi ^ other.hi);
      CHECK(flipped > 34);
      CHECK(flipped < 94);
    }
  }
}
