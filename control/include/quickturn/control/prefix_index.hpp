// The prefix index: which prefixes are cached, in which tier, by which blocks, and who keeps them.
//
// A node is a boundary: the prefix of `depth` blocks with one chained hash. Nodes form chains (parent links),
// never a radix tree.
// - The blocks of all `full` groups belong to the node itself: they live and die together in each tier.
// - Blocks of `window` and `state` groups are side entries of the node: each can go on its own.
// A node can't go while a child of it is known, so a known node means that the whole chain before it is
// known, and the longest known prefix is found by bisection. A pin on a node protects every node before it:
// one pin holds a whole context.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "quickturn/control/config.hpp"
#include "quickturn/control/events.hpp"
#include "quickturn/control/hash.hpp"
#include "quickturn/control/indexed_heap.hpp"
#include "quickturn/control/node_table.hpp"
#include "quickturn/control/storage.hpp"
#include "quickturn/control/types.hpp"

namespace quickturn::control {

class PrefixIndex;

// Keeps a node, and with it every node before it, in whatever tier it lies. The empty pin stands for the
// empty prefix.
class [[nodiscard]] NodePin {
 public:
  NodePin() = default;
  NodePin(NodePin&& other) noexcept
      : index_(std::exchange(other.index_, nullptr)), node_(other.node_), use_(other.use_) {}
  NodePin& operator=(NodePin&& other) noexcept;
  NodePin(const NodePin&) = delete;
  NodePin& operator=(const NodePin&) = delete;
  ~NodePin() { reset(); }

  NodeId node() const { return index_ != nullptr ? node_ : kNone; }
  void reset();

 private:
  friend class PrefixIndex;
  NodePin(PrefixIndex* index, NodeId node, bool use) : index_(index), node_(node), use_(use) {}
  PrefixIndex* index_ = nullptr;
  NodeId node_ = kNone;
  bool use_ = false;
};

// Keeps one side entry and its node.
class [[nodiscard]] SidePin {
 public:
  SidePin() = default;
  SidePin(SidePin&& other) noexcept
      : index_(std::exchange(other.index_, nullptr)), side_(other.side_), use_(other.use_) {}
  SidePin& operator=(SidePin&& other) noexcept;
  SidePin(const SidePin&) = delete;
  SidePin& operator=(const SidePin&) = delete;
  ~SidePin() { reset(); }

  explicit operator bool() const { return index_ != nullptr; }
  SideId side() const { return index_ != nullptr ? side_ : kNone; }
  void reset();

 private:
  friend class PrefixIndex;
  SidePin(PrefixIndex* index, SideId side, bool use) : index_(index), side_(side), use_(use) {}
  PrefixIndex* index_ = nullptr;
  SideId side_ = kNone;
  bool use_ = false;
};

struct Match {
  NodeId shared_node = kNone;  // longest known prefix
  std::uint32_t shared = 0;    // its depth
  NodeId resume_node = kNone;  // longest boundary from which every group can go on
  std::uint32_t resume = 0;
};

class PrefixIndex {
 public:
  PrefixIndex(const SchedulerConfig& config, Storage& storage, EventLog& events);
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  void set_now(Tick now) { now_ = now; }

  // The joint match. `hashes` are those of the prompt's blocks; the resume point is at most `limit` blocks.
  Match match(std::span<const Hash128> hashes, std::uint32_t limit) const;
  NodeId find(const Hash128& hash) const;
  // Fetches what `publish` will touch.
  void prefetch(const Hash128& hash, NodeId parent) const {
    table_.prefetch(hash);
    if (parent == kNone) return;
    __builtin_prefetch(&nodes_[parent], 1);
    __builtin_prefetch(&tiers_[kDevice].cells[parent], 1);
  }

  // Letting go of a pin counts as a use of what it kept, unless `use` is false (a copy to another tier is no
  // use).
  NodePin pin(NodeId node, bool use = true);
  SidePin pin_side(SideId side, bool use = true);

