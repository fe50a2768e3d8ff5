"""Every family on several ranks against one: the same logits, the same greedy tokens.

`python tests/parallel/every_mesh.py` does this for every option of the tiny models on every mesh of one, two
and four ranks, and prints what differs by how much.
"""

from collections.abc import Callable

import pytest
from crew import Crew
from families import tolerance, write
from scripted import Served, alone, compare, serve

from quickturn.parallel.mesh import make_mesh

MESHES = {
    "tp2": make_mesh(tp=2),
    "tp4": make_mesh(tp=4),
    "dp2": make_mesh(dp=2),
    "dp4": make_mesh(dp=4, ep=4),
    "cp2": make_mesh(cp=2, ep=2),
    "tp2dp2": make_mesh(tp=2, dp=2, ep=2),
    "tp2cp2": make_mesh(tp=2, cp=2, ep=4),
    "dp2cp2": make_mesh(dp=2, cp=2, dense_tp=4),
    "tp4, dense alone": make_mesh(tp=4, dense_tp=1, ep=4),
    "dp2, dense over both": make_mesh(dp=2, dense_tp=2, ep=2),
}
CASES = {
    "llama": ("tp2", "tp4", "dp4", "tp2cp2", "dp2, dense over both"),
    "llama-head-dim": ("tp4", "dp2cp2"),
    "llama-tied": ("tp2dp2",),
    "llama-biases": ("tp2", "tp4, dense alone"),
    "qwen2-window": ("tp2", "cp2", "tp2dp2"),
    "qwen3": ("tp4", "cp2"),
    "gemma3-softcap": ("tp4", "tp2cp2", "dp2cp2"),
    "qwen3-moe": ("tp2", "tp2dp2", "tp2cp2", "dp4", "tp4, dense alone"),
    "qwen3-next": ("tp4", "tp2dp2", "tp2cp2", "dp2, dense over both"),
    "qwen3.5": ("tp2", "dp2", "cp2"),
    "qwen3.5-moe": ("tp4, dense alone", "dp2cp2"),
    "gpt-oss": ("tp4", "cp2", "tp2dp2", "tp2cp2", "dp4"),
}

Checkpoint = Callable[[str], tuple[str, Served]]
SEED = 5


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Where a tiny model lies, and what one rank makes of the script."""
    made: dict[str, tuple[str, Served]] = {}

    def make(option: str) -> tuple[str, Served]:
        if option not in made:
            directory = tmp_path_factory.mktemp(option)
            write(option, directory)
            made[option] = str(directory), alone(str(directory), SEED)
        return made[option]

    return make


@pytest.mark.parametrize(("option", "mesh"), [(option, mesh) for option in CASES for mesh in CASES[option]])
def test_a_family_on_a_mesh(crew: Crew, checkpoint: Checkpoint, option: str, mesh: str) -> None:
    path, want = checkpoint(option)
    compare(want, crew.run(serve, path, MESHES[mesh], SEED), MESHES[mesh], tolerance(option))
