// Cache memory with its prefix index: allocation that evicts, capacity for admission, and the limbo of what
// is still in use.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "quickturn/control/config.hpp"
#include "quickturn/control/events.hpp"
#include "quickturn/control/prefix_index.hpp"
#include "quickturn/control/request.hpp"
#include "quickturn/control/states.hpp"
#include "quickturn/control/storage.hpp"

namespace quickturn::control {

using Need = std::array<std::int64_t, kMaxGroups>;

// Resources that a planned step may still touch, kept until it was applied. What no step touches any more is
// freed at once.
class Limbo {
 public:
  void keep(StepId until, BlockRef&& block);
  void keep(StepId until, SidePin&& pin);
  void keep(StepId until, Remains&& remains, std::unique_ptr<Request> request);
  // Lets go of all that waited for a step up to `applied`. True if something was freed.
  bool release(StepId applied);
  void set_applied(StepId applied) { applied_ = applied; }
  bool empty() const { return blocks_.empty() && pins_.empty() && remains_.empty(); }

 private:
  template <class T>
  struct Kept {
    StepId until;
    T what;
  };
  struct Rest {
    Remains remains;
    std::unique_ptr<Request> request;  // rows in flight still point at it
  };
  template <class T>
  static bool drop(std::deque<Kept<T>>& kept, StepId applied);

  StepId applied_ = -1;
  std::deque<Kept<BlockRef>> blocks_;
  std::deque<Kept<SidePin>> pins_;
  std::deque<Kept<Rest>> remains_;
};

class Cache {
 public:
  explicit Cache(const SchedulerConfig& config);

  // A block on the device, evicting what is worth least if it must; empty if nothing can give way.
  BlockRef allocate(GroupId group, BlockId near);
  // So many blocks of each group could be had now, evicting as it takes.
  bool fits(const Need& need) const;
  // So many blocks of each group would fit into an empty arena.
  bool fits_empty(const Need& need) const;
  // Share of a tier that nothing occupies; below the device, of its scarcest group.
  double free_share(TierId tier) const;

  Storage& storage() { return storage_; }
  const Storage& storage() const { return storage_; }
  PrefixIndex& index() { return index_; }
  const PrefixIndex& index() const { return index_; }
  EventLog& events() { return events_; }
  Limbo& limbo() { return limbo_; }
  std::int64_t evictions() const { return evictions_; }
  // Of these, the ones that freed a block of the group.
  std::int64_t evictions(GroupId group) const { return evictions_by_group_[group]; }
  std::size_t reset();

 private:
  bool evict_for(GroupId group);

  const SchedulerConfig& config_;
  EventLog events_;
  Storage storage_;
  PrefixIndex index_;
  Limbo limbo_;
  std::int64_t evictions_ = 0;
  std::vector<std::int64_t> evictions_by_group_;
};

}  // namespace quickturn::control
