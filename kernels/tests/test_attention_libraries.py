"""FlashAttention behind the ops: stand-ins with the documented signatures take arguments at their word."""

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quickturn_kernels import platform, registry
from quickturn_kernels.registry import Priority

if not platform.has_triton():
    pytest.skip("the tier hands what libraries don't take to Triton", allow_module_level=True)

from quickturn_kernels.ops.attention import libraries, reference

LENGTHS = (5, 0, 300, 257, 31)
QUERIES = (5, 0, 40, 1, 9)


def dense(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    keys: int,
    scale: float,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Causal attention of one row, aligned to the bottom right, by the libraries' own description."""
    size = k_cache.shape[1]
    blocks = table[: -(-keys // size)].long()
    k, v = (cache[blocks].flatten(0, 1)[:keys].float() for cache in (k_cache, v_cache))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.repeat_interleave(group, 1)) * scale
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    at = torch.arange(len(q))[:, None] + keys - len(q)
    key = torch.arange(keys)[None]
    hidden = key > at + (window[1] if window[1] >= 0 else 0)
    if window[0] >= 0:
        hidden |= key < at - window[0]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).to(q.dtype)


def version_3() -> ModuleType:
    """hopper/flash_attn_interface.py: blocks of any size; packed queries with cu_seqlens_q."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: None = None,
        v: None = None,
        qv: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: None = None,
        max_seqlen_q: int | None = None,
        *,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        assert causal
        assert cache_seqlens is not None
        assert page_table is not None
        assert cache_seqlens.dtype == page_table.dtype == torch.int32
        assert k_cache.stride(-1) == 1
        out = torch.full_like(q, float("nan"))
        for row, keys in enumerate(cache_seqlens.tolist()):
            if cu_seqlens_q is None:
                assert q.dim() == 4
                mine: object = row
            else:
                assert q.dim() == 3
                assert max_seqlen_q is not None
                assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
                mine = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
            if keys:
                out[mine] = dense(
                    q[mine], k_cache, v_cache, page_table[row], keys, softmax_scale, window_size, softcap
                )
        return out

    module = ModuleType(libraries.VERSION_3)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def version_2() -> ModuleType:
    """flash_attn/flash_attn_interface.py: blocks of a multiple of 256."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor:
        assert k_cache.shape[1] % 256 == 0
        return version_3().flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=cache_seqlens,
            page_table=block_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
        )

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        *,
        block_table: Tensor,
    ) -> Tensor:
        assert k.shape[1] % 256 == 0
        assert cu_seqlens_k.dtype == torch.int32
        assert int(cu_seqlens_k[0]) == 0
        assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
        return version_3().flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=cu_seqlens_k.diff(),
            page_table=block_table,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
        )

    module = ModuleType(libraries.VERSION_2)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (version_2(), version_3()):
        made.__spec__ = importlib.machinery.ModuleSpec(made.__name__, None)
        monkeypatch.setitem(sys.modules, made.__name__, made)


def caches(seed: int, block_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """k, v, strided as layers of one arena are, and tables."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(LENGTHS) // block_tokens)
    count = width * len(LENGTHS)
    arena = torch.randn(count, 3, 2, block_tokens, 2, 64, generator=generator)
    tables = torch.randperm(count, generator=generator).int().reshape(len(LENGTHS), width)
    return arena[:, 1, 0], arena[:, 1, 1], tables


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (33, 0.0), (0, 5.0)])
@pytest.mark.parametrize("version", [2, 3])
def test_arguments_mean_what_the_op_means(seed: int, version: int, window: int, softcap: float) -> None:
    k, v, tables = caches(seed, 256 if version == 2 else 64)
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    queries = torch.randn(len(LENGTHS), 4, 64, generator=torch.Generator().manual_seed(seed))
    decode = getattr(libraries, f"decode_version_{version}")
    given = (queries, k, v, tables, lens, 0.2, window, None, softcap, 300)
    torch.testing.assert_close(decode(*given), reference.paged_attention_decode(*given))

    starts = torch.tensor((0, *torch.tensor(QUERIES).cumsum(0).tolist()), dtype=torch.int32)
    packed = torch.randn(sum(QUERIES) + 3, 4, 64, generator=torch.Generator().manual_seed(seed))
    prefill = getattr(libraries, f"prefill_version_{version}")
    full = (packed, k, v, tables, starts, lens, 40, 0.2, window, None, softcap, 300)
    torch.testing.assert_close(prefill(*full), reference.paged_attention_prefill(*full))


@pytest.mark.usefixtures("installed")
def test_small_blocks_go_past_version_2(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    k, v, tables = caches(seed, 64)
    seen: list[str] = []
    monkeypatch.setattr(libraries.triton_decode, "paged_attention_decode", lambda *_: seen.append("decode"))
    monkeypatch.setattr(
        libraries.triton_prefill, "paged_attention_prefill", lambda *_: seen.append("prefill")
    )
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    libraries.decode_version_2(torch.empty(5, 4, 64), k, v, tables, lens, 0.2, 0, None, 0.0, 300)
    libraries.prefill_version_2(torch.empty(9, 4, 64), k, v, tables, lens, lens, 9, 0.2, 0, None, 0.0, 300)
    assert seen == ["decode", "prefill"]


@pytest.mark.usefixtures("installed")
def test_what_is_installed_ranks_between_the_portable_tier_and_our_own() -> None:
    before = {op: set(registry.ops()[op].implementations) for op in ("paged_attention_decode",)}
    try:
        libraries.register_installed()
        found = registry.ops()["paged_attention_decode"].implementations
        for name, least in (("flash_attn_2", (8, 0)), ("flash_attn_3", (9, 0))):
            one = found[name]
            assert Priority.PORTABLE < one.priority < Priority.PERFORMANCE
            assert one.platform.min_capability == least
            assert not one.fits(registry.Signature(torch.device("cuda"), torch.bfloat16, {"sinks": True}))
            assert one.fits(registry.Signature(torch.device("cuda"), torch.bfloat16, {"head_dim": 128}))
    finally:
        for op in ("paged_attention_decode", "paged_attention_prefill"):
            for name in ("flash_attn_2", "flash_attn_3"):
                if name in registry.ops()[op].implementations:
                    registry.unregister(op, name)
    assert {"paged_attention_decode": set(registry.ops()["paged_attention_decode"].implementations)} == before


def test_nothing_is_registered_that_is_not_installed() -> None:
    names = {one.name for one in registry.implementations("paged_attention_decode", every_tier=True)}
    for module, name in ((libraries.VERSION_2, "flash_attn_2"), (libraries.VERSION_3, "flash_attn_3")):
        assert (importlib.util.find_spec(module) is not None) == (name in names)
