"""Quickturn's control plane. See __init__.pyi for the surface and docs/control-plane.md for the ideas."""

from quickturn_control._control import (
    Admitted,
    Applied,
    BlockUpdates,
    Ended,
    GroupConfig,
    KvEvents,
    Policy,
    Released,
    Request,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
    TierConfig,
    Transfers,
    build_info,
    transitions,
)

STOP = 0
LENGTH = 1
CANCELLED = 2
TIMEOUT = 3
ERROR = 4
DEVICE = 0

__all__ = [
    "CANCELLED",
    "DEVICE",
    "ERROR",
    "LENGTH",
    "STOP",
    "TIMEOUT",
    "Admitted",
    "Applied",
    "BlockUpdates",
    "Ended",
    "GroupConfig",
    "KvEvents",
    "Policy",
    "Released",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "StepPlan",
    "StepResult",
    "TierConfig",
    "Transfers",
    "build_info",
    "transitions",
]
