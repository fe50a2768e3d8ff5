"""The first test that loses the device is the one that fails, whether it noticed or not."""

import pytest

from quickturn_kernels.numerics.loss import DeviceLost, LossWatch


class Device:
    lost = False

    def synchronise(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_loss_that_nobody_saw_fails_its_test() -> None:
    device = Device()
    watch = LossWatch(device.synchronise)
    with watch.during("fine"):
        pass
    assert watch.culprit is None
    with pytest.raises(DeviceLost, match="first left"), watch.during("first"):
        device.lost = True
    assert watch.culprit == "first"
    with watch.during("second"):
        pass
    assert watch.culprit == "first"


def test_a_test_that_fails_by_it_keeps_its_own_error() -> None:
    device = Device()
    watch = LossWatch(device.synchronise)
    for name, lost in (("other", False), ("first", True)):
        device.lost = lost
        with pytest.raises(ValueError, match="mine"), watch.during(name):
            raise ValueError("mine")
        assert watch.culprit == (name if lost else None)
