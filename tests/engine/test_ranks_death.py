"""When one of two ranks ends, hangs or differs, all end, and say which and why."""

import os
import signal

import numpy as np
import pytest
from driving import MAX_STEPS, Checkpoint, Driver
from ranks import alive, broken_checkpoint, config, driver_of, prompts_of, ranks_of

from quickturn.engine.core import EngineCore
from quickturn.engine.crew import RankLost, cut_off
from quickturn.engine.leader import Leader
from quickturn.engine.lockstep import Batch, Go
from quickturn.engine.ranked import RankedCore, RankMissing, RanksDiverged
from quickturn.engine.seat import Seat
from quickturn.parallel.collectives import Alone
from quickturn.parallel.communicator import Communicator
from quickturn.parallel.mesh import Mesh


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return broken_checkpoint(tmp_path_factory.mktemp("ranks"))


def test_plans_that_differ_end_all(
    checkpoint: Checkpoint, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank believes to have drawn something else than it has."""
    leader = Leader(config(checkpoint, tp=2))
    driver = driver_of(leader)
    for prompt in prompts_of(rng, [20, 30]):
        driver.add(prompt, max_tokens=100)
    for _ in range(5):
        driver.step()
    leader._core.digest ^= 1
    with pytest.raises(RankLost, match="rank 1 planned another step"):
        step_until_lost(driver)
    leader.close()
    assert not any(map(alive, ranks_of(leader)))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_rank_ends_the_others(checkpoint: Checkpoint, rng: np.random.Generator, how: str) -> None:
    """SIGSTOP stands for a process that hangs."""
    leader = Leader(config(checkpoint, tp=2))
    driver = driver_of(leader)
    for prompt in prompts_of(rng, [20, 30]):
        driver.add(prompt, max_tokens=200)
    for _ in range(5):
        driver.step()
    if how == "killed":
        os.kill(ranks_of(leader)[0], signal.SIGKILL)
        expected = r"rank 1 \(process \d+\) ended unexpectedly \(killed by SIGKILL"
    else:
        leader._crew._timeout = 1.0
        os.kill(ranks_of(leader)[0], signal.SIGSTOP)
        expected = r"the ranks hang: the first one has not got on with 'a step' for 1 s"
    with pytest.raises(RankLost, match=expected):
        step_until_lost(driver)
    leader.close()
    assert not any(map(alive, ranks_of(leader)))
    with pytest.raises(RankLost, match=expected):
        leader.step()


def step_until_lost(driver: Driver) -> None:
    for _ in range(MAX_STEPS):
        driver.step()


def test_a_failure_at_the_start_is_that_ranks_own_words(checkpoint: Checkpoint) -> None:
    """No process is left, and this one can start ranks again."""
    with pytest.raises((RankLost, ValueError), match=r"3 doesn't divide|heads"):
        Leader(config(checkpoint, tp=3))
    with pytest.raises(ValueError, match="no GPU"):
        Leader(config(checkpoint, tp=2, device="cuda"))


def test_ranked_core_refuses_a_foreign_digest(checkpoint: Checkpoint) -> None:
    core = EngineCore(config(checkpoint))
    ranked = RankedCore(core, Seat(Mesh()))
    assert ranked.plan(Batch(0.0)).digest == 0
    with pytest.raises(RanksDiverged, match="planned another step"):
        ranked.run(Go([1]))


class Waiting(Alone):
    """A kernel gave up waiting for a rank, which spoils all that the device does."""

    def missing(self) -> str:
        """Which one."""
        return "rank 1 did not come to a sum in 5 s"


def test_a_kernel_that_gave_up_names_the_rank_that_it_missed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(config(checkpoint))

    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(core, "run", fail)
    with pytest.raises(RankMissing, match="rank 1 did not come") as found:
        RankedCore(core, Seat(Mesh(), collectives=Waiting())).run(Go([0]))
    # Another rank is more to blame than the one that says so.
    assert cut_off(found.value)
    with pytest.raises(RuntimeError, match="launch failure"):
        RankedCore(core, Seat(Mesh())).run(Go([0]))


def test_what_the_device_waits_for_is_broken_off_when_a_rank_is_lost(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned: list[Communicator] = []
    monkeypatch.setattr(Communicator, "abandon", lambda self: abandoned.append(self))
    leader = Leader(config(checkpoint, tp=2))
    os.kill(ranks_of(leader)[0], signal.SIGKILL)
    driver = driver_of(leader)
    with pytest.raises(RankLost, match="rank 1"):
        driver.run([3, 4, 5], max_tokens=100)
    leader.close()
    assert abandoned == [leader._ranked.seat.collectives]