  // Enters the block after `parent`. Takes `blocks` (one for each full group), unless the node has its copy
  // on the device already.
  NodePin publish(const NodePin& parent, const Hash128& hash, std::span<BlockRef> blocks);
  // Enters a window block or a checkpoint at a node, taking `block` unless the node has one of the group on
  // the device already. `cost` is what it would take to compute it again, in tokens. A `spare` one only helps
  // those who part from a context in its middle: until it was used once, it goes before everything that
  // somebody is likely to extend.
  SideId publish_side(NodeId node, GroupId group, BlockRef& block, std::uint32_t cost, bool spare = false);

  NodeId parent(NodeId node) const { return nodes_[node].parent; }
  std::uint32_t depth(NodeId node) const { return node == kNone ? 0 : nodes_[node].depth; }
  const Hash128& hash(NodeId node) const { return hashes_[node]; }
  bool has_children(NodeId node) const { return nodes_[node].children > 0; }
  bool is_protected(NodeId node) const { return nodes_[node].holders > 0; }
  // Block of the `ordinal`-th full group, kNoBlock if the tier has no copy.
  BlockId block(NodeId node, TierId tier, int ordinal) const {
    return tiers_[tier].blocks[node * full_groups_.size() + static_cast<std::size_t>(ordinal)];
  }
  bool has_copy(NodeId node, TierId tier) const {
    return !full_groups_.empty() && block(node, tier, 0) != kNoBlock;
  }
  SideId side(NodeId node, GroupId group) const;
  BlockId side_block(SideId side, TierId tier) const { return sides_[side].block[tier]; }
  GroupId side_group(SideId side) const { return sides_[side].group; }
  NodeId side_node(SideId side) const { return sides_[side].node; }
  const std::vector<GroupId>& full_groups() const { return full_groups_; }

  // Adds a copy that arrived in a tier. Blocks stay with the caller if the tier has one by now.
  void install(NodeId node, TierId tier, std::span<BlockRef> blocks);
  void install_side(SideId side, TierId tier, BlockRef& block);

  // What would go next in a tier: the end of a chain, or a side entry. kNone if nothing can. Smaller keys go
  // first.
  NodeId chain_victim(TierId tier) const;
  SideId side_victim(TierId tier, GroupId group) const;
  std::uint32_t chain_key(TierId tier) const { return tiers_[tier].heap.top().key; }
  std::uint32_t side_key(TierId tier, GroupId group) const {
    return tiers_[tier].side_heaps[group].top().key;
  }
  // What a copy in the tier is worth.
  std::uint32_t key_of(NodeId node, TierId tier) const;
  std::uint32_t key_of_side(SideId side, TierId tier) const;
  bool is_superseded(NodeId node) const { return nodes_[node].used == 0; }
  bool is_side_superseded(SideId side) const { return sides_[side].used == 0; }
  // Removes the victim's copy from the tier.
  void evict_chain(TierId tier);
  void evict_side(TierId tier, GroupId group);

  // Keep warm until then; or mark as the first to go (an older tail that nobody will extend).
  void keep_until(NodeId node, Tick until);
  void keep_side_until(SideId side, Tick until);
  void supersede_tail(NodeId node);
  void supersede_side(SideId side);
  // What the node's blocks hold is wrong: it and every node after it can't be found any more, and go first.
  // Who keeps them keeps them; what is published after them can't be found either. Adds their blocks on the
  // device to `blocks`, by group.
  void forget(NodeId node, std::vector<std::vector<BlockId>>& blocks);
  bool is_forgotten(NodeId node) const { return node != kNone && hashes_[node].hi == kForgotten; }

  std::size_t num_nodes() const { return table_.size(); }
  std::size_t num_sides() const { return live_sides_; }
  std::size_t bytes() const;
  void check() const;

 private:
  friend class NodePin;
  friend class SidePin;

  // A forgotten node goes by a name with this upper half, which no hash of tokens has (but once in 2^64).
  static constexpr std::uint64_t kForgotten = ~std::uint64_t{0};

