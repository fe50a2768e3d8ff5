"""Times a gated delta net's ops on Hopper in CUDA graphs: 16 k heads, 32 v heads, 128 x 128 states.

    python kernels/bench/hopper_gated_delta.py OUT.json [decode] [prefill] [conv] [norm] [fla] [fla_graph]

Every form is first held against the reference. decode: `gated_delta_step` (convolution, delta rule and gated
norm), the portable ops that it replaces, and the recurrence alone; a graph has one call a layer, each with
states of its own, up to 48 layers or 16 GB, so that none is in L2; bandwidth counts each state read and
written once. prefill: `gated_delta_prefill` by implementation over ragged rows; FLOPs are not counted, the
figure is the time. fla: flash-linear-attention, if it's there, beside the implementation that is chosen here
over the same inputs; its q and k are normed inside, its gates made before, its states not gathered. It tunes
itself for minutes when its kernels are compiled for the first time.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import registry
from quickturn_kernels.ops.linear_attention import hopper_prefill, hopper_step, triton_prefill
from quickturn_kernels.ops.linear_attention.triton_prefill import Prepared

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
KEY_HEADS, HEADS, DIM = 16, 32, 128
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
LAYERS, STATE_BYTES = 48, 16 << 30
REPEATS = 9
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = ((512,), (2048,), (8192,), (32768,), (1024,) * 8, (8192,) * 4, (64,) * 64, (720, 4664, 64, 2000))

Call = Callable[[], Any]


def timed(calls: list[Call]) -> float:
    """Median microseconds of one call; the calls stand in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    for _ in range(2):
        graph.replay()
    return _median(graph.replay) / len(calls)


def eager(call: Call) -> float:
    """Median microseconds of one call as the host launches it."""
    for _ in range(3):
        call()
    return _median(call)


def _median(run: Call) -> float:
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return round(statistics.median(times), 2)


