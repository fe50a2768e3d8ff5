"""What a case is, and how two runs of it are compared."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quickturn_kernels.platform import describe
from quickturn_kernels.registry import Signature, implementations, use

TOLERANCE: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
"""(relative, absolute) by dtype of the output: some units in the last place of values around one; relative
is, for the narrow ones, what two roundings may part by.
"""

TWICE_ROUNDED = 2

Accept = Callable[[Tensor, Tensor], bool]


@dataclass(frozen=True)
class Result:
    """What one run gave. `outputs` by name, changed inputs among them; `accept` judges an output instead of
    closeness. `slack`: factor of the absolute tolerance. `roundings`: how often an element is rounded to the
    dtype of the output, one factor after the other: where a sum is taken in another order, each may fall
    to the other side, a unit in the last place away.
    """

    outputs: Mapping[str, Tensor]
    accept: Mapping[str, Accept] = field(default_factory=dict)
    slack: float = 1.0
    roundings: int = TWICE_ROUNDED


@dataclass(frozen=True)
class Case:
    """One call of one op. `run` builds the inputs from the generator (on the CPU), moves them to the device
    and calls the public op.

    dtype and traits are those of the call, to find out which implementations take it. companions: other ops
    that `run` calls, and the implementation that they get beside the one under test ("" leaves the choice
    free); beside the reference they are references too.
    """

    op: str
    name: str
    dtype: torch.dtype
    traits: Mapping[str, Hashable]
    run: Callable[[torch.Generator, torch.device], Result]
    companions: Mapping[str, str] = field(default_factory=dict)

    def takers(self, device: torch.device) -> tuple[str, ...]:
        """Names of the implementations, the reference aside, that can run this case on this device."""
        signature = Signature(device, self.dtype, self.traits)
        machine = describe(device)
        return tuple(
            one.name
            for one in implementations(self.op)
            if one.name != "reference" and one.fits(signature) and one.platform.runs_on(machine)
        )


def check(case: Case, implementation: str, seed: int, device: torch.device) -> None:
    """Run the case with the reference and with the implementation; AssertionError says what differs, with
    the seed.
    """
    with use(**dict.fromkeys((case.op, *case.companions), "reference")):
        expected = case.run(torch.Generator().manual_seed(seed), device)
    chosen = {op: name for op, name in case.companions.items() if name}
    with use(**chosen, **{case.op: implementation}), poisoned():
        actual = case.run(torch.Generator().manual_seed(seed), device)
    where = f"{case.op}={implementation}, case {case.name}, seed {seed}"
    for name, want in expected.outputs.items():
        got = actual.outputs[name]
        if name in expected.accept:
            if not expected.accept[name](want, got):
                raise AssertionError(f"{where}: {name} is {got}, expected {want}")
            continue
        relative, absolute = TOLERANCE.get(want.dtype, (0.0, 0.0))
        relative, absolute = relative * expected.roundings / TWICE_ROUNDED, absolute * expected.slack
        try:
            torch.testing.assert_close(got, want, rtol=relative, atol=absolute, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{where}: {name}: {error}") from None


def check_repeats(case: Case, implementation: str, seed: int, device: torch.device, repeats: int) -> None:
    """Run the case `repeats` times on the same inputs; AssertionError if two runs differ in a bit.

    On a GPU other work runs beside it, more of it each time, so that blocks start and end in other orders:
    what depends on them is a race, or sums in no fixed order.
    """
    chosen = {op: name for op, name in case.companions.items() if name}
    aside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    noise = torch.zeros(1 << 22, device=device) if aside is not None else None
    first: Mapping[str, Tensor] = {}
    for repeat in range(repeats):
        if aside is not None and noise is not None:
            with torch.cuda.stream(aside):
                for _ in range(repeat):
                    noise.add_(1.0)
        with use(**chosen, **{case.op: implementation}):
            outputs = case.run(torch.Generator().manual_seed(seed), device).outputs
        first = first or outputs
        for name, value in outputs.items():
            if not torch.equal(_bits(value), _bits(first[name])):
                where = f"{case.op}={implementation}, case {case.name}, seed {seed}"
                raise AssertionError(f"{where}: {name} of run {repeat + 1} differs from that of the first")


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within the block, torch fills memory that it allocates uninitialised with NaN (integers: the
    largest).
    """
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
