import random
from collections.abc import Iterator

import pytest
from crew import Crew
from threads import one_thread as one_thread


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
