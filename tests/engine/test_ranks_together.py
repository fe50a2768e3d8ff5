"""Groups of ranks that take one step together though each has requests of its own: recorded decode steps of
one size, and prompts with scores, slice by slice.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from driving import Checkpoint, assert_greedy, random_prompts
from ranks import alive, config, driver_of, ranks_of
from recorded import SCORED_AT_ONCE, Eager, all_ranks_as_on_a_gpu
from test_scores import Listener, assert_scores
from tiny import random_checkpoints

from quickturn.engine.leader import Leader, together
from quickturn.engine.lockstep import Report
from quickturn.execution.scoring import slices_together

MESHES = {
    "llama": {"dp": 2, "dense_tp": 2},
    "qwen3-moe": {"dp": 2, "ep": 2},
    "qwen3.5": {"dp": 2, "dense_tp": 1},
}


@pytest.fixture(scope="module", params=MESHES)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Leader, Checkpoint]]:
    checkpoint = Checkpoint(*random_checkpoints(tmp_path_factory.mktemp("together"))(request.param), "cpu")
    with pytest.MonkeyPatch.context() as patch:
        all_ranks_as_on_a_gpu(patch)
        leader = Leader(config(checkpoint, memory=8 << 20, **MESHES[request.param]))
    yield leader, checkpoint
    leader.close()
    assert not any(map(alive, ranks_of(leader)))


def test_decode_steps_are_replayed_together(
    made: tuple[Leader, Checkpoint], rng: np.random.Generator
) -> None:
    """Groups with other numbers of rows, or none, and prompts that come between."""
    leader, checkpoint = made
    graphs = leader._core._runner._graphs
    assert graphs is not None
    recorded = dict(graphs._decode)
    before = {size: step.replays for size, step in recorded.items() if isinstance(step, Eager)}
    driver = driver_of(leader)
    prompts = random_prompts(rng, rng.integers(1, 40, 11).tolist())
    counts = rng.integers(1, 30, len(prompts)).tolist()
    ids = []
    for prompt, count in zip(prompts, counts, strict=True):
        ids.append(driver.add(prompt, max_tokens=count))
        for _ in range(int(rng.integers(0, 4))):
            driver.step()
    driver.drain()
    for id, prompt, count in zip(ids, prompts, counts, strict=True):
        assert_greedy(checkpoint.reference, prompt, driver.answers[id].tokens, count)
    # One request alone: the other group has no row, and helps with as many.
    lonely = driver.run(prompts[0], max_tokens=20)
    assert_greedy(checkpoint.reference, prompts[0], lonely.tokens, 20)
    replayed = {size: recorded[size].replays - before[size] for size in before}  # type: ignore[attr-defined]
    assert replayed[1] >= 15
    stats = leader.stats().values
    assert stats["steps_decode_graph"] >= 15
    assert stats.get("steps_prompt_graph", 0) == 0


def test_prompts_are_scored_beside_groups_that_score_none(
    made: tuple[Leader, Checkpoint], rng: np.random.Generator
) -> None:
    leader, checkpoint = made
    listener = Listener(driver_of(leader))
    driver = listener.driver
    prompts = random_prompts(rng, rng.integers(2, 70, 12).tolist())
    asked: dict[int, tuple[list[int], int | None]] = {}
    for index, prompt in enumerate(prompts):
        top = (0, None, 2)[index % 3]
        id = driver.add(prompt, max_tokens=int(rng.integers(1, 12)), prompt_logprobs=top)
        asked[id] = prompt, top
        for _ in range(int(rng.integers(0, 4))):
            listener.step()
            if rng.random() < 0.2:
                leader.stats()
    listener.drain()
    for id, (prompt, top) in asked.items():
        assert driver.answers[id].finish == "length", driver.answers[id]
        tokens = driver.answers[id].tokens
        assert_greedy(checkpoint.reference, prompt, tokens, len(tokens))
        if top is None:
            assert id not in listener.scores
        else:
            assert_scores(checkpoint.reference, prompt, listener.scores[id], top)
    assert leader.news() == []


@pytest.mark.parametrize(
    ("scored", "slices"),
    [
        ((0, 1), [(1, 1)]),
        ((5, 3), [(5, 3)]),
        ((6, 0, 11), [(5, 1, 5), (1, 1, 5), (1, 1, 1)]),
    ],
)
def test_slices_of_all_groups(scored: tuple[int, ...], slices: list[tuple[int, ...]]) -> None:
    assert list(slices_together(scored, SCORED_AT_ONCE)) == slices


def test_only_decode_rows_everywhere_are_replayed() -> None:
    idle, decodes = Report(0, 0, 1), Report(3, 3, 2, rows=3, decode_rows=3)
    assert together([idle, decodes]).decode_rows == 3
    assert together([decodes, Report(9, 1, 3, rows=1)]).decode_rows == 0
    assert together([decodes, Report(3, 2, 3, rows=3, decode_rows=3)]).decode_rows == 0
    assert together([decodes, Report(4, 4, 3, rows=4, decode_rows=3)]).decode_rows == 0
    scoring = together([decodes, Report(1, 1, 3, rows=1, decode_rows=1, scored=1)])
    assert (scoring.decode_rows, scoring.scored) == (0, [0, 1])
    assert together([idle, idle]).decode_rows == 0
