"""`quickturn bench agent`: agent sessions against a server, or against the engine in this process."""

import asyncio
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from quickturn.cli import options
from quickturn.cli.progress import counted

if TYPE_CHECKING:
    from quickturn.bench.agent.load import Load
    from quickturn.bench.agent.measure import Api as ApiName
    from quickturn.bench.agent.measure import Server
    from quickturn.bench.agent.run import Pace

EXAMPLE = (
    "Example: quickturn bench agent --url http://127.0.0.1:8000/v1 --concurrency 8 --scale 0.1"
    " --output run.json --page run.html"
)

Url = Annotated[str, typer.Option(help="Base of the OpenAI API, such as http://127.0.0.1:8000/v1.")]
Model = Annotated[str, typer.Option(help="Name that is asked for. Default: the first that the server names.")]
Key = Annotated[str, typer.Option("--api-key", help="Bearer token; it is in no result.")]
Api = Annotated[str, typer.Option(help="chat: messages. ids: prompts as token ids, to /completions.")]
Ids = Annotated[str, typer.Option(help="With --api ids: draw token ids from this range.")]
Trace = Annotated[
    str, typer.Option(help="Recorded sessions: a file, a folder of trace_*.json, or Mooncake's .jsonl.")
]
First = Annotated[int, typer.Option(help="Synthetic: tokens of the first turn.", min=1)]
Grow = Annotated[int, typer.Option(help="Synthetic: new tokens of each later turn.", min=1)]
Turns = Annotated[str, typer.Option(help="Synthetic: turns of a session, or a range.")]
Answer = Annotated[int, typer.Option(help="Synthetic: tokens of an answer.", min=1)]
Shared = Annotated[int, typer.Option(help="Synthetic: first tokens that all sessions share.", min=0)]
Think = Annotated[float, typer.Option(help="Synthetic: seconds between answer and next turn.", min=0)]
Scale = Annotated[float, typer.Option(help="Multiplies all prompt lengths.", min=0)]
AnswerScale = Annotated[float, typer.Option(help="Multiplies all answer lengths.", min=0)]
MaxTurns = Annotated[int | None, typer.Option(help="Cut sessions to so many turns.", min=1)]
Context = Annotated[int | None, typer.Option("--max-context", help="Cut sessions before more tokens.", min=1)]
ThinkScale = Annotated[float, typer.Option(help="Recorded: multiplies think times; 0: none.", min=0)]
Sessions = Annotated[
    int, typer.Option(help="Sessions in all; 0: those of the trace, or two for each user.", min=0)
]
Seed = Annotated[
    int | None, typer.Option(help="Fixes what is said. Default: new each time, so that no cache knows it.")
]
Gpus = Annotated[int, typer.Option(help="GPUs of the server, for rates per GPU.", min=1)]
Timeout = Annotated[float, typer.Option(help="Seconds that one answer may take.", min=0)]
Limit = Annotated[float, typer.Option(help="No turn begins after so many seconds; 0: no limit.", min=0)]


