"""`quickturn bench`: measurements, as JSON and as lines to read."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quickturn.config import EngineConfig, parse_size

app = typer.Typer(
    no_args_is_help=True, help="Measure this machine. Example: quickturn bench offline embedded"
)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} must be whole numbers with commas, such as 512,2048") from error


@app.command(
    epilog="Example: quickturn bench offline embedded --dtype bfloat16 --peer transformers --output out.json"
)
def offline(
    model: Annotated[str, typer.Argument(help="hub id, directory, .gguf file, or 'embedded'")] = "embedded",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    memory: Annotated[str, typer.Option(help="bound of the cache")] = "1GiB",
    prefill: Annotated[str, typer.Option(help="prompt lengths")] = "512,2048",
    decode: Annotated[str, typer.Option(help="batch sizes")] = "1,8",
    steps: Annotated[int, typer.Option(help="decode steps of one repetition")] = 64,
    repeats: Annotated[int, typer.Option(help="repetitions; the median is reported")] = 5,
    starts: Annotated[int, typer.Option(help="engine starts to time; 0: none")] = 3,
    peer: Annotated[str, typer.Option(help="'transformers': the same figures from it in this run")] = "",
    output: Annotated[Path | None, typer.Option(help="file for the result as JSON")] = None,
) -> None:
    """Prefill, decode, overhead and start of one engine, offline."""
    from quickturn.bench import offline as bench
    from quickturn.bench.start import measure_start

    if peer not in ("", "transformers"):
        raise typer.BadParameter(f"no peer {peer!r}; there is 'transformers'")
    config = EngineConfig(
        model=model,
        dtype=dtype,  # type: ignore[arg-type]
        device=device,
        memory=parse_size(memory),
    )
    lengths, batches = _numbers(prefill), _numbers(decode)
    result: dict[str, object] = {}
    if starts:
        figure = measure_start(config, starts)
        typer.echo(
            f"start: ready {figure.ready_seconds.median:.2f} s,"
            f" first token {figure.first_token_seconds.median:.2f} s"
        )
        result["start"] = asdict(figure)
    result |= bench.run(config, prefill=lengths, decode=batches, steps=steps, repeats=repeats, log=typer.echo)
    if peer:
        result["peer"] = _transformers(config, lengths, batches, steps, repeats)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
        typer.echo(f"written to {output}")


def _transformers(
    config: EngineConfig, lengths: list[int], batches: list[int], steps: int, repeats: int
) -> dict[str, object]:
    from quickturn.bench.transformers_peer import TransformersPeer, run
    from quickturn.engine.start import pick_device
    from quickturn.loading.dtype import resolve_dtype
    from quickturn.loading.resolve import resolve

    device = pick_device(config.device)
    path = resolve(config.model, config.load_format).path
    peer = TransformersPeer(path, resolve_dtype(config.dtype, device), device)
    return run(peer, prefill=lengths, decode=batches, steps=steps, repeats=repeats, log=typer.echo)
