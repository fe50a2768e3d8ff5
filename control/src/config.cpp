#include "quickturn/control/config.hpp"

#include <stdexcept>

namespace quickturn::control {

namespace {

void require(bool good, const std::string& message) {
  if (!good) throw std::invalid_argument(message);
}

}  // namespace

void validate(const SchedulerConfig& config) {
  require(!config.groups.empty(), "groups must name at least one cache group");
  require(config.groups.size() <= kMaxGroups, "at most " + std::to_string(kMaxGroups) + " cache groups");
  require(config.num_slabs >= 1, "num_slabs must be at least 1, got " + std::to_string(config.num_slabs));
  const auto unit = config.block_tokens;
  require(unit >= 1 && (unit & (unit - 1)) == 0,
          "block_tokens must be a power of two, got " + std::to_string(unit));
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const auto& group = config.groups[g];
    const std::string who = "group " + std::to_string(g) + " (" + std::string(name_of(group.kind)) + ")";
    require(group.blocks_per_slab >= 1, who + ": blocks_per_slab must be at least 1");
    require(std::int64_t{config.num_slabs} * group.blocks_per_slab < (1 << 30), who + ": too many blocks");
    require((group.kind == GroupKind::window) == (group.window > 0),
            who + ": window is for window groups, and at least 1 there");
  }
  require(config.max_requests >= 1 && config.max_requests <= 1 << 20,
          "max_requests must be between 1 and 2^20");
  require(config.draft_tokens >= 0 && config.draft_tokens < unit,
          "draft_tokens must be at least 0 and less than block_tokens");
  require(config.max_step_tokens > config.draft_tokens, "max_step_tokens must be more than draft_tokens");
  require(config.max_context >= 2, "max_context must be at least 2");
  require(config.pipeline_depth >= 1 && config.pipeline_depth <= 2, "pipeline_depth must be 1 or 2");
  require(config.tiers.size() < kMaxTiers,
          "at most " + std::to_string(kMaxTiers - 1) + " tiers below the device");
  for (const auto& tier : config.tiers) {
    require(tier.blocks.size() == config.groups.size(),
            "tier " + tier.name + " must give blocks for each group");
    for (const auto blocks : tier.blocks)
      require(blocks >= 0 && blocks < 1 << 30, "tier " + tier.name + ": bad number of blocks");
  }
  for (const auto& step : config.recorded)
    require(step.rows >= 1 && step.tokens > step.rows,
            "a recorded step needs rows, and room for a prompt beside them");
  const auto& policy = config.policy;
  require(policy.min_tps_per_user >= 0 && policy.max_ttft >= 0 && policy.max_pause >= 0 &&
              policy.fairness >= 0 && policy.share_wait >= 0 && policy.eviction_hold >= 0 &&
              policy.max_hold >= 0 && policy.max_gap_factor >= 0,
          "times and rates of the policy must not be negative");
  require(policy.max_hold_share >= 0 && policy.max_hold_share <= 1 && policy.demote_below >= 0 &&
              policy.demote_below <= 1,
          "shares of the policy must be between 0 and 1");
  require(policy.pause_every >= 1 && policy.pause_every <= 1 << 20, "pause_every must be between 1 and 2^20");
  require(policy.checkpoint_stride >= 0 && policy.checkpoint_tail >= 0 && policy.max_demotes_per_step >= 0,
          "checkpoint_stride, checkpoint_tail and max_demotes_per_step must not be negative");
}

}  // namespace quickturn::control
