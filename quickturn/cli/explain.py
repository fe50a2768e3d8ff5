"""`quickturn explain`: what the parallel compiler makes of a model on some ranks. Starts none of them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quickturn.cli import options

EXAMPLE = "Example: quickturn explain Qwen/Qwen3-30B-A3B --tp 8 --ep 8 --batch 32 --svg layer.svg"


def explain(
    model: options.Model,
    tp: Annotated[int, typer.Option(help="Ranks that share out the heads of attention.", min=1)] = 1,
    dp: Annotated[int, typer.Option(help="Groups of ranks with requests of their own.", min=1)] = 1,
    cp: Annotated[int, typer.Option(help="Ranks that share out the tokens of a cache.", min=1)] = 1,
    dense_tp: Annotated[
        int | None, typer.Option(help="Ranks that share out dense layers. Default: all, or a group's.", min=1)
    ] = None,
    moe_tp: Annotated[
        int | None, typer.Option(help="Ranks that share out each expert. Default: what --ep leaves.", min=1)
    ] = None,
    ep: Annotated[
        int | None, typer.Option(help="Groups of ranks that hold experts of their own.", min=1)
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests that decode at once, in all.", min=1)] = 8,
    context: Annotated[int, typer.Option(help="Tokens that each has in the cache.", min=1)] = 8192,
    prompt: Annotated[
        int | None, typer.Option(help="A step of so many prompt tokens a group, instead of decoding.", min=1)
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw it into this file, too.")] = None,
) -> None:
    """Print the compiled layers of a model: each step, each collective, bytes and predicted time.

    Reads the model's configuration only; no ranks are started.
    """
    from quickturn.files.errors import LoadError
    from quickturn.models.plan import Bytes, explain_model
    from quickturn.models.registry import architecture_of
    from quickturn.parallel.cost import decode_load, prefill_load
    from quickturn.parallel.explain_svg import svg as drawing
    from quickturn.parallel.explain_text import text
    from quickturn.parallel.mesh import make_mesh

    try:
        mesh = make_mesh(tp=tp, dp=dp, cp=cp, dense_tp=dense_tp, moe_tp=moe_tp, ep=ep)
        name, config = _config(model)
        architecture = architecture_of(config)
        load = prefill_load(prompt) if prompt else decode_load(-(-batch // dp), context)
        explained = explain_model(architecture, mesh, load, Bytes(matrices=_matrix_bytes(config)))
    except (LoadError, ValueError) as error:
        raise options.fail(error) from error
    about = (
        f"{name}: {architecture.family}, {len(architecture.layers)} layers of {architecture.hidden_size}"
        f" features, {architecture.vocab_size} tokens in the vocabulary"
    )
    typer.echo(text(about, explained))
    if svg is not None:
        svg.write_text(drawing(about, explained))
        typer.echo(f"drawn   {svg}")


def _config(model: str) -> tuple[str, dict[str, Any]]:
    """Name and Hugging Face config of a model; a path to its config.json does, too."""
    from quickturn.files.resolve import display_name, resolve
    from quickturn.loading.checkpoint import read_config

    given = Path(model).expanduser()
    if given.name == "config.json":
        model = str(given.parent)
    path = resolve(model, "dummy").path
    if path.is_file():
        from quickturn.loading.gguf import GgufSource

        return display_name(model), GgufSource(path).config
    return display_name(model), read_config(path)


def _matrix_bytes(config: dict[str, Any]) -> float:
    """Bytes of a weight as it is multiplied."""
    from quickturn.models.config import stored_in_fp8, text_config

    return 1.0 if stored_in_fp8(text_config(config)) else 2.0
