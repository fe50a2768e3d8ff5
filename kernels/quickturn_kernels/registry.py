"""Ops and their implementations: registration, selection, overrides.

An op is a public function (`quickturn_kernels.rms_norm`); an implementation is a function with the same
positional arguments that registered itself for a platform, some dtypes and some traits. The best one that
fits is chosen once for each (device, dtype, traits) and kept in the op's table, so that a call costs one
dictionary look-up. Any thread may call; what changes or makes choices takes one lock.
"""

import os
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

from quickturn_kernels import platform as platforms
from quickturn_kernels.platform import ANY, Platform, Requirement

F = TypeVar("F", bound=Callable[..., Any])

PLUGIN_GROUP = "quickturn_kernels.plugins"
OVERRIDE_VARIABLE = "QUICKTURN_KERNELS"
GPU_TIERS = ("triton", "hopper", "libraries")
FAMILIES = (
    "norm",
    "all_reduce",
    "linear",
    "fp8_linear",
    "gated_linear",
    "norm_linear",
    "activation",
    "rotary",
    "attention",
    "attention_partial",
    "attention_step",
    "decode_stack",
    "linear_attention",
    "batch",
    "embedding",
    "sampling",
    "moe",
)


class Priority(IntEnum):
    """Of the implementations that fit, the highest is taken; among equals the one registered last."""

    REFERENCE = 0
    PORTABLE = 10
    LIBRARY = 15
    PERFORMANCE = 20
    SPECIALIZED = 30


@dataclass(frozen=True)
class Signature:
    """What a call looks like to selection: the device, the dtype of the first operand, and the op's own
    traits.
    """

    device: torch.device
    dtype: torch.dtype
    traits: Mapping[str, Hashable] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Implementation:
    """One registered function. `dtypes` None takes every dtype; `traits` names the allowed values of some
    traits.
    """

    op: str
    name: str
    function: Callable[..., Any]
    platform: Requirement
    dtypes: frozenset[torch.dtype] | None
    traits: Mapping[str, Container[Hashable]]
    priority: Priority

    def fits(self, signature: Signature) -> bool:
        """Whether dtype and traits suit (the platform is judged apart)."""
        if self.dtypes is not None and signature.dtype not in self.dtypes:
            return False
        return all(
            signature.traits[name] in allowed
            for name, allowed in self.traits.items()
            if name in signature.traits
        )


class Op(Generic[F]):
    """A public op: its implementations by name, and the table of choices made."""

    def __init__(self, name: str, trait_names: tuple[str, ...]) -> None:
        self.name = name
        self.trait_names = trait_names
        self.implementations: dict[str, Implementation] = {}
        self.table: dict[tuple[Hashable, ...], F] = {}

    def bind(self, device: torch.device, dtype: torch.dtype, *traits: Hashable) -> F:
        """Choose for (device, dtype, *traits), remember the choice in `table` under that key, and return
        the function.
        """
        signature = Signature(device, dtype, dict(zip(self.trait_names, traits, strict=True)))
        with _lock:
            chosen = select(self.name, signature)
            function: F = chosen.function  # type: ignore[assignment]
            if _calls is not None:
                function = _calls.counting(self.name, chosen.name, function)
            self.table[(device, dtype, *traits)] = function
        return function


