#include "quickturn/control/arena.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace quickturn::control {

Arena::Arena(std::int32_t num_slabs, std::span<const std::int32_t> blocks_per_slab)
    : slabs_(static_cast<std::size_t>(num_slabs)), groups_(blocks_per_slab.size()) {
  for (std::size_t g = 0; g < groups_.size(); ++g) groups_[g].blocks_per_slab = blocks_per_slab[g];
  max_per_slab_ = *std::max_element(blocks_per_slab.begin(), blocks_per_slab.end());
  owners_.assign(slabs_.size() * static_cast<std::size_t>(max_per_slab_), kNone);
  for (std::int32_t slab = num_slabs - 1; slab >= 0; --slab)
    free_slabs_.push_back(static_cast<std::uint32_t>(slab));
}

void Arena::link(Group& group, std::uint32_t id) {
  Slab& slab = slabs_[id];
  slab.partial = true;
  slab.prev = kNone;
  slab.next = group.partial;
  if (group.partial != kNone) slabs_[group.partial].prev = id;
  group.partial = id;
}

void Arena::unlink(Group& group, std::uint32_t id) {
  Slab& slab = slabs_[id];
  slab.partial = false;
  (slab.prev == kNone ? group.partial : slabs_[slab.prev].next) = slab.next;
  if (slab.next != kNone) slabs_[slab.next].prev = slab.prev;
}

void Arena::update_reclaimable(std::uint32_t id) {
  Slab& slab = slabs_[id];
  const bool now = slab.out > 0 && slab.fixed == 0;
  if (now != slab.reclaimable) groups_[slab.group].reclaimable += now ? 1 : -1;
  slab.reclaimable = now;
}

BlockRef Arena::allocate(GroupId g, BlockId near) {
  Group& group = groups_[g];
  if (near != kNoBlock) {
    const std::uint32_t id = slab_of(g, near);
    if (slabs_[id].group == g && slabs_[id].partial) return take(g, id);
  }
  const bool plenty = free_slabs_.size() * 8 > slabs_.size();
  if (!free_slabs_.empty() && (plenty || group.partial == kNone)) {
    const std::uint32_t id = free_slabs_.back();
    free_slabs_.pop_back();
    Slab& slab = slabs_[id];
    slab.group = g;
    slab.fresh = group.blocks_per_slab;
    ++group.slabs;
    link(group, id);
  }
  return group.partial == kNone ? BlockRef{} : take(g, group.partial);
}

BlockRef Arena::take(GroupId g, std::uint32_t id) {
  Group& group = groups_[g];
  Slab& slab = slabs_[id];
  const std::size_t base = std::size_t{id} * static_cast<std::size_t>(max_per_slab_);
  std::uint32_t index;
  if (slab.free_head != kFreeEnd) {
    index = slab.free_head;
    slab.free_head = owners_[base + index] & ~kFreeBit;
  } else {
    index = static_cast<std::uint32_t>(group.blocks_per_slab - slab.fresh--);
  }
  owners_[base + index] = kPrivate;
  ++slab.out;
  ++slab.fixed;
  ++group.out;
  ++group.fixed;
  update_reclaimable(id);
  if (slab.out == group.blocks_per_slab) unlink(group, id);
  return {this, g, static_cast<BlockId>(id) * group.blocks_per_slab + static_cast<BlockId>(index)};
}

void Arena::release(GroupId g, BlockId block) {
  Group& group = groups_[g];
  const std::uint32_t id = slab_of(g, block);
  Slab& slab = slabs_[id];
  owners_[cell(g, block)] = kFreeBit | slab.free_head;
  slab.free_head = static_cast<std::uint32_t>(block % group.blocks_per_slab);
  --slab.out;
  --slab.fixed;
  --group.out;
  --group.fixed;
  update_reclaimable(id);
  if (!slab.partial) link(group, id);
  if (slab.out == 0) {
    unlink(group, id);
    slab = Slab{};
    --group.slabs;
    free_slabs_.push_back(id);
  }
}

BlockId Arena::adopt(BlockRef&& block, std::uint32_t owner) {
  const BlockId id = block.block_;
  owners_[cell(block.group_, id)] = owner;
  block.arena_ = nullptr;
  return id;
}

BlockRef Arena::surrender(GroupId group, BlockId block) {
  owners_[cell(group, block)] = kPrivate;
  return {this, group, block};
}

void Arena::fix(GroupId group, BlockId block) {
  const std::uint32_t slab = slab_of(group, block);
  ++slabs_[slab].fixed;
  ++groups_[group].fixed;
  update_reclaimable(slab);
}

void Arena::unfix(GroupId group, BlockId block) {
  const std::uint32_t slab = slab_of(group, block);
  --slabs_[slab].fixed;
  --groups_[group].fixed;
  update_reclaimable(slab);
}

bool Arena::is_out(GroupId group, BlockId block) const {
  const Slab& slab = slabs_[slab_of(group, block)];
  if (slab.group != group) return false;
  const std::int32_t index = block % groups_[group].blocks_per_slab;
  if (index >= groups_[group].blocks_per_slab - slab.fresh) return false;
  const std::uint32_t word = owners_[cell(group, block)];
  return (word & kSideBit) != 0 || (word & kFreeBit) == 0;  // kPrivate has both bits
}

void Arena::blocks_out(GroupId group, std::uint32_t slab, std::vector<BlockId>& blocks) const {
  const std::int32_t per = groups_[group].blocks_per_slab;
  blocks.clear();
  for (std::int32_t i = 0; i < per; ++i) {
    const BlockId block = static_cast<BlockId>(slab) * per + i;
    if (is_out(group, block)) blocks.push_back(block);
  }
}

std::size_t Arena::bytes() const {
  return owners_.capacity() * sizeof(owners_[0]) + slabs_.capacity() * sizeof(Slab) +
         free_slabs_.capacity() * sizeof(free_slabs_[0]);
}

void Arena::check() const {
  const auto require = [](bool good, const char* what) {
    if (!good) throw std::logic_error(std::string("arena: ") + what);
  };
  std::vector<Group> seen(groups_.size());
  std::int32_t free = 0;
  std::vector<BlockId> blocks;
  for (std::uint32_t id = 0; id < slabs_.size(); ++id) {
    const Slab& slab = slabs_[id];
    if (slab.group == kFreeSlab) {
      ++free;
      require(slab.out == 0 && slab.fixed == 0, "a free slab has blocks out");
      continue;
    }
    Group& group = seen[slab.group];
    blocks_out(slab.group, id, blocks);
    require(static_cast<std::int32_t>(blocks.size()) == slab.out, "blocks out of a slab");
    require(slab.out > 0, "an empty slab belongs to a group");
    require(slab.fixed >= 0 && slab.fixed <= slab.out, "fixed blocks of a slab");
    require(slab.partial == (slab.out < groups_[slab.group].blocks_per_slab), "partial list");
    require(slab.reclaimable == (slab.fixed == 0), "evictable slab");
    ++group.slabs;
    group.out += slab.out;
    group.fixed += slab.fixed;
    group.reclaimable += slab.reclaimable ? 1 : 0;
  }
  require(free == free_slabs(), "free slabs");
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    require(seen[g].slabs == groups_[g].slabs && seen[g].out == groups_[g].out &&
                seen[g].fixed == groups_[g].fixed,
            "group totals");
    require(seen[g].reclaimable == groups_[g].reclaimable, "evictable slabs");
  }
}

}  // namespace quickturn::control
