// An open-addressing hash table from prefix hash to node id: 32-bit cells, linear probing, deletion by
// backward shift.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "quickturn/control/hash.hpp"
#include "quickturn/control/types.hpp"

namespace quickturn::control {

class NodeTable {
 public:
  explicit NodeTable(std::size_t capacity) : cells_(cells_for(capacity), kNone) {}

  // `hash_of(id)` gives the hash of a node in the table.
  template <class HashOf>
  NodeId find(const Hash128& hash, HashOf hash_of) const {
    for (std::size_t at = home(hash); cells_[at] != kNone; at = after(at)) {
      if (hash_of(cells_[at]) == hash) return cells_[at];
    }
    return kNone;
  }

  // Fetches the cell where the hash belongs: a large table isn't in the processor's caches.
  void prefetch(const Hash128& hash) const { __builtin_prefetch(&cells_[home(hash)]); }

  template <class HashOf>
  void insert(NodeId id, HashOf hash_of) {
    if (cells_for(++size_) > cells_.size()) grow(hash_of);
    place(id, hash_of(id));
  }

  template <class HashOf>
  void erase(NodeId id, HashOf hash_of) {
    std::size_t hole = home(hash_of(id));
    while (cells_[hole] != id) hole = after(hole);
    --size_;
    for (std::size_t at = after(hole); cells_[at] != kNone; at = after(at)) {
      // An entry may move back into the hole unless its home lies between the hole (excluded) and its place.
      const std::size_t from = distance(home(hash_of(cells_[at])), at);
      if (from >= distance(hole, at)) {
        cells_[hole] = cells_[at];
        hole = at;
      }
    }
    cells_[hole] = kNone;
  }

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return cells_.capacity() * sizeof(NodeId); }

 private:
  static std::size_t cells_for(std::size_t count) { return count + count / 3 + 16; }

  std::size_t home(const Hash128& hash) const {
    __extension__ using u128 = unsigned __int128;
    return static_cast<std::size_t>((u128{hash.lo} * cells_.size()) >> 64);
  }
  std::size_t after(std::size_t at) const { return at + 1 == cells_.size() ? 0 : at + 1; }
  std::size_t distance(std::size_t from, std::size_t to) const {
    return to >= from ? to - from : to + cells_.size() - from;
  }

  void place(NodeId id, const Hash128& hash) {
    std::size_t at = home(hash);
    while (cells_[at] != kNone) at = after(at);
    cells_[at] = id;
  }

  template <class HashOf>
  void grow(HashOf hash_of) {
    std::vector<NodeId> old(cells_for(size_ + size_ / 2), kNone);
    old.swap(cells_);
    for (const NodeId id : old) {
      if (id != kNone) place(id, hash_of(id));
    }
  }

  std::vector<NodeId> cells_;
  std::size_t size_ = 0;
};

}  // namespace quickturn::control
