"""What `quickturn explain` prints and draws."""

import json
import re
import xml.etree.ElementTree as tree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quickturn.cli.main import build
from quickturn.models.plan import explain_model
from quickturn.models.registry import architecture_of
from quickturn.parallel.cost import decode_load, prefill_load
from quickturn.parallel.explain import Explained
from quickturn.parallel.explain_svg import svg
from quickturn.parallel.explain_text import size, text, time
from quickturn.parallel.mesh import make_mesh
from quickturn.parallel.program import Dispatch

GOLDEN = Path(__file__).with_name("explain_qwen3_moe.txt")
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return tmp_path / "qwen"


def explained(**mesh: int) -> Explained:
    return explain_model(architecture_of(QWEN3_30B_A3B), make_mesh(**mesh), decode_load(8, 8192))


def run(*words: str) -> str:
    done = CliRunner().invoke(build("explain"), ["explain", *words])
    return done.output


def test_the_text_is_the_golden_one(model: Path) -> None:
    """Read it before you change it: `quickturn explain DIR --tp 8 --ep 8`."""
    assert run(str(model), "--tp", "8", "--ep", "8").splitlines() == GOLDEN.read_text().splitlines()


def test_help_has_an_example() -> None:
    said = " ".join(run("--help").split())
    assert "Example: quickturn explain " in said


def test_a_path_to_the_config_will_do(model: Path) -> None:
    given = run(str(model / "config.json"), "--tp", "8", "--ep", "8")
    assert given.splitlines() == GOLDEN.read_text().splitlines()


def test_bytes_are_those_of_the_model() -> None:
    """Worked out by hand from the sizes in the config, in bf16, on one of eight ranks."""
    shown = explained(tp=8, ep=8)
    line = {line.step: line for line in shown.sections[2].lines}
    assert line["self_attn.qkv_proj"].weights == (32 * 128 // 8 + 2 * 128) * 2048 * 2
    assert line["self_attn.o_proj"].weights == 2048 * 32 * 128 // 8 * 2
    assert line["self_attn.attend"].cache == 8 * 8192 * 2 * 128 * 2
    assert line["mlp.experts"].held == 16 * 3 * 768 * 2048 * 2 + 128 * 2048 * 2
    # All heads, experts and the head are shared out; kv heads are held twice, table, router and norms by all.
    layer = 2048 * 4096 * 2 + 2 * 2048 * 1024 + 128 * 3 * 768 * 2048
    every = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048 + 151936 * 2048
    assert shown.total("held") == 2 * ((48 * layer + 151936 * 2048) / 8 + every)
    assert line["input_layernorm"].sent * 8 == 7 * (8 * 2048 * 2)


@pytest.mark.parametrize(
    "mesh", [{}, {"tp": 8, "ep": 8}, {"tp": 2, "dp": 4, "ep": 4, "moe_tp": 2}, {"tp": 2, "cp": 2}, {"dp": 2}]
)
@pytest.mark.parametrize("tokens", [0, 5000])
def test_lines_add_up_to_the_programs_prediction(mesh: dict[str, int], tokens: int) -> None:
    load = prefill_load(tokens) if tokens else decode_load(8, 8192)
    shown = explain_model(architecture_of(QWEN3_30B_A3B), make_mesh(**mesh), load)
    assert shown.total("seconds") == pytest.approx(shown.program.seconds, rel=1e-9)
    assert sum(len(section.layers) for section in shown.sections) == 48
    assert sum(section.times * len(section.lines) for section in shown.sections) == len(
        shown.program.instructions
    )
    assert text("it", shown).count("\n") > 10


def test_the_drawing_says_what_the_text_says(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "layer.svg"
    said = run(str(model), "--tp", "8", "--ep", "8", "--svg", str(file))
    assert f"drawn   {file}" in said.replace("\n", "")
    drawn = tree.fromstring(file.read_text())
    words = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    shown = explained(tp=8, ep=8)
    assert len([word for word in words if word == "all-reduce + add + norm"]) == sum(
        line.kind == "fused" for section in shown.sections for line in section.lines
    )
    assert "Layers 1-46 (46 alike)" in words
    assert not re.search(r"(href|src|url)\s*[=(]", file.read_text())


@pytest.mark.parametrize(
    ("ranks", "top_k", "tokens", "travels"),
    [(8, 8, 16384, 0), (8, 2, 4096, 47), (64, 8, 4096, 47), (64, 8, 0, 0)],
    ids=["as many experts as ranks", "few experts", "many ranks", "decode"],
)
def test_tokens_travel_where_that_pays(ranks: int, top_k: int, tokens: int, travels: int) -> None:
    """In all layers but the last, of which one token is sampled. In a decode step's graph they would have to
    go everywhere.
    """
    load = prefill_load(tokens) if tokens else decode_load(64, 8192)
    model = architecture_of(QWEN3_30B_A3B | {"num_experts_per_tok": top_k})
    shown = explain_model(model, make_mesh(dp=ranks, ep=ranks), load)
    assert sum(isinstance(one, Dispatch) for one in shown.program.instructions) == travels
    lines = [(section, line) for section in shown.sections for line in section.lines]
    found = [(section, line) for section, line in lines if line.kind == "dispatch"]
    assert sum(section.times for section, _ in found) == travels
    assert shown.total("seconds") == pytest.approx(shown.program.seconds, rel=1e-9)
    assert shown.between > 0.99 * sum(section.times * line.between for section, line in found)
    for _, line in found:
        # To and fro, of what a rank would have for itself, too.
        copies = min(top_k, ranks) * (ranks - 1) / ranks
        assert line.sent == pytest.approx(copies * (2 * 2 * 2048 + 8 * top_k))
        assert 0 < line.between < line.seconds
        assert line.held == 128 // ranks * 3 * 768 * 2048 * 2 + 128 * 2048 * 2
    assert (f"dispatch + combine over {ranks}: mlp.experts" in text("it", shown)) == bool(travels)
    assert ("dispatch + combine: mlp.experts" in svg("it", shown)) == bool(travels)
    tree.fromstring(svg("it", shown))


def test_a_drawing_escapes_names() -> None:
    tree.fromstring(svg('<model> & "others"', explained(tp=2)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "3"], "has 32 heads, which --tp 3 can't share out; take 1, 2, 4, 8, 16 or 32 for --tp"),
        (["--tp", "4", "--ep", "8"], "--ep 8 doesn't divide the 4 ranks of attention"),
        (["--dp", "64", "--ep", "64", "--moe-tp", "2"], "both share out the same ranks"),
    ],
)
def test_mistakes_say_what_to_change(model: Path, words: list[str], message: str) -> None:
    assert message in " ".join(run(str(model), *words).split())


def test_numbers_read_well() -> None:
    assert [size(value) for value in (0, 999, 9999, 99950, 1e6, 2.5e9)] == [
        "0 B", "999 B", "10 kB", "100 kB", "1 MB", "2.5 GB"
    ]  # fmt: skip
    assert [time(value) for value in (0, 2.04e-6, 9.996e-4, 0.012, 3)] == [
        "0", "2.04 us", "1 ms", "12 ms", "3 s"
    ]  # fmt: skip
