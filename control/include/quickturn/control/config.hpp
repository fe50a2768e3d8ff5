// Everything that a scheduler is told at its start.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "quickturn/control/types.hpp"

namespace quickturn::control {

struct GroupConfig {
  GroupKind kind = GroupKind::full;
  std::int32_t blocks_per_slab = 1;
  std::int32_t window = 0;
  std::string name;
};

// Room below the device, in blocks of each group.
struct TierConfig {
  std::string name;
  std::vector<std::int32_t> blocks;
};

// What the operator promises and how cache is kept. Seconds; 0 switches a bound off.
struct Policy {
  double min_tps_per_user = 0.0;
  double max_gap_factor = 2.0;
  double max_ttft = 0.0;
  double max_pause = 0.0;
  std::int32_t pause_every = 128;
  double fairness = 5.0;
  double share_wait = 10.0;
  std::int32_t checkpoint_stride = 16384;
  std::int32_t checkpoint_tail = 384;
  double eviction_hold = 30.0;
  double max_hold = 300.0;
  double max_hold_share = 0.5;
  double demote_below = 0.25;
  std::int32_t max_demotes_per_step = 64;
};

// A step of one prompt's tokens beside decoding rows that costs little to launch: rows that it has room for,
// and tokens of all rows, the prompt's with them.
struct RecordedStep {
  std::int32_t rows = 0;
  std::int32_t tokens = 0;
};

struct SchedulerConfig {
  std::vector<GroupConfig> groups;
  std::int32_t num_slabs = 0;
  std::int32_t block_tokens = 64;
  std::int32_t max_requests = 256;
  std::int32_t max_step_tokens = 2048;
  std::int32_t max_context = 1 << 30;
  bool prefix_cache = true;
  std::int32_t draft_tokens = 0;
  std::int32_t pipeline_depth = 2;
  std::vector<TierConfig> tiers;
  std::vector<RecordedStep> recorded;
  Policy policy;
  std::array<std::uint8_t, 16> hash_key{};
  std::string model_salt;
  bool kv_events = false;
};

// Throws std::invalid_argument, with the numbers, for a configuration that can't work.
void validate(const SchedulerConfig& config);

}  // namespace quickturn::control
