// Request slots: rows of the device's slot-indexed tensors.
#pragma once

#include <utility>
#include <vector>

#include "quickturn/control/types.hpp"

namespace quickturn::control {

class SlotPool;

// The one owner of a slot. Destroying it frees the slot.
class [[nodiscard]] SlotRef {
 public:
  SlotRef() = default;
  SlotRef(SlotRef&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), slot_(other.slot_) {}
  SlotRef& operator=(SlotRef&& other) noexcept {
    if (this != &other) {
      reset();
      pool_ = std::exchange(other.pool_, nullptr);
      slot_ = other.slot_;
    }
    return *this;
  }
  SlotRef(const SlotRef&) = delete;
  SlotRef& operator=(const SlotRef&) = delete;
  ~SlotRef() { reset(); }

  SlotId id() const { return pool_ != nullptr ? slot_ : kNoSlot; }
  void reset();

 private:
  friend class SlotPool;
  SlotRef(SlotPool* pool, SlotId slot) : pool_(pool), slot_(slot) {}
  SlotPool* pool_ = nullptr;
  SlotId slot_ = kNoSlot;
};

class SlotPool {
 public:
  explicit SlotPool(std::int32_t count) : count_(count) {
    for (SlotId slot = count - 1; slot >= 0; --slot) free_.push_back(slot);
  }
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  std::int32_t capacity() const { return count_; }
  std::int32_t free() const { return static_cast<std::int32_t>(free_.size()); }
  SlotRef take() {
    const SlotId slot = free_.back();
    free_.pop_back();
    return {this, slot};
  }

 private:
  friend class SlotRef;
  std::int32_t count_;
  std::vector<SlotId> free_;
};

inline void SlotRef::reset() {
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->free_.push_back(slot_);
}

}  // namespace quickturn::control