class _Calls:
    """Calls of implementations, counted by who carries them out in the end."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._running: list[tuple[str, str]] = []
        self._handed_on: list[bool] = []

    def counting(self, op: str, name: str, function: F) -> F:
        """`function`, counted as a call of `op` by `name`, and no longer as one by the implementation that
        hands it on.
        """

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if self._running and self._running[-1][0] == op and not self._handed_on[-1]:
                # Once, even if it hands on several parts of the call.
                self._handed_on[-1] = True
                self.counts[self._running[-1]] -= 1
            self.counts[op, name] += 1
            self._running.append((op, name))
            self._handed_on.append(False)
            try:
                return function(*arguments, **options)
            finally:
                self._running.pop()
                self._handed_on.pop()

        return call  # type: ignore[return-value]


_ops: dict[str, Op[Any]] = {}
_overrides: dict[str, str] = {}
_loaded: set[str] = set()
_calls: _Calls | None = None
_lock = threading.RLock()
"""Held while tiers are imported, so that no thread chooses among half of them. Reentrant: what is imported
registers.
"""


def define(name: str, *trait_names: str) -> Op[Any]:
    """Make an op known. `trait_names` are the traits that its public function passes to `bind`, in order."""
    if name in _ops:
        raise ValueError(f"op {name} is already defined")
    _ops[name] = Op(name, trait_names)
    return _ops[name]


def undefine(name: str) -> None:
    """Forget an op and its implementations. Raises KeyError when it isn't defined."""
    del _ops[_find(name).name]


def unregister(op: str, name: str) -> None:
    """Forget one implementation. Raises KeyError when there is none of that name."""
    target = _find(op)
    with _lock:
        del target.implementations[name]
        target.table.clear()


def register(
    op: str,
    *,
    name: str,
    platform: Requirement = ANY,
    dtypes: tuple[torch.dtype, ...] | None = None,
    traits: Mapping[str, Container[Hashable]] | None = None,
    priority: Priority = Priority.PORTABLE,
) -> Callable[[F], F]:
    """Register the decorated function as implementation `name` of `op`.

    Returns the function, for implementations that hand a call on to this one: within `counted` such a call
    is counted as this one's. The function takes the arguments of the public op, all positional. Registering
    a name again replaces it. Raises KeyError for an op that isn't defined.
    """
    target = _find(op)

    def add(function: F) -> F:
        made = Implementation(
            op,
            name,
            function,
            platform,
            None if dtypes is None else frozenset(dtypes),
            dict(traits or {}),
            priority,
        )
        with _lock:
            target.implementations.pop(name, None)
            target.implementations[name] = made
            target.table.clear()

        @wraps(function)
        def handed_on(*arguments: Any, **options: Any) -> Any:
            run = function if _calls is None else _calls.counting(op, name, function)
            return run(*arguments, **options)

        return handed_on  # type: ignore[return-value]

    return add


def select(op: str, signature: Signature) -> Implementation:
    """The implementation that calls with this signature get.

    An override by name wins and must fit, else ValueError says why not; the override of "*" applies to the
    ops that have such an implementation and where it fits. Raises LookupError when nothing fits.
    """
    load()
    target = _find(op)
    machine = platforms.describe(signature.device)
    named = _overrides.get(op)
    if named is not None:
        return _take_named(target, named, signature, machine)
    wildcard = _overrides.get("*")
    if wildcard is not None:
        _ensure_loaded_for(wildcard)
        choice = target.implementations.get(wildcard)
        if choice is not None and choice.fits(signature) and choice.platform.runs_on(machine):
            return choice
    fitting = [
        implementation
        for implementation in target.implementations.values()
        if implementation.fits(signature) and implementation.platform.met_by(machine)
    ]
    if not fitting:
        names = list(target.implementations)
        raise LookupError(f"no implementation of {op} fits {signature} on {machine.name}; it has {names}")
    best = fitting[0]
    for implementation in fitting:
        if implementation.priority >= best.priority:
            best = implementation
    return best


