"""The typed surface and the compiled module agree."""

import ast
from pathlib import Path

import numpy as np
import pytest
import quickturn_control as qc

STUB = Path(__file__).parents[2] / "control" / "quickturn_control" / "__init__.pyi"


def test_every_name_of_the_stub_exists() -> None:
    """Classes, their members, functions and constants."""
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            cls = getattr(qc, node.name)
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    assert hasattr(cls, member.name), f"{node.name}.{member.name}"
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    assert hasattr(cls, member.target.id), f"{node.name}.{member.target.id}"
        elif isinstance(node, ast.FunctionDef):
            assert hasattr(qc, node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert hasattr(qc, node.target.id)


def scheduler(**options: object) -> qc.Scheduler:
    return qc.Scheduler(qc.SchedulerConfig(groups=[qc.GroupConfig("full", 4)], num_slabs=8, **options))  # type: ignore[arg-type]


def test_views_outlive_the_scheduler() -> None:
    """Arrays of a plan stay what they are while somebody holds them, whatever is planned later."""
    target = scheduler()
    kept = []
    for number in range(30):
        target.add(qc.Request(number, np.arange(number, number + 5, dtype=np.int32), max_tokens=1))
        plan = target.plan(0.0)
        assert plan is not None
        kept.append(
            (number, plan.admitted.ids, plan.block_updates[0].blocks, plan.slots.tolist(), plan.slots)
        )
        target.apply(qc.StepResult(plan.step, np.array([9], np.int32)))
    del target, plan
    for number, ids, blocks, slots, view in kept:
        assert ids.tolist() == [number]
        assert len(blocks) == 1
        assert view.tolist() == slots
        assert not view.flags.writeable


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_tokens": 48}, "power of two"),
        ({"max_requests": 0}, "max_requests"),
        ({"pipeline_depth": 3}, "pipeline_depth"),
        ({"draft_tokens": 64}, "draft_tokens"),
        ({"hash_key": b"short"}, "16 bytes"),
        ({"tiers": [qc.TierConfig("host", [1, 2])]}, "blocks for each group"),
    ],
)
def test_bad_configurations_are_refused(options: dict[str, object], message: str) -> None:
    """With a message that names the field."""
    with pytest.raises(ValueError, match=message):
        scheduler(**options)


def test_bad_results_are_refused_and_change_nothing() -> None:
    """A wrong step, too few tokens, impossible counts."""
    target = scheduler()
    target.add(qc.Request(1, np.arange(5, dtype=np.int32), max_tokens=2))
    plan = target.plan(0.0)
    assert plan is not None
    one = np.array([3], np.int32)
    for bad in (
        qc.StepResult(plan.step + 1, one),
        qc.StepResult(plan.step, np.empty(0, np.int32)),
        qc.StepResult(plan.step, one, np.array([2], np.int32)),
        qc.StepResult(plan.step, one, np.array([1, 1], np.int32)),
    ):
        with pytest.raises(ValueError, match=r"step|tokens|count"):
            target.apply(bad)
    assert target.apply(qc.StepResult(plan.step, one)).accepted.tolist() == [1]
    with pytest.raises(ValueError, match="isn't in progress"):
        target.transfers_done([5])


def test_tokens_are_not_copied_or_kept() -> None:
    """`add` reads the prompt once; changing it afterwards changes nothing."""
    target = scheduler()
    tokens = np.arange(200, dtype=np.int32)
    target.add(qc.Request(1, tokens, max_tokens=1))
    hashes = target.prefix_hashes(tokens)
    tokens[:] = 0
    plan = target.plan(0.0)
    assert plan is not None
    target.apply(qc.StepResult(plan.step, np.array([3], np.int32)))
    assert target.match(np.arange(200, dtype=np.int32)) == 192
    assert hashes.shape == (3, 2)
    assert target.prefix_hashes(tokens).tolist() != hashes.tolist()
