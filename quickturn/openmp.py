"""How long OpenMP's threads spin at a barrier before they sleep. Imports nothing that could load OpenMP.

libgomp's default is to spin for milliseconds: on a machine whose cores do anything else, each barrier then
waits for a thread that the system has put aside in favour of a spinning one. It reads its settings when it is
loaded, so they have to be in the environment before torch is imported.
"""

from collections.abc import Mapping, MutableMapping

SPIN_COUNT = "4000"
"""Longer than most gaps between the operations of a decode step. On two quiet cores a step took no longer
than with the default, where 2000 cost a fifth and sleeping at once half as much again; beside six other
processes it took a tenth of what the default made of it, and longer spins cost more.
"""

_ASKED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def with_short_spins(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environment` for a new process, with short spins unless the user set how threads wait."""
    changed = dict(environment)
    set_short_spins(changed)
    return changed


def set_short_spins(environment: MutableMapping[str, str]) -> None:
    """Ask for short spins in `environment`, unless the user set how threads wait."""
    if not any(name in environment for name in _ASKED):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
