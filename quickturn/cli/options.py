"""Options of the engine that several commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_args

import typer

from quickturn.config import (
    DtypeName,
    EngineConfig,
    KvCacheDtype,
    LoadFormat,
    Quantization,
    StateDtype,
    parse_size,
)
from quickturn.files.resolve import EMBEDDED
from quickturn.parallel.mesh import make_mesh


def _one_of(choices: Any) -> Any:
    allowed = get_args(choices)

    def check(value: str) -> str:
        if value not in allowed:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(allowed)}")
        return value

    return check


def _size(text: str) -> str:
    if text:
        try:
            parse_size(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return text


Model = Annotated[str, typer.Argument(help=f"Hub id, directory of safetensors, .gguf file, or '{EMBEDDED}'.")]
Dtype = Annotated[
    str,
    typer.Option(help="Of weights and cache: auto, float32, bfloat16, float16.", callback=_one_of(DtypeName)),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Format = Annotated[
    str,
    typer.Option(help="auto, safetensors, gguf, or dummy for random weights.", callback=_one_of(LoadFormat)),
]
Quantize = Annotated[
    str,
    typer.Option(
        help="Matrices in fewer bits: none, stored (as the file has them), fp8, int8, int4. auto: fp8 stays"
        " where the GPU multiplies it.",
        callback=_one_of(Quantization),
    ),
]
KvCache = Annotated[
    str,
    typer.Option(
        help="Keys and values in the cache: auto (the model's dtype) or fp8.", callback=_one_of(KvCacheDtype)
    ),
]
State = Annotated[
    str,
    typer.Option(
        help="Of recurrent states in the cache: float32, bfloat16 (half the bytes).",
        callback=_one_of(StateDtype),
    ),
]
Memory = Annotated[
    str, typer.Option(help="Bound of the cache, such as 2GiB. Default: from the machine.", callback=_size)
]
MaxContext = Annotated[
    int | None, typer.Option(help="Tokens of prompt and answer together. Default: the model's.", min=1)
]
MaxRequests = Annotated[int, typer.Option(help="Requests that run at once.", min=1)]
MaxStepTokens = Annotated[int, typer.Option(help="Tokens of one step.", min=1)]
MinTps = Annotated[
    float,
    typer.Option("--min-tps-per-user", help="Tokens a second promised to every user; 0 for none.", min=0),
]
MaxTtft = Annotated[
    float,
    typer.Option("--max-ttft", help="Seconds to the first token to aim at; 0 for none.", min=0),
]
MaxPause = Annotated[
    float,
    typer.Option(
        "--max-pause",
        help="Seconds that a step may take now and then where that brings prompts on faster; 0: none.",
        min=0,
    ),
]
PauseEvery = Annotated[
    int, typer.Option("--pause-every", help="Steps of which --max-pause allows one to be long.", min=1)
]
Tp = Annotated[
    int,
    typer.Option("--tp", help="Ranks that share out heads and features, each on a GPU of its own.", min=1),
]
Dp = Annotated[
    int, typer.Option("--dp", help="Groups of ranks with requests and a cache of their own.", min=1)
]
Cp = Annotated[int, typer.Option("--cp", help="Ranks that share out the tokens of a cache.", min=1)]
DenseTp = Annotated[
    int | None, typer.Option("--dense-tp", help="Ranks that share out a dense layer. Default: all.", min=1)
]
MoeTp = Annotated[
    int | None, typer.Option("--moe-tp", help="Ranks that share out the features of an expert.", min=1)
]
Ep = Annotated[int | None, typer.Option("--ep", help="Ranks that share out the experts.", min=1)]
RanksPerGpu = Annotated[
    int,
    typer.Option(
        "--ranks-per-gpu", help="Ranks that share a GPU, to try several where there are too few.", min=1
    ),
]
RankTimeout = Annotated[
    float, typer.Option("--rank-timeout", help="Seconds after which a rank that hangs ends all.", min=1)
]
BlockTokens = Annotated[int, typer.Option(help="Tokens of a cache block, a power of two.", min=1)]
PrefixCache = Annotated[bool, typer.Option(help="Reuse what earlier requests computed.")]

Core = Annotated[str, typer.Option(help="Class that the engine process runs, as module:name.", hidden=True)]


_MESH = ("tp", "dp", "cp", "dense_tp", "moe_tp", "ep")


def numbers(text: str) -> list[int]:
    """What an option such as `--batches 1,8` holds."""
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} must be whole numbers with commas, such as 512,2048") from error


def engine_config(model: str, **options: Any) -> EngineConfig:
    """The configuration that the options describe; a wrong combination ends the command with its message."""
    memory = options.pop("memory", "")
    try:
        make_mesh(**{name: options[name] for name in _MESH if name in options})
        return EngineConfig(model=model, memory=parse_size(memory) if memory else None, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def fail(message: object) -> typer.Exit:
    """Print an error for the user; raise the result to end the command with status 1."""
    typer.secho(f"Error: {message}", err=True, fg=typer.colors.RED)
    return typer.Exit(1)


@contextmanager
def explained() -> Iterator[None]:
    """Errors that a user can mend end the command with their message, not with a stack; also a decorator."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        raise fail(error) from error
