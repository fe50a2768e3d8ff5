"""Triton kernels are interpreted where there is no GPU; random cases draw one seed a session and print it. A
test that loses the GPU fails, those behind it in its process are skipped and name it.
"""

import random
from collections.abc import Generator, Iterator

import pytest
import torch

from quickturn_kernels import platform, registry
from quickturn_kernels.numerics.loss import LossWatch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

KEPT_MEMORY = 1 << 30
"""Bytes that PyTorch's allocator may keep from test to test."""

INTERPRETED = DEVICE.type == "cpu" and platform.has_triton()

if INTERPRETED:
    # Triton decides at import. Outside the tests of this folder the switch stays as it was: processes that
    # other tests start must not load Triton.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        registry.load(every_tier=True)
        platform.describe(DEVICE)


def _synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


LOSS = LossWatch(_synchronise)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-seed", type=int, help="seed of the random kernel tests (default: a new one)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--kernel-seed") is None:
        config.option.kernel_seed = random.SystemRandom().randrange(2**31)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    # Before the fixtures, which may want the device.
    if LOSS.culprit is not None:
        pytest.skip(f"the device was lost in {LOSS.culprit}")
    with LOSS.during(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with LOSS.during(item.nodeid):
        return (yield)


def pytest_report_header(config: pytest.Config) -> str:
    return f"kernel tests: --kernel-seed {config.option.kernel_seed}"


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    value: int = pytestconfig.option.kernel_seed
    print(f"--kernel-seed {value}")
    return value


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def large_memory_is_given_back() -> Iterator[None]:
    """Some tests want gigabytes of a device that other test processes use as well."""
    yield
    if LOSS.culprit is None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_MEMORY:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks again when it runs a kernel."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
