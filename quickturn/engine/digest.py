"""A checksum of plans: ranks whose plans differ must notice before they wait for each other."""

import zlib

import numpy as np
import quickturn_control as control
from numpy.typing import NDArray


def plan_digest(plan: control.StepPlan, before: int) -> int:
    """A checksum of what a plan says, and of those before it."""
    changes = (plan.ended, plan.admitted, plan.released)
    arrays: list[NDArray[np.integer]] = [
        plan.slots,
        plan.query_lens,
        plan.context_lens,
        plan.samples,
        *plan.state_in,
        *plan.state_out,
    ]
    arrays += [change.ids for change in changes]
    arrays += [
        part for update in plan.block_updates for part in (update.slots, update.indexes, update.blocks)
    ]
    for array in arrays:
        before = zlib.crc32(array.data, before)
    return before
