// How entries leave the prefix index, in which order, and what keeps them.
#include <algorithm>

#include "quickturn/control/prefix_index.hpp"

namespace quickturn::control {

void PrefixIndex::refresh(NodeId id) {
  const Node& node = nodes_[id];
  for (TierId t = 0; t < tiers_.size(); ++t) {
    Tier& tier = tiers_[t];
    bool want = node.holders == 0 && has_copy(id, t) && tier.cells[id].kids == 0;
    if (want && node.children > 0) {
      // The last copy of a node stays while something after it is known.
      bool other = false;
      for (TierId o = 0; o < tiers_.size(); ++o) other = other || (o != t && has_copy(id, o));
      want = other;
    }
    if (want == (tier.cells[id].heap != kNone)) continue;
    const auto place = [&tier](NodeId at) -> std::uint32_t& { return tier.cells[at].heap; };
    if (want) {
      tier.heap.push(key_of(id, t), id, place);
    } else {
      tier.heap.remove(id, place);
    }
  }
}

void PrefixIndex::rekey(NodeId id) {
  for (TierId t = 0; t < tiers_.size(); ++t) {
    Tier& tier = tiers_[t];
    if (tier.cells[id].heap == kNone) continue;
    const auto place = [&tier](NodeId at) -> std::uint32_t& { return tier.cells[at].heap; };
    tier.heap.remove(id, place);
    tier.heap.push(key_of(id, t), id, place);
  }
}

void PrefixIndex::refresh_side(SideId id) {
  Side& side = sides_[id];
  for (TierId t = 0; t < tiers_.size(); ++t) {
    const bool want = side.pins == 0 && side.block[t] != kNoBlock;
    if (want == (side.heap[t] != kNone)) continue;
    const auto place = [this, t](SideId at) -> std::uint32_t& { return sides_[at].heap[t]; };
    if (want) {
      tiers_[t].side_heaps[side.group].push(key_of_side(id, t), id, place);
    } else {
      tiers_[t].side_heaps[side.group].remove(id, place);
    }
  }
}

void PrefixIndex::rekey_side(SideId id) {
  Side& side = sides_[id];
  for (TierId t = 0; t < tiers_.size(); ++t) {
    if (side.heap[t] == kNone) continue;
    const auto place = [this, t](SideId at) -> std::uint32_t& { return sides_[at].heap[t]; };
    tiers_[t].side_heaps[side.group].remove(id, place);
    tiers_[t].side_heaps[side.group].push(key_of_side(id, t), id, place);
  }
}

NodeId PrefixIndex::chain_victim(TierId tier) const {
  return tiers_[tier].heap.empty() ? kNone : tiers_[tier].heap.top().id;
}

SideId PrefixIndex::side_victim(TierId tier, GroupId group) const {
  const auto& heap = tiers_[tier].side_heaps[group];
  return heap.empty() ? kNone : heap.top().id;
}

void PrefixIndex::evict_chain(TierId tier) {
  const NodeId id = chain_victim(tier);
  drop_copy(id, tier);
  collect(id);
}

void PrefixIndex::evict_side(TierId tier, GroupId group) {
  const SideId id = side_victim(tier, group);
  const NodeId node = sides_[id].node;
  drop_side_copy(id, tier);
  collect(node);
}

void PrefixIndex::drop_copy(NodeId id, TierId t) {
  Node& node = nodes_[id];
  for (std::size_t f = 0; f < full_groups_.size(); ++f) {
    const GroupId group = full_groups_[f];
    BlockId& block = tiers_[t].blocks[id * full_groups_.size() + f];
    if (t == kDevice && node.holders == 0) storage_.device().fix(group, block);
    storage_.surrender(t, group, std::exchange(block, kNoBlock)).reset();
    log(EventKind::removed, t, group, id);
  }
  if (node.parent != kNone) {
    // Whoever used the end of the chain used what is before it.
    Node& parent = nodes_[node.parent];
    if (parent.used != 0) parent.used = std::max(parent.used, node.used);
    --tiers_[t].cells[node.parent].kids;
    refresh(node.parent);
  }
  refresh(id);
}

void PrefixIndex::drop_side_copy(SideId id, TierId t) {
  Side& side = sides_[id];
  if (t == kDevice && side.pins == 0) storage_.device().fix(side.group, side.block[t]);
  storage_.surrender(t, side.group, std::exchange(side.block[t], kNoBlock)).reset();
  log(EventKind::removed, t, side.group, side.node);
  refresh_side(id);
  for (const BlockId block : side.block) {
    if (block != kNoBlock) return;
  }
  remove_side(id);
}

void PrefixIndex::remove_side(SideId id) {
  SideId* link = &first_side_[sides_[id].node];
  while (*link != id) link = &sides_[*link].next;
  *link = sides_[id].next;
  free_sides_.push_back(id);
  --live_sides_;
}

void PrefixIndex::collect(NodeId id) {
  while (id != kNone) {
    Node& node = nodes_[id];
    if (node.holders > 0 || node.children > 0 || has_any_copy(id)) return;
    if (full_groups_.empty() && first_side(id) != kNone) return;
    // Without the full groups' blocks nothing can go on from here, whatever else is kept.
    while (first_side(id) != kNone) {
      const SideId side = first_side(id);
      for (TierId t = 0; t < tiers_.size(); ++t) {
        if (sides_[side].block[t] == kNoBlock) continue;
        drop_side_copy(side, t);
        if (first_side(id) != side) break;
      }
    }
    table_.erase(id, hash_of());
    const NodeId parent = node.parent;
    free_nodes_.push_back(id);
    node = Node{};
    if (parent != kNone) {
      --nodes_[parent].children;
      refresh(parent);
    }
    id = parent;
  }
}

// ---- retention

void PrefixIndex::keep_until(NodeId node, Tick until) {
  nodes_[node].used = std::max(nodes_[node].used, until);
  rekey(node);
}

void PrefixIndex::keep_side_until(SideId side, Tick until) {
  sides_[side].used = std::max(sides_[side].used, until);
  rekey_side(side);
}

void PrefixIndex::supersede_tail(NodeId node) {
  while (node != kNone && nodes_[node].holders == 0 && nodes_[node].children <= 1) {
    nodes_[node].used = 0;
    rekey(node);
    node = nodes_[node].parent;
  }
}

void PrefixIndex::supersede_side(SideId side) {
  sides_[side].used = 0;
  rekey_side(side);
}

// ---- forgetting

void PrefixIndex::forget(NodeId root, std::vector<std::vector<BlockId>>& blocks) {
  // Nobody lists a node's children: whether the root is before a node is found by climbing, each node once.
  enum class Verdict : std::uint8_t { open, stays, goes };
  std::vector<Verdict> verdicts(nodes_.size(), Verdict::open);
  std::vector<NodeId> path;
  verdicts[root] = Verdict::goes;
  for (NodeId id = 0; id < nodes_.size(); ++id) {
    if (nodes_[id].depth == 0) continue;  // not in use
    path.clear();
    NodeId at = id;
    for (; verdicts[at] == Verdict::open && nodes_[at].depth > nodes_[root].depth; at = nodes_[at].parent)
      path.push_back(at);
    const Verdict verdict = verdicts[at] == Verdict::goes ? Verdict::goes : Verdict::stays;
    for (const NodeId passed : path) verdicts[passed] = verdict;
  }
  for (NodeId id = 0; id < nodes_.size(); ++id) {
    if (verdicts[id] != Verdict::goes || is_forgotten(id)) continue;
    list_blocks(id, blocks);
    rename(id);
  }
}

void PrefixIndex::list_blocks(NodeId id, std::vector<std::vector<BlockId>>& blocks) const {
  for (std::size_t f = 0; f < full_groups_.size() && has_copy(id, kDevice); ++f)
    blocks[full_groups_[f]].push_back(block(id, kDevice, static_cast<int>(f)));
  for (SideId side = first_side(id); side != kNone; side = sides_[side].next) {
    if (sides_[side].block[kDevice] != kNoBlock)
      blocks[sides_[side].group].push_back(sides_[side].block[kDevice]);
  }
}

void PrefixIndex::rename(NodeId id) {
  for (TierId t = 0; t < tiers_.size(); ++t) {
    if (!has_copy(id, t)) continue;
    for (const GroupId group : full_groups_) log(EventKind::removed, t, group, id);
  }
  for (SideId side = first_side(id); side != kNone; side = sides_[side].next) {
    for (TierId t = 0; t < tiers_.size(); ++t) {
      if (sides_[side].block[t] != kNoBlock) log(EventKind::removed, t, sides_[side].group, id);
    }
    supersede_side(side);
  }
  table_.erase(id, hash_of());
  hashes_[id] = secret_name();
  table_.insert(id, hash_of());
  nodes_[id].used = 0;
  rekey(id);
}

}  // namespace quickturn::control
