"""`quickturn bench sweep` and `page`: agent runs over a grid of settings, and pages of results."""

import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from quickturn.cli import bench_agent as of

SWEEP_EXAMPLE = (
    "Example: quickturn bench sweep Qwen/Qwen3-0.6B --concurrency 1,4,16 --promise 0,70 --output runs/qwen"
)
PAGE_EXAMPLE = "Example: quickturn bench page runs/ours/*.json runs/theirs/*.json --output page.html"


def sweep(
    model: Annotated[
        str, typer.Argument(help="Model to serve with each promise; with --url, its name.")
    ] = "",
    output: Annotated[Path, typer.Option(help="Folder for a result a cell, and the page.")] = Path("sweep"),
    url: Annotated[str, typer.Option(help="Measure this server in place of starting our own.")] = "",
    serve: Annotated[
        str, typer.Option(help="More words for `quickturn serve`, such as '--memory 8GiB'.")
    ] = "",
    concurrency: Annotated[str, typer.Option(help="Users at a time, with commas.")] = "1,2,4,8,16",
    promise: Annotated[
        str, typer.Option(help="--min-tps-per-user of the server, with commas; 0: none.")
    ] = "0",
    api_key: of.Key = "",
    api: of.Api = "chat",
    ids: of.Ids = "1000-30000",
    trace: of.Trace = "",
    first: of.First = 50_000,
    grow: of.Grow = 800,
    turns: of.Turns = "10-15",
    answer: of.Answer = 500,
    shared: of.Shared = 0,
    think: of.Think = 0.0,
    scale: of.Scale = 1.0,
    answer_scale: of.AnswerScale = 1.0,
    max_turns: of.MaxTurns = None,
    max_context: of.Context = None,
    think_scale: of.ThinkScale = 0.0,
    sessions_per_user: Annotated[int, typer.Option(help="Sessions that each user holds.", min=1)] = 2,
    seed: of.Seed = None,
    gpus: of.Gpus = 1,
    timeout: of.Timeout = 600.0,
    limit: of.Limit = 0.0,
    label: Annotated[str, typer.Option(help="Name of the engine on the page.")] = "quickturn",
) -> None:
    """Agent sessions over numbers of users and promises; run it again to go on where it was stopped."""
    import secrets
    from dataclasses import replace

    from quickturn.bench.agent import sweep as grid
    from quickturn.bench.agent.load import Load
    from quickturn.bench.agent.measure import Server
    from quickturn.bench.agent.page import write_page
    from quickturn.bench.agent.run import Pace
    from quickturn.bench.agent.synthetic import Shape

    promises = [float(number) for number in of.numbers(promise)]
    if url and promises != [0.0]:
        raise typer.BadParameter("--promise is for servers that this command starts; leave --url out")
    if not url and not model:
        raise typer.BadParameter("name a model to serve, or a server with --url")
    shape = Shape(first, grow, of.range_of(turns), answer, think, shared)
    load = Load(1, 0, trace, shape, scale, answer_scale, max_turns, max_context)
    cells = grid.grid([int(number) for number in of.numbers(concurrency)], promises)
    settings = {
        "label": label,
        "model": model,
        "url": url,
        "serve": serve,
        "api": api,
        "sessions_per_user": sessions_per_user,
        "think_scale": think_scale,
        "limit": limit,
        "gpus": gpus,
        "load": {key: value for key, value in load.facts().items() if key not in ("sessions", "seed")},
    }

    def session_count(users: int) -> int:
        return users * sessions_per_user

    with ExitStack() as stack:
        started: dict[float, str] = {}

        def server_of(cell: grid.Cell) -> str:
            if url:
                return url
            if cell.promise not in started:
                stack.close()
                started.clear()
                words = [*shlex.split(serve), "--min-tps-per-user", str(cell.promise)]
                log = output / f"server_promise{cell.promise:g}.log"
                started[cell.promise] = stack.enter_context(grid.serving(model, words, log))
            return started[cell.promise]

        def measure(cell: grid.Cell) -> dict[str, Any]:
            server = Server(server_of(cell), model if url else "", api_key, of.api_of(api), of.range_of(ids))
            chosen = secrets.randbits(32) if seed is None else seed + cells.index(cell)
            held = replace(load, sessions=session_count(cell.concurrency), seed=chosen)
            pace = Pace(cell.concurrency, think_scale if trace else 1.0, limit=limit or float("inf"))
            name = f"{label}, promise {cell.promise:g}" if cell.promise else label
            found = of.measured(server, held, pace, name, gpus, cell.promise, 0.0, timeout)
            of.show(found)
            return found

        found = grid.sweep(output, cells, settings, measure, typer.echo)
    write_page(output / "page.html", found)
    typer.echo(f"page written to {output / 'page.html'}")


def page(
    runs: Annotated[list[Path], typer.Argument(help="Results of `quickturn bench agent` or `sweep`.")],
    output: Annotated[Path, typer.Option(help="File for the page.")] = Path("page.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Agent sessions",
) -> None:
    """One self-contained page over several runs and engines."""
    from quickturn.bench.agent import report
    from quickturn.bench.agent.page import write_page

    write_page(output, [report.read(path) for path in runs], title)
    typer.echo(f"page written to {output}")
