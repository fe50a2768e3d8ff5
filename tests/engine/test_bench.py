"""The benchmarks measure what they say, on a tiny engine."""

import json
from pathlib import Path

import numpy as np
import pytest
from driving import Checkpoint, Checkpoints
from typer.testing import CliRunner

from quickturn.bench.latency import at_once, decode_shape, first_token
from quickturn.bench.offline import WARM_STEPS, OfflineBench
from quickturn.bench.throughput import Ask, Load, Turn, draw, measure, summary
from quickturn.bench.transformers_batching import BatchingPeer
from quickturn.config import EngineConfig


def bench(checkpoint: Checkpoint, **options: object) -> OfflineBench:
    chosen: dict[str, object] = {
        "dtype": "float32",
        "device": checkpoint.device,
        "memory": 8 << 20,
        "block_tokens": 4,
        "max_requests": 8,
        "max_step_tokens": 64,
        "graphs": False,
    } | options
    return OfflineBench(EngineConfig(str(checkpoint.path), **chosen))  # type: ignore[arg-type]


def test_figures_of_a_run() -> None:
    """Two users: 3 tokens at 1, 2 and 4 s after a prompt of 5; 2 tokens at 3 and 3.5 s after one of 7."""
    prompt = np.zeros(7, dtype=np.int32)
    turns = [
        Turn(Ask(prompt[:5], 3), sent=0.5, tokens=[1.0, 2.0, 4.0], cached=4),
        Turn(Ask(prompt, 2), sent=1.0, tokens=[3.0, 3.5]),
    ]
    found = summary(turns, users=2)
    assert (found.requests, found.prompt_tokens, found.answer_tokens, found.cached_tokens) == (2, 12, 5, 4)
    assert found.seconds == 3.5
    assert found.prompt_tokens_per_second == pytest.approx(12 / 3.5)
    assert found.answer_tokens_per_second == pytest.approx(5 / 3.5)
    assert (found.user_tokens_per_second.low, found.user_tokens_per_second.high) == (2 / 3, 2.0)
    assert (found.first_token_ms.low, found.first_token_ms.high) == (500, 2000)


def test_a_closed_loop_keeps_so_many_users_busy(checkpoints: Checkpoints) -> None:
    running = bench(checkpoints("llama"))
    load = Load(users=3, turns=4, prompt=(9, 20), answer=(2, 7), shared=8)
    asks = draw(load, running.core.ready().vocab_size)
    assert len({ask.prompt[:8].tobytes() for ask in asks}) == 1
    assert {len(ask.prompt) for ask in asks} <= set(range(9, 21))
    assert {ask.answer for ask in asks} <= set(range(2, 8))
    seen: list[tuple[int, int]] = []
    most = 0

    def progress(done: int, total: int) -> None:
        nonlocal most
        seen.append((done, total))
        most = max(most, int(running.core.stats().values["requests_running"]))

    found = measure(running, asks, load.users, progress)
    assert seen == [(done, 12) for done in range(1, 13)]
    assert most <= 3
    assert found.answer_tokens == sum(ask.answer for ask in asks)
    # The first of all computes the shared blocks, the others find them.
    assert found.cached_tokens >= 8 * (12 - 3)


