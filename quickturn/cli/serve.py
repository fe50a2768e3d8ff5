"""`quickturn serve`: a model over HTTP."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from quickturn.cli import options
from quickturn.config import EngineConfig
from quickturn.engine.process import DEFAULT_CORE

EXAMPLE = "Example: quickturn serve Qwen/Qwen3-0.6B --port 8000 --memory 8GiB --api-key secret"


def serve(
    model: options.Model = "embedded",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)
    ] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; may be given several times.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may call from a browser; may be given several times."),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients ask for.")] = None,
    memory: options.Memory = "",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.Format = "auto",
    quantization: options.Quantize = "auto",
    kv_cache_dtype: options.KvCache = "auto",
    state_dtype: options.State = "float32",
    max_context: options.MaxContext = None,
    max_requests: options.MaxRequests = 256,
    max_step_tokens: options.MaxStepTokens = 2048,
    block_tokens: options.BlockTokens = 64,
    prefix_cache: options.PrefixCache = True,
    min_tps_per_user: options.MinTps = 0.0,
    max_ttft: options.MaxTtft = 0.0,
    max_pause: options.MaxPause = 0.0,
    pause_every: options.PauseEvery = 128,
    max_queue: Annotated[
        int | None,
        typer.Option(
            help="Requests that wait for a place; more get 429. Default: 256 under a promise.", min=1
        ),
    ] = None,
    max_queue_wait: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a request waits for a place before it gets 429. Default: under a promise what"
            " --max-ttft says, or 30.",
            min=0.001,
        ),
    ] = None,
    tp: options.Tp = 1,
    dp: options.Dp = 1,
    cp: options.Cp = 1,
    dense_tp: options.DenseTp = None,
    moe_tp: options.MoeTp = None,
    ep: options.Ep = None,
    ranks_per_gpu: options.RanksPerGpu = 1,
    rank_timeout: options.RankTimeout = 300.0,
    tool_call_parser: Annotated[
        str, typer.Option(help="How the model writes tool calls; auto goes by its chat template.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="How the model writes what it thinks; auto goes by its chat template.")
    ] = "auto",
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.", min=0)
    ] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    core: options.Core = DEFAULT_CORE,
) -> None:
    """Serve a model over HTTP, as the OpenAI API, until SIGTERM or Ctrl-C."""
    config = options.engine_config(
        model,
        dtype=dtype,
        device=device,
        load_format=load_format,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        state_dtype=state_dtype,
        memory=memory,
        max_context=max_context,
        max_requests=max_requests,
        max_step_tokens=max_step_tokens,
        block_tokens=block_tokens,
        prefix_cache=prefix_cache,
        min_tps_per_user=min_tps_per_user,
        max_ttft=max_ttft,
        max_pause=max_pause,
        pause_every=pause_every,
        tp=tp,
        dp=dp,
        cp=cp,
        dense_tp=dense_tp,
        moe_tp=moe_tp,
        ep=ep,
        ranks_per_gpu=ranks_per_gpu,
        rank_timeout=rank_timeout,
        served_model_name=served_model_name,
    )
    from quickturn.cli.progress import StartDisplay
    from quickturn.engine.messages import EngineReady
    from quickturn.engine.stream import EngineDied
    from quickturn.server import serving
    from quickturn.server.waiting_room import QueueLimits

    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"{log_level!r} is no log level", param_hint="--log-level")
    if not all(api_key or ()):
        # A variable that isn't set, say: whoever sends no key would be let in.
        raise typer.BadParameter("a key must not be empty", param_hint="--api-key")
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve_config = serving.ServeConfig(
        host,
        port,
        frozenset(api_key or ()),
        tuple(cors_origin or ()),
        shutdown_timeout,
        queue=QueueLimits(max_queue, max_queue_wait),
        core=core,
        log_level=log_level,
        tool_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    if config.world > 1 and (status := _other_rank(config)) is not None:
        raise typer.Exit(status)
    with StartDisplay() as display:

        def on_ready(ready: EngineReady, url: str) -> None:
            display.end()
            for name, value in ready.facts.items():
                typer.echo(f"{name + ':':24}{value}", err=True)
            typer.echo(f"{'context:':24}{ready.max_context} tokens", err=True)
            typer.echo(f"serving at {url}", err=True)

        try:
            _run(serving.serve(config, serve_config, display, on_ready))
        except (EngineDied, ValueError, OSError) as error:
            display.end()
            raise options.fail(error) from error


def _other_rank(config: EngineConfig) -> int | None:
    """Be the rank that a launcher made of this process, to its end, and return the exit status; None for the
    first one, which serves.
    """
    from quickturn.engine.join import join, outside

    with options.explained():
        place = outside(config, os.environ)
        if place is None or place.rank == 0:
            return None
        from quickturn.engine.follower import follow, ignore_signals

        ignore_signals()
        status, steps = join(config, place)
    return follow(config, place.rank, (place.local_rank, place.local_ranks), status, steps)


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)