  struct Node {
    NodeId parent = kNone;
    std::uint32_t holders = 0;   // pins, and children with holders
    std::uint32_t children = 0;  // known nodes after this one
    std::uint32_t depth = 0;
    Tick used = 0;  // 0: superseded
  };
  struct Cell {
    std::uint32_t kids = 0;  // children with a copy in this tier
    std::uint32_t heap = kNone;
  };
  struct Tier {
    std::vector<Cell> cells;
    std::vector<BlockId> blocks;  // node-major, one for each full group
    IndexedHeap heap;
    std::array<IndexedHeap, kMaxGroups> side_heaps;
  };
  struct Side {
    NodeId node = kNone;
    SideId next = kNone;
    std::uint32_t pins = 0;
    Tick used = 0;
    std::uint32_t bonus = 0;
    GroupId group = 0;
    bool spare = false;
    std::array<BlockId, kMaxTiers> block{kNoBlock, kNoBlock, kNoBlock};
    std::array<std::uint32_t, kMaxTiers> heap{kNone, kNone, kNone};
  };

  void protect(NodeId node);
  void unprotect(NodeId node, bool use);
  void unpin_side(SideId side, bool use);
  void set_fixed(NodeId node, bool fixed);
  void refresh(NodeId node);
  void refresh_side(SideId side);
  void rekey(NodeId node);
  void rekey_side(SideId side);
  SideId first_side(NodeId node) const { return first_side_.empty() ? kNone : first_side_[node]; }
  void drop_copy(NodeId node, TierId tier);
  void drop_side_copy(SideId side, TierId tier);
  void remove_side(SideId side);
  void collect(NodeId node);
  NodeId new_node(const Hash128& hash, NodeId parent);
  bool has_any_copy(NodeId node) const;
  void rename(NodeId node);
  void list_blocks(NodeId node, std::vector<std::vector<BlockId>>& blocks) const;
  Hash128 secret_name() { return {++forgotten_ * 0x9e3779b97f4a7c15, kForgotten}; }
  bool windows_reach(NodeId node, std::uint32_t depth, std::uint32_t& missing) const;
  void log(EventKind kind, TierId tier, GroupId group, NodeId node);
  auto hash_of() const {
    return [this](NodeId id) -> const Hash128& { return hashes_[id]; };
  }

  const SchedulerConfig& config_;
  Storage& storage_;
  EventLog& events_;
  std::vector<GroupId> full_groups_;
  std::vector<GroupId> window_groups_;
  std::vector<GroupId> state_groups_;
  std::uint32_t hold_ticks_;
  Tick now_ = kFirstTick;
  NodeTable table_;
  std::vector<Node> nodes_;
  std::vector<Hash128> hashes_;  // by node
  std::vector<Tier> tiers_;
  std::vector<SideId> first_side_;  // by node; empty when there are full groups only
  std::vector<NodeId> free_nodes_;
  std::vector<Side> sides_;
  std::vector<SideId> free_sides_;
  std::size_t live_sides_ = 0;
  std::uint64_t forgotten_ = 0;
};

inline NodePin& NodePin::operator=(NodePin&& other) noexcept {
  if (this != &other) {
    reset();
    index_ = std::exchange(other.index_, nullptr);
    node_ = other.node_;
    use_ = other.use_;
  }
  return *this;
}
inline void NodePin::reset() {
  if (index_ != nullptr) std::exchange(index_, nullptr)->unprotect(node_, use_);
}
inline SidePin& SidePin::operator=(SidePin&& other) noexcept {
  if (this != &other) {
    reset();
    index_ = std::exchange(other.index_, nullptr);
    side_ = other.side_;
    use_ = other.use_;
  }
  return *this;
}
inline void SidePin::reset() {
  if (index_ != nullptr) std::exchange(index_, nullptr)->unpin_side(side_, use_);
}

}  // namespace quickturn::control
