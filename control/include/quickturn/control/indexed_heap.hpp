// A binary min-heap of (key, id) that can remove any id in O(log n); whoever owns the ids keeps their
// positions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quickturn/control/types.hpp"

namespace quickturn::control {

class IndexedHeap {
 public:
  struct Entry {
    std::uint32_t key;
    std::uint32_t id;
  };

  bool empty() const { return entries_.empty(); }
  std::size_t size() const { return entries_.size(); }
  const Entry& top() const { return entries_.front(); }
  std::size_t bytes() const { return entries_.capacity() * sizeof(Entry); }

  // `place(id)` is a reference to the stored position of `id`, kNone while it isn't in the heap.
  template <class Place>
  void push(std::uint32_t key, std::uint32_t id, Place place) {
    // By a quarter, not by doubling: the heap is part of what the index takes for each block.
    if (entries_.size() == entries_.capacity()) entries_.reserve(entries_.size() + entries_.size() / 4 + 16);
    entries_.push_back({key, id});
    rise(static_cast<std::uint32_t>(entries_.size() - 1), place);
  }

  template <class Place>
  void remove(std::uint32_t id, Place place) {
    const std::uint32_t at = place(id);
    place(id) = kNone;
    const Entry last = entries_.back();
    entries_.pop_back();
    if (last.id == id) return;
    entries_[at] = last;
    place(last.id) = at;
    if (at > 0 && before(last, entries_[(at - 1) / 2])) {
      rise(at, place);
    } else {
      sink(at, place);
    }
  }

 private:
  // Equal keys go by id, so that the order depends on nothing but the calls.
  static bool before(const Entry& a, const Entry& b) { return a.key != b.key ? a.key < b.key : a.id < b.id; }

  template <class Place>
  void rise(std::uint32_t at, Place place) {
    const Entry entry = entries_[at];
    while (at > 0) {
      const std::uint32_t up = (at - 1) / 2;
      if (!before(entry, entries_[up])) break;
      entries_[at] = entries_[up];
      place(entries_[at].id) = at;
      at = up;
    }
    entries_[at] = entry;
    place(entry.id) = at;
  }

  template <class Place>
  void sink(std::uint32_t at, Place place) {
    const Entry entry = entries_[at];
    const auto count = static_cast<std::uint32_t>(entries_.size());
    for (std::uint32_t down = 2 * at + 1; down < count; down = 2 * at + 1) {
      if (down + 1 < count && before(entries_[down + 1], entries_[down])) ++down;
      if (!before(entries_[down], entry)) break;
      entries_[at] = entries_[down];
      place(entries_[at].id) = at;
      at = down;
    }
    entries_[at] = entry;
    place(entry.id) = at;
  }

  std::vector<Entry> entries_;
};

}  // namespace quickturn::control