@contextmanager
def use(**overrides: str) -> Iterator[None]:
    """Within the block, take the named implementation for each named op: `with use(rms_norm="triton"):`.

    `use(**{"*": "reference"})` names one for every op that has it. Process-wide, not per thread.
    """
    with _lock:
        before = dict(_overrides)
        override(overrides)
    try:
        yield
    finally:
        with _lock:
            _overrides.clear()
            _overrides.update(before)
            _forget_choices()


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Within the block, count the calls by (op, implementation); process-wide, for one thread that calls.

    Where an implementation hands a call on to another of the same op, that one is counted: the counter says
    who did the work, not who was chosen. A CUDA graph counts when it is recorded, not when it is replayed.
    """
    global _calls
    with _lock:
        outer, _calls = _calls, _Calls()
        counts = _calls.counts
        _forget_choices()
    try:
        yield counts
    finally:
        with _lock:
            _calls = outer
            _forget_choices()


def override(names: Mapping[str, str]) -> None:
    """Take these implementations from now on ({op or "*": name}). Raises KeyError for an unknown op."""
    for op in names:
        if op != "*":
            _find(op)
    with _lock:
        _overrides.update(names)
        _forget_choices()


def override_from_text(text: str) -> None:
    """Overrides as in the environment: "op=name,op=name", or "@path" for a TOML file of `op = "name"`
    lines.
    """
    if text.startswith("@"):
        override(tomllib.loads(Path(text[1:]).read_text()))
        return
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    bad = [op for op, equals, name in pairs if not (equals and name.strip())]
    if bad:
        raise ValueError(f"{OVERRIDE_VARIABLE} must look like op=name,op=name; got {text!r}")
    override({op.strip(): name.strip() for op, _, name in pairs})


def ops() -> Mapping[str, Op[Any]]:
    """Every op by name."""
    return MappingProxyType(_ops)


def implementations(op: str, *, every_tier: bool = False) -> tuple[Implementation, ...]:
    """The registered implementations of an op. `every_tier` also loads tiers that this machine wouldn't
    choose.
    """
    load(every_tier=every_tier)
    return tuple(_find(op).implementations.values())


def load(*, every_tier: bool = False) -> None:
    """Import the tiers that can be chosen on this machine, the plugins, and the overrides of the
    environment. Idempotent.

    The tiers of GPUs are loaded only where they can run (a CUDA device; for Triton its interpreter too), or
    when asked, because they take long to import.
    """
    with _lock:
        if "base" not in _loaded:
            _loaded.add("base")
            _import_tier("reference")
            _import_tier("torch")
            _import_tier("cpu")
            for plugin in entry_points(group=PLUGIN_GROUP):
                plugin.load()()
            if text := os.environ.get(OVERRIDE_VARIABLE):
                override_from_text(text)
        if every_tier or torch.cuda.is_available():
            _ensure_loaded_for("triton")
            _ensure_loaded_for("hopper")
            _ensure_loaded_for("libraries")
        elif platforms.interpreting():
            _ensure_loaded_for("triton")


def _ensure_loaded_for(name: str) -> None:
    """Load the tier of this name, if there is such a tier and it isn't loaded."""
    # The Hopper tier hands what it doesn't take to the Triton one.
    if name in _loaded or not platforms.has_triton():
        return
    if name in GPU_TIERS:
        with _lock:
            if name not in _loaded:
                _loaded.add(name)
                _import_tier(name)


def _import_tier(tier: str) -> None:
    for family in FAMILIES:
        module = f"quickturn_kernels.ops.{family}.{tier}"
        if find_spec(module) is not None:
            import_module(module)


def _take_named(target: Op[Any], name: str, signature: Signature, machine: Platform) -> Implementation:
    _ensure_loaded_for(name)
    choice = target.implementations.get(name)
    if choice is None:
        raise ValueError(
            f"{target.name} has no implementation {name!r}; it has {list(target.implementations)}"
        )
    if not choice.platform.runs_on(machine):
        raise ValueError(f"{target.name}={name} asks for {choice.platform}, this is {machine}")
    if not choice.fits(signature):
        raise ValueError(
            f"{target.name}={name} takes {choice.dtypes} {choice.traits}, the call has {signature}"
        )
    return choice


def _find(op: str) -> Op[Any]:
    if op not in _ops:
        raise KeyError(f"no op {op!r}; there are {sorted(_ops)}")
    return _ops[op]


def _forget_choices() -> None:
    for op in _ops.values():
        op.table.clear()
