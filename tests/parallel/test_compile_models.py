"""Every family on every mesh of up to eight ranks: compiled, or the step that can't be split is named."""

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from numpy_ranks import meshes
from tiny import OPTIONS, TINY
from transformers import AutoConfig

from quickturn.models.base import Architecture, tail_of
from quickturn.models.experts import Mix
from quickturn.models.mixers import Attend, Delta
from quickturn.models.plan import ops_of, programs_of
from quickturn.models.registry import architecture_of
from quickturn.parallel.compile import compile_program
from quickturn.parallel.cost import Load
from quickturn.parallel.mesh import Mesh, MeshError, make_mesh
from quickturn.parallel.moves import spans
from quickturn.parallel.program import Fused, Layout, Move, RunStep, Select

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3-moe-mixed",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "gemma3",
    "gpt-oss",
)


def architecture(option: str) -> Architecture:
    """Of a tiny random model of `tests/models`."""
    kind, options = OPTIONS[option]
    config = AutoConfig.for_model(kind, **(TINY | options))
    return architecture_of({"architectures": [CLASSES[kind]], **config.to_dict()})


CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
}  # fmt: skip


def refusals(model: Architecture, mesh: Mesh) -> list[str]:
    """The steps that a mesh's ranks can't share out, worked out from the model's sizes."""
    found = []
    for step in model.declarations():
        match step:
            case Attend():
                one = step.heads % mesh.tp or (step.kv_heads % mesh.tp and mesh.tp % step.kv_heads)
            case Delta():
                one = step.key_heads % mesh.tp
            case Mix():
                shared = step.shared.intermediate if step.shared else 0
                one = step.count % mesh.ep or step.intermediate % mesh.moe_tp or shared % mesh.world
            case _:
                wide = step.weights()[0].rows if step.placed.axis == "dense" else 0
                one = wide // 2 % mesh.dense_tp if "gate_up_proj" in step.name else 0
        if one:
            found.append(step.name)
    return found


@pytest.mark.parametrize("option", FAMILIES)
def test_a_family_on_every_mesh(option: str) -> None:
    model = architecture(option)
    steps, tail = model.declarations(), tail_of(model.declarations())
    experts = bool(model.mixtures())
    legal = 0
    for world in (1, 2, 4, 8):
        for mesh in meshes(world, experts):
            bad = refusals(model, mesh)
            if bad:
                with pytest.raises(MeshError, match=re.escape(f"step '{bad[0]}' has ")):
                    ops_of(model, mesh)
                continue
            legal += 1
            ops = ops_of(model, mesh)
            for tokens in (1, 5000):
                program = compile_program(ops, tail, mesh, Load(tokens, 1, 1, 64))
                check_order(program.instructions, len(steps), tail, mesh)
    assert legal >= 4


def check_order(instructions: tuple[Any, ...], steps: int, tail: int, mesh: Mesh) -> None:
    """Every step once, in order; tokens selected ahead of the tail; the stream moves from where it lies."""
    ran = [one.step for one in instructions if isinstance(one, RunStep | Fused)]
    assert ran == list(range(steps))
    selected = [at for at, one in enumerate(instructions) if isinstance(one, Select)]
    assert [sum(isinstance(one, RunStep | Fused) for one in instructions[:at]) for at in selected] == [tail]
    stream = Layout(mesh.attention_span)
    for one in instructions:
        if isinstance(one, Move | Fused):
            assert mesh.world % (one.over.size * one.over.stride) == 0
            assert {one.before.span, one.after.span} <= set(spans(mesh))
        if isinstance(one, Move) and one.tensor == "residual":
            assert one.before == stream
            stream = one.after
    if mesh.world == 1:
        assert all(isinstance(one, RunStep | Select) for one in instructions)


def test_one_rank_has_one_program() -> None:
    programs = programs_of(architecture("llama"), Mesh())
    assert len(programs.programs) == 1
    assert not programs.moves
    assert programs.groups() == ()


