import random
from collections.abc import Iterator

import pytest
import torch
from crew import Crew


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are no faster on two threads, and far slower if the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Four ranks for all tests of the session."""
    made = Crew(4, tmp_path_factory.mktemp("crew"))
    yield made
    made.close()


@pytest.fixture
def seed() -> int:
    """Of random cases; printed, so that a failure can be seen again."""
    chosen = random.SystemRandom().randrange(1 << 16)
    print(f"seed {chosen}")
    return chosen
