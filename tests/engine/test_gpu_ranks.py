"""Several ranks on one GPU, or on one each where there are two: the same tokens as of one rank, with graphs
and without, and a clear end.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driving import Checkpoint, assert_greedy, random_prompts
from test_gpu import assert_same
from transformers import PreTrainedModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CHILD = Path(__file__).with_name("ranks_of_one_gpu.py")
LIMIT_S = 90.0
OPTIONS = {
    "memory": 8 << 20,
    "block_tokens": 4,
    "max_requests": 4,
    "max_step_tokens": 64,
    "rank_timeout": 60.0,
    "ranks_per_gpu": 4,
}


@pytest.fixture
def checkpoint(saved: Callable[[str], tuple[Path, PreTrainedModel]], family: str) -> Checkpoint:
    return Checkpoint(*saved(family), "cuda")


@pytest.fixture
def family() -> str:
    return "qwen3"


def answers(checkpoint: Checkpoint, prompts: list[list[int]], path: Path, **options: object) -> Any:
    """What the ranks say, in a process that is killed if it hangs."""
    result = path / "result.json"
    words = [str(checkpoint.path), json.dumps(OPTIONS | options), json.dumps(prompts), str(result)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(CHILD), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as child:
        try:
            said, _ = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            said, _ = child.communicate()
            raise AssertionError(f"the ranks hung for {LIMIT_S:g} s\n{said[-4000:]}") from None
    assert child.returncode == 0, said[-4000:]
    found = json.loads(result.read_text())
    print(found["facts"], found["stats"])
    return found


@pytest.mark.parametrize(
    "mesh", [{"tp": 2}, {"dp": 2, "dense_tp": 2}, {"cp": 2}, {"tp": 2, "dp": 2}], ids=str
)
def test_float32_goes_by_way_of_the_host(
    checkpoint: Checkpoint, rng: np.random.Generator, tmp_path: Path, mesh: dict[str, int]
) -> None:
    prompts = random_prompts(rng, [30, 7, 1, 44])
    found = answers(checkpoint, prompts, tmp_path, dtype="float32", **mesh)
    assert "on each GPU" in found["facts"]["ranks"]
    for prompt, tokens in zip(prompts, found["tokens"], strict=True):
        assert_greedy(checkpoint.reference, prompt, tokens, len(tokens))
        assert len(tokens) == 24


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3", {"tp": 2}),
        ("qwen3", {"dp": 2, "dense_tp": 2}),
        ("qwen3", {"cp": 2}),
        ("qwen3-moe", {"dp": 2, "ep": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus(
    checkpoint: Checkpoint, rng: np.random.Generator, tmp_path: Path, mesh: dict[str, int], dtype: str
) -> None:
    prompts = random_prompts(rng, [30, 7, 1, 44])
    found = answers(checkpoint, prompts, tmp_path, dtype=dtype, ranks_per_gpu=1, **mesh)
    assert "graphs" not in found["facts"]
    assert found["stats"]["steps_decode_graph"] > 10
    if dtype == "bfloat16":
        check_bfloat16(checkpoint, prompts, found["tokens"])
        return
    for prompt, tokens in zip(prompts, found["tokens"], strict=True):
        assert_greedy(checkpoint.reference, prompt, tokens, 24)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bfloat16_sums_over_shared_memory_in_graphs(
    checkpoint: Checkpoint, rng: np.random.Generator, tmp_path: Path, ranks: int
) -> None:
    """On Hopper no tensor passes the host, so that decode steps are graphs on every rank."""
    prompts = random_prompts(rng, [30, 7, 1, 44])
    found = answers(checkpoint, prompts, tmp_path, dtype="bfloat16", tp=ranks)
    if torch.cuda.get_device_capability() == (9, 0):
        assert "graphs" not in found["facts"]
        assert found["stats"]["steps_decode_graph"] > 10
    check_bfloat16(checkpoint, prompts, found["tokens"])


def check_bfloat16(checkpoint: Checkpoint, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """The tokens of one rank, or tokens that are level with them."""
    driver = checkpoint.driver(dtype="bfloat16", graphs=False)
    ids = [driver.add(prompt, max_tokens=24) for prompt in prompts]
    driver.drain()
    for prompt, id, tokens in zip(prompts, ids, answers, strict=True):
        assert_same(checkpoint, "bfloat16", prompt, tokens, driver.answers[id].tokens, "several ranks")


def test_a_rank_that_is_killed_ends_all(
    checkpoint: Checkpoint, rng: np.random.Generator, tmp_path: Path
) -> None:
    """What the first rank's kernels wait for is gone; nobody waits for a time limit."""
    found = answers(checkpoint, random_prompts(rng, [30]), tmp_path, dtype="bfloat16", tp=2, kill=True)
    assert "rank 1" in found["error"]
    assert "killed by SIGKILL" in found["error"]


def test_ranks_share_a_gpu_only_when_asked_to(checkpoint: Checkpoint) -> None:
    from quickturn.engine.device import pick_device

    ranks = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match=f"{ranks} ranks of this machine need {ranks} GPUs"):
        pick_device("cuda", 0, ranks)
