"""What a very long prompt does to a stream beside it: the largest gap and delay of the stream's tokens.

    python benchmarks/tokenise_stall.py --output benchmarks/results/tokenise_stall.json

A real server around an engine that computes nothing (`instant_core.py`). One stream gets tokens at a steady
pace; meanwhile chats of about 200k tokens arrive, of several shapes, each new to the server. The delay of a
token is from the engine's send to the client's read; what the machine itself adds is in the row `alone`.
`parts` is the CPU time of each step of preparing such a prompt in the thread that does it, and its longest
single call that keeps the interpreter's lock: between calls the lock changes hands within half a millisecond.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from instant_core import MOST_STREAMS, MOST_TOKENS
from server_overhead import HERE, Load, free_port, stream, wait_until_ready

from quickturn.text.answer_format import markup_of
from quickturn.text.chat_template import ChatTemplate
from quickturn.text.conversation import normalise_messages
from quickturn.text.parsing.parser import begins_thinking
from quickturn.text.rendering import WrittenAnswers, render_chat
from quickturn.text.tokenizer import load_tokenizer, pack_tokens

PACE, TOKENS, CONTEXT = 200.0, 800, 260_000
RELEASING = ("Tokenizer.encode_batch_fast", "str.join")
"""Calls during which other threads run: the second one runs the template, as jinja2 calls it."""
Chat = list[dict[str, Any]]


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "cpu": platform.processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": os.getloadavg(),
        },
        "pace": PACE,
        "streams": streams(options.repeats),
        "parts": {shape: parts_of(chat) for shape, chat in chats(0).items()},
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


def chats(number: int) -> dict[str, Chat]:
    """Conversations of about 200k tokens, by their shape; another text for each number."""
    source = Path(__file__).read_text()
    lines = [f"{number} {line}" for line in (source * (700_000 // len(source))).splitlines(keepends=True)]
    many = [
        {"role": "assistant" if index % 2 else "user", "content": "".join(lines[index::200])}
        for index in range(200)
    ]
    quoting = [{**message, "content": message["content"] + "<|im_end|>"} for message in many]
    return {
        "many messages": [*many, {"role": "user", "content": "go on"}],
        "one message": [{"role": "user", "content": "".join(lines)}],
        "quoted control tokens": [*quoting, {"role": "user", "content": "go on"}],
    }


def streams(repeats: int) -> dict[str, dict[str, float]]:
    """Per shape the median, over the repeats, of the stream's largest gap and delay in milliseconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        left = np.memmap(times, np.float64, "w+", shape=(MOST_STREAMS, MOST_TOKENS))
        with serving(times) as port:
            for number in range(repeats):
                bodies = {"alone": None, **chats(number)}
                bodies["four at once"] = bodies["many messages"]
                for shape, chat in bodies.items():
                    copies = 4 if shape == "four at once" else 1
                    arrived = asyncio.run(beside(port, chat, copies, f"{number} {shape}"))
                    gap = np.diff(arrived).max() * 1e3
                    delay = (np.array(arrived) - left[0, : len(arrived)]).max() * 1e3
                    found.setdefault(shape, []).append((float(gap), float(delay)))
    results = {}
    for shape, values in found.items():
        gaps, delays = zip(*values, strict=True)
        results[shape] = {
            "largest_gap_ms": round(float(np.median(gaps)), 2),
            "largest_delay_ms": round(float(np.median(delays)), 2),
            "largest_delay_of_all_ms": round(max(delays), 2),
        }
        print(shape, json.dumps(results[shape]), flush=True)
    return results


@contextlib.contextmanager
def serving(times: Path) -> Iterator[int]:
    """The port of a server whose engine writes to `times` when tokens leave it."""
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "INSTANT_CORE_TIMES": str(times),
        "INSTANT_CORE_PACE": str(PACE),
    }
    command = [sys.executable, "-m", "quickturn", "serve", "embedded", "--port", str(port)]
    command += ["--core", "instant_core:InstantCore", "--log-level", "warning"]
    command += ["--max-context", str(CONTEXT)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(port, process)
        yield port
    finally:
        process.terminate()
        process.wait()


async def beside(port: int, chat: Chat | None, copies: int, salt: str) -> list[float]:
    """When each token of a stream arrived, beside which the chat was sent so many times."""
    tokens = asyncio.create_task(stream(port, Load(1, TOKENS, PACE), 0, ""))
    await asyncio.sleep(0.5)
    if chat is not None:
        await asyncio.gather(*(send(port, chat, f"{salt} {copy}", copy + 1) for copy in range(copies)))
    return await tokens


async def send(port: int, chat: Chat, salt: str, index: int) -> None:
    """One chat that isn't streamed, of one token."""
    fields = {"messages": chat, "max_tokens": 1, "cache_salt": salt, "prompt_cache_key": str(index)}
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {(await reader.read(2000)).decode()}")
    writer.close()


def parts_of(chat: Chat) -> dict[str, dict[str, Any]]:
    """Each step of preparing a chat by itself."""
    tokenizer = load_tokenizer("embedded")
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special)
    markup = markup_of(tokenizer, reasoning_parser="qwen3")
    body = json.dumps({"messages": chat}).encode()
    normal = normalise_messages(chat, template.source)
    marked = tokenizer.mark_data(normal)
    text = template.render(marked)
    ids = tokenizer.encoder.encode([text]).ids
    steps: dict[str, Callable[[], object]] = {
        "JSON of the body": lambda: msgspec.json.decode(body),
        "normalising messages": lambda: normalise_messages(chat, template.source),
        "marking control tokens in data": lambda: tokenizer.mark_data(normal),
        "rendering the template": lambda: template.render(marked),
        "putting answers back": lambda: WrittenAnswers(template, markup).put_back(text, normal, ""),
        "tokenising, nothing known": lambda: tokenizer.encoder.encode([text], scope=str(time.monotonic())),
        "tokenising, all known": lambda: tokenizer.encoder.encode([text]),
        "is thinking open?": lambda: begins_thinking(
            ids, tokenizer, markup.format.reasoning, markup.alphabet
        ),
        "packing ids": lambda: pack_tokens(ids),
        "everything, the second time": lambda: render_chat(tokenizer, template, chat, partings=True),
    }
    steps["everything, the second time"]()
    print(len(ids), "tokens")
    results: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        runs = [timed(step) for _ in range(5)]
        seconds = min(taken for taken, _, _ in runs)
        _, held, call = min(runs, key=lambda run: run[1])
        results[name] = {
            "cpu_ms": round(seconds * 1e3, 2),
            "longest_call_ms": round(held * 1e3, 2),
            "longest_call": call,
        }
        print(name, json.dumps(results[name]), flush=True)
    return results


def timed(step: Callable[[], object]) -> tuple[float, float, str]:
    """CPU seconds of a step in this thread, and of the longest call in it that doesn't give the interpreter's
    lock to a thread that asks for it, with that call's name.
    """
    started = time.thread_time()
    step()
    taken = time.thread_time() - started
    began: list[float] = []
    longest = (0.0, "")

    def profile(frame: object, event: str, called: object) -> None:
        nonlocal longest
        name = getattr(called, "__qualname__", "")
        if event == "c_call":
            began.append(time.thread_time())
        elif event in ("c_return", "c_exception") and began:
            seconds = time.thread_time() - began.pop()
            if name not in RELEASING:
                longest = max(longest, (seconds, name))

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return taken, *longest


if __name__ == "__main__":
    main()
