"""Model files know nothing of ranks: how a model runs on several is not their business."""

import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

import quickturn

ROOT = Path(quickturn.__file__).parent
COMPILED = {"__init__", "base", "plan"}
"""The files of `models/` that turn declarations into what ranks run."""
SHARED = {"declare", "experts", "mixers"}
"""Declarations: they say what a rank's share of a step is."""

COLLECTIVES = r"collectives|communicator|all_reduce|all_gather|reduce_scatter|all_to_all|torch\.distributed"
RANKS = r"\b[Pp]lace\b|\bmesh|\brank|world_size|\bworld\b"


def code(file: Path) -> str:
    """Without comments and strings."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    return " ".join(token.string for token in tokens if token.type not in (tokenize.COMMENT, tokenize.STRING))


FILES = [file for file in sorted((ROOT / "models").glob("*.py")) if file.stem not in COMPILED]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_no_collective_and_no_rank(file: Path) -> None:
    words = COLLECTIVES if file.stem in SHARED else f"{COLLECTIVES}|{RANKS}"
    assert not re.findall(words, code(file))


def test_every_model_file_is_under_the_contract() -> None:
    """The list that `lint-imports` reads has no gap."""
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    listed = next(each for each in contracts if each["name"] == "models and layers know no collectives")
    assert {f"quickturn.models.{file.stem}" for file in FILES} == set(listed["source_modules"]) - {
        "quickturn.layers"
    }
