"""Fixtures: a model without weights, and servers over it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Served, start_server, stop_server
from tiny_text import write_tiny_text


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_text(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    """One server for all tests of a module that leave it whole."""
    server = start_server(tiny_model)
    yield server
    stop_server(server)


@pytest.fixture
def own_server(tiny_model: Path) -> Iterator[Callable[..., Served]]:
    """Makes servers that a test may break."""
    servers: list[Served] = []

    def make(**options: Any) -> Served:
        servers.append(start_server(tiny_model, **options))
        return servers[-1]

    yield make
    for server in servers:
        stop_server(server)
