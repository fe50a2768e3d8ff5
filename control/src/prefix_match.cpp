// Reading the prefix index: the joint match over all groups, and the audit of its books.
#include <stdexcept>
#include <string>

#include "quickturn/control/prefix_index.hpp"

namespace quickturn::control {

Match PrefixIndex::match(std::span<const Hash128> hashes, std::uint32_t limit) const {
  Match result;
  // A known node means that all before it are known, so the border between known and unknown can be bisected.
  std::uint32_t known = 0;
  std::uint32_t unknown = static_cast<std::uint32_t>(hashes.size()) + 1;
  while (unknown - known > 1) {
    const std::uint32_t middle = known + (unknown - known) / 2;
    const NodeId node = find(hashes[middle - 1]);
    if (node == kNone) {
      unknown = middle;
    } else {
      known = middle;
      result.shared_node = node;
    }
  }
  result.shared = known;

  NodeId node = result.shared_node;
  std::uint32_t depth = known;
  for (; depth > limit; --depth) node = nodes_[node].parent;
  while (depth > 0) {
    bool states = true;
    for (const GroupId group : state_groups_) states = states && side(node, group) != kNone;
    std::uint32_t missing = depth;
    if (states && windows_reach(node, depth, missing)) break;
    // Every boundary whose window contains the missing block fails too: go on from before it.
    for (; depth >= missing && depth > 0; --depth) node = nodes_[node].parent;
  }
  result.resume = depth;
  result.resume_node = depth > 0 ? node : kNone;
  return result;
}

bool PrefixIndex::windows_reach(NodeId node, std::uint32_t depth, std::uint32_t& missing) const {
  for (const GroupId group : window_groups_) {
    const std::int64_t first_seen =
        std::int64_t{depth} * config_.block_tokens - config_.groups[group].window + 1;
    const auto first_block =
        static_cast<std::uint32_t>(first_seen > 0 ? first_seen / config_.block_tokens : 0);
    NodeId at = node;
    for (std::uint32_t d = depth; d > first_block; --d) {
      if (side(at, group) == kNone) {
        missing = d;
        return false;
      }
      at = nodes_[at].parent;
    }
  }
  return true;
}

void PrefixIndex::check() const {
  const auto require = [](bool good, const std::string& what) {
    if (!good) throw std::logic_error("prefix index: " + what);
  };
  std::vector<bool> free(nodes_.size(), false);
  for (const NodeId id : free_nodes_) free[id] = true;
  std::vector<std::uint32_t> children(nodes_.size(), 0);
  std::vector<std::uint32_t> protected_children(nodes_.size(), 0);
  std::vector<std::vector<std::uint32_t>> kids(tiers_.size(), std::vector<std::uint32_t>(nodes_.size(), 0));
  std::vector<bool> side_seen(sides_.size(), false);
  std::size_t live = 0;
  std::size_t live_sides = 0;
  for (NodeId id = 0; id < nodes_.size(); ++id) {
    if (free[id]) continue;
    const Node& node = nodes_[id];
    ++live;
    require(find(hashes_[id]) == id, "a node isn't found by its hash");
    require(node.parent == kNone ? node.depth == 1 : nodes_[node.parent].depth + 1 == node.depth,
            "depth of a node");
    if (node.parent != kNone) {
      require(!free[node.parent], "a node's parent is gone");
      ++children[node.parent];
      if (node.holders > 0) ++protected_children[node.parent];
    }
    for (TierId t = 0; t < tiers_.size(); ++t) {
      if (!has_copy(id, t)) continue;
      if (node.parent != kNone) ++kids[t][node.parent];
      if (t != kDevice) continue;
      for (std::size_t f = 0; f < full_groups_.size(); ++f) {
        require(storage_.device().owner(full_groups_[f], block(id, t, static_cast<int>(f))) == id,
                "owner of a node's block");
      }
    }
    for (SideId side = first_side(id); side != kNone; side = sides_[side].next) {
      require(sides_[side].node == id && !side_seen[side], "a side entry hangs at the wrong node");
      side_seen[side] = true;
      ++live_sides;
      if (sides_[side].block[kDevice] != kNoBlock) {
        require(storage_.device().owner(sides_[side].group, sides_[side].block[kDevice]) ==
                    (Arena::kSideBit | side),
                "owner of a side block");
      }
    }
  }
  require(live == table_.size() && live_sides == live_sides_, "number of nodes or side entries");
  for (NodeId id = 0; id < nodes_.size(); ++id) {
    if (free[id]) continue;
    const Node& node = nodes_[id];
    require(node.children == children[id], "children of a node");
    require(node.holders >= protected_children[id], "holders of a node");
    require(has_any_copy(id) || full_groups_.empty() || node.holders > 0, "a node without a copy");
    require(full_groups_.size() > 0 || node.holders > 0 || node.children > 0 || first_side(id) != kNone,
            "an empty node");
    for (TierId t = 0; t < tiers_.size(); ++t) {
      require(tiers_[t].cells[id].kids == kids[t][id], "kids of a node");
      bool want = node.holders == 0 && has_copy(id, t) && kids[t][id] == 0;
      if (want && node.children > 0) {
        bool other = false;
        for (TierId o = 0; o < tiers_.size(); ++o) other = other || (o != t && has_copy(id, o));
        want = other;
      }
      require(want == (tiers_[t].cells[id].heap != kNone), "eviction order of a node");
    }
  }
}

}  // namespace quickturn::control
