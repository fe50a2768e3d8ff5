"""What each rank holds, in every format: its part of the numbers that one rank holds, of which no byte is
read that isn't its own.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from families import write
from gguf_files import Sizes, random_tensors, write_gguf
from quickturn_kernels import LinearWeight, prepare_linear
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_fp8 import floats
from test_fp8 import write as write_fp8
from tiny import OPTIONS, random_checkpoint

from quickturn.config import Quantization
from quickturn.loading import checkpoint as checkpoint_module
from quickturn.loading.checkpoint import SafetensorsSource, read_config
from quickturn.loading.dummy import DummySource
from quickturn.loading.fp8 import Fp8Source
from quickturn.loading.gguf import GgufSource
from quickturn.loading.mxfp4 import MxfpSource
from quickturn.loading.parameters import choose, load_parameters
from quickturn.loading.source import RenamedSource, TensorSource, take
from quickturn.models.base import Architecture
from quickturn.models.registry import architecture_of
from quickturn.parallel.mesh import Mesh, make_mesh
from quickturn.parallel.placement import Partial, PlacementError, Shard
from quickturn.parallel.shards import Place, local_weight
from quickturn.parallel.weights import Cut, Segment, Share, WeightSpec, narrowed

CPU = torch.device("cpu")
Loaded = dict[str, torch.Tensor]


def can_quantize() -> bool:
    try:
        prepare_linear(torch.zeros(32, 32), quantize="int8")
    except LookupError:
        return False
    return True


def plain(parameters: dict[str, torch.Tensor | LinearWeight]) -> Loaded:
    """Every parameter as the numbers that it means."""
    scales = {name for name in parameters if name.endswith(".scale")}
    found = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, LinearWeight):
            found[name] = floats(parameter)
        elif f"{name}.scale" in scales:
            blocks = parameters[f"{name}.scale"]
            assert isinstance(blocks, torch.Tensor)
            rows, columns = parameter.shape[1:]
            wide = blocks.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[..., :columns]
            found[name] = parameter.float() * wide
        elif name not in scales:
            found[name] = parameter
    return found


def own_part(whole: torch.Tensor, spec: WeightSpec, place: Place) -> torch.Tensor:
    """A rank's part, cut out of the whole by counting: for each row of a segment, whose it is."""
    if spec.stack:
        ep, groups = place.experts()
        whole = whole.chunk(groups, 0)[ep]
        index, ranks = place.expert_features()
    else:
        index, ranks = place.part(spec.axis)
    if spec.placement == Shard(1):
        return whole.chunk(ranks, -1)[index]
    if spec.placement == Partial():
        return whole if index == 0 else torch.zeros_like(whole)
    if spec.placement != Shard(0) or ranks == 1:
        return whole
    each = [whole] if not spec.stack else list(whole)
    sizes = [segment.rows for segment in spec.segments[: len(spec.segments) // (spec.stack or 1)]]
    parts = []
    for matrix in each:
        mine = []
        for rows, segment in zip(matrix.split(sizes), spec.segments, strict=False):
            units = rows.split(segment.unit)
            if len(units) < ranks and segment.repeats:
                mine.append(units[index // (ranks // len(units))])
                continue
            count = -(-len(units) // ranks)
            kept = [*units, *[torch.zeros_like(units[0])] * (count * ranks - len(units))]
            mine += kept[index * count : (index + 1) * count]
        parts.append(torch.cat(mine))
    return torch.stack(parts) if spec.stack else parts[0]


def check_shares(
    architecture: Architecture,
    source: TensorSource,
    mesh: Mesh,
    quantization: Quantization = "none",
    make: Callable[[Place | None], TensorSource] | None = None,
) -> None:
    """Of every parameter the first two ranks and the last have their parts, bit for bit."""

    def load(place: Place | None) -> Loaded:
        given = source if make is None else make(place)
        specs = architecture.weights()
        return plain(load_parameters(specs, given, torch.float32, CPU, None, quantization, place))

    whole = load(None)
    specs = {spec.name: spec for spec in choose(architecture.weights(), source.shapes())}
    for rank in sorted({0, 1, mesh.world - 1}):
        place = Place(mesh, rank)
        for name, got in load(place).items():
            want = own_part(whole[name], specs[name], place)
            assert got.shape == want.shape, (name, rank)
            assert torch.equal(got, want), (name, rank)


MESHES = {
    "tp2": make_mesh(tp=2),
    "tp4": make_mesh(tp=4),
    "ep4": make_mesh(tp=4, ep=4),
    "tp2dp2": make_mesh(tp=2, dp=2, ep=2),
    "cp2": make_mesh(cp=2, dense_tp=1),
}


@pytest.mark.parametrize(
    "option", ["llama-biases", "llama-tied", "qwen3.5", "qwen3-moe", "qwen3-next", "gpt-oss"]
)
def test_floats(tmp_path: Path, option: str) -> None:
    write(option, tmp_path)
    architecture = architecture_of(read_config(tmp_path))
    for mesh in MESHES.values():
        check_shares(architecture, SafetensorsSource(tmp_path), mesh)


def test_a_shared_expert_for_tokens_that_travel(tmp_path: Path) -> None:
    """Held once more, by features over the ranks that have the same experts."""
    write("qwen3-next", tmp_path)
    plain_one = architecture_of(read_config(tmp_path))
    names = [step.name for step in plain_one.declarations()]
    mixtures = {names.index(step.name) for step in plain_one.mixtures()}
    assert plain_one.dispatching(()) == plain_one
    architecture, source = plain_one.dispatching(mixtures), SafetensorsSource(tmp_path)
    more = {spec.name for spec in architecture.weights()} - {spec.name for spec in plain_one.weights()}
    assert len(more) == 2 * len(mixtures)
    whole = plain(load_parameters(plain_one.weights(), source, torch.float32, CPU))
    specs = {spec.name: spec for spec in choose(architecture.weights(), source.shapes())}
    for mesh, rank in product((make_mesh(tp=2, ep=2), MESHES["ep4"], MESHES["tp2dp2"]), range(2)):
        place = Place(mesh, rank)
        found = plain(load_parameters(architecture.weights(), source, torch.float32, CPU, place=place))
        assert set(found) == set(whole) | more
        for name, got in found.items():
            assert torch.equal(got, own_part(whole[name.replace(".whole", "")], specs[name], place)), name
        for name in more:
            assert found[name].numel() * mesh.moe_tp == whole[name.replace(".whole", "")].numel()


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "F16"), ("llama", "Q4_1"), ("qwen2", "Q8_0"), ("qwen2", "Q6_K")]
)
def test_gguf(tmp_path: Path, family: str, kind: str) -> None:
    sizes = Sizes(layers=1)
    path = tmp_path / "model.gguf"
    write_gguf(path, family, sizes, random_tensors(sizes, family), gguf.GGMLQuantizationType[kind])
    source = GgufSource(path)
    for mesh in (make_mesh(tp=2), make_mesh(tp=8)):
        check_shares(architecture_of(source.config), source, mesh)


@pytest.mark.skipif(not can_quantize(), reason="no integer products on this machine")
def test_gguf_kept_as_stored(tmp_path: Path) -> None:
    """What is split within a group of 32 columns becomes floats: 288 inner features, by two or four."""
    sizes = Sizes(intermediate=288, layers=1)
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", sizes, random_tensors(sizes, "llama"), gguf.GGMLQuantizationType.Q8_0)
    source = GgufSource(path)
    specs = architecture_of(source.config).weights()
    down = "model.layers.0.mlp.down_proj.weight"
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            place = Place(make_mesh(tp=ranks), rank)
            kept = load_parameters(specs, source, torch.bfloat16, CPU, None, "stored", place)
            o_proj, down_proj = kept["model.layers.0.self_attn.o_proj.weight"], kept[down]
            assert isinstance(o_proj, LinearWeight)
            assert isinstance(down_proj, LinearWeight)
            assert "int8" in o_proj.layout
            assert ("int8" in down_proj.layout) == (ranks == 1)
            assert down_proj.shape == (256, 288 // ranks)


@pytest.mark.parametrize("form", ["blocks", "channel", "tensor"])
def test_fp8(tmp_path: Path, form: str) -> None:
    """Kept as they are where blocks of scales can be cut, else dequantised: the same numbers."""
    write_fp8(tmp_path, form)
    architecture = architecture_of(read_config(tmp_path))
    source = Fp8Source(SafetensorsSource(tmp_path))
    for mesh in (make_mesh(tp=2), make_mesh(tp=4)):
        for quantization in ("none", "stored"):
            check_shares(architecture, source, mesh, quantization)


@pytest.mark.parametrize("stacked", [False, True])
def test_fp8_experts(tmp_path: Path, stacked: bool) -> None:
    """256 features: two ranks get whole blocks, four don't."""
    sizes = {"hidden_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    model = random_checkpoint("qwen3_moe", sizes | {"head_dim": 16, "num_hidden_layers": 1}, seed=3)
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(4)
    tensors: Loaded = {}
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = defaultdict(dict)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        *module, expert, which, _ = name.split(".")
        found[".".join(module)][int(expert), which] = tensor
    for module, matrices in found.items():
        parts = {f"{expert}.{which}.weight": matrix for (expert, which), matrix in matrices.items()}
        if stacked:
            gate, up, down = (
                torch.stack([matrices[expert, which] for expert in range(4)])
                for which in ("gate_proj", "up_proj", "down_proj")
            )
            parts = {"gate_up_proj": torch.cat((gate, up), 1), "down_proj": down}
        for part, matrix in parts.items():
            key = f"{module}.{part}"
            blocks = [-(-size // 128) for size in matrix.shape[-2:]]
            tensors[key] = (matrix * 50).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = torch.rand(*matrix.shape[:-2], *blocks, generator=generator) + 0.5
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    architecture = architecture_of(read_config(tmp_path))
    source = Fp8Source(SafetensorsSource(tmp_path))
    for mesh in (make_mesh(tp=2), make_mesh(tp=4, ep=2), make_mesh(tp=4)):
        for quantization in ("none", "stored"):
            check_shares(architecture, source, mesh, quantization)


def test_mxfp4(tmp_path: Path) -> None:
    """Features of an expert end within blocks of 32."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    random_checkpoint("gpt_oss", OPTIONS["gpt-oss"][1] | sizes).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        shape = (count, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), generator=generator, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    architecture = architecture_of(read_config(tmp_path))
    source = MxfpSource(RenamedSource(SafetensorsSource(tmp_path), architecture.prefixes, ()))
    for mesh in (make_mesh(tp=2), make_mesh(tp=4), make_mesh(tp=4, ep=2), make_mesh(tp=4, ep=4)):
        check_shares(architecture, source, mesh)


@pytest.mark.parametrize("option", ["llama-tied", "qwen3-next", "gpt-oss"])
def test_dummies(tmp_path: Path, option: str) -> None:
    """The same random model whatever the mesh."""
    write(option, tmp_path)
    architecture = architecture_of(read_config(tmp_path))
    specs = architecture.weights()
    for mesh in (MESHES["tp4"], MESHES["tp2dp2"]):
        check_shares(
            architecture, DummySource(specs), mesh, make=lambda place: DummySource(specs, place=place)
        )


class Recorder:
    """A safetensors file that knows which elements of its tensors were read."""

    def __init__(self, file: Any, read: dict[str, torch.Tensor]) -> None:
        self.file, self.read = file, read

    def keys(self) -> list[str]:
        return list(self.file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.file.get_tensor(name)
        self.read.setdefault(name, torch.zeros(tensor.shape, dtype=torch.bool)).fill_(True)
        return tensor

    def get_slice(self, name: str) -> Any:
        part, read = self.file.get_slice(name), self.read
        shape = tuple(part.get_shape())

        class Slice:
            def get_shape(self) -> tuple[int, ...]:
                return shape

            def __getitem__(self, at: Any) -> torch.Tensor:
                read.setdefault(name, torch.zeros(shape, dtype=torch.bool))[at] = True
                found: torch.Tensor = part[at]
                return found

        return Slice()


HOLDERS = (
    (r"layernorm|norm\.weight|embed_tokens|mlp\.gate\.|router|shared_expert_gate", lambda mesh: mesh.world),
    (r"shared_expert\.|experts.*(gate|up|down)_proj(\.|$)", lambda mesh: 1),
    (r"experts.*proj_bias", lambda mesh: 1),
    (r"o_proj\.bias", lambda mesh: mesh.world // mesh.tp),
    (r"mlp\.down_proj\.bias", lambda mesh: mesh.world // mesh.dense_tp),
    (r"mlp\.", lambda mesh: mesh.world // mesh.dense_tp),
    (r"[kv]_proj", lambda mesh: mesh.world // min(mesh.tp, 2)),
    (r"", lambda mesh: mesh.world // mesh.tp),
)
"""How many ranks read each element of a tensor, by the first pattern that its name has; two heads of keys and
values."""


@pytest.mark.parametrize("option", ["llama-biases", "qwen3-next", "qwen3.5-moe", "gpt-oss"])
def test_every_rank_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """Together: the file once, and once more for every further rank that holds the same."""
    write(option, tmp_path)
    read: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(checkpoint_module, "safe_open", lambda *a, **k: Recorder(safe_open(*a, **k), read))
    architecture = architecture_of(read_config(tmp_path))
    for mesh in (MESHES["tp4"], MESHES["tp2dp2"]):
        counts: dict[str, torch.Tensor] = {}
        for rank in range(mesh.world):
            read.clear()
            specs, source = architecture.weights(), SafetensorsSource(tmp_path)
            load_parameters(specs, source, torch.float32, CPU, place=Place(mesh, rank))
            for name, mask in read.items():
                counts[name] = counts.get(name, torch.zeros(mask.shape, dtype=torch.int32)) + mask
        assert set(counts) == set(load_file(tmp_path / "model.safetensors"))
        for name, times in counts.items():
            holders = next(how for pattern, how in HOLDERS if re.search(pattern, name))
            assert (times == holders(mesh)).all(), (name, str(mesh))


def test_a_cut_of_a_cut_is_what_its_rows_and_columns_are(seed: int) -> None:
    """Against slicing what the cut gives: views, steps, changed places of the last two dimensions."""
    numbers = torch.Generator().manual_seed(seed)
    tensor = torch.randn(6, 8, 10, generator=numbers)
    cuts = [
        Cut((6, 8, 10), (6, 8, 10), ((2, 3, 1), (0, 8, 2), (0, 10, 1))),
        Cut((6, 8, 10), (6, 8, 10), ((4, 5, 1), (0, 8, 1), (1, 10, 2)), swapped=True),
        Cut((48, 10), (6, 8, 10), ((0, 6, 1), (2, 5, 1), (0, 10, 1))),
        Cut((48, 10), (48, 10), ((3, 40, 1), (2, 8, 1))),
    ]
    seen: dict[bool, int] = defaultdict(int)
    for cut, _ in product(cuts, range(20)):
        whole = take(tensor, cut)
        whole = whole.reshape(-1, whole.shape[-1])
        low, high = sorted(torch.randint(0, whole.shape[0] + 1, (2,), generator=numbers).tolist())
        left, right = sorted(torch.randint(0, whole.shape[1] + 1, (2,), generator=numbers).tolist())
        share = Share(tuple(whole.shape), (low, high), (left, right))
        inner = 3 if cut.view != cut.shape else 1
        fits = low % inner == 0 and high % inner == 0
        seen[fits] += 1
        if fits:
            got = take(tensor, narrowed(cut, share))
            want = take(tensor, cut).reshape(share.whole)[low:high, left:right]
            assert torch.equal(got.reshape(want.shape), want)
        else:
            with pytest.raises(ValueError, match="belong together"):
                narrowed(cut, share)
    assert seen[True]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            WeightSpec("w", (Segment("a.weight", 12, 4),), 8, "linear", "attn", Shard(0)),
            "a.weight has 3 parts",
        ),
        (
            WeightSpec("w", (Segment("a.weight", 12),), 7, "linear", "attn", Shard(1)),
            "w has 7 input features",
        ),
        (
            WeightSpec("w", (Segment("a", 4),) * 3, 8, "experts", "moe", Shard(0), stack=3),
            "w is of 3 experts",
        ),
    ],
)
def test_what_cant_be_shared_out_is_refused(spec: WeightSpec, said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        local_weight(spec, Place(make_mesh(tp=2, ep=2), 1))
