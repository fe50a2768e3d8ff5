"""A world for the benchmark without time or network: a loop whose clock jumps, and a scripted server."""

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quickturn.bench.agent.asking import Asking
from quickturn.bench.agent.run import Floor, Pace
from quickturn.bench.agent.sessions import Piece, Session, Turn
from quickturn.bench.agent.wire import ConnectionFault, Head

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Waits by moving the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen: the run hangs")
        self.now += max(0.0, timeout)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, in no time."""
    loop = JumpingLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Script:
    """What a request gets: (seconds to wait, bytes of the body) in order, then the end or a fault."""

    reads: list[tuple[float, bytes]] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    fault: ConnectionFault | None = None


@dataclass
class ScriptedServer:
    """`answer(body, number of the request)` says what happens."""

    answer: Callable[[dict[str, Any], int], Script]
    connects: float = 0.0
    """Seconds that connecting takes."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    live: int = 0
    most: int = 0

    def wire(self) -> "ScriptedWire":
        return ScriptedWire(self)


class ScriptedWire:
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._script = Script()

    async def open(self) -> None:
        if self._server.connects:
            await asyncio.sleep(self._server.connects)

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[float, Head]:
        fields = json.loads(body)
        self._script = self._server.answer(fields, len(self._server.bodies))
        self._server.bodies.append(fields | {"path": path})
        return now(), Head(self._script.status, self._script.headers)

    async def reads(self) -> AsyncIterator[tuple[float, bytes]]:
        self._server.live += 1
        self._server.most = max(self._server.most, self._server.live)
        try:
            for wait, data in self._script.reads:
                await asyncio.sleep(wait)
                yield now(), data
            if self._script.fault is not None:
                raise self._script.fault
        finally:
            self._server.live -= 1

    def close(self) -> None:
        return None


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text_event(text: str, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields)


def usage_event(prompt: int, answer: int, cached: int | None) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": answer}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return event(choices=[], usage=usage)


DONE = b"data: [DONE]\n\n"


def plain(
    first: float, gap: float, tokens: int, prompt: int, cached: int | None = 0, word: str = "w "
) -> Script:
    """`tokens` tokens, an event and a read each, the first after `first` seconds, then `gap` between them."""
    reads = [(first if index == 0 else gap, text_event(word)) for index in range(tokens)]
    return Script([*reads, (0.0, usage_event(prompt, tokens, cached)), (0.0, DONE)])


def floor_of(server: ScriptedServer, pace: Pace, **options: Any) -> Floor:
    return Floor(server.wire, Asking("model", **options), pace, now)


def session(name: str, turns: int, first: int = 100, grow: int = 10, answer: int = 5) -> Session:
    made = [Turn(-1, 0, (Piece(f"{name}/0", first),), answer)]
    for index in range(1, turns):
        made.append(
            Turn(index - 1, made[-1].prompt + answer, (Piece(f"{name}/{index}", grow),), answer, think=4.0)
        )
    return Session(name, tuple(made))


def tiny_config(vocab_size: int) -> dict[str, Any]:
    """A model that computes in no time."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
    }
