"""Serving with programs that are the cheapest ones on some other machine, so that ranks run what this one's
costs would never choose.
"""

from unittest import mock

import numpy as np
from numpy_ranks import random_hardware
from scripted import Served, serve

from quickturn.models.base import Architecture, tail_of
from quickturn.models.plan import ops_of
from quickturn.parallel.compile import compile_programs
from quickturn.parallel.mesh import Mesh
from quickturn.parallel.program import Programs


def programs_on(machine: int, architecture: Architecture, mesh: Mesh) -> Programs:
    """The programs for a machine of random rates."""
    hardware = random_hardware(np.random.default_rng(machine))
    return compile_programs(ops_of(architecture, mesh), tail_of(architecture.declarations()), mesh, hardware)


def serve_on(rank: int, machine: int, path: str, mesh: Mesh, seed: int) -> Served | None:
    """As `serve`, with the programs for that machine."""
    with mock.patch(
        "quickturn.loading.load.programs_of",
        lambda architecture, mesh: programs_on(machine, architecture, mesh),
    ):
        return serve(rank, path, mesh, seed)