@pytest.mark.parametrize(
    "wrong", [{"users": 0}, {"turns": 0}, {"prompt": (9, 3)}, {"answer": (0, 3)}, {"shared": 5}]
)
def test_loads_that_cannot_be_made(wrong: dict[str, object]) -> None:
    good: dict[str, object] = {"users": 1, "turns": 1, "prompt": (5, 5), "answer": (1, 1), "shared": 0}
    Load(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Load(**(good | wrong))  # type: ignore[arg-type]


def test_every_step_that_counts_decodes_all_rows(checkpoints: Checkpoints) -> None:
    """Prompts that take many steps each, so that the first rows decode long before the last."""
    running = bench(checkpoints("llama"), max_step_tokens=16, overlap=False)
    rows: list[tuple[int, int]] = []
    step = running.core.step

    def watched() -> object:
        output = step()
        rows.append((running.core.last_step.decode_rows, running.core.last_step.rows))
        return output

    running.core.step = watched  # type: ignore[method-assign, assignment]
    for _ in range(2):
        rows.clear()
        prompts = [running.prompt(60) for _ in range(6)]
        assert len(running.decode_steps(prompts, 10)) == 10
        full = [at for at, row in enumerate(rows) if row == (6, 6)]
        assert full[: 10 + WARM_STEPS] == list(range(full[0], full[0] + 10 + WARM_STEPS))
        assert not running.core.has_work()


@pytest.mark.parametrize("case", ["rows", "context", "cache"])
def test_rows_that_cannot_run_together_are_refused(checkpoints: Checkpoints, case: str) -> None:
    running = bench(checkpoints("llama"), memory=1 << 20 if case == "cache" else 8 << 20)
    rows, length = {"rows": (9, 8), "context": (1, 245), "cache": (8, 200)}[case]
    with pytest.raises(ValueError, match="don't decode together"):
        running.decode_steps([running.prompt(length) for _ in range(rows)], 20)
    assert running.prefill_once(8) > 0


def test_shapes_first_tokens_and_all_at_once(checkpoints: Checkpoints) -> None:
    running = bench(checkpoints("qwen3"))
    shape = decode_shape(running, 4, 40, 6, 1e9)
    assert shape.step_bytes == running.core.step_bytes(4, 43)
    assert shape.tokens_per_second == pytest.approx(4e3 / shape.step_ms.median)
    first = first_token(running, 100, 2)
    assert (first.seen_99_cached, first.again_cached) == (96, 96)
    together = at_once(running, 5, 30, 12, 6, 1e9)
    assert (together.decode.batch, together.decode.context) == (5, 30)
    assert together.output_tokens_per_second == pytest.approx(60 / together.seconds)


def test_command_beside_a_peer(checkpoints: Checkpoints, tmp_path: Path) -> None:
    from quickturn.cli.bench import app

    checkpoint = checkpoints("llama")
    out = tmp_path / "out.json"
    words = ["throughput", str(checkpoint.path), "--device", checkpoint.device, "--dtype", "float32"]
    words += ["--memory", "16MiB", "--users", "1,2", "--turns", "2", "--prompt", "20-30", "--answer", "5"]
    done = CliRunner().invoke(app, [*words, "--output", str(out)])
    assert done.exit_code == 0, done.output
    loads = json.loads(out.read_text())["loads"]
    assert [one["load"]["users"] for one in loads] == [1, 2]
    assert [one["throughput"]["answer_tokens"] for one in loads] == [10, 20]


def test_peer_answers_the_same_requests(checkpoints: Checkpoints) -> None:
    import torch

    checkpoint = checkpoints("llama")
    load = Load(users=2, turns=2, prompt=(10, 30), answer=(3, 6))
    asks = draw(load, 198)
    peer = BatchingPeer(checkpoint.path, torch.float32, torch.device(checkpoint.device), random=False)
    found = peer.measure(asks, 2)
    assert found.answer_tokens == sum(ask.answer for ask in asks)
    assert found.prompt_tokens == sum(len(ask.prompt) for ask in asks)
    assert peer.attention


def test_skipped_prompts_leave_a_blank_cache_and_true_decode_steps(checkpoints: Checkpoints) -> None:
    """A prompt's own logits are zeros, and the steps behind it are computed."""
    running = bench(checkpoints("llama"))
    vocab = running.core.ready().vocab_size
    running.core.skip_prompts()  # type: ignore[union-attr]

    running.ask(np.random.default_rng(1).integers(0, vocab, 30, dtype=np.int32), 6)
    tokens: list[int] = []
    while running.core.has_work():
        tokens += [token for output in running.core.step().outputs for token in output.tokens]
    assert tokens[0] == 0
    assert any(tokens[1:])
    assert decode_shape(running, 2, 50, 3, 1e9).batch == 2
