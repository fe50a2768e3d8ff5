"""Requests served by hand on one rank of a mesh: prompts in chunks, decode rows beside them, greedily."""

import random
from dataclasses import dataclass, replace

import torch
from crew import GROUPS
from paged import PagedCache, PagedRequest

from quickturn.config import EngineConfig
from quickturn.loading.load import load_model
from quickturn.models.base import Model
from quickturn.parallel.communicator import connect
from quickturn.parallel.mesh import Mesh, make_mesh
from quickturn.parallel.shards import Place

LENGTHS = (13, 6, 1, 9)
"""Of the prompts: some end within a chunk, one has a single token."""
CHUNK = 4
NEW_TOKENS = 5
BLOCK_TOKENS = 4
VOCAB = 198


@dataclass(frozen=True)
class Served:
    """Of each request: the logits of every row that was sampled, and the greedy tokens."""

    logits: dict[int, torch.Tensor]
    tokens: dict[int, list[int]]


Work = list[tuple[int, int]]
"""(Request, tokens) of each row of a step, decode rows first."""


def schedule(requests: list[int]) -> list[Work]:
    """Who runs in each step: everybody who isn't done, with a chunk of the prompt or one token."""
    left = {request: LENGTHS[request] for request in requests}
    made = dict.fromkeys(requests, 0)
    steps: list[Work] = []
    while live := [request for request in requests if made[request] < NEW_TOKENS]:
        takes = [(request, min(CHUNK, left[request]) or 1) for request in live]
        begun = {request for step in steps for request, _ in step}
        takes.sort(key=lambda take: not (take[1] == 1 and take[0] in begun))
        steps.append(takes)
        for request, count in takes:
            left[request] = max(0, left[request] - count)
            made[request] += left[request] == 0
    return steps


def serve(rank: int, path: str, mesh: Mesh, seed: int) -> Served | None:
    """What the requests of this rank's group get; None for a rank outside the mesh."""
    if rank >= mesh.world:
        return None
    place = Place(mesh, rank)
    collectives = connect(mesh, made=GROUPS) if mesh.world > 1 else None
    config = EngineConfig(path, dtype="float32")
    model, _ = load_model(config, torch.device("cpu"), None, place, collectives)
    with torch.inference_mode():
        return _serve(model, mesh, rank // mesh.attention_span, seed)


def _serve(model: Model, mesh: Mesh, group: int, seed: int) -> Served:
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    plans = [schedule([r for r in range(len(prompts)) if r % mesh.dp == g]) for g in range(mesh.dp)]
    cache = PagedCache(model, 24, BLOCK_TOKENS, seed)
    states = [PagedRequest() for _ in prompts]
    tokens: dict[int, list[int]] = {}
    logits: dict[int, list[torch.Tensor]] = {}
    for step in range(max(map(len, plans))):
        # A group that has nothing to do runs a row of padding.
        rows = [plan[step] if step < len(plan) else [] for plan in plans]
        work = [
            (states[request], (prompts[request] + tokens.get(request, []))[states[request].cached :][:count])
            for request, count in rows[group]
        ]
        batch = cache.batch(work, sample_all=False, padding_rows=0 if work else 1)
        if not work:
            batch = replace(batch, sample_rows=torch.zeros(1, dtype=torch.long), max_context_len=1)
        if mesh.dp > 1:
            batch = replace(
                batch,
                dp_tokens=tuple(sum(count for _, count in of) or 1 for of in rows),
                dp_samples=tuple(len(of) or 1 for of in rows),
            )
        got = model.forward(batch)
        assert got.shape == (batch.sample_rows.shape[0], VOCAB)
        for (request, _), row in zip(rows[group], got, strict=False):
            logits.setdefault(request, []).append(row)
            if states[request].cached >= LENGTHS[request]:
                tokens.setdefault(request, []).append(int(row.argmax()))
    return Served({request: torch.stack(rows) for request, rows in logits.items()}, tokens)


def alone(path: str, seed: int) -> Served:
    """The same on one rank, in this process."""
    served = serve(0, path, make_mesh(), seed)
    assert served is not None
    return served


def compare(want: Served, got: list[Served | None], mesh: Mesh, tolerance: float) -> None:
    """Every rank of the mesh has its group's logits as one rank has them, and the same bits as its peers."""
    for rank in range(mesh.world):
        served = got[rank]
        assert served is not None
        first = got[rank // mesh.attention_span * mesh.attention_span]
        assert first is not None
        assert set(served.logits) == {r for r in want.logits if r % mesh.dp == rank // mesh.attention_span}
        for request, logits in served.logits.items():
            assert served.tokens[request] == want.tokens[request], (rank, request)
            torch.testing.assert_close(
                logits, want.logits[request], atol=tolerance, rtol=tolerance, msg=f"rank {rank}"
            )
            assert torch.equal(logits, first.logits[request])
