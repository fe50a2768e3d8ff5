"""The `quickturn` command: its subcommands, each imported only when it's asked for."""

import importlib
import os
import sys
from typing import Annotated

import typer

from quickturn import __version__
from quickturn.openmp import set_short_spins

COMMANDS = {
    "serve": "Serve a model over HTTP, as the OpenAI API.",
    "chat": "Talk to a model in this terminal.",
    "bench": "Measure this machine.",
    "explain": "Print what the ranks do with each layer of a model, and what it takes.",
    "validate": "Check a model on this machine, from its kernels to its speed.",
}
"""Names and short descriptions. Module `quickturn.cli.NAME` holds either a function NAME or a Typer `app`."""


def app() -> None:
    """Entry of the console script."""
    set_short_spins(os.environ)
    build(next((word for word in sys.argv[1:] if not word.startswith("-")), None))()


def build(asked: str | None) -> typer.Typer:
    """The command line with `asked` in full, and no more than the names of the other commands.

    So `quickturn --help` doesn't wait for imports that only one of them needs.
    """
    cli = typer.Typer(
        name="quickturn",
        help="An inference engine for agents.",
        epilog="Example: quickturn serve embedded",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    cli.callback()(_options)
    for name, description in COMMANDS.items():
        if name != asked:
            cli.command(name, help=description)(_not_asked)
            continue
        module = importlib.import_module(f"quickturn.cli.{name}")
        if hasattr(module, "app"):
            cli.add_typer(module.app, name=name)
        else:
            cli.command(name, epilog=module.EXAMPLE)(getattr(module, name))
    return cli


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Hold what comes before a command's name."""


def _not_asked() -> None:
    raise AssertionError("only the command that was asked for can run")
