#include "quickturn/control/prefix_index.hpp"

#include <algorithm>

namespace quickturn::control {

namespace {

// Attention makes a token at this depth cost twice one at the start, about right for the models that agents
// use.
constexpr double kDoubleCostDepth = 32768.0;

// Spare checkpoints count as an hour older than they are, and what it costs to make them again counts more.
constexpr Tick kSpareAge = static_cast<Tick>(3600 * kTicksPerSecond);
constexpr std::uint32_t kSpareBonus = 16;
static_assert(kFirstTick > 2 * kSpareAge);

// Fetching a block from the tier below costs about this much less than computing it again.
constexpr std::uint32_t kCheaperToLoad = 4;

// How much longer a block is kept for costing `ratio` times the mean a byte; grows slower and slower, at most
// 8 times `hold`.
std::uint32_t bonus(std::uint32_t hold, double ratio) {
  return static_cast<std::uint32_t>(hold * (ratio / (1.0 + ratio / 8.0)));
}

std::size_t expected_nodes(const SchedulerConfig& config, const std::vector<GroupId>& full_groups) {
  if (full_groups.empty()) return 1024;
  const GroupId group = full_groups[0];
  std::size_t count = static_cast<std::size_t>(config.num_slabs) *
                      static_cast<std::size_t>(config.groups[group].blocks_per_slab);
  for (const auto& tier : config.tiers) count += static_cast<std::size_t>(tier.blocks[group]);
  return count;
}

std::vector<GroupId> groups_of(const SchedulerConfig& config, GroupKind kind) {
  std::vector<GroupId> groups;
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    if (config.groups[g].kind == kind) groups.push_back(static_cast<GroupId>(g));
  }
  return groups;
}

}  // namespace

PrefixIndex::PrefixIndex(const SchedulerConfig& config, Storage& storage, EventLog& events)
    : config_(config),
      storage_(storage),
      events_(events),
      full_groups_(groups_of(config, GroupKind::full)),
      window_groups_(groups_of(config, GroupKind::window)),
      state_groups_(groups_of(config, GroupKind::state)),
      hold_ticks_(static_cast<std::uint32_t>(config.policy.eviction_hold * kTicksPerSecond)),
      table_(config.prefix_cache ? expected_nodes(config, full_groups_) : 0),
      tiers_(static_cast<std::size_t>(storage.num_tiers())) {}

std::uint32_t PrefixIndex::key_of(NodeId id, TierId tier) const {
  const Node& node = nodes_[id];
  if (node.used == 0) return 0;
  const std::uint32_t extra =
      bonus(hold_ticks_, 1.0 + node.depth * static_cast<double>(config_.block_tokens) / kDoubleCostDepth);
  for (std::size_t below = tier + std::size_t{1}; below < tiers_.size(); ++below) {
    if (has_copy(id, static_cast<TierId>(below))) return node.used + extra / kCheaperToLoad;
  }
  return node.used + extra;
}

std::uint32_t PrefixIndex::key_of_side(SideId id, TierId tier) const {
  const Side& side = sides_[id];
  // Left behind by its session: what would be cheap to make again goes first, so that the rest is spread over
  // the context.
  if (side.used == 0) return side.bonus;
  if (side.spare) return side.used - kSpareAge + kSpareBonus * side.bonus;
  for (std::size_t below = tier + std::size_t{1}; below < tiers_.size(); ++below) {
    if (side.block[below] != kNoBlock) return side.used + side.bonus / kCheaperToLoad;
  }
  return side.used + side.bonus;
}

NodeId PrefixIndex::find(const Hash128& hash) const { return table_.find(hash, hash_of()); }

bool PrefixIndex::has_any_copy(NodeId node) const {
  for (TierId t = 0; t < tiers_.size(); ++t) {
    if (has_copy(node, t)) return true;
  }
  return false;
}

// ---- pins

NodePin PrefixIndex::pin(NodeId node, bool use) {
  if (node == kNone) return {};
  protect(node);
  return {this, node, use};
}

void PrefixIndex::protect(NodeId node) {
  for (NodeId at = node; at != kNone && nodes_[at].holders++ == 0; at = nodes_[at].parent) {
    set_fixed(at, true);
    refresh(at);
  }
}

void PrefixIndex::unprotect(NodeId node, bool use) {
  for (NodeId at = node; at != kNone;) {
    const NodeId parent = nodes_[at].parent;
    // A superseded node that was used again is as good as any other; one kept until later stays so.
    if (use && !is_forgotten(at)) nodes_[at].used = std::max(nodes_[at].used, now_);
    if (--nodes_[at].holders > 0) return;
    set_fixed(at, false);
    refresh(at);
    collect(at);
    at = parent;
  }
}

SidePin PrefixIndex::pin_side(SideId id, bool use) {
  Side& side = sides_[id];
  if (side.pins++ == 0) {
    if (side.block[kDevice] != kNoBlock) storage_.device().fix(side.group, side.block[kDevice]);
    refresh_side(id);
  }
  protect(side.node);
  return {this, id, use};
}

void PrefixIndex::unpin_side(SideId id, bool use) {
  Side& side = sides_[id];
  if (use && !is_forgotten(side.node)) {
    side.used = std::max(side.used, now_);
    side.spare = false;
  }
  if (--side.pins == 0) {
    if (side.block[kDevice] != kNoBlock) storage_.device().unfix(side.group, side.block[kDevice]);
    refresh_side(id);
  }
  unprotect(side.node, use);
}

void PrefixIndex::set_fixed(NodeId node, bool fixed) {
  if (!has_copy(node, kDevice)) return;
  for (std::size_t f = 0; f < full_groups_.size(); ++f) {
    const BlockId id = block(node, kDevice, static_cast<int>(f));
    if (fixed) {
      storage_.device().fix(full_groups_[f], id);
    } else {
      storage_.device().unfix(full_groups_[f], id);
    }
  }
}

