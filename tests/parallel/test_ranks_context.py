"""Attention over a cache whose tokens several ranks share out, against one rank with all of them."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crew import GROUPS, Crew
from paged import PagedCache, PagedRequest

from quickturn.cache.arena import Arena
from quickturn.cache.layout import CacheDtypes, CacheGroup, plan_arena
from quickturn.layers.attention import Attention
from quickturn.layers.context import SharedAttention, TokenShare
from quickturn.layers.forward import ForwardBatch
from quickturn.layers.rotary import Rotary, cos_sin_table
from quickturn.parallel.collectives import gathering
from quickturn.parallel.communicator import connect
from quickturn.parallel.mesh import make_mesh

BLOCK_TOKENS, HEADS, KV_HEADS, DIM = 8, 4, 2, 16
CPU = torch.device("cpu")

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed and gated": {"q_norm": True, "k_norm": True, "gated": True},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0},
}
"""What `Attention` is given, tensors by True."""


def attention(variant: str, generator: torch.Generator, dtype: torch.dtype) -> Attention:
    given = dict(VARIANTS[variant])
    for name, size in (("q_norm", DIM), ("k_norm", DIM), ("sinks", HEADS)):
        if given.get(name):
            given[name] = torch.randn(size, generator=generator).to(dtype)
    table = cos_sin_table(Rotary(DIM, 1e4), 128, CPU)
    return Attention(0, DIM, HEADS // KV_HEADS, DIM**-0.5, table, **given)


def outputs(
    rank: int, parts: int, variant: str, dtype: torch.dtype, kept: torch.dtype, seed: int
) -> list[torch.Tensor] | None:
    """Prompts in chunks, then decode rows beside them, rows of padding between, on one of `parts` ranks."""
    if rank >= parts:
        return None
    generator = torch.Generator().manual_seed(seed)
    whole = attention(variant, generator, dtype)
    group = CacheGroup("full", (0,), KV_HEADS, DIM, parts=parts)
    model: Any = SimpleNamespace(cache_groups=lambda: (group,))
    cache = PagedCache(model, 16, BLOCK_TOKENS, seed, kept)
    layer: Any = whole
    if parts > 1:
        mesh = make_mesh(cp=parts)
        gather = gathering(connect(mesh, made=GROUPS), mesh.axis("cp"))
        layer = SharedAttention(whole, TokenShare(rank, parts, gather))
    numbers = random.Random(seed)
    rows = [PagedRequest() for _ in range(3)]
    width = (HEADS * (2 if whole.gated else 1) + 2 * KV_HEADS) * DIM
    found = []
    for takes in ((numbers.randrange(1, 30), 0, 5), (1, numbers.randrange(2, 20), 1), (1, 1, 1), (1, 1, 9)):
        work = [(row, [7] * count) for row, count in zip(rows, takes, strict=True) if count]
        work.sort(key=lambda item: not (len(item[1]) == 1 and item[0].cached > 0))
        batch = cache.batch(work, padding_rows=numbers.randrange(3))
        qkv = torch.randn(batch.token_ids.shape[0], width, generator=generator).to(dtype)
        out = layer(qkv, qkv, batch)
        found.append(out[batch.slot_mapping[0] >= 0].float())
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float8_e4m3fn),
    ],
    ids=["float32", "bfloat16", "e4m3"],
)
def test_attention_over_shared_tokens(
    crew: Crew, variant: str, dtype: torch.dtype, kept: torch.dtype, seed: int
) -> None:
    # Of bfloat16: results of one rank are rounded, too, and lie below four.
    bound = 2e-5 if dtype == torch.float32 else 2**-5
    want = outputs(0, 1, variant, dtype, kept, seed)
    assert want is not None
    for parts in (2, 4):
        for got in crew.run(outputs, parts, variant, dtype, kept, seed)[:parts]:
            for ours, whole in zip(got, want, strict=True):
                torch.testing.assert_close(ours, whole, atol=bound, rtol=bound)


def test_which_tokens_are_whose(seed: int) -> None:
    """Against counting: every token has one owner, and its place there; padding has none."""
    numbers = random.Random(seed)
    lens = [numbers.randrange(0, 50) for _ in range(6)]
    slots = [numbers.choice((-1, -5, numbers.randrange(400))) for _ in range(30)]
    batch = ForwardBatch(
        token_ids=torch.zeros(30, dtype=torch.long),
        positions=torch.zeros(30, dtype=torch.long),
        num_decode=0,
        query_start=torch.zeros(7, dtype=torch.int32),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=(),
        slot_mapping=(torch.tensor(slots),),
        max_query_len=1,
        max_context_len=50,
        sample_rows=None,
        caches=(),
    )
    parts, size = 4, 3
    for part in range(parts):
        vars(batch).pop("_own_tokens", None)
        own = batch.own_tokens(0, size, part, parts)
        for slot, here in zip(slots, own.slots.tolist(), strict=True):
            block, offset = divmod(slot, size * parts)
            if slot < 0 or offset // size != part:
                assert here < 0
            else:
                assert here == block * size + offset % size
        for length, here in zip(lens, own.context_lens.tolist(), strict=True):
            assert here == sum(token % (size * parts) // size == part for token in range(length))
            assert here <= own.max_context_len
        assert own.context_lens.dtype == torch.int32
        assert own.lines.tolist() == [-1 if slot < 0 else index for index, slot in enumerate(slots)]


def test_the_cache_of_a_part_is_a_part_of_the_cache() -> None:
    dtypes = CacheDtypes(torch.float32, torch.float32, torch.float32)
    window = CacheGroup("window", (1,), 2, 64, 16)
    layouts = [
        plan_arena(
            (CacheGroup("full", (0, 2), 2, 64, parts=parts), window),
            block_tokens=64,
            dtypes=dtypes,
            memory=1 << 25,
        )
        for parts in (1, 4)
    ]
    whole, part = (layout.groups[0].block_bytes for layout in layouts)
    assert whole == 4 * part
    assert layouts[0].groups[1].block_bytes == layouts[1].groups[1].block_bytes
    caches: Any = Arena(layouts[1], CPU).layer_caches()
    assert caches[0].k.shape[1:] == (16, 2, 64)
    assert caches[1].k.shape[1:] == (64, 2, 64)
    with pytest.raises(ValueError, match="take a divisor of 64 for --cp"):
        plan_arena(
            (CacheGroup("full", (0,), 2, 64, parts=3),), block_tokens=64, dtypes=dtypes, memory=1 << 25
        )
