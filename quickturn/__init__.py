"""Quickturn: an inference engine for agents. `LLM` is the offline door; `quickturn serve` the online one."""

from typing import TYPE_CHECKING

from quickturn.version import __version__

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from quickturn.config import EngineConfig
    from quickturn.engine.llm import LLM
    from quickturn.sampling_params import SamplingParams


def __getattr__(name: str) -> object:
    """Load the public names on first use, so that `import quickturn` costs nothing."""
    if name == "LLM":
        _prepare_openmp()
        from quickturn.engine.llm import LLM

        return LLM
    if name == "EngineConfig":
        from quickturn.config import EngineConfig

        return EngineConfig
    if name == "SamplingParams":
        from quickturn.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'quickturn' has no attribute {name!r}")


def _prepare_openmp() -> None:
    import os
    import sys

    from quickturn.openmp import set_short_spins

    if "torch" not in sys.modules:
        set_short_spins(os.environ)
