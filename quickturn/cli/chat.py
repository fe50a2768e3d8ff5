"""`quickturn chat`: talk to a model in the terminal, in front of an engine process of its own."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quickturn.cli import options
from quickturn.engine.process import DEFAULT_CORE
from quickturn.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quickturn.engine.client import EngineClient
    from quickturn.text.chat_template import ChatTemplate
    from quickturn.text.tokenizer import Tokenizer

EXAMPLE = 'Example: quickturn chat embedded --prompt "Name three rivers." --temperature 0'
_HELP = "Ctrl-C stops an answer, Ctrl-D or /exit leaves; /clear forgets the conversation."

_READS_WELL = {"temperature": 0.2, "top_p": 0.9}
"""For a model that says nothing: small ones, which often don't, ramble when they are sampled as they are."""


def chat(
    model: options.Model = "embedded",
    prompt: Annotated[str, typer.Option(help="Answer this and exit; '-' reads standard input.")] = "",
    system: Annotated[str, typer.Option(help="System message of the conversation.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: the model's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answer.", min=0, max=(1 << 63) - 1)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 1024,
    memory: options.Memory = "512MiB",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.Format = "auto",
    quantization: options.Quantize = "auto",
    kv_cache_dtype: options.KvCache = "auto",
    max_context: options.MaxContext = None,
    tp: options.Tp = 1,
    core: options.Core = DEFAULT_CORE,
) -> None:
    """Talk to a model in this terminal. Answers stream as they form."""
    config = options.engine_config(
        model,
        memory=memory,
        dtype=dtype,
        device=device,
        load_format=load_format,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_context=max_context,
        tp=tp,
        max_requests=8,
    )
    given = {"temperature": temperature, "top_p": top_p, "seed": seed}
    chosen = {name: value for name, value in given.items() if value is not None}
    messages = [{"role": "system", "content": whole_text(system)}] if system else []
    from quickturn.cli.progress import StartDisplay
    from quickturn.engine.stream import EngineDied
    from quickturn.server.startup import start_engine

    with asyncio.Runner() as runner:
        engine: EngineClient | None = None
        try:
            with StartDisplay() as display:
                started = runner.run(start_engine(config, display, core, "warning"))
            engine = started.engine
            if started.template is None:
                raise ValueError(f"{model} has no chat template, so it can't chat; try /v1/completions")
            sampling = sampling_of(started.tokenizer.sampling_defaults, chosen)
            talk = Talk(engine, started.tokenizer, started.template, sampling, max_tokens, messages)
            if prompt:
                text = sys.stdin.read() if prompt == "-" else prompt
                runner.run(talk.say(text))
            else:
                _converse(runner, talk)
        except (EngineDied, ValueError, OSError) as error:
            raise options.fail(error) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        finally:
            if engine is not None:
                runner.run(engine.close())


def sampling_of(model: Mapping[str, float], chosen: dict[str, Any]) -> dict[str, Any]:
    """What the user chose, else the model's own defaults, else (for a model without a temperature) careful
    ones.
    """
    careful = {} if "temperature" in model else _READS_WELL
    return {**careful, **model, **chosen}


def whole_text(text: str) -> str:
    """`text` from a command line or a terminal; bytes in it that are no UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Talk:
    """A conversation: what was said, and the engine that answers."""

    def __init__(
        self,
        engine: "EngineClient",
        tokenizer: "Tokenizer",
        template: "ChatTemplate",
        sampling: dict[str, Any],
        max_tokens: int,
        messages: list[dict[str, Any]],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._beginning = list(messages)
        self.messages = messages
        self.tokens = 0

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._beginning)

    async def say(self, text: str) -> None:
        """Print the answer to `text` as it comes. Of an interrupted answer, what was printed stays in the
        conversation; a text that could not be answered doesn't. Raises ValueError for such a one.
        """
        self.messages.append({"role": "user", "content": whole_text(text)})
        parts: list[str] = []
        try:
            async with aclosing(self._answer()) as answer:
                async for part in answer:
                    parts.append(part)
                    sys.stdout.write(part)
                    sys.stdout.flush()
        except ValueError:
            self.messages.pop()
            raise
        except asyncio.CancelledError:
            self._end(parts)
            raise
        self._end(parts)

    def _end(self, parts: list[str]) -> None:
        sys.stdout.write("\n")
        self.messages.append({"role": "assistant", "content": "".join(parts)})

    async def _answer(self) -> AsyncGenerator[str, None]:
        from quickturn.text.detokenizer import Detokenizer
        from quickturn.text.rendering import render_chat
        from quickturn.text.tokenizer import pack_tokens

        assert self._engine.ready is not None
        ids = render_chat(self._tokenizer, self._template, self.messages).ids
        left = self._engine.ready.max_context - len(ids)
        if left < 1:
            raise ValueError(f"the conversation fills the context of {self._engine.ready.max_context} tokens")
        sampling = SamplingParams(
            max_tokens=min(self._max_tokens, left), stop_token_ids=self._tokenizer.eos_ids, **self._sampling
        )
        detokenizer = Detokenizer(self._tokenizer, sampling)
        stream = self._engine.submit(pack_tokens(ids), sampling)
        self.tokens = 0
        try:
            async for output in stream:
                if output.finish == "error":
                    raise ValueError(output.error)
                delta = detokenizer.push(output.tokens, output.finish)
                self.tokens += delta.tokens
                yield delta.text
        finally:
            stream.cancel()


def _converse(runner: asyncio.Runner, talk: Talk) -> None:
    import readline  # noqa: F401  (line editing for input)

    typer.secho(_HELP, err=True, dim=True)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if text == "/clear":
            talk.clear()
        elif text in ("/help", "/?"):
            typer.echo(_HELP)
        elif text in ("/exit", "/quit"):
            return
        elif text:
            started = time.perf_counter()
            try:
                runner.run(talk.say(text))
            except KeyboardInterrupt:
                typer.secho("(stopped)", err=True, dim=True)
            except ValueError as error:
                typer.secho(f"Error: {error}; /clear begins a new conversation", err=True, fg="red")
            else:
                seconds = time.perf_counter() - started
                typer.secho(f"({talk.tokens} tokens, {talk.tokens / seconds:.0f}/s)", err=True, dim=True)
