"""One request's accident is its own: numbers that are none, memory that was never written, padding rows."""

from pathlib import Path

import numpy as np
import pytest
import quickturn_control as control
import torch
from driving import Checkpoint, Checkpoints, Driver, assert_greedy, assert_same_or_level, random_prompts
from quickturn_kernels import use

from quickturn.cache.arena import Arena
from quickturn.cache.layout import CacheDtypes, CacheGroup, plan_arena
from quickturn.execution.wipe import Wiper

BROKEN = 7
"""A token whose embedding is NaN: whoever has it in the context computes nothing but NaN from there on."""


@pytest.fixture
def broken(checkpoints: Checkpoints, family: str, tmp_path: Path) -> Checkpoint:
    """A checkpoint in which one token is broken, and is never the likeliest."""
    sound = checkpoints(family)
    saved = {name: value.clone() for name, value in sound.reference.state_dict().items()}
    saved["model.embed_tokens.weight"][BROKEN] = float("nan")
    saved["lm_head.weight"][BROKEN] = 0.0
    model = type(sound.reference)(sound.reference.config)
    model.load_state_dict(saved)
    model.save_pretrained(tmp_path)
    return Checkpoint(tmp_path, model.eval(), sound.device)


def prompts_of(rng: np.random.Generator, lengths: list[int]) -> list[list[int]]:
    """Random prompts without the broken token."""
    return [[token if token != BROKEN else 8 for token in one] for one in random_prompts(rng, lengths)]


def assert_ended_with_error(driver: Driver, id: int, tokens: int) -> None:
    answer = driver.answers[id]
    assert answer.finish == "error"
    assert answer.error == "the model's output is not a finite number; this request can't go on"
    assert len(answer.tokens) == tokens


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_bad_prompt_ends_alone(
    broken: Checkpoint, rng: np.random.Generator, overlap: bool, sampled: bool
) -> None:
    """Others beside it go on, and what it found in the cache stays good for the next one."""
    driver = broken.driver(overlap=overlap, max_step_tokens=16)
    prompts = prompts_of(rng, [41, 30, 9, 17])
    good = [driver.add(prompts[0], max_tokens=20)]
    driver.drain()
    bad_prompt = [*prompts[0][:29], 5, 6, 4, 3, 8, BROKEN, 11, 12]
    good.append(driver.add(prompts[1], max_tokens=20))
    bad = driver.add(bad_prompt, max_tokens=20, temperature=0.8 * sampled, seed=1)
    good += [driver.add(prompt, max_tokens=20) for prompt in prompts[2:]]
    driver.drain()
    assert_ended_with_error(driver, bad, 0)
    assert driver.answers[bad].cached_tokens == 28
    for id, prompt in zip(good, prompts, strict=True):
        assert_greedy(broken.reference, prompt, driver.answers[id].tokens, 20)
    again = driver.run(bad_prompt, max_tokens=1)
    assert (again.finish, again.cached_tokens) == ("error", 28)
    fine = driver.run([*bad_prompt[:34], 9], max_tokens=6)
    assert fine.cached_tokens == 28
    assert_greedy(broken.reference, [*bad_prompt[:34], 9], fine.tokens, 6)
    stats = driver.core.stats().values
    assert (stats["finished_error"], stats["requests_failed"]) == (2, 2)
    assert stats["requests_running"] == 0


