// One step as flat arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "quickturn/control/types.hpp"

namespace quickturn::control {

struct BlockUpdates {
  std::vector<std::int32_t> slots, indexes, blocks;
  void add(SlotId slot, std::uint32_t index, BlockId block) {
    slots.push_back(slot);
    indexes.push_back(static_cast<std::int32_t>(index));
    blocks.push_back(block);
  }
  void clear() { slots.clear(), indexes.clear(), blocks.clear(); }
};

struct AdmittedRows {
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> slots, cached_tokens, known_tokens;
  void clear() { ids.clear(), slots.clear(), cached_tokens.clear(), known_tokens.clear(); }
};

struct ReleasedRows {
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> slots;
  void clear() { ids.clear(), slots.clear(); }
};

struct EndedRows {
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> slots, reasons;
  void add(RequestId id, SlotId slot, Reason reason) {
    ids.push_back(id);
    slots.push_back(slot);
    reasons.push_back(static_cast<std::int32_t>(reason));
  }
  void clear() { ids.clear(), slots.clear(), reasons.clear(); }
};

struct TransferRows {
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> groups, src_tiers, src_blocks, dst_tiers, dst_blocks;
  void clear() {
    ids.clear(), groups.clear(), src_tiers.clear(), src_blocks.clear(), dst_tiers.clear(), dst_blocks.clear();
  }
};

struct StateRows {
  std::vector<std::int32_t> in, out;
  std::vector<std::uint8_t> zero;
  void clear() { in.clear(), out.clear(), zero.clear(); }
};

struct StepPlan {
  StepId step = -1;
  std::int32_t num_decode_rows = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_samples = 0;
  std::int32_t max_context_len = 0;
  std::vector<std::int32_t> slots, query_lens, context_lens;
  std::vector<std::uint8_t> samples;
  std::vector<BlockUpdates> block_updates;  // by group
  std::vector<StateRows> states;            // by group
  AdmittedRows admitted;
  ReleasedRows released;
  EndedRows ended;
  TransferRows transfers_before, transfers_after;

  std::int32_t num_rows() const { return static_cast<std::int32_t>(slots.size()); }
  // Something that the runtime must hear of.
  bool says_something() const {
    return !slots.empty() || !admitted.ids.empty() || !released.ids.empty() || !ended.ids.empty() ||
           !transfers_before.ids.empty() || !transfers_after.ids.empty();
  }
  void clear() {
    step = -1;
    num_decode_rows = num_tokens = num_samples = max_context_len = 0;
    slots.clear(), query_lens.clear(), context_lens.clear(), samples.clear();
    for (auto& group : block_updates) group.clear();
    for (auto& group : states) group.clear();
    admitted.clear(), released.clear(), ended.clear(), transfers_before.clear(), transfers_after.clear();
  }
};

struct Applied {
  EndedRows ended;
  std::vector<std::int32_t> accepted;  // by sampled row
};

}  // namespace quickturn::control
