"""Shows how far an engine's start has come: a bar in a terminal, plain lines in a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from quickturn.engine.messages import LoadProgress


class StartDisplay:
    """Call it with every report; it vanishes from a terminal when the `with` block ends."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = console.is_terminal
        self._stage = ""
        self._task: TaskID | None = None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> "StartDisplay":
        if self._live:
            self._progress.start()
            self._task = self._progress.add_task("starting the engine", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def __call__(self, report: LoadProgress) -> None:
        """Show one report."""
        if self._task is not None:
            self._progress.update(
                self._task, description=report.stage, completed=report.done, total=report.total or None
            )
        elif report.stage != self._stage:
            print(f"{report.stage} ...", file=sys.stderr, flush=True)
        self._stage = report.stage

    def end(self) -> None:
        """Take the display away; without effect the second time."""
        self._progress.stop()


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that `show(done, total)` moves, in a terminal only; it vanishes when the `with` block ends."""
    console = Console(stderr=True)
    columns = TextColumn(what), BarColumn(), TextColumn("{task.completed:.0f}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
