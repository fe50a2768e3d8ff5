"""Registration, selection, overrides, plugins, and the command line."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import quickturn_kernels as kernels
from quickturn_kernels import registry
from quickturn_kernels.__main__ import main
from quickturn_kernels.platform import Platform, Requirement
from quickturn_kernels.registry import Op, Priority, Signature

CPU = torch.device("cpu")


@pytest.fixture
def op() -> Iterator[Op[object]]:  # type: ignore[type-var]
    """An op of the test's own, with a trait `size`."""
    made = registry.define("toy", "size")
    yield made
    registry.undefine("toy")


def add(name: str, **options: object) -> None:
    registry.register("toy", name=name, **options)(lambda: name)  # type: ignore[arg-type]


def taken(dtype: torch.dtype = torch.float32, **traits: object) -> str:
    return registry.select("toy", Signature(CPU, dtype, traits)).name  # type: ignore[arg-type]


def test_highest_priority_wins_and_the_later_of_equals(op: Op[object]) -> None:  # type: ignore[type-var]
    add("plain", priority=Priority.REFERENCE)
    add("fast", priority=Priority.PERFORMANCE)
    assert taken() == "fast"
    add("faster", priority=Priority.PERFORMANCE)
    add("portable", priority=Priority.PORTABLE)
    assert taken() == "faster"


def test_dtype_traits_and_platform_filter(op: Op[object]) -> None:  # type: ignore[type-var]
    add("plain", priority=Priority.REFERENCE)
    add("half", dtypes=(torch.float16,), priority=Priority.PORTABLE)
    add("small", traits={"size": range(1, 9)}, priority=Priority.PERFORMANCE)
    add("gpu", platform=Requirement(device="cuda"), priority=Priority.SPECIALIZED)
    add("rare", platform=Requirement(cpu_features=frozenset({"no such"})), priority=Priority.SPECIALIZED)
    assert taken(size=64) == "plain"
    assert taken(torch.float16, size=64) == "half"
    assert taken(torch.float16, size=8) == "small"


def test_nothing_fits(op: Op[object]) -> None:  # type: ignore[type-var]
    add("half", dtypes=(torch.float16,))
    with pytest.raises(LookupError, match="no implementation of toy"):
        taken()


def test_capability_bounds() -> None:
    hopper = Platform("cuda", "H200", capability=(9, 0))
    assert Requirement("cuda", min_capability=(9, 0), max_capability=(9, 9)).met_by(hopper)
    assert not Requirement("cuda", min_capability=(10, 0)).met_by(hopper)
    assert not Requirement("cuda", max_capability=(8, 9)).met_by(hopper)
    assert not Requirement("cpu").met_by(hopper)


def test_interpreted_kernels_run_but_are_not_chosen() -> None:
    requirement = Requirement("cuda", interpretable=True)
    here = Platform("cpu", "cpu", interpreter=True)
    assert requirement.runs_on(here)
    assert not requirement.met_by(here)
    assert not requirement.runs_on(Platform("cpu", "cpu"))


def test_override_by_name(op: Op[object]) -> None:  # type: ignore[type-var]
    add("plain", priority=Priority.REFERENCE)
    add("fast", priority=Priority.PERFORMANCE)
    with registry.use(toy="plain"):
        assert taken() == "plain"
        with registry.use(toy="fast"):
            assert taken() == "fast"
        assert taken() == "plain"
    assert taken() == "fast"


def test_override_must_fit(op: Op[object]) -> None:  # type: ignore[type-var]
    add("half", dtypes=(torch.float16,))
    add("gpu", platform=Requirement(device="cuda"))
    for name, why in (("half", "takes"), ("gpu", "asks for"), ("absent", "no implementation 'absent'")):
        with registry.use(toy=name), pytest.raises(ValueError, match=why):
            taken()
    with pytest.raises(KeyError, match="no op 'tyo'"), registry.use(tyo="half"):
        pass


def test_wildcard_applies_where_it_fits(op: Op[object]) -> None:  # type: ignore[type-var]
    add("plain", priority=Priority.REFERENCE)
    add("fast", priority=Priority.PERFORMANCE)
    with registry.use(**{"*": "plain"}):
        assert taken() == "plain"
    with registry.use(**{"*": "elsewhere"}):
        assert taken() == "fast"


def test_override_forgets_earlier_choices() -> None:
    x, weight = torch.ones(1, 4), torch.ones(4)
    expected = kernels.rms_norm(x, weight, 0.0)
    with registry.use(rms_norm="reference"):
        torch.testing.assert_close(kernels.rms_norm(x, weight, 0.0), expected)
        table = registry.ops()["rms_norm"].table
        assert table[(x.device, x.dtype)] is registry.ops()["rms_norm"].implementations["reference"].function
    assert not table


