"""`quickturn validate`: one model on this machine, checked from its kernels to its speed."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quickturn.cli import options

if TYPE_CHECKING:
    from quickturn.validate.report import Report
    from quickturn.validate.run import Settings

EXAMPLE = "Example: quickturn validate embedded --output before.tar.zst"


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(options.numbers(text))
    if any(number < 1 for number in found):
        raise typer.BadParameter(f"{text!r} must be numbers from 1 on")
    return found


@options.explained()
def validate(
    model: Annotated[str, typer.Argument(help="As for `serve`; with --rerun, left out.")] = "embedded",
    load_format: options.Format = "auto",
    quantization: options.Quantize = "auto",
    kv_cache_dtype: options.KvCache = "auto",
    state_dtype: options.State = "float32",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    memory: options.Memory = "",
    block_tokens: options.BlockTokens = 64,
    kernels: Annotated[str, typer.Option(help="implementations to take, as op=name,op=name")] = "",
    expect: Annotated[
        list[str] | None, typer.Option(help="fail unless op=name (or step=kind) was taken; may be repeated")
    ] = None,
    sections: Annotated[
        str, typer.Option(help="what to check, with commas")
    ] = "numerics,parity,features,performance",
    lengths: Annotated[str, typer.Option(help="prompt lengths for parity and features")] = "33,700,4096",
    answer: Annotated[int, typer.Option(help="greedy tokens behind each prompt", min=2)] = 96,
    sweep: Annotated[int, typer.Option(help="longest context that kernels are swept to", min=1)] = 1024,
    rows: Annotated[
        str, typer.Option(help="tokens of a step that kernels are tried with")
    ] = "1,2,5,8,33,130",
    repeats: Annotated[int, typer.Option(help="runs of each kernel on one input", min=1)] = 5,
    every: Annotated[
        bool, typer.Option(help="all implementations that run here, not only those taken")
    ] = False,
    batches: Annotated[str, typer.Option(help="batch sizes of the performance matrix")] = "1,8",
    contexts: Annotated[str, typer.Option(help="its contexts")] = "1024,4096",
    seed: Annotated[int, typer.Option(help="of every random number")] = 0,
    output: Annotated[Path | None, typer.Option(help="the bundle, NAME.tar.zst")] = None,
    rerun: Annotated[Path | None, typer.Option(help="run what this bundle ran, and compare with it")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="only compare two bundles, the older one first")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="share by which speeds may differ", min=0)] = 0.05,
) -> None:
    """Check a model on this machine: kernels in its shapes, parity with the reference tier over long contexts
    and answers, features, speed. Exits with 1 if anything failed or got worse.
    """
    from quickturn.validate import bundle
    from quickturn.validate.run import SECTIONS, Settings

    if compare is not None:
        if _compare(bundle.read(compare[0]), bundle.read(compare[1]), tolerance):
            raise typer.Exit(1)
        return
    if output is not None:
        bundle.check_writable(output)
    names = tuple(name for name in sections.split(",") if name)
    if unknown := set(names) - set(SECTIONS):
        raise typer.BadParameter(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    before = bundle.read(rerun) if rerun is not None else None
    if before is not None:
        settings = _settings_of(before)
    else:
        settings = Settings(
            options.engine_config(
                model,
                load_format=load_format,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                state_dtype=state_dtype,
                dtype=dtype,
                device=device,
                memory=memory,
                block_tokens=block_tokens,
                max_requests=max(_numbers(batches), default=8),
            ),
            names,
            kernels,
            tuple(expect or ()),
            _numbers(lengths),
            answer,
            sweep,
            _numbers(rows),
            repeats,
            every,
            _numbers(batches),
            _numbers(contexts),
            seed=seed,
        )
    report, log = _run(settings)
    worse = _summary(report)
    if output is not None:
        bundle.write(output, report, log)
        typer.echo(f"written to {output}")
    if before is not None:
        worse = _compare(before, report, tolerance) or worse
    if worse:
        raise typer.Exit(1)


def _run(settings: "Settings") -> "tuple[Report, str]":
    """The report, and what was printed meanwhile with the time of each line."""
    from quickturn.cli.progress import counted
    from quickturn.validate.run import validate as run

    lines: list[str] = []
    began = time.monotonic()

    def show(line: str) -> None:
        typer.echo(line)
        lines.append(f"{time.monotonic() - began:9.1f} {line}")

    with counted("kernel cases") as progress:
        report = run(settings, _decoder(settings.engine.model), show, progress)
    return report, "\n".join(lines) + "\n"


def _decoder(model: str) -> Callable[[Sequence[int]], str] | None:
    """Answer ids to text; None for a model without a tokenizer, such as a bare configuration."""
    from quickturn.text.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except (ValueError, OSError):
        return None
    return tokenizer.decode


def _settings_of(before: "Report") -> "Settings":
    """The settings of a bundle. Raises ValueError if this version doesn't know them."""
    from quickturn.config import EngineConfig
    from quickturn.validate.run import Settings

    stored: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in before.settings.items()
    }
    try:
        return Settings(**stored | {"engine": EngineConfig(**stored["engine"])})
    except TypeError as error:
        raise ValueError(f"the bundle is of another version: {error}") from error


def _summary(report: "Report") -> bool:
    """Print the counts and the paths; whether anything failed."""
    sections = dict.fromkeys(finding.section for finding in report.findings)
    for section in sections:
        found = [finding.status for finding in report.findings if finding.section == section]
        counts = ", ".join(f"{found.count(kind)} {kind}" for kind in ("passed", "failed", "absent"))
        typer.echo(f"{section}: {counts}")
    typer.echo("paths: " + ", ".join(f"{path} {count}" for path, count in report.paths.items()))
    return bool(report.failed)


def _compare(before: "Report", after: "Report", tolerance: float) -> bool:
    """Print what differs; whether anything got worse."""
    from quickturn.validate.compare import compare

    differences = list(compare(before, after, tolerance))
    for one in differences:
        typer.echo(f"{one.kind}: {one.what}: {one.before} -> {one.after}")
    if not differences:
        typer.echo("no difference")
    return any(one.kind == "worse" for one in differences)
