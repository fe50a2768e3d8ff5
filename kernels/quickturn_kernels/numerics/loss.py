"""Where a CUDA device was lost: after an illegal access every later call of the process fails as well."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DeviceLost(RuntimeError):
    """The device took an error during this test that nobody had looked for."""


class LossWatch:
    """Remembers the first test after which the device answered no more.

    synchronise: waits for the device, RuntimeError if it's lost.
    """

    def __init__(self, synchronise: Callable[[], None]) -> None:
        self.synchronise = synchronise
        self.culprit: str | None = None

    @contextmanager
    def during(self, test: str) -> Iterator[None]:
        """Around a test. DeviceLost if it left the device lost and didn't fail itself."""
        try:
            yield
        except KeyboardInterrupt:  # of a device that hangs
            raise
        except BaseException:
            self._lost_in(test)
            raise
        cause = self._lost_in(test)
        if cause is not None:
            raise DeviceLost(f"{test} left the device lost") from cause

    def _lost_in(self, test: str) -> RuntimeError | None:
        if self.culprit is not None:
            return None
        try:
            self.synchronise()
        except RuntimeError as error:
            self.culprit = test
            return error
        return None
