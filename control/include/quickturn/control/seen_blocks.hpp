// Which prefixes were ever seen: what an infinite cache would hold, for cached / ceiling. 8 bytes a block, at
// most a few million blocks (then it starts anew, and the ceiling is too low until it has learned again).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "quickturn/control/hash.hpp"

namespace quickturn::control {

class SeenBlocks {
 public:
  // The longest prefix of `hashes` (a chain) that was seen before; the rest is remembered.
  std::size_t see(std::span<const Hash128> hashes) {
    std::size_t known = 0;
    std::size_t unknown = hashes.size() + 1;
    while (unknown - known > 1) {
      const std::size_t middle = known + (unknown - known) / 2;
      (contains(hashes[middle - 1].lo) ? known : unknown) = middle;
    }
    for (std::size_t i = known; i < hashes.size(); ++i) insert(hashes[i].lo);
    return known;
  }
  std::size_t bytes() const { return cells_.capacity() * sizeof(std::uint64_t); }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 23;

  std::size_t home(std::uint64_t word) const { return static_cast<std::size_t>(word) & (cells_.size() - 1); }
  bool contains(std::uint64_t word) const {
    if (cells_.empty()) return false;
    for (std::size_t at = home(word); cells_[at] != 0; at = (at + 1) & (cells_.size() - 1)) {
      if (cells_[at] == word) return true;
    }
    return false;
  }
  void insert(std::uint64_t word) {
    if (2 * (count_ + 1) > cells_.size()) grow();
    std::size_t at = home(word);
    while (cells_[at] != 0 && cells_[at] != word) at = (at + 1) & (cells_.size() - 1);
    count_ += cells_[at] == 0 ? 1 : 0;
    cells_[at] = word;
  }
  void grow() {
    if (cells_.size() >= kMost) {
      cells_.assign(1024, 0);
      count_ = 0;
      return;
    }
    std::vector<std::uint64_t> old(cells_.empty() ? 1024 : 2 * cells_.size(), 0);
    old.swap(cells_);
    for (const std::uint64_t word : old) {
      if (word == 0) continue;
      std::size_t at = home(word);
      while (cells_[at] != 0) at = (at + 1) & (cells_.size() - 1);
      cells_[at] = word;
    }
  }

  std::vector<std::uint64_t> cells_;
  std::size_t count_ = 0;
};

}  // namespace quickturn::control
