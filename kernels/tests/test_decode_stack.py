"""The decoder stack as one op: the reference against float32, and the persistent Hopper kernel, whose rows
must not know of each other.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels.numerics.decode_stack import (
    SHAPES,
    StackInputs,
    StackShape,
    random_inputs,
    random_stack,
    relative_error,
    widened,
)
from quickturn_kernels.ops.decode_stack.hopper_launch import SHARED_LIMIT, most_rows, shared_memory, sizes_of
from quickturn_kernels.ops.linear import LinearWeight

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
IDS = [shape.name for shape in SHAPES]


def made(shape: StackShape, seed: int, device: torch.device) -> tuple[kernels.DecoderStack, StackInputs]:
    generator = torch.Generator().manual_seed(seed)
    return random_stack(shape, generator, device), random_inputs(shape, generator, device)


def in_float32(stack: kernels.DecoderStack, inputs: StackInputs) -> Tensor:
    caches = [(k.float(), v.float()) for k, v in inputs.caches]
    with kernels.use(**{"*": "reference"}):
        return replace(inputs, x=inputs.x.float(), caches=caches).run(widened(stack))


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_reference_is_the_layers(shape: StackShape, device: torch.device, seed: int) -> None:
    stack, inputs = made(shape, seed, device)
    want = in_float32(stack, inputs)
    with kernels.use(**{"*": "reference"}):
        assert relative_error(want, inputs.run(stack)) < 3e-2


def test_sizes_decide_how_many_rows_the_kernel_takes(device: torch.device) -> None:
    stack, _ = made(SHAPES[0], 0, torch.device("cpu"))
    assert most_rows(stack) == 8
    assert most_rows(replace(stack, head_dim=64)) == 0
    assert most_rows(replace(stack, norm=stack.norm.float())) == 0
    packed = LinearWeight(stack.head.shape, stack.head.dtype, "other", stack.head.tensors)
    assert most_rows(replace(stack, head=packed)) == 0
    large = replace(sizes_of(stack), layers=36, hidden=4096, attended=4096, inner=12288)
    assert shared_memory(large, 4, 4) <= SHARED_LIMIT < shared_memory(large, 5, 4)


@needs_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_kernel_is_as_close_to_float32_as_its_parts(
    shape: StackShape, device: torch.device, seed: int
) -> None:
    stack, inputs = made(shape, seed, device)
    want = in_float32(stack, inputs)
    with kernels.use(decode_stack="reference"):
        parts = relative_error(want, inputs.run(stack))
    with kernels.use(decode_stack="hopper"):
        assert relative_error(want, inputs.run(stack)) < 1.3 * parts + 1e-3


@needs_hopper
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape.contexts) > 1])
def test_a_row_has_the_same_bits_alone_and_among_others(
    shape: StackShape, device: torch.device, seed: int
) -> None:
    stack, inputs = made(shape, seed, device)
    rows = len(shape.contexts)
    with kernels.use(decode_stack="hopper"):
        together = inputs.run(stack)
        for row in range(rows):
            assert torch.equal(inputs.rows(row, 1).run(stack)[0], together[row]), f"row {row}, seed {seed}"
        assert torch.equal(inputs.rows(1, rows - 1).run(stack), together[1:])


@needs_hopper
def test_replayed_for_other_contexts(device: torch.device, seed: int) -> None:
    stack, inputs = made(replace(SHAPES[1], layers=5, contexts=(1500, 1, 900, 64)), seed, device)
    with kernels.use(decode_stack="hopper"):
        want = inputs.run(stack)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = inputs.run(stack)
        for lens in ((1500, 1, 900, 64), (3, 0, 65, 1300), (0, 0, 0, 1), (1500, 1, 900, 64)):
            inputs.context_lens.copy_(torch.tensor(lens))
            want = inputs.run(stack)
            for _ in range(10):
                got.fill_(float("nan"))
                graph.replay()
                assert torch.equal(got, want), f"contexts {lens}, seed {seed}"


@needs_hopper
def test_the_first_call_is_not_captured(device: torch.device) -> None:
    stack, inputs = made(SHAPES[0], 1, device)
    graph = torch.cuda.CUDAGraph()
    with (
        kernels.use(decode_stack="hopper"),
        pytest.raises(RuntimeError, match="can't be captured"),
        torch.cuda.graph(graph),
    ):
        inputs.run(stack)
