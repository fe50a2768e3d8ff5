"""A small paged cache driven by hand: what the runner and the control plane do, in the simplest way."""

import random
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from quickturn.cache.layout import StateGroup
from quickturn.cache.views import AnyCache, LayerCache, LayerState
from quickturn.layers.forward import ForwardBatch, StateRows
from quickturn.models.base import Model


@dataclass
class PagedRequest:
    """Tokens already in the cache, the blocks that hold them (the same ids for every group), and the block of
    its states.
    """

    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    state: int = -1


class PagedCache:
    """Blocks handed out in random order from a cache of garbage; a block holds all layers of its group.

    States move: each step writes them to another block, or to the same, and what they leave becomes NaN.
    """

    def __init__(
        self, model: Model, num_blocks: int, block_tokens: int, seed: int, dtype: torch.dtype = torch.float32
    ):
        self.block_tokens = block_tokens
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        generator = torch.Generator().manual_seed(seed)
        self.layers: dict[int, AnyCache] = {}
        self.paged, self.states = 0, 0
        self.random = random.Random(seed)
        self.moves: list[tuple[int, int, int]] = []
        for group in model.cache_groups():
            if isinstance(group, StateGroup):
                self._add_states(group, num_blocks, dtype)
                continue
            tokens = group.tokens_here(block_tokens)
            shape = (num_blocks, len(group.layers), 2, tokens, group.kv_heads, group.head_dim)
            arena = (torch.randn(shape, generator=generator) * 50).to(dtype)
            for index, layer in enumerate(group.layers):
                self.layers[layer] = LayerCache(self.paged, arena[:, index, 0], arena[:, index, 1])
            self.paged += 1
        self.free_states = list(range(num_blocks))
        self.random.shuffle(self.free_states)

    def _add_states(self, group: StateGroup, num_blocks: int, dtype: torch.dtype) -> None:
        layers = len(group.layers)
        shape = (num_blocks, layers, group.heads, group.key_dim, group.value_dim)
        recurrent = torch.full(shape, torch.nan)
        conv = torch.full((num_blocks, layers, group.channels, group.width - 1), torch.nan, dtype=dtype)
        for index, layer in enumerate(group.layers):
            self.layers[layer] = LayerState(self.states, recurrent[:, index], conv[:, index])
        self.states += 1

    def _move_state(self, request: PagedRequest | None) -> tuple[int, int, int]:
        """Blocks read and written, and whether the state begins."""
        if request is None:
            return -1, -1, 0
        before = request.state
        if before < 0 or self.random.random() < 0.5:
            request.state = self.free_states.pop()
        return before, request.state, int(before < 0)

    def settle(self, moves: list[tuple[int, int, int]]) -> None:
        """After the step: what was left behind is poisoned and free."""
        for before, after, _ in moves:
            if before not in (-1, after):
                self.free_states.append(before)
                for layer in self.layers.values():
                    if isinstance(layer, LayerState):
                        layer.recurrent[before] = torch.nan
                        layer.conv[before] = torch.nan

    def batch(
        self, work: list[tuple[PagedRequest, list[int]]], sample_all: bool = True, padding_rows: int = 0
    ) -> ForwardBatch:
        """The batch that feeds these tokens to these requests; decode rows (one token, something cached) must
        come first.
        """
        decoding = [len(tokens) == 1 and request.cached > 0 for request, tokens in work]
        assert decoding == sorted(decoding, reverse=True)
        num_decode = sum(decoding) + padding_rows
        positions: list[int] = []
        slots: list[int] = []
        context_lens: list[int] = []
        starts = [0]
        ids: list[int] = []
        tables: list[list[int]] = []
        padded = work[: sum(decoding)] + [None] * padding_rows + work[sum(decoding) :]
        for item in padded:
            if item is None:
                ids, positions, slots = [*ids, 0], [*positions, 0], [*slots, -1]
                context_lens.append(0)
                tables.append([])
                starts.append(len(ids))
                continue
            request, tokens = item
            while len(request.blocks) * self.block_tokens < request.cached + len(tokens):
                request.blocks.append(self.free.pop())
            for token in tokens:
                block, offset = divmod(request.cached, self.block_tokens)
                ids.append(token)
                positions.append(request.cached)
                slots.append(request.blocks[block] * self.block_tokens + offset)
                request.cached += 1
            context_lens.append(request.cached)
            tables.append(list(request.blocks))
            starts.append(len(ids))
        width = max(len(table) for table in tables)
        table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in tables], dtype=torch.int32)
        ends = torch.tensor([starts[i + 1] - 1 for i, item in enumerate(padded) if item is not None])
        self.settle(self.moves)
        self.moves = [self._move_state(None if item is None else item[0]) for item in padded]
        reads, writes, zero = torch.tensor(self.moves, dtype=torch.int32).unbind(1)
        state_rows = StateRows(reads, writes, zero.to(torch.uint8))
        return ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            num_decode=num_decode,
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=(table,) * self.paged,
            slot_mapping=(torch.tensor(slots),) * self.paged,
            max_query_len=max(b - a for a, b in pairwise(starts)),
            max_context_len=max(context_lens),
            sample_rows=torch.arange(len(ids)) if sample_all else ends,
            caches=tuple(self.layers[i] for i in range(len(self.layers))),
            states=(state_rows,) * self.states,
        )


def greedy(
    model: Model, cache: PagedCache, prompts: list[list[int]], new_tokens: int, chunk: int
) -> list[list[int]]:
    """Greedy continuations of all prompts, batched continuously, prompts in chunks."""
    requests = [PagedRequest() for _ in prompts]
    pending = [list(prompt) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    while any(len(output) < new_tokens for output in outputs):
        live = [i for i, output in enumerate(outputs) if len(output) < new_tokens]
        takes = {i: pending[i][:chunk] for i in live}
        order = sorted(live, key=lambda i: not (len(takes[i]) == 1 and requests[i].cached > 0))
        logits = model.forward(cache.batch([(requests[i], takes[i]) for i in order], sample_all=False))
        for i, token in zip(order, logits.argmax(-1).tolist(), strict=True):
            pending[i] = pending[i][len(takes[i]) :]
            if not pending[i]:
                outputs[i].append(token)
                pending[i] = [token]
    return outputs
