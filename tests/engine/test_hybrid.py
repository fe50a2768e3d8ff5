"""Models with states: whatever the schedule, every token is the one that transformers gives, and every state
that is read is the state of exactly the tokens before it.
"""

import numpy as np
import pytest
import torch
from driving import Checkpoints, assert_all_greedy, assert_greedy, random_prompts
from tiny import TINY
from torch.utils._python_dispatch import TorchDispatchMode
from watching import StateWatch

from quickturn.engine.messages import HoldSession
from quickturn.layers.attention import Attention
from quickturn.layers.linear_attention import GatedDelta

HYBRIDS = ["qwen3-next", "qwen3.5"]
ALL = [*HYBRIDS, "qwen3.5-moe"]
TIGHT = 1 << 20
"""Bytes of a cache that some requests fill."""


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("overlap", [False, True])
def test_ragged_batch(checkpoints: Checkpoints, rng: np.random.Generator, family: str, overlap: bool) -> None:
    """Prefill chunks join decoding rows, in an order that the clock decides."""
    checkpoint = checkpoints(family)
    driver = checkpoint.driver(overlap=overlap, max_step_tokens=24)
    watch = StateWatch(driver)
    prompts = random_prompts(rng, [1, 2, 37, 5, 64, 11, 90, 3, 29, 16, 4])
    counts = [int(n) for n in rng.integers(1, 25, len(prompts))]
    ids = []
    for prompt, count in zip(prompts, counts, strict=True):
        ids.append(driver.add(prompt, max_tokens=count))
        for _ in range(int(rng.integers(0, 4))):
            driver.step()
    driver.drain()
    for id, prompt, count in zip(ids, prompts, counts, strict=True):
        assert_greedy(checkpoint.reference, prompt, driver.answers[id].tokens, count)
    assert watch.began == len(prompts)
    assert 0 < watch.moved < watch.stayed


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_chunk_size(checkpoints: Checkpoints, rng: np.random.Generator, family: str) -> None:
    checkpoint = checkpoints(family)
    (prompt,) = random_prompts(rng, [23])
    for chunk in range(1, len(prompt) + 1):
        driver = checkpoint.driver(max_step_tokens=chunk, max_requests=1)
        StateWatch(driver)
        assert_greedy(checkpoint.reference, prompt, driver.run(prompt, max_tokens=6).tokens, 6)


@pytest.mark.parametrize("family", ALL)
def test_hits_at_every_boundary(checkpoints: Checkpoints, rng: np.random.Generator, family: str) -> None:
    """A prompt that names all its boundaries leaves a state at each; others go on from every one."""
    checkpoint = checkpoints(family)
    driver = checkpoint.driver(max_requests=4)
    StateWatch(driver)
    (prompt,) = random_prompts(rng, [41])
    places = tuple(range(4, 41, 4))
    assert driver.run(prompt, max_tokens=3, boundaries=places).cached_tokens == 0
    for place in places:
        branch = prompt[:place] + random_prompts(rng, [int(rng.integers(1, 7))])[0]
        if branch[place] == prompt[place]:
            branch[place] = 3 if prompt[place] != 3 else 4
        answer = driver.run(branch, max_tokens=5)
        assert answer.cached_tokens == place
        assert_greedy(checkpoint.reference, branch, answer.tokens, 5)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_session_reuses_its_answers(
    checkpoints: Checkpoints, rng: np.random.Generator, family: str, overlap: bool
) -> None:
    """Each turn goes on where the last answer ended, but for less than one block; so does a turn whose
    answer was rewritten, from the end of its prompt.
    """
    checkpoint = checkpoints(family)
    driver = checkpoint.driver(overlap=overlap)
    StateWatch(driver)
    context, computed = random_prompts(rng, [13])[0], 0
    for turn in range(6):
        answer = driver.run(context, max_tokens=9, session="one")
        assert_greedy(checkpoint.reference, context, answer.tokens, 9)
        assert answer.cached_tokens == computed // 4 * 4, f"turn {turn}"
        prompt_end = len(context)
        context = context + answer.tokens
        computed = len(context) - 1
        context = context + random_prompts(rng, [int(rng.integers(1, 9))])[0]
    rewritten = context[:prompt_end] + [3 if context[prompt_end] != 3 else 4] + random_prompts(rng, [10])[0]
    answer = driver.run(rewritten, max_tokens=5)
    assert_greedy(checkpoint.reference, rewritten, answer.tokens, 5)
    assert answer.cached_tokens == prompt_end // 4 * 4


