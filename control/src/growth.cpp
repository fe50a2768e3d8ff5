// Blocks for tokens that are about to be computed.
#include <algorithm>

#include "quickturn/control/scheduler.hpp"

namespace quickturn::control {

std::int32_t Scheduler::grow(Request& request, std::int32_t tokens) {
    Holding& cache = request.cache();
    const std::int32_t unit = config_.block_tokens;
    const auto& full_groups = cache_.index().full_groups();
    std::int32_t edge = ceil_div(std::int64_t{request.planned} + tokens, unit) * unit;
    for (std::size_t f = 0; f < full_groups.size(); ++f) {
        auto& fresh = cache.full[f];
        BlockId near = kNoBlock;
        if (!fresh.empty()) {
            near = fresh.back().id();
        } else if (cache.published > 0) {
            near = cache_.index().block(cache.tip.node(), kDevice, static_cast<int>(f));
        }
        std::uint32_t have = cache.published + static_cast<std::uint32_t>(fresh.size());
        while (static_cast<std::int32_t>(have) * unit < edge) {
            BlockRef block = cache_.allocate(full_groups[f], near);
            if (!block) {
                edge = static_cast<std::int32_t>(have) * unit;
                break;
            }
            near = block.id();
            draft_->block_updates[full_groups[f]].add(request.slot, have++, near);
            fresh.push_back(std::move(block));
        }
    }
    request.edge = std::max(request.edge, edge);
    return std::min(tokens, edge - request.planned);
}

void Scheduler::states_for_row(Request&, bool) {}

}  // namespace quickturn::control
