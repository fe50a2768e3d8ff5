"""What must be reused of a model with states, and what must never change an answer: the cases that clients
report, through HTTP and the real engine over a tiny hybrid.

Every prompt is token ids. `cache_salt` keeps requests apart: one with a salt of its own is computed from
nothing, and is what a reused one must equal.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import Served, stop_server
from tiny_hybrid import serve, write_tiny_hybrid

pytest.importorskip("quickturn_control")
pytest.importorskip("quickturn_kernels")

UNIT = 64
TIE = 1e-2
"""Letters nearer than this are level: a recurrence cut in other pieces moves logits by up to 1e-3."""
_salts = itertools.count()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def served(hybrid: Path) -> Iterator[Served]:
    server = serve(hybrid)
    yield server
    stop_server(server)


@pytest.fixture
async def client(served: Served) -> AsyncIterator["Client"]:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="any", max_retries=0, timeout=300) as api:
        yield Client(api)


LETTERS = {str(byte): 100 for byte in range(ord("a"), ord("z") + 1)}
"""Answers are made of letters only, so that their text says which token ids they are."""


class Client:
    """Completions of token ids: greedy, as long as asked for."""

    def __init__(self, api: openai.AsyncOpenAI) -> None:
        self.api = api

    async def ask(self, prompt: list[int], count: int = 8, *, salt: str = "", session: str = "") -> "Reply":
        extra = {"ignore_eos": True, "cache_salt": salt}
        if session:
            extra["prompt_cache_key"] = session
        answer = await self.api.completions.create(
            model="hybrid",
            prompt=prompt,
            max_tokens=count,
            temperature=0,
            logit_bias=LETTERS,
            extra_body=extra,
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == count
        return Reply(answer)

    async def cold(self, prompt: list[int], count: int = 8) -> "Reply":
        """The same from nothing."""
        reply = await self.ask(prompt, count, salt=f"cold {next(_salts)}")
        assert reply.cached == 0
        return reply

    async def assert_same(self, prompt: list[int], one: "Reply", other: "Reply", what: str = "") -> None:
        """Both say the same, or part where two letters are level."""
        for place, pair in enumerate(zip(one.tokens, other.tokens, strict=True)):
            if pair[0] != pair[1]:
                ways = [[*prompt, *one.tokens[:place], token] for token in pair]
                first, second = [await self.logprob_of_last(way) for way in ways]
                assert abs(first - second) <= TIE, f"{what} {pair} at {place}: {first}, {second}"
                return

    async def logprob_of_last(self, tokens: list[int]) -> float:
        answer = await self.api.completions.create(
            model="hybrid", prompt=tokens, max_tokens=1, extra_body={"prompt_logprobs": 0}
        )
        (said,) = answer.choices[0].model_extra["prompt_logprobs"][-1].values()  # type: ignore[index]
        return float(said["logprob"])


class Reply:
    """Token ids and cached tokens of an answer."""

    def __init__(self, answer: Any) -> None:
        self.tokens = list(answer.choices[0].text.encode())
        self.cached = answer.usage.prompt_tokens_details.cached_tokens


@pytest.fixture
def tokens() -> Callable[[int], list[int]]:
    """Random prompts."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    return lambda count: [rng.randrange(3, 250) for _ in range(count)]


Tokens = Callable[[int], list[int]]


@pytest.mark.parametrize("suffix", [40, 376, 1296])
async def test_r1_a_long_suffix_hides_no_shared_prefix(client: Client, tokens: Tokens, suffix: int) -> None:
    """Two prompts part after 6,476 tokens; whoever shares that prefix third finds a state where they did."""
    shared = tokens(6476)
    cached = []
    for first in (3, 4, 5):
        prompt = [*shared, first, *tokens(suffix - 1)]
        reply = await client.ask(prompt)
        cached.append(reply.cached)
    await client.assert_same(prompt, reply, await client.cold(prompt))
    assert cached[0] == 0
    assert cached[2] >= len(shared) // UNIT * UNIT


async def test_r3_a_short_shared_prefix_is_a_hit(client: Client, tokens: Tokens) -> None:
    shared = tokens(480)
    await client.ask([*shared, 3])
    reply = await client.ask([*shared, 4])
    assert reply.cached >= 448
    await client.assert_same([*shared, 4], reply, await client.cold([*shared, 4]))


async def test_r4_chained_turns_stay_exact(client: Client, tokens: Tokens) -> None:
    """Three turns, each the one before and more, then a question about the first: as with the cache off."""
    context: list[int] = []
    for turn in range(4):
        context += tokens(70)
        reply = await client.ask(context, 24, session="r4")
        await client.assert_same(context, reply, await client.cold(context, 24), f"turn {turn}")
        context += reply.tokens


async def test_r5_what_was_generated_is_reusable(client: Client, tokens: Tokens) -> None:
    context = tokens(100)
    answer = await client.ask(context, 50, session="r5")
    reply = await client.ask([*context, *answer.tokens, *tokens(50)], session="r5")
    assert reply.cached == 150 // UNIT * UNIT


async def test_r7_prompts_that_land_among_decoding_rows_change_nothing(
    client: Client, tokens: Tokens
) -> None:
    """Eight long answers run while a burst of prompts of all lengths comes."""
    slow = [tokens(20 + 7 * index) for index in range(6)]
    burst = [tokens(length) for length in (1, 30, 64, 65, 200, 450)]
    alone = [await client.cold(prompt, 40) for prompt in slow] + [
        await client.cold(prompt) for prompt in burst
    ]

    async def late(prompt: list[int]) -> Reply:
        await client.ask(slow[0], 2, salt="r7 pace")
        return await client.ask(prompt, salt="r7")

    together = await asyncio.gather(
        *(client.ask(prompt, 40, salt="r7") for prompt in slow), *(late(prompt) for prompt in burst)
    )
    for prompt, one, other in zip([*slow, *burst], together, alone, strict=True):
        await client.assert_same(prompt, one, other)


async def test_r8_who_gave_way_comes_back_exact(hybrid: Path, tokens: Tokens) -> None:
    """A pool for a few of the requests: some are retracted in mid-answer, and the metrics say so."""
    server = serve(hybrid, memory=1 << 20)
    try:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=300) as api:
            client = Client(api)
            prompts = [tokens(60) for _ in range(24)]
            together = await asyncio.gather(*(client.ask(prompt, 200) for prompt in prompts))
            assert server.stats()["quickturn_engine_retractions"] > 0
            for prompt, reply in zip(prompts[::4], together[::4], strict=True):
                await client.assert_same(prompt, reply, await client.cold(prompt, 200))
    finally:
        stop_server(server)


async def test_r9_what_fits_progresses_and_what_never_can_is_refused(hybrid: Path, tokens: Tokens) -> None:
    server = serve(hybrid, memory=1 << 20)
    try:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=300) as api:
            client = Client(api)
            models = await api.models.list()
            longest = models.data[0].max_model_len  # type: ignore[attr-defined]
            reply, other = await asyncio.gather(
                client.ask(tokens(longest - 20), 8), client.ask(tokens(30), 8)
            )
            assert len(reply.tokens) == len(other.tokens) == 8
            with pytest.raises(openai.BadRequestError, match=str(longest)):
                await client.ask(tokens(longest + 1), 1)
    finally:
        stop_server(server)
