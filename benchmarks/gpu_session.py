"""Everything that needs a GPU, in one command with one limit of time: builds, checks, then measures.

    python benchmarks/gpu_session.py --out results --limit 540
    python benchmarks/gpu_session.py --out results --limit 540 --only build,engine,dense

Stages run one after another, the most telling first; a stage that reaches its own limit is ended and the
next begins. Each leaves a log and its result files in the folder, and `session.json` says how each ended.
Needs what the core needs (torch, numpy, safetensors, transformers), pytest with xdist, and nvcc; several
ranks need msgspec and pyzmq besides. No network.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

SHAPES = "benchmarks/shapes"
LATENCY = "-m quickturn bench latency {shape} --load-format dummy --dtype bfloat16"
PYTEST = "-m pytest -p no:cacheprovider -q -n {workers} --durations=5"

BUILD = """
import time
from concurrent.futures import ThreadPoolExecutor
import torch
from quickturn_kernels.cuda_build import build, sources
def one(source):
    start = time.monotonic()
    build(source, torch.cuda.get_device_capability())
    return f"{source.name}: {time.monotonic() - start:.1f} s"
with ThreadPoolExecutor(14) as pool:
    for line in pool.map(one, sources()):
        print(line, flush=True)
"""


@dataclass(frozen=True)
class Stage:
    """A command of this interpreter, in `folder` of the repository, the seconds that it may take, and the
    GPUs without which it is left out.
    """

    name: str
    seconds: int
    arguments: tuple[str, ...]
    folder: str = "."
    gpus: int = 1


def pytest_stage(name: str, seconds: int, paths: str, workers: int, folder: str = ".") -> Stage:
    """Tests in several processes, as they wait for compilers more than for the GPU; not those that name the
    CPU.
    """
    options = PYTEST.format(workers=workers).split()
    return Stage(name, seconds, (*options, "-k", "not cpu", *paths.split()), folder)


def latency_stage(name: str, seconds: int, shape: str, options: str) -> Stage:
    """`quickturn bench latency` of a published shape; its result is `h200_<name>.json`."""
    arguments = LATENCY.format(shape=f"{SHAPES}/{shape}").split()
    return Stage(name, seconds, (*arguments, *options.split(), "--output", f"{{out}}/h200_{name}.json"))


STAGES = (
    Stage("build", 150, ("-c", BUILD)),
    pytest_stage("kernels", 240, "tests", 8, "kernels"),
    pytest_stage(
        "engine",
        240,
        "tests/engine/test_gpu.py tests/engine/test_graphs.py tests/engine/test_parity.py "
        "tests/engine/test_sampling.py tests/engine/test_robustness.py",
        6,
    ),
    pytest_stage("hybrids", 200, "tests/engine/test_hybrid.py", 6),
    latency_stage(
        "qwen3_8b",
        60,
        "qwen3-8b",
        "--decode 1x2048,8x2048,32x2048,64x2048 --first-token 32768 --repeats 5 --max-requests 64 --steps 64",
    ),
    latency_stage(
        "qwen35_35b_a3b",
        80,
        "qwen3.5-35b-a3b",
        "--decode 1x2048,2x2048,8x2048,32x2048,64x2048,1x131072 --first-token 32768 --steps 48",
    ),
    latency_stage(
        "qwen35_35b_a3b_1m",
        60,
        "qwen3.5-35b-a3b-1m",
        "--kv-cache-dtype fp8 --decode 1x131072,1x1000000 --max-requests 1 --steps 48 --skip-prompts",
    ),
    latency_stage(
        "qwen35_9b",
        50,
        "qwen3.5-9b",
        "--decode 1x2048,8x2048,32x2048,64x2048 --first-token 32768 --repeats 3 --max-requests 64 --steps 48",
    ),
    latency_stage("qwen3_06b", 30, "qwen3-0.6b", "--decode 1x2048,8x2048 --max-requests 8"),
    pytest_stage("ranks", 90, "tests/engine/test_gpu_ranks.py", 4),
    Stage(
        "all_reduce",
        45,
        ("benchmarks/all_reduce.py", "--ranks", "2", "--json", "{out}/h200_all_reduce.json"),
        gpus=2,
    ),
    replace(
        latency_stage("qwen3_8b_tp2", 75, "qwen3-8b", "--tp 2 --decode 1x2048,8x2048,32x2048 --steps 48"),
        gpus=2,
    ),
)


def run_stage(stage: Stage, out: Path, seconds: float) -> dict[str, object]:
    """Runs it with its output in a log; at the limit it gets an interrupt, ten seconds to report, and then
    the whole process group is killed.
    """
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-u", *(argument.replace("{out}", str(out)) for argument in stage.arguments)]
    path = os.pathsep.join(part for part in (str(root), os.environ.get("PYTHONPATH")) if part)
    start = time.monotonic()
    with (out / f"{stage.name}.log").open("w") as log:
        child = subprocess.Popen(
            command,
            cwd=root / stage.folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        for limit, after in ((seconds, signal.SIGINT), (10.0, signal.SIGKILL), (5.0, signal.SIGKILL)):
            try:
                code = child.wait(limit)
                break
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, after)
    took = round(time.monotonic() - start, 1)
    return {"name": stage.name, "exit": code, "seconds": took, "cut": took >= seconds}


def chosen(only: str, gpus: int) -> Iterable[Stage]:
    """The stages named in `only`, in their own order; where it is empty, all for which there are enough GPUs.
    Raises SystemExit for a name that no stage has.
    """
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        raise SystemExit(f"no such stage: {', '.join(sorted(unknown))}; there are {[s.name for s in STAGES]}")
    return [stage for stage in STAGES if stage.name in names or (not names and stage.gpus <= gpus)]


def main() -> None:
    """Reads the command line, runs the stages, and exits with 1 if one failed or was cut."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--limit", type=float, default=540, help="seconds for everything")
    parser.add_argument("--only", default="", help="names of stages, with commas between")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit
    results: list[dict[str, object]] = []
    for stage in chosen(options.only, torch.cuda.device_count()):
        left = end - time.monotonic() - 15
        if left < 10:
            results.append({"name": stage.name, "exit": None, "seconds": 0.0, "cut": True})
            continue
        results.append(run_stage(stage, out, min(stage.seconds, left)))
        print(json.dumps(results[-1]), flush=True)
        (out / "session.json").write_text(json.dumps(results, indent=1) + "\n")
    if any(result["exit"] != 0 for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
