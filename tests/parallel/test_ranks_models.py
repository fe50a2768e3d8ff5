"""Every family on several ranks against one: the same logits, the same greedy tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
from crew import Crew
from scripted import Served, alone, compare, serve
from tiny import OPTIONS, random_checkpoint

from quickturn.parallel.mesh import make_mesh

MESHES = {
    "tp2": make_mesh(tp=2),
    "tp4": make_mesh(tp=4),
    "dp2": make_mesh(dp=2),
    "tp2dp2": make_mesh(tp=2, dp=2),
    "dp4": make_mesh(dp=4),
    "dense1": make_mesh(tp=2, dense_tp=1),
}
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]

Checkpoint = Callable[[str], tuple[str, Served]]
SEED = 5


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Where a tiny model lies, and what one rank makes of the script."""
    made: dict[str, tuple[str, Served]] = {}

    def make(option: str) -> tuple[str, Served]:
        if option not in made:
            directory: Path = tmp_path_factory.mktemp(option)
            random_checkpoint(*OPTIONS[option]).save_pretrained(directory)
            made[option] = str(directory), alone(str(directory), SEED)
        return made[option]

    return make


@pytest.mark.parametrize("option", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_family_on_a_mesh(crew: Crew, checkpoint: Checkpoint, option: str, mesh: str) -> None:
    path, want = checkpoint(option)
    compare(want, crew.run(serve, path, MESHES[mesh], SEED), MESHES[mesh], 2e-4)
