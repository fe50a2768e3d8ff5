"""`quickturn bench`: measurements, as JSON and as lines to read."""

import gc
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quickturn.cli import bench_agent, bench_sweep, options
from quickturn.config import EngineConfig
from quickturn.files.resolve import resolve

if TYPE_CHECKING:
    from quickturn.bench.throughput import Load

app = typer.Typer(
    no_args_is_help=True, help="Measure this machine. Example: quickturn bench offline embedded"
)

app.command(epilog=bench_agent.EXAMPLE)(options.explained()(bench_agent.agent))
app.command(epilog=bench_sweep.SWEEP_EXAMPLE)(options.explained()(bench_sweep.sweep))
app.command(epilog=bench_sweep.PAGE_EXAMPLE)(options.explained()(bench_sweep.page))


@app.command(
    epilog="Example: quickturn bench offline embedded --dtype bfloat16 --peer transformers --output out.json"
)
@options.explained()
def offline(
    model: options.Model = "embedded",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantize = "auto",
    kv_cache_dtype: options.KvCache = "auto",
    memory: options.Memory = "1GiB",
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
    config = options.engine_config(
        model,
        dtype=dtype,
        device=device,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        memory=memory,
    )
    resolve(config.model)
    lengths, batches = options.numbers(prefill), options.numbers(decode)
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

    device = pick_device(config.device)
    path = resolve(config.model, config.load_format).path
    peer = TransformersPeer(path, resolve_dtype(config.dtype, device), device)
    return run(peer, prefill=lengths, decode=batches, steps=steps, repeats=repeats, log=typer.echo)


@app.command(
    epilog="Example: quickturn bench latency benchmarks/shapes/qwen3-8b --load-format dummy --decode 1x2048"
)
@options.explained()
def latency(
    model: options.Model = "embedded",
    load_format: options.Format = "auto",
    quantization: options.Quantize = "auto",
    kv_cache_dtype: options.KvCache = "auto",
    state_dtype: options.State = "float32",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    memory: options.Memory = "",
    tp: options.Tp = 1,
    dp: options.Dp = 1,
    cp: options.Cp = 1,
    dense_tp: options.DenseTp = None,
    moe_tp: options.MoeTp = None,
    ep: options.Ep = None,
    ranks_per_gpu: options.RanksPerGpu = 1,
    decode: Annotated[str, typer.Option(help="decode shapes, batch x context")] = "1x2048,8x2048",
    first_token: Annotated[str, typer.Option(help="prompt lengths for the time to the first token")] = "",
    at_once: Annotated[str, typer.Option(help="requests x prompt x answer, added together")] = "",
    max_requests: Annotated[int, typer.Option(help="most requests that run together")] = 64,
    max_step_tokens: Annotated[int, typer.Option(help="most tokens of a step")] = 8192,
    steps: Annotated[int, typer.Option(help="decode steps of one shape")] = 128,
    skip_prompts: Annotated[
        bool, typer.Option("--skip-prompts", help="prompts aren't computed; any cache will do for speed")
    ] = False,
    repeats: Annotated[int, typer.Option(help="repetitions of a first token")] = 5,
    output: Annotated[Path | None, typer.Option(help="file for the result as JSON")] = None,
) -> None:
    """Decode steps, time to the first token and throughput of one engine, each beside its roof."""
    import torch

    from quickturn.bench import latency as bench
    from quickturn.bench.offline import OfflineBench, machine
    from quickturn.engine.core import EngineCore
    from quickturn.engine.start import pick_device

    config = options.engine_config(
        model,
        load_format=load_format,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        state_dtype=state_dtype,
        dtype=dtype,
        device=device,
        memory=memory,
        tp=tp,
        dp=dp,
        cp=cp,
        dense_tp=dense_tp,
        moe_tp=moe_tp,
        ep=ep,
        ranks_per_gpu=ranks_per_gpu,
        max_requests=max_requests,
        max_step_tokens=max_step_tokens,
    )
    if skip_prompts and (first_token or at_once or config.world > 1):
        raise typer.BadParameter("--skip-prompts is for decode shapes on one rank alone")
    rate = bench.copy_rate(pick_device(device))
    started = time.perf_counter()
    running = OfflineBench(config)
    running.prefill_once(8)
    start_seconds = time.perf_counter() - started
    if skip_prompts and isinstance(running.core, EngineCore):
        running.core.skip_prompts()
    typer.echo(f"memory roof {rate / 1e9:.0f} GB/s, first token after {start_seconds:.1f} s")
    result: dict[str, object] = {
        "machine": machine(),
        "config": asdict(config),
        "copy_bytes_per_second": rate,
        "start_to_first_token_seconds": start_seconds,
        "prompts_skipped": skip_prompts,
    }
    shapes = []
    for batch, context in _tuples(decode, 2):
        shape = bench.decode_shape(running, batch, context, steps, rate)
        typer.echo(shape.line())
        shapes.append(asdict(shape))
    firsts = []
    for length in options.numbers(first_token):
        first = bench.first_token(running, length, repeats)
        typer.echo(first.line())
        firsts.append(asdict(first))
    together = []
    for requests, prompt, answer in _tuples(at_once, 3):
        figure = bench.at_once(running, requests, prompt, answer, steps, rate)
        typer.echo(figure.line())
        together.append(asdict(figure))
    running.core.close()
    if torch.cuda.is_available():
        result["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    result |= {"decode": shapes, "first_token": firsts, "at_once": together}
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")


@app.command(
    epilog="Example: quickturn bench throughput benchmarks/shapes/qwen3-8b --load-format dummy --users 8,32"
)
@options.explained()
def throughput(
    model: options.Model = "embedded",
    load_format: options.Format = "auto",
    quantization: options.Quantize = "auto",
    kv_cache_dtype: options.KvCache = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    memory: options.Memory = "",
    tp: options.Tp = 1,
    dp: options.Dp = 1,
    cp: options.Cp = 1,
    dense_tp: options.DenseTp = None,
    moe_tp: options.MoeTp = None,
    ep: options.Ep = None,
    ranks_per_gpu: options.RanksPerGpu = 1,
    users: Annotated[str, typer.Option(help="requests at a time; several loads with commas")] = "16",
    turns: Annotated[int, typer.Option(help="requests that each user sends", min=1)] = 4,
    prompt: Annotated[str, typer.Option(help="prompt tokens, or a range")] = "1024",
    answer: Annotated[str, typer.Option(help="answer tokens, or a range")] = "128",
    shared: Annotated[int, typer.Option(help="first tokens that all prompts share", min=0)] = 0,
    min_tps_per_user: options.MinTps = 0.0,
    max_ttft: options.MaxTtft = 0.0,
    max_pause: options.MaxPause = 0.0,
    pause_every: options.PauseEvery = 128,
    max_step_tokens: Annotated[int, typer.Option(help="most tokens of a step")] = 8192,
    peer: Annotated[str, typer.Option(help="'transformers': the same from its continuous batching")] = "",
    output: Annotated[Path | None, typer.Option(help="file for the result as JSON")] = None,
) -> None:
    """Tokens a second of many requests, in all and for each user, in a closed loop."""
    from quickturn.bench import throughput as bench
    from quickturn.bench.offline import OfflineBench, machine
    from quickturn.cli.progress import counted

    if peer not in ("", "transformers"):
        raise typer.BadParameter(f"no peer {peer!r}; there is 'transformers'")
    loads = [bench.Load(n, turns, _range(prompt), _range(answer), shared) for n in options.numbers(users)]
    config = options.engine_config(
        model,
        load_format=load_format,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        device=device,
        memory=memory,
        tp=tp,
        dp=dp,
        cp=cp,
        dense_tp=dense_tp,
        moe_tp=moe_tp,
        ep=ep,
        ranks_per_gpu=ranks_per_gpu,
        max_requests=max(load.users for load in loads),
        max_step_tokens=max_step_tokens,
        min_tps_per_user=min_tps_per_user,
        max_ttft=max_ttft,
        max_pause=max_pause,
        pause_every=pause_every,
    )
    running = OfflineBench(config)
    running.prefill_once(8)
    vocab_size = running.core.ready().vocab_size
    measured: list[dict[str, object]] = []
    for load in loads:
        with counted("requests") as progress:
            figure = bench.measure(running, bench.draw(load, vocab_size), load.users, progress)
        typer.echo(figure.line())
        measured.append({"load": asdict(load), "throughput": asdict(figure)})
    result = {
        "machine": machine(),
        "config": asdict(config),
        "loads": measured,
        "engine": running.core.stats().values,
    }
    running.core.close()
    del running
    if peer:
        result["peer"] = _batching_peer(config, loads, vocab_size)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")


def _batching_peer(config: EngineConfig, loads: "list[Load]", vocab_size: int) -> dict[str, object]:
    import torch

    from quickturn.bench.throughput import draw
    from quickturn.bench.transformers_batching import BatchingPeer
    from quickturn.engine.start import pick_device
    from quickturn.loading.dtype import resolve_dtype

    # What the engine held goes back to the device first.
    gc.collect()
    device = pick_device(config.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    path = resolve(config.model, config.load_format).path
    random = config.load_format == "dummy"
    peer = BatchingPeer(path, resolve_dtype(config.dtype, device), device, random=random)
    measured: list[dict[str, object]] = []
    for load in loads:
        try:
            figure = peer.measure(draw(load, vocab_size), load.users)
        except RuntimeError as error:
            typer.echo(f"{peer.name}: {error}")
            measured.append({"load": asdict(load), "error": str(error)})
        else:
            typer.echo(f"{peer.name}: {figure.line()}")
            measured.append({"load": asdict(load), "throughput": asdict(figure)})
    return {"name": peer.name, "attention": peer.attention, "loads": measured}


def _range(text: str) -> tuple[int, int]:
    """'512' or '512-2048'."""
    numbers = options.numbers(text.replace("-", ","))
    if len(numbers) not in (1, 2):
        raise typer.BadParameter(f"{text!r} must be a number or a range, such as 1024 or 512-2048")
    return numbers[0], numbers[-1]


def _tuples(text: str, size: int) -> list[tuple[int, ...]]:
    """Entries such as '8x2048', comma between them."""
    entries = [tuple(options.numbers(entry.replace("x", ","))) for entry in text.split(",") if entry]
    if any(len(entry) != size for entry in entries):
        raise typer.BadParameter(f"{text!r} must be entries of {size} numbers with x between, such as 8x2048")
    return entries
