"""A rank that is lost while the ranks start ends all of them, wherever they are, and is named."""

import os
import signal
from collections.abc import Iterator

import pytest
from driving import Checkpoint
from ranks import alive, broken_checkpoint, check, config, driver_of
from recorded import BY_HOST, all_ranks_as_on_a_gpu

from quickturn.engine.crew import RankLost, spawn
from quickturn.engine.leader import Leader
from quickturn.engine.messages import LoadProgress


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return broken_checkpoint(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    all_ranks_as_on_a_gpu(monkeypatch)
    return


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        *((stage, signal.SIGKILL) for stage in ("launched", "loading", "allocating the cache")),
        *((stage, signal.SIGSTOP) for stage in ("launched", "recording graphs")),
        ("recording graphs", signal.SIGKILL),
    ],
)
def test_a_rank_lost_at_the_start(checkpoint: Checkpoint, stage: str, how: signal.Signals) -> None:
    """SIGSTOP stands for a rank that hangs."""
    killed = how == signal.SIGKILL
    # What isn't noticed by then is another error.
    chosen = config(checkpoint, tp=2, rank_timeout=60.0)
    crew = spawn(chosen, "WARNING", bound=False)
    (process,) = (member.process for member in crew.members)
    assert process is not None
    struck: list[str] = []

    def strike(at: str) -> None:
        if stage in at and not struck:
            struck.append(at)
            crew._timeout = 60.0 if killed else 1.0
            os.kill(process.pid, how)

    def progress(report: LoadProgress) -> None:
        strike(report.stage)

    strike("launched")
    expected = r"rank 1 \(process \d+\) ended unexpectedly \(killed by SIGKILL" if killed else "hang"
    with pytest.raises(RankLost, match=expected):
        Leader(chosen, progress, crew)
    assert struck
    assert not alive(process.pid)


def test_after_that_ranks_start_again(checkpoint: Checkpoint) -> None:
    leader = Leader(config(checkpoint, tp=2))
    assert driver_of(leader).run([3, 4, 5], max_tokens=3).finish == "length"
    assert leader.stats().values["steps_decode_graph"] > 0
    leader.close()


def test_ranks_replay_steps_that_mix(checkpoint: Checkpoint) -> None:
    """A prompt comes beside a request that is being answered."""
    leader = Leader(config(checkpoint, tp=2))
    driver = driver_of(leader)
    prompts = [[3, 4, 5], list(range(3, 43))]
    ids = [driver.add(prompts[0], max_tokens=40)]
    while not driver.answers[ids[0]].tokens:
        driver.step()
    ids.append(driver.add(prompts[1], max_tokens=5))
    driver.drain()
    stats = leader.stats().values
    leader.close()
    for id, prompt in zip(ids, prompts, strict=True):
        check(checkpoint, prompt, driver.answers[id].tokens, None)
    assert stats["steps_mixed_graph"] > 0


@pytest.mark.parametrize("by_host", [False, True])
def test_ranks_that_share_a_gpu_record_steps_unless_tensors_pass_the_host(
    checkpoint: Checkpoint, by_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all ranks are on the CPU, which one of them takes for a GPU."""
    if by_host:
        monkeypatch.setenv(BY_HOST, "1")
        all_ranks_as_on_a_gpu(monkeypatch)
    leader = Leader(config(checkpoint, tp=2, ranks_per_gpu=2))
    answer = driver_of(leader).run([3, 4, 5], max_tokens=12)
    check(checkpoint, [3, 4, 5], answer.tokens, None)
    replayed = leader.stats().values.get("steps_decode_graph", 0)
    facts = leader.ready().facts
    leader.close()
    assert (replayed == 0) == by_host
    assert facts.get("graphs", "") == (
        "none: ranks that share a GPU exchange tensors by way of the host" if by_host else ""
    )