def agent(
    url: Url = "http://127.0.0.1:8000/v1",
    model: Model = "",
    api_key: Key = "",
    api: Api = "chat",
    ids: Ids = "1000-30000",
    trace: Trace = "",
    first: First = 50_000,
    grow: Grow = 800,
    turns: Turns = "10-15",
    answer: Answer = 500,
    shared: Shared = 0,
    think: Think = 0.0,
    scale: Scale = 1.0,
    answer_scale: AnswerScale = 1.0,
    max_turns: MaxTurns = None,
    max_context: Context = None,
    think_scale: ThinkScale = 0.0,
    concurrency: Annotated[int, typer.Option(help="Sessions that live at a time.", min=1)] = 1,
    sessions: Sessions = 0,
    seed: Seed = None,
    gpus: Gpus = 1,
    promise: Annotated[float, typer.Option(help="Tokens/s that each user should get.", min=0)] = 0.0,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    timeout: Timeout = 600.0,
    retries: Annotated[int, typer.Option(help="Tries after a 429 or 503.", min=0)] = 3,
    limit: Limit = 0.0,
    label: Annotated[str, typer.Option(help="Name of the engine on the page.")] = "",
    offline: Annotated[
        str, typer.Option(help="No server: this model's engine in this process, prompts as token ids.")
    ] = "",
    load_format: options.Format = "auto",
    memory: options.Memory = "",
    output: Annotated[Path | None, typer.Option(help="File for the result as JSON.")] = None,
    page: Annotated[Path | None, typer.Option(help="File for the result as a page.")] = None,
) -> None:
    """Hold agent sessions against any OpenAI-compatible server, and measure what their users see."""
    from quickturn.bench.agent.load import Load
    from quickturn.bench.agent.measure import Server
    from quickturn.bench.agent.run import Pace
    from quickturn.bench.agent.synthetic import Shape

    load = Load(
        sessions or (0 if trace else 2 * concurrency),
        secrets.randbits(32) if seed is None else seed,
        trace,
        Shape(first, grow, range_of(turns), answer, think, shared),
        scale,
        answer_scale,
        max_turns,
        max_context,
    )
    pace = Pace(concurrency, think_scale if trace else 1.0, retries, limit or float("inf"))
    if offline:
        config = options.engine_config(
            offline,
            load_format=load_format,
            memory=memory,
            min_tps_per_user=promise,
            max_requests=concurrency,
            max_step_tokens=8192,
        )
        from quickturn.bench.agent.engine import measure_engine

        with counted("turns") as progress:
            found = measure_engine(
                config, load, pace, label or "quickturn, offline", gpus, sys.argv, progress
            )
    else:
        server = Server(url, model, api_key, api_of(api), range_of(ids))
        found = measured(server, load, pace, label, gpus, promise, temperature, timeout)
    show(found)
    keep(found, output, page)


def measured(
    server: "Server",
    load: "Load",
    pace: "Pace",
    label: str,
    gpus: int,
    promise: float,
    temperature: float,
    timeout: float,
) -> dict[str, Any]:
    """One run against a server, as its result."""
    from quickturn.bench.agent import report
    from quickturn.bench.agent.load import describe
    from quickturn.bench.agent.measure import measure

    made = load.make()
    with counted("turns") as progress:
        work = measure(server, made, pace, timeout=timeout or 1e9, temperature=temperature, progress=progress)
        run = asyncio.run(work)
    return report.result(
        run.run,
        label=label or str(run.server["model"]),
        gpus=gpus,
        promise=promise,
        load=describe(pace, made, load.facts()),
        server=run.server,
        client=run.client,
        warm_up=run.warm_up,
        words=["quickturn", *sys.argv[1:]],
    )


def show(found: dict[str, Any]) -> None:
    """The result as a table in the terminal, a warning beside it where the client was too slow."""
    from quickturn.bench.agent import report

    table = Table(title=str(found["label"]), show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in report.lines(found):
        table.add_row(name, value)
    Console().print(table)
    if found["client"].get("warning"):
        typer.secho(f"Warning: {found['client']['warning']}", err=True, fg=typer.colors.YELLOW)


def keep(found: dict[str, Any], output: Path | None, page: Path | None) -> None:
    """Write the files that were asked for."""
    from quickturn.bench.agent import report
    from quickturn.bench.agent.page import write_page

    if output is not None:
        report.write(output, found)
        typer.echo(f"written to {output}")
    if page is not None:
        write_page(page, [found])
        typer.echo(f"page written to {page}")


def numbers(text: str) -> list[float]:
    """'1,4,16'."""
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} must be numbers with commas, such as 1,4,16") from error


def range_of(text: str) -> tuple[int, int]:
    """'10-15', or '10' for 10 to 10."""
    low, dash, high = text.partition("-")
    try:
        return int(low), int(high if dash else low)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} must be a number or a range, such as 10-15") from error


def api_of(text: str) -> "ApiName":
    """The API by its name."""
    from quickturn.bench.agent.measure import Api

    if text not in get_args(Api):
        raise typer.BadParameter(f"{text!r} is none of {', '.join(get_args(Api))}")
    return cast("ApiName", text)
