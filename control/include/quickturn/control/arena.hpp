// The device's cache memory as ids: slabs of one size, each a whole number of blocks of the one group that
// has it at the time.
//
// Every operation is O(1). A block that is out is `fixed` (somebody needs it) or evictable (only the prefix
// index keeps it). Slabs whose blocks are all evictable are counted, since only those can move to another
// group.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "quickturn/control/types.hpp"

namespace quickturn::control {

class Arena;

// The one owner of a block that is out of the free lists. Destroying it gives the block back.
class [[nodiscard]] BlockRef {
 public:
  BlockRef() = default;
  BlockRef(BlockRef&& other) noexcept
      : arena_(std::exchange(other.arena_, nullptr)), group_(other.group_), block_(other.block_) {}
  BlockRef& operator=(BlockRef&& other) noexcept {
    if (this != &other) {
      reset();
      arena_ = std::exchange(other.arena_, nullptr);
      group_ = other.group_;
      block_ = other.block_;
    }
    return *this;
  }
  BlockRef(const BlockRef&) = delete;
  BlockRef& operator=(const BlockRef&) = delete;
  ~BlockRef() { reset(); }

  explicit operator bool() const { return arena_ != nullptr; }
  BlockId id() const { return arena_ != nullptr ? block_ : kNoBlock; }
  GroupId group() const { return group_; }
  void reset();

 private:
  friend class Arena;
  BlockRef(Arena* arena, GroupId group, BlockId block) : arena_(arena), group_(group), block_(block) {}

  Arena* arena_ = nullptr;
  GroupId group_ = 0;
  BlockId block_ = kNoBlock;
};

class Arena {
 public:
  // What an owner word says about a block: nobody (private to a request), a chain node or a side entry of the
  // prefix index.
  static constexpr std::uint32_t kPrivate = kNone;
  static constexpr std::uint32_t kSideBit = 0x8000'0000u;

  Arena(std::int32_t num_slabs, std::span<const std::int32_t> blocks_per_slab);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A free block of the group; empty if there is none. Blocks of one context keep together, so that whole
  // slabs come free when it goes: first the slab of `near` (the context's block before, or kNoBlock), then a
  // free slab while there are plenty, then any slab with room.
  BlockRef allocate(GroupId group, BlockId near);

  // Hands the block from its RAII owner to the prefix index, and back. It stays fixed.
  BlockId adopt(BlockRef&& block, std::uint32_t owner);
  BlockRef surrender(GroupId group, BlockId block);

  void fix(GroupId group, BlockId block);
  void unfix(GroupId group, BlockId block);

  std::uint32_t owner(GroupId group, BlockId block) const { return owners_[cell(group, block)]; }
  bool is_out(GroupId group, BlockId block) const;
  void prefetch(GroupId group, BlockId block) const { __builtin_prefetch(&owners_[cell(group, block)], 1); }

  std::int32_t num_slabs() const { return static_cast<std::int32_t>(slabs_.size()); }
  std::int32_t free_slabs() const { return static_cast<std::int32_t>(free_slabs_.size()); }
  std::int32_t blocks_per_slab(GroupId group) const { return groups_[group].blocks_per_slab; }
  std::int32_t num_groups() const { return static_cast<std::int32_t>(groups_.size()); }
  std::int64_t out(GroupId group) const { return groups_[group].out; }
  std::int64_t fixed(GroupId group) const { return groups_[group].fixed; }
  std::int64_t evictable(GroupId group) const { return groups_[group].out - groups_[group].fixed; }
  std::int32_t slabs_of(GroupId group) const { return groups_[group].slabs; }
  // Slabs of the group whose blocks are all evictable.
  std::int32_t reclaimable_slabs(GroupId group) const { return groups_[group].reclaimable; }
  // Blocks that the group can have without taking anything from another: free in its slabs.
  std::int64_t free_in_slabs(GroupId group) const {
    return std::int64_t{groups_[group].slabs} * groups_[group].blocks_per_slab - groups_[group].out;
  }
  // Blocks of the slab that are out.
  void blocks_out(GroupId group, std::uint32_t slab, std::vector<BlockId>& blocks) const;
  std::uint32_t slab_of(GroupId group, BlockId block) const {
    return static_cast<std::uint32_t>(block / groups_[group].blocks_per_slab);
  }
  std::size_t bytes() const;

  // Throws std::logic_error if the books don't add up.
  void check() const;

 private:
  friend class BlockRef;

  static constexpr std::uint8_t kFreeSlab = 0xff;
  static constexpr std::uint32_t kFreeBit = 0x4000'0000u;
  static constexpr std::uint32_t kFreeEnd = 0x3fff'ffffu;

  struct Slab {
    std::uint8_t group = kFreeSlab;
    bool partial = false;
    bool reclaimable = false;
    std::int32_t out = 0;
    std::int32_t fixed = 0;
    std::int32_t fresh = 0;              // blocks that were never out since the group got the slab
    std::uint32_t free_head = kFreeEnd;  // of those that were
    std::uint32_t prev = kNone;          // slabs of the group with room
    std::uint32_t next = kNone;
  };
  struct Group {
    std::int32_t blocks_per_slab = 1;
    std::int32_t slabs = 0;
    std::int64_t out = 0;
    std::int64_t fixed = 0;
    std::int32_t reclaimable = 0;
    std::uint32_t partial = kNone;  // first slab with room
  };

  std::size_t cell(GroupId group, BlockId block) const {
    const std::int32_t per = groups_[group].blocks_per_slab;
    return static_cast<std::size_t>(block / per) * static_cast<std::size_t>(max_per_slab_) +
           static_cast<std::size_t>(block % per);
  }
  void release(GroupId group, BlockId block);
  BlockRef take(GroupId group, std::uint32_t slab);
  void link(Group& group, std::uint32_t slab);
  void unlink(Group& group, std::uint32_t slab);
  void update_reclaimable(std::uint32_t slab);

  std::vector<Slab> slabs_;
  std::vector<Group> groups_;
  std::vector<std::uint32_t> free_slabs_;
  std::vector<std::uint32_t>
      owners_;  // by cell; of a free block: kFreeBit | next free index in its slab, or kFreeEnd
  std::int32_t max_per_slab_ = 1;
};

inline void BlockRef::reset() {
  if (arena_ != nullptr) std::exchange(arena_, nullptr)->release(group_, block_);
}

}  // namespace quickturn::control