@pytest.mark.parametrize("family", ["qwen2"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_may_break_in_the_middle(broken: Checkpoint, rng: np.random.Generator, overlap: bool) -> None:
    driver = broken.driver(overlap=overlap)
    prompts = prompts_of(rng, [12, 25, 8])
    bad = driver.add(prompts[0], max_tokens=30, logit_bias={BROKEN: 1000.0})
    good = [driver.add(prompt, max_tokens=30) for prompt in prompts[1:]]
    driver.drain()
    assert driver.answers[bad].tokens == [BROKEN]
    assert_ended_with_error(driver, bad, 1)
    for id, prompt in zip(good, prompts[1:], strict=True):
        assert_greedy(broken.reference, prompt, driver.answers[id].tokens, 30)
    later = driver.run(prompts[0], max_tokens=5)
    assert_greedy(broken.reference, prompts[0], later.tokens, 5)


@pytest.mark.parametrize("tier", ["", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen3-window"])
def test_blocks_of_a_bad_request_are_wiped_for_the_next_owner(
    broken: Checkpoint, rng: np.random.Generator, tier: str
) -> None:
    """A cache so small that every block changes hands: attention gives keys that are not there yet no weight,
    but no weight times NaN is NaN.
    """
    with use(**({"paged_attention_decode": tier, "paged_attention_prefill": tier} if tier else {})):
        driver = broken.driver(memory=1 << 20, block_tokens=16, graphs=False)
        (start,) = prompts_of(rng, [60])
        for _ in range(3):
            bad = driver.run([*start[:20], BROKEN, *start[20:]], max_tokens=4)
            assert bad.finish == "error"
        memory = driver.core._runner.arena.block_bytes(0).view(torch.float32)
        assert not memory.isfinite().all()
        prompts = prompts_of(rng, [37] * 40)
        ids = [driver.add(prompt, max_tokens=20) for prompt in prompts]
        driver.drain()
    for id, prompt in zip(ids, prompts, strict=True):
        assert driver.answers[id].finish == "length"
        assert_greedy(broken.reference, prompt, driver.answers[id].tokens, 20)
    assert memory.isfinite().all()


def test_only_what_was_spoilt_is_wiped() -> None:
    """Two groups whose blocks lie in the same slabs at different times: what counts are the bytes."""
    groups = (CacheGroup("full", (0,), 1, 64), CacheGroup("window", (1,), 2, 64, window=8))
    types = CacheDtypes(torch.float32, torch.float32, torch.float32)
    layout = plan_arena(groups, block_tokens=8, dtypes=types, memory=1 << 20)
    strides = [laid.block_stride for laid in layout.groups]
    assert strides[1] == 2 * strides[0]
    arena = Arena(layout, torch.device("cpu"))
    arena.block_bytes(0).fill_(7)
    wiper = Wiper(arena)
    wiper.wipe(0, np.array([1, 2], dtype=np.int32))
    assert bool((arena.block_bytes(0) == 7).all())
    wiper.spoil(0, [3, 4, 11])
    wiper.wipe(0, np.array([2, 5], dtype=np.int32))
    assert bool((arena.block_bytes(0) == 7).all())
    # The window group's blocks 1 and 2 lie over the other's 2 to 5, of which 3 and 4 are spoilt.
    wiper.wipe(1, np.array([2], dtype=np.int32))
    assert (arena.block_bytes(0) == 0).all(1).nonzero()[:, 0].tolist() == [4, 5]
    arena.block_bytes(0).fill_(7)
    wiper.wipe(0, np.array([3, 4, 11], dtype=np.int32))
    assert (arena.block_bytes(0) == 0).all(1).nonzero()[:, 0].tolist() == [3, 11]
    arena.block_bytes(0).fill_(7)
    wiper.wipe(0, np.arange(20, dtype=np.int32))
    assert bool((arena.block_bytes(0) == 7).all())


STAGES = {
    "quickturn.engine.start.load_model": (
        "no room for the weights of",
        "use a smaller model, --dtype bfloat16 or --quantization fp8",
    ),
    "quickturn.cache.arena.torch.zeros": ("no room for a cache of 0.01 GiB", "lower --memory"),
    "quickturn.execution.runner.DeviceBatch": (
        "no room for the tables of 8 requests of 256 tokens beside a cache of 0.01 GiB",
        "lower --memory, --max-requests or --max-context",
    ),
    "quickturn.engine.start.Runner.capture_graphs": (
        "no room for graphs of decode steps of up to 8 rows",
        "lower --memory (the cache takes 0.01 GiB) or --max-requests",
    ),
    "quickturn.execution.runner.Runner.launch": (
        "no room for a step of 9 tokens",
        "lower --memory or --max-step-tokens",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_no_memory_says_for_what_and_what_to_lower(
    checkpoints: Checkpoints, rng: np.random.Generator, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoints("llama")
    if "graphs" in stage and checkpoint.device == "cpu":
        pytest.skip("no graphs on a CPU")

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore lines")

    monkeypatch.setattr(stage, full)
    (prompt,) = random_prompts(rng, [9])
    with pytest.raises(MemoryError) as raised:
        checkpoint.driver().run(prompt, max_tokens=2)
    for part in STAGES[stage]:
        assert part in str(raised.value)
    assert "More lines" not in str(raised.value)


def test_the_promise_reaches_the_scheduler(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []
    real = control.Policy

    def policy(**options: object) -> control.Policy:
        made.append(options)
        return real(**options)  # type: ignore[arg-type]

    monkeypatch.setattr(control, "Policy", policy)
    checkpoints("llama").driver(min_tps_per_user=70.0, max_ttft=1.5, max_pause=0.2, pause_every=9)
    wanted = {"min_tps_per_user": 70.0, "max_ttft": 1.5, "max_pause": 0.2, "pause_every": 9}
    assert made[0].items() >= wanted.items()
    with pytest.raises(ValueError, match="max_ttft must be 0"):
        checkpoints("llama").driver(max_ttft=-1.0)


@pytest.mark.parametrize("family", ["llama", "qwen3-window"])
def test_padding_rows_are_neither_read_nor_written(
    checkpoints: Checkpoints, rng: np.random.Generator, family: str
) -> None:
    """Three rows in a graph of four, in an arena whose last blocks and padding slot hold poison."""
    checkpoint = checkpoints(family)
    driver = checkpoint.driver(memory=1 << 20, max_requests=4)
    runner = driver.core._runner
    prompts = random_prompts(rng, [20, 9, 33])
    first = [driver.add(prompt, max_tokens=25) for prompt in prompts]
    driver.drain()
    # Blocks that these few tokens never come to; block -1, where a negative place would lead, is the last.
    far = runner.arena.block_bytes(0)[-20:]
    assert not far.any()
    far.fill_(0xFF)  # NaN in every floating dtype
    padding = runner._batch.padding_slot
    ids = runner._batch.token_ids[padding]
    ids.fill_(2**31 - 1)
    second = [driver.add(prompt, max_tokens=25) for prompt in prompts]
    driver.drain()
    for prompt, a, b in zip(prompts, first, second, strict=True):
        assert_same_or_level(checkpoint.reference, prompt, driver.answers[a].tokens, driver.answers[b].tokens)
        assert driver.answers[b].cached_tokens > 0
    assert bool((ids == 2**31 - 1).all())
    assert all(bool((table[padding] == -1).all()) for table in runner._batch.block_tables)
    assert bool((far == 0xFF).all())
