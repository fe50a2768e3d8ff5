"""Whatever program is compiled, ranks that run it give one rank's logits: programs for any machine."""

from pathlib import Path

import pytest
from crew import Crew
from families import tolerance, write
from otherwise import programs_on, serve_on
from scripted import alone, compare

from quickturn.loading.checkpoint import read_config
from quickturn.models.registry import architecture_of
from quickturn.parallel.mesh import Mesh
from quickturn.parallel.program import Fused, Move

SEED = 5
CASES = {
    "llama-biases": [Mesh(tp=4, dense_tp=4, moe_tp=4), Mesh(tp=2, dp=2, dense_tp=4, moe_tp=4)],
    "gemma3": [Mesh(tp=2, cp=2, dense_tp=2, moe_tp=4)],
    "qwen3-moe-mixed": [Mesh(tp=2, dp=2, dense_tp=1, ep=4), Mesh(tp=4, dense_tp=2, moe_tp=2, ep=2)],
    "qwen3-next": [Mesh(tp=4, dense_tp=4, ep=4), Mesh(dp=4, moe_tp=2, ep=2)],
}
MACHINES = 3


def machines(path: str, mesh: Mesh) -> list[int]:
    """Machines whose programs differ from each other in what they move."""
    architecture = architecture_of(read_config(Path(path)))
    found: dict[frozenset[str], int] = {}
    for machine in range(12):
        kinds = {
            f"{one.kind} {one.tensor}" if isinstance(one, Move) else one.kind
            for program in programs_on(machine, architecture, mesh).programs
            for one in program.instructions
            if isinstance(one, Move | Fused)
        }
        found.setdefault(frozenset(kinds), machine)
    # The ones that move in the most ways.
    return [found[kinds] for kinds in sorted(found, key=lambda kinds: (-len(kinds), found[kinds]))][:MACHINES]


@pytest.mark.parametrize("option", CASES)
def test_every_program_gives_the_same(crew: Crew, option: str, tmp_path: Path) -> None:
    write(option, tmp_path)
    want = alone(str(tmp_path), SEED)
    for mesh in CASES[option]:
        for machine in machines(str(tmp_path), mesh):
            print(mesh, "machine", machine)
            got = crew.run(serve_on, machine, str(tmp_path), mesh, SEED)
            compare(want, got, mesh, tolerance(option))