def test_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(1, 4), torch.ones(4)
    kernels.rms_norm(x, weight, 0.0)
    monkeypatch.setattr(registry, "select", None)
    kernels.rms_norm(x, weight, 0.0)


def test_overrides_from_text_and_file(op: Op[object], tmp_path: Path) -> None:  # type: ignore[type-var]
    add("plain", priority=Priority.REFERENCE)
    add("fast", priority=Priority.PERFORMANCE)
    with registry.use():
        registry.override_from_text(" toy = plain , rms_norm=reference")
        assert taken() == "plain"
    with registry.use():
        file = tmp_path / "choices.toml"
        file.write_text('toy = "plain"\n"*" = "reference"\n')
        registry.override_from_text(f"@{file}")
        assert taken() == "plain"
    assert taken() == "fast"
    with pytest.raises(ValueError, match="must look like op=name"):
        registry.override_from_text("toy")


def test_environment_overrides_in_a_new_process() -> None:
    code = (
        "import torch, quickturn_kernels as k;"
        "print(k.select('rms_norm', k.Signature(torch.device('cpu'), torch.float32)).name)"
    )
    environment = {**os.environ, "QUICKTURN_KERNELS": "rms_norm=reference"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "reference"


def test_threads_that_call_first_all_wait_for_the_tiers() -> None:
    """In a new process, which has loaded nothing: each thread takes the best implementation, none a part."""
    code = """
import threading, torch
from quickturn_kernels import Signature, registry, select
found, together, chosen = [], threading.Barrier(8), threading.Event()
load_tier = registry._import_tier
def import_tier(tier):
    chosen.wait(0.1)  # room for another thread to choose too early
    load_tier(tier)
registry._import_tier = import_tier
def run():
    together.wait()
    try:
        found.append(select("rms_norm", Signature(torch.device("cpu"), torch.float32)).name)
    except LookupError as error:
        found.append(str(error))
    chosen.set()
threads = [threading.Thread(target=run) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(set(found)) == 1, found
assert found[0] == select("rms_norm", Signature(torch.device("cpu"), torch.float32)).name, found
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plugins_register_by_entry_point(op: Op[object], monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-var]
    add("plain", priority=Priority.REFERENCE)
    entry = SimpleNamespace(load=lambda: lambda: add("plugged", priority=Priority.SPECIALIZED))
    asked = []
    monkeypatch.setattr(registry, "entry_points", lambda group: asked.append(group) or [entry])
    monkeypatch.setattr(registry, "_loaded", set())
    assert taken() == "plugged"
    assert asked == ["quickturn_kernels.plugins"]


def test_list_prints_every_op_and_marks_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--dtype", "fp32", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in registry.ops():
        start = lines.index(name)
        block = lines[start + 1 :][: len(registry.implementations(name))]
        taken_here = sum(line.startswith("  * ") for line in block)
        # An op may exist for other dtypes only, but not one that has a reference.
        assert taken_here == 1 or (
            taken_here == 0 and "reference" not in registry.ops()[name].implementations
        )


IMPORT_ALONE = """
import sys
for name in ("triton", "quickturn", "quickturn_kernels._cpu"):
    sys.modules[name] = None
import torch, quickturn_kernels as k
from quickturn_kernels.__main__ import main
k.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
main(["list"])
"""


def test_works_without_triton_and_without_the_extension() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "* reference" in done.stdout


def test_calls_are_counted_for_who_does_the_work(op: Op[object]) -> None:  # type: ignore[type-var]
    slow = registry.register("toy", name="slow", priority=Priority.REFERENCE)(lambda x: f"slow {x}")

    @registry.register("toy", name="fast", priority=Priority.SPECIALIZED)
    def fast(x: int) -> str:
        return f"fast {x}" if x < 2 else slow(x) + slow(x)

    def call(x: int) -> object:
        function = op.table.get((CPU, torch.float32, 1)) or op.bind(CPU, torch.float32, 1)
        return function(x)  # type: ignore[operator]

    assert call(5) == "slow 5slow 5"
    with registry.counted() as calls:
        assert [call(x) for x in range(3)] == ["fast 0", "fast 1", "slow 2slow 2"]
        assert calls == {("toy", "fast"): 2, ("toy", "slow"): 2}
        with registry.counted() as inner, registry.use(toy="slow"):
            call(0)
        assert inner == {("toy", "slow"): 1}
        call(1)
    call(1)
    assert calls == {("toy", "fast"): 3, ("toy", "slow"): 2}