def test_500_retractions(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    """A pool that holds a few of the requests: hundreds give way in mid-decode and come back, and nobody
    notices. A returning request begins with zeros or with a checkpoint, never with what its old block holds.
    """
    checkpoint = checkpoints("qwen3.5-small")
    driver = checkpoint.driver(overlap=True, memory=TIGHT, max_requests=128, max_step_tokens=256)
    answer_len, ids, prompts = 60, [], []
    while driver.core.stats().values["retractions"] < 500:
        assert len(ids) < 4000, f"{driver.core.stats().values['retractions']} retractions"
        for prompt in random_prompts(rng, [20] * 128):
            prompts.append(prompt)
            ids.append(driver.add(prompt, max_tokens=answer_len))
        driver.drain()
    assert_all_greedy(checkpoint.reference, prompts, [driver.answers[id].tokens for id in ids], answer_len)


@pytest.mark.parametrize("overlap", [False, True])
def test_retraction_in_mid_prefill(checkpoints: Checkpoints, rng: np.random.Generator, overlap: bool) -> None:
    """The same under watch, with chunks of prompts between."""
    checkpoint = checkpoints("qwen3.5")
    driver = checkpoint.driver(overlap=overlap, memory=TIGHT, max_requests=48, max_step_tokens=56)
    StateWatch(driver)
    prompts = random_prompts(rng, [20] * 48)
    ids = [driver.add(prompt, max_tokens=100) for prompt in prompts]
    driver.drain()
    assert driver.core.stats().values["retractions"] > 0
    assert_all_greedy(checkpoint.reference, prompts, [driver.answers[id].tokens for id in ids], 100)


def test_freed_states_are_never_read(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    checkpoint = checkpoints("qwen3-next")
    driver = checkpoint.driver()
    watch = StateWatch(driver)
    prompts = random_prompts(rng, [30, 17, 44])
    for round in range(3):
        ids = [driver.add(prompt, max_tokens=8) for prompt in prompts]
        driver.drain()
        for id, prompt in zip(ids, prompts, strict=True):
            assert_greedy(checkpoint.reference, prompt, driver.answers[id].tokens, 8)
            assert round == 0 or driver.answers[id].cached_tokens == 0
        driver.core._scheduler.reset_prefix_cache()
        watch.ruin_everything()


def test_cancelled_requests_leave_no_trace(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    from quickturn.engine.messages import CancelRequest

    checkpoint = checkpoints("qwen3-next")
    driver = checkpoint.driver(overlap=True, max_step_tokens=16)
    StateWatch(driver)
    prompts = random_prompts(rng, [int(n) for n in rng.integers(1, 80, 12)])
    ids = [driver.add(prompt, max_tokens=20) for prompt in prompts]
    for id in sorted(int(id) for id in rng.choice(ids, 6, replace=False)):
        for _ in range(int(rng.integers(0, 6))):
            driver.step()
        driver.core.cancel(CancelRequest(id))
    driver.drain()
    for id, prompt in zip(ids, prompts, strict=True):
        answer = driver.answers[id]
        assert_greedy(checkpoint.reference, prompt, answer.tokens, len(answer.tokens))
    assert driver.core.stats().values["requests_running"] == 0


class _Touched(TorchDispatchMode):
    """Counts the bytes of the arena that PyTorch's own operations are given."""

    def __init__(self, arena: torch.Tensor) -> None:
        super().__init__()
        self.storage = arena.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == self.storage:
                self.bytes += value.nbytes
        return function(*args, **(kwargs or {}))


def test_decoding_copies_no_state(
    checkpoints: Checkpoints, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the layers' kernels nothing touches a byte of the arena, at boundaries and between them."""
    driver = checkpoints("qwen3.5").driver(graphs=False, overlap=False)
    for prompt in random_prompts(rng, [9, 10, 11, 12]):
        driver.add(prompt, max_tokens=20)
    watch = StateWatch(driver)
    for _ in range(10):
        driver.step()
        if driver.core.last_step.decode_rows == 4:
            break
    assert driver.core.last_step.decode_rows == 4
    touched = _Touched(driver.core._runner.arena._bytes)
    # What kernels do inside is theirs: some tiers are made of PyTorch.
    monkeypatch.setattr(
        GatedDelta, "_decode", lambda self, x, *rest: x.new_zeros(len(x), self._heads[1], self.value_dim)
    )
    monkeypatch.setattr(Attention, "_attend", lambda self, q, *rest: torch.zeros_like(q))
    watch._ruin = lambda *_: None  # type: ignore[method-assign]
    watch._ruin_new_blocks = lambda *_: None  # type: ignore[method-assign]
    moved = watch.moved
    with touched:
        for _ in range(8):
            driver.step()
    assert watch.moved > moved
    assert touched.bytes == 0


def test_bfloat16_states_stay_near(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    """Half the bytes; logits move by rounding, and tokens only where two are nearly level."""
    checkpoint = checkpoints("qwen3.5")
    (prompt,) = random_prompts(rng, [40])
    wide = checkpoint.driver().run(prompt, max_tokens=12, logprobs=5)
    driver = checkpoint.driver(state_dtype="bfloat16")
    narrow = driver.run(prompt, max_tokens=12, logprobs=0)
    first, other = (answer.outputs[0].logprobs[0] for answer in (wide, narrow))  # type: ignore[index]
    known = dict(first.top)[narrow.tokens[0]]
    assert known > first.logprob - 0.5
    assert abs(known - other.logprob) < 0.5
    sizes = [laid.block_bytes for laid in driver.core._started.layout.groups]
    assert sizes[1] < 0.75 * [laid.block_bytes for laid in checkpoint.driver().core._started.layout.groups][1]


def test_what_needs_the_whole_pool_progresses_and_what_never_fits_is_refused(
    checkpoints: Checkpoints, rng: np.random.Generator
) -> None:
    checkpoint = checkpoints("qwen3.5")
    driver = checkpoint.driver(memory=TIGHT, max_requests=4, max_context=None)
    StateWatch(driver)
    longest = driver.core.ready().max_context
    (prompt,) = random_prompts(rng, [min(longest, TINY["max_position_embeddings"]) - 10])
    answer = driver.run(prompt, max_tokens=8)
    assert_greedy(checkpoint.reference, prompt, answer.tokens, 8)
    refused = driver.run([5] * (longest + 1), max_tokens=1)
    assert refused.finish == "error"
    assert str(longest) in refused.error


def test_holds_and_facts(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    driver = checkpoints("qwen3.5").driver()
    facts = driver.core.ready().facts
    assert facts["least cacheable prefix"] == "4 tokens"
    assert "tokens of keys and values" in facts["state"]
    (prompt,) = random_prompts(rng, [24])
    driver.run(prompt, max_tokens=4, session="tool")
    driver.core.hold(HoldSession("tool", 60.0))
    driver.step()
    assert driver.core.stats().values["blocks_held"] > 0
