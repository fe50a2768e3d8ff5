"""Kernels against their references in the model's own shapes, and against themselves."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from quickturn_kernels import Signature, select
from quickturn_kernels.numerics import Case, check, check_repeats

from quickturn.validate.report import Finding, Section

LONGEST_DETAIL = 800
"""Characters kept of what an assertion says."""


def taken(case: Case, device: torch.device) -> str | None:
    """The implementation that this machine takes for the call, overrides included; None if there is none."""
    try:
        return select(case.op, Signature(device, case.dtype, case.traits)).name
    except LookupError:
        return None


def check_numerics(
    cases: Iterable[Case],
    device: torch.device,
    seed: int,
    repeats: int,
    every: bool,
    progress: Callable[[], None],
) -> Iterator[Finding]:
    """Each case with the implementation that is taken, or with `every` one that runs here: against the
    reference, and `repeats` times against its own bits.
    """
    for case in cases:
        chosen = taken(case, device)
        names = list(case.takers(device)) if every else [chosen] if chosen not in (None, "reference") else []
        if not names:
            detail = "nothing but the reference takes it here"
            yield Finding("numerics", f"{case.op}: {case.name}", "absent", detail)
        for name in names:
            label = f"{case.op}={name}: {case.name}"
            yield _tried("numerics", label, partial(check, case, name, seed, device))
            if repeats > 1:
                yield _tried("repeats", label, partial(check_repeats, case, name, seed, device, repeats))
        progress()


def _tried(section: Section, label: str, run: Callable[[], None]) -> Finding:
    # A kernel may fail in any way; what it says is the finding.
    try:
        run()
    except Exception as error:
        return Finding(section, label, "failed", f"{type(error).__name__}: {error}"[:LONGEST_DETAIL])
    return Finding(section, label, "passed")
