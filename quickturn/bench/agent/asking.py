"""Sends one turn to a server and records what came: the part of the benchmark that holds the stopwatch."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quickturn.bench.agent.records import Record
from quickturn.bench.agent.stream import StreamFault, StreamReader
from quickturn.bench.agent.talk import Answer, Talk, encoded
from quickturn.bench.agent.wire import Clock, ConnectionFault, Head, Wire


@dataclass(frozen=True)
class Asking:
    """How every request of a run is sent. `exact`: ask for answers of exactly the wanted length, in fields
    that not every server knows; `began`: the time that records count from.
    """

    model: str
    exact: bool = True
    temperature: float = 0.0
    timeout: float = 600.0
    began: float = 0.0
    extra: tuple[tuple[str, Any], ...] = ()

    def fields(self, session: str, answer: int) -> dict[str, Any]:
        """The body without its prompt."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": answer,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.exact:
            fields |= {"ignore_eos": True, "min_tokens": answer, "prompt_cache_key": session}
            fields |= {"return_token_ids": True}
        return fields | dict(self.extra)


async def ask(
    wire: Wire, asking: Asking, talk: Talk, session: str, index: int, answer: int, now: Clock
) -> tuple[Record, Answer | None]:
    """One turn, to its end; the answer is None where the record has an error.

    A refusal (a status) is read to its end, and the wire can be used again; after any other error it can't.
    """
    record = Record(session, index, now(), answer)
    body = encoded(asking.fields(session, answer) | talk.body(index))
    reader = StreamReader()
    came: Answer | None = None
    try:
        async with asyncio.timeout(asking.timeout):
            await wire.open()
            record.sent, head = await wire.request("POST", talk.path, body)
            refused = b""
            async for at, data in wire.reads():
                record.done = at
                if head.status == 200:
                    reader.feed(at, data)
                else:
                    refused += data
            if head.status != 200:
                raise StreamFault(f"http {head.status}", _said(refused), _retry_after(head))
        came = reader.settle(record)
    except TimeoutError:
        record.error, record.detail = "timeout", f"no whole answer within {asking.timeout:g} s"
    except (StreamFault, ConnectionFault) as fault:
        record.error, record.detail = fault.kind, fault.detail
        record.retry_after = getattr(fault, "retry_after", None)
    if came is None:
        with suppress(StreamFault):
            reader.settle(record)
    record.sent -= asking.began
    record.arrivals = [at - asking.began for at in record.arrivals]
    record.done = max(record.done - asking.began, record.sent)
    return record, came


def _retry_after(head: Head) -> float | None:
    """Seconds that a refusal asks to wait."""
    try:
        return max(0.0, float(head.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def _said(body: bytes) -> str:
    """The message of an error object, or the body's beginning."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
    except (ValueError, AttributeError):
        return body[:200].decode(errors="replace")