// ---- entering

NodeId PrefixIndex::new_node(const Hash128& hash, NodeId parent) {
  NodeId id;
  if (!free_nodes_.empty()) {
    id = free_nodes_.back();
    free_nodes_.pop_back();
  } else {
    id = static_cast<NodeId>(nodes_.size());
    if (nodes_.empty()) {
      // One exact reservation: growing by doubling would waste half of what the index may take.
      const std::size_t expected = expected_nodes(config_, full_groups_);
      nodes_.reserve(expected);
      hashes_.reserve(expected);
      for (auto& tier : tiers_) {
        tier.cells.reserve(expected);
        tier.blocks.reserve(expected * full_groups_.size());
      }
    }
    nodes_.emplace_back();
    hashes_.emplace_back();
    if (!window_groups_.empty() || !state_groups_.empty()) first_side_.push_back(kNone);
    for (auto& tier : tiers_) {
      tier.cells.emplace_back();
      tier.blocks.resize(tier.blocks.size() + full_groups_.size(), kNoBlock);
    }
  }
  hashes_[id] = hash;
  nodes_[id] = Node{parent, 0, 0, depth(parent) + 1, is_forgotten(id) ? 0 : now_};
  if (parent != kNone) {
    ++nodes_[parent].children;
    refresh(parent);
  }
  table_.insert(id, hash_of());
  return id;
}

NodePin PrefixIndex::publish(const NodePin& parent, const Hash128& hash, std::span<BlockRef> blocks) {
  const bool known = !is_forgotten(parent.node());
  NodeId id = known ? find(hash) : kNone;
  if (id == kNone) id = new_node(known ? hash : secret_name(), parent.node());
  NodePin held = pin(id);
  install(id, kDevice, blocks);
  return held;
}

void PrefixIndex::install(NodeId id, TierId t, std::span<BlockRef> blocks) {
  if (full_groups_.empty() || has_copy(id, t)) return;
  for (std::size_t f = 0; f < full_groups_.size(); ++f) {
    const GroupId group = full_groups_[f];
    const BlockId block = storage_.adopt(t, group, std::move(blocks[f]), id);
    tiers_[t].blocks[id * full_groups_.size() + f] = block;
    if (t == kDevice && nodes_[id].holders == 0) storage_.device().unfix(group, block);
    log(EventKind::stored, t, group, id);
  }
  const NodeId parent = nodes_[id].parent;
  if (parent != kNone) {
    ++tiers_[t].cells[parent].kids;
    refresh(parent);
  }
  refresh(id);
  if (t > 0) rekey(id);
}

SideId PrefixIndex::side(NodeId node, GroupId group) const {
  SideId id = first_side(node);
  while (id != kNone && sides_[id].group != group) id = sides_[id].next;
  return id;
}

SideId PrefixIndex::publish_side(NodeId node, GroupId group, BlockRef& block, std::uint32_t cost,
                                 bool spare) {
  SideId id = side(node, group);
  if (id == kNone) {
    if (!free_sides_.empty()) {
      id = free_sides_.back();
      free_sides_.pop_back();
    } else {
      id = static_cast<SideId>(sides_.size());
      sides_.emplace_back();
    }
    // Cost per byte against that of a block of the first group: bytes go with 1 / blocks_per_slab.
    const double bytes =
        static_cast<double>(config_.groups[0].blocks_per_slab) / config_.groups[group].blocks_per_slab;
    sides_[id] = Side{};
    sides_[id].node = node;
    sides_[id].next = std::exchange(first_side_[node], id);
    sides_[id].group = group;
    sides_[id].spare = spare;
    sides_[id].bonus = bonus(hold_ticks_, cost / (static_cast<double>(config_.block_tokens) * bytes));
    ++live_sides_;
  }
  sides_[id].used = is_forgotten(node) ? 0 : std::max(sides_[id].used, now_);
  sides_[id].spare = sides_[id].spare && spare;
  install_side(id, kDevice, block);
  return id;
}

void PrefixIndex::install_side(SideId id, TierId t, BlockRef& block) {
  Side& side = sides_[id];
  if (side.block[t] != kNoBlock) return;
  side.block[t] = storage_.adopt(t, side.group, std::move(block), Arena::kSideBit | id);
  if (t == kDevice && side.pins == 0) storage_.device().unfix(side.group, side.block[t]);
  log(EventKind::stored, t, side.group, side.node);
  refresh_side(id);
  if (t > 0) rekey_side(id);
}

void PrefixIndex::log(EventKind kind, TierId tier, GroupId group, NodeId id) {
  if (!events_.enabled() || is_forgotten(id)) return;
  const NodeId parent = nodes_[id].parent;
  events_.record(
      {kind, tier, group, nodes_[id].depth, hashes_[id], parent == kNone ? Hash128{} : hashes_[parent]});
}

std::size_t PrefixIndex::bytes() const {
  std::size_t total = table_.bytes() + nodes_.capacity() * sizeof(Node) +
                      hashes_.capacity() * sizeof(Hash128) + first_side_.capacity() * sizeof(SideId) +
                      free_nodes_.capacity() * sizeof(NodeId) + sides_.capacity() * sizeof(Side) +
                      free_sides_.capacity() * sizeof(SideId);
  for (const auto& tier : tiers_) {
    total +=
        tier.cells.capacity() * sizeof(Cell) + tier.blocks.capacity() * sizeof(BlockId) + tier.heap.bytes();
    for (const auto& heap : tier.side_heaps) total += heap.bytes();
  }
  return total;
}

}  // namespace quickturn::control