def test_small_and_large_steps_have_programs_of_their_own() -> None:
    """Few tokens: the fewest exchanges. Many: the fewest bytes, norms on shared-out tokens."""
    sizes = TINY | {"hidden_size": 4096, "intermediate_size": 8192, "num_attention_heads": 32}
    config = AutoConfig.for_model("llama", **sizes).to_dict()
    programs = programs_of(
        architecture_of({"architectures": ["LlamaForCausalLM"], **config}), make_mesh(tp=8)
    )
    kinds = [
        {
            one.kind
            for one in programs.programs[programs.choose(tokens)].instructions
            if isinstance(one, Fused)
        }
        for tokens in (1, 16384, 99999)
    ]
    assert kinds == [{"all_reduce_add_norm"}, {"reduce_scatter_add_norm", "all_reduce_add_norm"}, kinds[1]]


@pytest.mark.parametrize(
    ("option", "mesh", "words"),
    [
        ("llama", {"tp": 8}, "attend' has 4 heads, which --tp 8 can't share out; take 1, 2 or 4 for --tp"),
        (
            "llama",
            {"tp": 4, "dense_tp": 4, "heads": 12, "kv": 3},
            "has 3 heads of keys and values, which --tp 4 neither shares out nor repeats; take 1, 3, 6 or 12",
        ),
        ("llama", {"dp": 32, "dense_tp": 32}, "has 112 inner features, which --dense-tp 32 can't share out"),
        ("gpt-oss", {"dp": 4, "ep": 4}, "has 6 experts, which --ep 4 can't share out; take 1, 2, 3 or 6"),
        ("qwen3-next", {"tp": 4}, "has 2 key heads, which --tp 4 can't share out; take 1 or 2 for --tp"),
        ("qwen3.5-moe", {"dp": 6, "ep": 6}, "shared expert of 40 inner features, which 6 ranks can't share"),
    ],
)
def test_a_mesh_that_cant_be_is_refused_with_what_would_do(
    option: str, mesh: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = dict(mesh)
    if "heads" in mesh:
        monkeypatch.setitem(TINY, "num_attention_heads", mesh.pop("heads"))
        monkeypatch.setitem(TINY, "num_key_value_heads", mesh.pop("kv"))
        monkeypatch.setitem(TINY, "hidden_size", 96)
    with pytest.raises(MeshError, match=re.escape(words)):
        ops_of(architecture(option), make_mesh(**mesh))


MeshMaker = Callable[..., Mesh]


@pytest.mark.parametrize(
    ("make", "sizes", "words"),
    [
        (
            make_mesh,
            {"tp": 2, "ep": 3},
            "--ep 3 doesn't divide the 2 ranks of attention (tp 2 x dp 1 x cp 1)",
        ),
        (make_mesh, {"tp": 2, "ep": 4, "moe_tp": 1}, "Change --tp, --dp or --cp until their product is 4"),
        (make_mesh, {"tp": 6, "dense_tp": 4}, "which --dense-tp 4 doesn't divide; take 1, 2, 3 or 6 for it"),
        (make_mesh, {"tp": 4, "moe_tp": 3}, "--moe-tp 3 doesn't divide the 4 ranks"),
        (make_mesh, {"tp": 0}, "--tp 0: every size is at least 1"),
        (Mesh, {"tp": 2, "ep": 2, "moe_tp": 2, "dense_tp": 1}, "--moe-tp and --ep until theirs is 2"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(make: MeshMaker, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(MeshError, match=re.escape(words)):
        make(**sizes)


def test_a_mesh_gives_ranks_their_places() -> None:
    mesh = make_mesh(tp=2, dp=2, cp=2, ep=4)
    assert (mesh.world, mesh.attention_span, mesh.dense_tp, mesh.moe_tp, mesh.ep) == (8, 4, 4, 2, 4)
    assert str(mesh) == "tp 2, dp 2, cp 2, dense-tp 4, moe-tp 2, ep 4"
    seen = [tuple(mesh.coordinates(rank)[name] for name in ("dp", "cp", "tp")) for rank in range(8)]
    assert seen == list(product(range(2), repeat=3))
    assert [(mesh.coordinates(rank)["ep"], mesh.coordinates(rank)["moe_tp"]) for rank in (0, 5, 7)] == [
        (0, 0), (2, 1), (3, 1)
    ]  # fmt: skip
    assert mesh.axis("cp").all(8) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.axis("dp").members(5) == (1, 5)
    assert (make_mesh(tp=4).dense_tp, make_mesh(dp=4).dense_tp, make_mesh(dp=4).moe_tp) == (4, 1, 4)
    with pytest.raises(MeshError, match="rank 8 is not one of 8"):
        mesh.coordinates(8)
