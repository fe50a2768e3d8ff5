"""Requests that compute every token themselves, because the logits of each are wanted."""

from random import Random

import pytest
import quickturn_control as qc
from control_sim import FULL, STATE, Sim, prompt

WINDOW = qc.GroupConfig("window", 8, window=100)


@pytest.mark.parametrize("groups", [[FULL], [FULL, STATE], [FULL, WINDOW]], ids=["full", "hybrid", "window"])
def test_nothing_of_others_is_used(groups: list[qc.GroupConfig]) -> None:
    """Neither what is cached nor what is being computed; what it computes itself serves others."""
    sim = Sim(60, groups)
    tokens = prompt(1000, 1)
    first = sim.add(tokens, fresh=True)
    second = sim.add(tokens, fresh=True)
    sim.run()
    assert [sim.cached[first], sim.cached[second]] == [0, 0]
    assert sim.answer(tokens, fresh=True) == 0
    assert sim.answer(tokens) == 960
    stats = sim.scheduler.stats()
    assert stats["cached_tokens"] == 960
    assert stats["ceiling_tokens"] >= 960


def test_a_retracted_one_goes_on_from_its_own_tokens() -> None:
    """Others may have cached more of its prompt meanwhile: it uses no more than it computed before."""
    retractions = 0
    for number in range(30):
        random = Random(f"fresh and retracted {number}")
        print(f"seed {number}")
        sim = Sim(3, [qc.GroupConfig("full", 4)], max_step_tokens=32)
        tokens = prompt(600, number)
        reached = 0
        scored = sim.add(tokens, fresh=True)
        for _ in range(3000):
            if not sim.scheduler.has_unfinished():
                break
            if scored in sim.slot_of and sim.next_id < 6 and random.random() < 0.5:
                sim.add(tokens[: random.randint(40, 64)], random.randint(100, 200), priority=1)
            if scored in sim.retracted and sim.next_id < 10:
                sim.next_id = 10
                sim.add(tokens, 1, priority=1)
            plan = sim.step()
            if plan is None:
                continue
            for slot, query, context in zip(
                plan.slots.tolist(), plan.query_lens.tolist(), plan.context_lens.tolist(), strict=True
            ):
                if sim.slot_of.get(scored) == slot:
                    assert context <= reached, "a token was skipped"
                    reached = max(reached, context + query)
        assert scored in sim.ended
        assert reached >= len(tokens)
        retractions += sim.retracted.count(scored)
    assert retractions > 5
