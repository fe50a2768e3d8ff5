"""Agents on a simulated clock: all come at once, and each sends its next turn as soon as it has an answer."""

from dataclasses import dataclass
from random import Random

import numpy as np
import quickturn_control as qc
from control_clocks import RECORDED, mixture, noisy
from control_sim import FULL, STATE, Sim, prompt
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sessions:
    """How many, their turns, and tokens: of the first prompt, of what each later turn brings, of answers."""

    users: int
    turns: int = 4
    first: int = 50_000
    more: int = 800
    answer: int = 500


@dataclass(frozen=True)
class Agents:
    """What they got: seconds to the first token of first turns and of later ones, each answer's tokens a
    second, seconds between tokens, and seconds in all.
    """

    first: NDArray[np.float64]
    later: NDArray[np.float64]
    speeds: NDArray[np.float64]
    gaps: NDArray[np.float64]
    seconds: float


def large_mixture(seed: int, policy: qc.Policy) -> Sim:
    """A server of the 35B shape that has answered one long prompt to nobody else."""
    noise = noisy(mixture, Random(seed), 0.01, stalls=0.0)
    sim = Sim(40_000, [FULL, STATE], noise, max_step_tokens=8192, recorded=RECORDED, policy=policy)
    sim.answer(prompt(9000, seed), 1)
    return sim


def run_agents(sim: Sim, sessions: Sessions, seed: int) -> Agents:
    """All turns of all of them."""
    began = sim.now
    talks = [prompt(sessions.first, 1000 * seed + user) for user in range(sessions.users)]
    turn = [0] * sessions.users
    asked: dict[int, tuple[int, float]] = {}
    waits: tuple[list[float], list[float]] = ([], [])
    gaps: list[NDArray[np.float64]] = []

    def ask(user: int) -> None:
        asked[sim.add(talks[user], sessions.answer)] = user, sim.now

    for user in range(sessions.users):
        ask(user)
    while asked:
        sim.step()
        sim.plans.clear()
        for number in sorted(asked.keys() & sim.ended.keys()):
            user, at = asked.pop(number)
            times = sim.token_times.pop(number)
            waits[turn[user] > 0].append(times[0] - at)
            gaps.append(np.diff(times))
            turn[user] += 1
            if turn[user] < sessions.turns:
                new = prompt(sessions.more, 1000 * (seed + turn[user]) + user)
                talks[user] = np.concatenate([talks[user], np.full(sessions.answer, 7, np.int32), new])
                ask(user)
    speeds = np.array([1 / times.mean() for times in gaps])
    return Agents(np.array(waits[0]), np.array(waits[1]), speeds, np.concatenate(gaps), sim.now - began)