def differs(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|; nan if anything is."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal values."""
    return torch.randn(shape, device=DEVICE, dtype=dtype)


class Decode:
    """Inputs of one step of some rows, for some layers."""

    def __init__(self, rows: int, state_dtype: torch.dtype) -> None:
        size = rows * HEADS * DIM * DIM * state_dtype.itemsize
        self.rows, self.moved = rows, 2 * size
        self.layers = max(2, min(LAYERS, STATE_BYTES // size))
        self.states = torch.empty(
            rows, self.layers, HEADS, DIM, DIM, device=DEVICE, dtype=state_dtype
        ).normal_()
        self.conv = random(rows, self.layers, CHANNELS, 3)
        self.qkv, self.weight = random(rows, CHANNELS), random(CHANNELS, 4)
        gates = random(rows, 2 * HEADS)
        self.a, self.b = gates[:, :HEADS], gates[:, HEADS:]
        self.a_log, self.dt_bias = (random(HEADS, dtype=torch.float32) for _ in range(2))
        self.gate, self.norm_weight = random(rows, HEADS, DIM), random(DIM)
        block = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        self.places = (block, block, torch.zeros(rows, device=DEVICE, dtype=torch.bool))

    def step(self, layer: int, columns: int | None = None) -> Tensor:
        """Our kernel."""
        return hopper_step.launch(
            self.qkv,
            self.weight,
            self.conv[:, layer],
            self.a,
            self.b,
            self.a_log,
            self.dt_bias,
            self.states[:, layer],
            *self.places,
            KEY_HEADS,
            DIM**-0.5,
            None,
            self.gate,
            self.norm_weight,
            1e-6,
            True,
            columns,
        )

    def op(self, layer: int) -> Tensor:
        """The public op."""
        return kernels.gated_delta_step(
            self.qkv,
            self.weight,
            self.conv[:, layer],
            self.a,
            self.b,
            self.a_log,
            self.dt_bias,
            self.states[:, layer],
            *self.places,
            key_heads=KEY_HEADS,
            scale=DIM**-0.5,
            gate=self.gate,
            norm_weight=self.norm_weight,
        )

    def recurrence(self, layer: int) -> Tensor:
        """The delta rule alone."""
        q, k, v = self.qkv.split((KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM), dim=1)
        return kernels.gated_delta_decode(
            q.view(self.rows, KEY_HEADS, DIM),
            k.view(self.rows, KEY_HEADS, DIM),
            v.view(self.rows, HEADS, DIM),
            self.a,
            self.b,
            self.a_log,
            self.dt_bias,
            self.states[:, layer],
            *self.places,
            scale=DIM**-0.5,
        )


def decode(rows: int, state_dtype: torch.dtype) -> dict[str, Any]:
    """One batch: every form's time, and how far it is from the reference."""
    made = Decode(rows, state_dtype)
    line: dict[str, Any] = {"rows": rows, "state": str(state_dtype)[6:], "layers": made.layers}
    states, conv = made.states[:, 0].clone(), made.conv[:, 0].clone()

    def fresh() -> None:
        made.states[:, 0].copy_(states)
        made.conv[:, 0].copy_(conv)

    with registry.use(**{"*": "reference"}):
        expected = made.op(0)
        expected_state = made.states[:, 0].clone()
    forms: dict[str, tuple[Callable[[int], Tensor], dict[str, str]]] = {
        "portable": (made.op, {"gated_delta_step": "reference", "*": "triton"}),
        "recurrence_portable": (made.recurrence, {"*": "triton"}),
        **{f"step_{columns}": (lambda layer, c=columns: made.step(layer, c), {}) for columns in (0, 64, 128)},
        "step": (made.step, {}),
    }
    for name, (form, names) in forms.items():
        try:
            fresh()
            with registry.use(**names):
                out = form(0)
                if "recurrence" not in name:
                    line[f"{name}_error"] = [
                        differs(out, expected),
                        differs(made.states[:, 0], expected_state),
                    ]
                us = timed([lambda layer=layer, f=form: f(layer) for layer in range(made.layers)])
            line[name] = us
            line[f"{name}_gbs"] = round(made.moved / us / 1e3)
        except Exception as error:
            line[name] = repr(error)[:300]
    return line


class Prefill:
    """Inputs of one layer's prompts."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        tokens, rows = sum(lengths), len(lengths)
        self.lengths, self.tokens, self.rows = lengths, tokens, rows
        self.mixed, self.weight = random(tokens, CHANNELS), random(CHANNELS, 4)
        gates = random(tokens, 2 * HEADS)
        self.a, self.b = gates[:, :HEADS], gates[:, HEADS:]
        self.a_log = torch.rand(HEADS, device=DEVICE) * 4 - 4
        self.dt_bias = random(HEADS, dtype=torch.float32)
        self.states = torch.empty(2 * rows, 2, HEADS, DIM, DIM, device=DEVICE).normal_()[:, 1]
        self.conv = random(2 * rows, CHANNELS, 3)
        block = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        self.places = (block, block + rows, torch.zeros(rows, device=DEVICE, dtype=torch.bool))
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self.starts = starts.to(torch.int32).to(DEVICE)
        self.lens = self.starts[1:] - self.starts[:-1]

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v."""
        q, k, v = self.mixed.split((KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM), dim=1)
        tokens = self.tokens
        return q.view(tokens, KEY_HEADS, DIM), k.view(tokens, KEY_HEADS, DIM), v.view(tokens, HEADS, DIM)

    def op(self) -> Tensor:
        """The public op."""
        return kernels.gated_delta_prefill(
            *self.heads(),
            self.a,
            self.b,
            self.a_log,
            self.dt_bias,
            self.states,
            *self.places,
            query_start=self.starts,
            max_query_len=max(self.lengths),
            scale=DIM**-0.5,
            context_lens=self.lens,
        )

    def walk(self, groups: int, made: Prepared | None = None) -> Tensor:
        """Our kernels, the second with so many warpgroups a thread block."""
        return hopper_prefill.launch(
            *self.heads(),
            self.a,
            self.b,
            self.a_log,
            self.dt_bias,
            self.states,
            *self.places,
            self.starts,
            self.lens,
            max(self.lengths),
            DIM**-0.5,
            None,
            groups,
            made,
        )

    def prepare(self, form: Callable[..., Prepared]) -> Prepared:
        """The first of the two kernels."""
        q, k, _ = self.heads()
        gates = (self.a, self.b, self.a_log, self.dt_bias)
        return form(q, k, *gates, self.starts, self.lens, DIM**-0.5)

    def convolution(self) -> Tensor:
        """The convolution ahead of it."""
        return kernels.causal_conv1d(
            self.mixed,
            self.weight,
            self.conv,
            *self.places,
            query_start=self.starts,
            max_query_len=max(self.lengths),
        )


def prefill(lengths: tuple[int, ...]) -> dict[str, Any]:
    """One batch of prompts by every form, the PyTorch implementation being the measure of rightness."""
    made = Prefill(lengths)
    line: dict[str, Any] = {"lengths": lengths}
    expected = None
    if made.tokens <= 16384:
        with registry.use(gated_delta_prefill="torch"):
            expected = made.op()
            expected_state = made.states[made.rows :].clone()
    prepared = made.prepare(triton_prefill.prepare)
    line["prepare_triton"] = timed([lambda: made.prepare(triton_prefill.prepare)] * 4)
    forms: dict[str, tuple[Call, dict[str, str]]] = {
        "triton": (made.op, {"gated_delta_prefill": "triton"}),
        "walk_1": (lambda: made.walk(1, prepared), {}),
        "walk_2": (lambda: made.walk(2, prepared), {}),
        "hopper": (made.op, {"gated_delta_prefill": "hopper"}),
    }
    for name, (form, names) in forms.items():
        try:
            with registry.use(**names):
                made.states[made.rows :] = torch.nan
                out = form()
                if expected is not None:
                    state = made.states[made.rows :]
                    line[f"{name}_error"] = [differs(out, expected), differs(state, expected_state)]
                line[name] = timed([form] * 4)
        except Exception as error:
            line[name] = repr(error)[:300]
    line["prepare"] = timed([lambda: made.prepare(hopper_prefill.prepare)] * 4)
    return line


def convolution(lengths: tuple[int, ...]) -> dict[str, Any]:
    """The convolution of one batch of prompts; bytes in and out."""
    made = Prefill(lengths)
    line: dict[str, Any] = {"lengths": lengths}
    with registry.use(causal_conv1d="reference"):
        expected = made.convolution()
    for one in registry.implementations("causal_conv1d"):
        if one.name == "reference":
            continue
        with registry.use(causal_conv1d=one.name):
            line[f"{one.name}_error"] = differs(made.convolution(), expected)
            line[one.name] = timed([made.convolution] * 4)
            line[f"{one.name}_gbs"] = round(made.mixed.numel() * 4 / line[one.name] / 1e3)
    return line


def fla(lengths: tuple[int, ...], graphs: bool) -> dict[str, Any]:
    """flash-linear-attention's chunked kernel, launched by the host, and ours in a graph; or its in one."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    made = Prefill(lengths)
    q, k, v = (x[None].contiguous() for x in made.heads())
    g = -made.a_log.exp() * torch.nn.functional.softplus(made.a.float() + made.dt_bias)
    beta = made.b.float().sigmoid()
    # The same tensor each time: what is derived from it is kept, and the host isn't asked again in a graph.
    state, starts = made.states[: made.rows].contiguous(), made.starts.long()

    def call() -> Tensor:
        out, _ = chunk_gated_delta_rule(
            q,
            k,
            v,
            g[None],
            beta[None].to(BF16),
            scale=DIM**-0.5,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
        )
        return out[0]

    if graphs:
        return {"lengths": lengths, "fla_graph": timed([call] * 4)}
    made.states[made.rows :] = torch.nan  # written to, read by nobody
    line: dict[str, Any] = {"lengths": lengths, "differ": differs(made.op(), call())}
    return line | {"fla_eager": eager(call), "ours": timed([made.op] * 4)}


def norm(tokens: int) -> dict[str, Any]:
    """The gated norm of a prompt."""
    x, gate, weight = random(tokens, HEADS, DIM), random(tokens, HEADS, DIM), random(DIM)
    us = timed([lambda: kernels.gated_rms_norm(x, gate, weight, 1e-6)] * 4)
    return {"tokens": tokens, "us": us, "gbs": round(tokens * HEADS * DIM * 6 / us / 1e3)}


def main() -> None:
    """Measure what the command line names, or everything."""
    wanted = sys.argv[2:] or ["decode", "prefill", "conv", "norm", "fla", "fla_graph"]
    registry.load(every_tier=True)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    parts: dict[str, list[Call]] = {
        "decode": [
            *(lambda rows=rows: decode(rows, torch.float32) for rows in BATCHES),
            *(lambda rows=rows: decode(rows, BF16) for rows in (1, 64)),
        ],
        "prefill": [lambda lengths=lengths: prefill(lengths) for lengths in PROMPTS],
        "conv": [lambda lengths=lengths: convolution(lengths) for lengths in PROMPTS],
        "norm": [lambda tokens=tokens: norm(tokens) for tokens in (512, 8192)],
        "fla": [lambda lengths=lengths: fla(lengths, False) for lengths in PROMPTS],
        "fla_graph": [lambda lengths=lengths: fla(lengths, True) for lengths in PROMPTS],
    }
    for part in wanted:
        report[part] = []
        for case in parts[part]:
            try:
                report[part].append(case())
            except Exception as error:
                report[part].append({"failed": repr(error)[:300]})
            print(part, json.dumps(report[part][-1]), flush=True)
            torch.cuda.empty_cache()
            Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
