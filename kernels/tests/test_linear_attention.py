"""Linear attention: the reference against transformers' functions; how prompts may be cut and batched."""

import pytest
import torch
from torch import Generator, Tensor

from quickturn_kernels import (
    Boundaries,
    causal_conv1d,
    gated_delta_decode,
    gated_delta_prefill,
    gated_rms_norm,
    platform,
    registry,
    rms_norm,
    use,
)
from quickturn_kernels.registry import Signature

DEVICE = torch.device(platform.current().device)
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
HEAD_DIM = 128 if DEVICE.type == "cuda" else 32

modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

TOKENS, KEY_HEADS, HEADS, DIM = 150, 2, 4, 32


def inputs(seed: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    generator = Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": random(tokens, KEY_HEADS, DIM),
        "k": random(tokens, KEY_HEADS, DIM),
        "v": random(tokens, HEADS, DIM),
        "a": random(tokens, HEADS),
        "b": random(tokens, HEADS),
        "a_log": random(HEADS),
        "dt_bias": random(HEADS),
        "states": random(2, HEADS, DIM, DIM),
    }


def one_row(block_in: int, block_out: int) -> dict[str, Tensor]:
    return {
        "state_in": torch.tensor([block_in], dtype=torch.int32),
        "state_out": torch.tensor([block_out], dtype=torch.int32),
        "state_zero": torch.tensor([block_in < 0]),
    }


def theirs(given: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    g = -given["a_log"].exp() * torch.nn.functional.softplus(given["a"] + given["dt_bias"])
    # Some versions repeat the heads of q and k in this function, some before it.
    q, k = (given[name].repeat_interleave(HEADS // KEY_HEADS, dim=1) for name in ("q", "k"))
    out, last = modeling.torch_recurrent_gated_delta_rule(
        *(tensor[None] for tensor in (q, k, given["v"])),
        g=g[None],
        beta=given["b"].sigmoid()[None],
        initial_state=None if state is None else state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], last[0]


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("block_in", [-1, 0])
def test_prefill_is_transformers_recurrence(name: str, block_in: int, seed: int) -> None:
    given = inputs(seed)
    expected, last = theirs(given, None if block_in < 0 else given["states"][block_in])
    start = torch.tensor([0, TOKENS], dtype=torch.int32)
    with use(gated_delta_prefill=name):
        out = gated_delta_prefill(
            **given, **one_row(block_in, 1), query_start=start, max_query_len=TOKENS, scale=DIM**-0.5
        )
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(given["states"][1], last, rtol=2e-5, atol=2e-5)


def test_decode_is_one_token_of_it(seed: int) -> None:
    given = inputs(seed, tokens=1)
    expected, last = theirs(given, given["states"][0])
    out = gated_delta_decode(**given, **one_row(0, 0), scale=DIM**-0.5)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(given["states"][0], last, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_decay_of_each_channel_is_kimis(name: str, seed: int) -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    given = inputs(seed)
    generator = Generator().manual_seed(seed + 1)
    given["q"], given["k"] = (given[x].repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in "qk")
    given["a"] = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    given["dt_bias"] = torch.randn(HEADS, DIM, generator=generator)
    rate = given["a_log"].exp()[:, None]
    g = -rate * torch.nn.functional.softplus(given["a"] + given["dt_bias"])
    expected, last = kimi.recurrent_kimi_delta_attention(
        *(given[x][None] for x in ("q", "k", "v")),
        g=g[None],
        beta=given["b"].sigmoid()[None],
        initial_state=given["states"][:1],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    start = torch.tensor([0, TOKENS], dtype=torch.int32)
    with use(gated_delta_prefill=name):
        out = gated_delta_prefill(
            **given, **one_row(0, 1), query_start=start, max_query_len=TOKENS, scale=DIM**-0.5
        )
    torch.testing.assert_close(out, expected[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(given["states"][1], last[0], rtol=2e-5, atol=2e-5)


def test_convolution_is_transformers(seed: int) -> None:
    generator = Generator().manual_seed(seed)
    x, weight = torch.randn(TOKENS, 24, generator=generator), torch.randn(24, 4, generator=generator)
    states = torch.full((2, 24, 3), torch.nan)
    expected = modeling.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    for first, last in ((0, 1), (1, 3), (3, 100), (100, TOKENS)):
        start = torch.tensor([0, last - first], dtype=torch.int32)
        block = one_row(0 if first else -1, 0)
        out = causal_conv1d(
            x[first:last], weight, states, **block, query_start=start, max_query_len=last - first
        )
        torch.testing.assert_close(out, expected[first:last], rtol=2e-5, atol=2e-5)
    assert torch.equal(states[0], x[-3:].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_is_transformers(dtype: torch.dtype, seed: int) -> None:
    generator = Generator().manual_seed(seed)
    x, gate, weight = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((5, 3, 24), (5, 3, 24), (24,))
    )
    module = modeling.Qwen3NextRMSNormGated(24, eps=1e-5).to(dtype)
    module.weight.data.copy_(weight)
    with use(gated_rms_norm="reference"):
        out = gated_rms_norm(x, gate, weight, 1e-5)
    assert torch.equal(out, module(x, gate).detach())


def test_norm_with_a_wide_weight_is_transformers(seed: int) -> None:
    generator = Generator().manual_seed(seed)
    x = torch.randn(5, 24, generator=generator).bfloat16()
    module = modeling.Qwen3NextRMSNorm(24, eps=1e-5)
    module.weight.data.copy_(torch.randn(24, generator=generator))
    with use(rms_norm="reference"):
        assert torch.equal(rms_norm(x, 1 + module.weight.detach(), 1e-5), module(x).detach())


def implementations() -> list[str]:
    """Of prefill, on this machine."""
    signature = Signature(DEVICE, DTYPE, {"head_dim": HEAD_DIM, "channelwise": False})
    machine = platform.describe(DEVICE)
    found = registry.implementations("gated_delta_prefill")
    return [one.name for one in found if one.fits(signature) and one.platform.runs_on(machine)]


class Prompts:
    """Prompts one behind another, of which parts are run; row r's states are blocks r and r + rows."""

    def __init__(self, lengths: tuple[int, ...], seed: int) -> None:
        generator = Generator().manual_seed(seed)
        tokens = sum(lengths)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DTYPE).to(DEVICE)

        self.first = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self.tensors = {"q": random(tokens, 2, HEAD_DIM), "k": random(tokens, 2, HEAD_DIM)}
        self.tensors |= {"v": random(tokens, 4, HEAD_DIM), "a": random(tokens, 4), "b": random(tokens, 4)}
        self.gates = {"a_log": random(4).float() - 2, "dt_bias": random(4).float()}
        self.states = torch.full((2 * len(lengths), 4, HEAD_DIM, HEAD_DIM), torch.nan, device=DEVICE)

    def run(self, parts: list[tuple[int, int, int]], boundaries: Boundaries | None = None) -> Tensor:
        """Tokens begin .. end of each (row, begin, end), going on from where the row is if begin > 0."""
        whole = torch.cat(
            [torch.arange(self.first[row] + begin, self.first[row] + end) for row, begin, end in parts]
        )
        lengths = [end - begin for _, begin, end in parts]
        blocks = integers([row for row, _, _ in parts])
        return gated_delta_prefill(
            **{name: tensor[whole.to(DEVICE)] for name, tensor in self.tensors.items()},
            **self.gates,
            states=self.states,
            state_in=blocks,
            state_out=blocks,
            state_zero=torch.tensor([begin == 0 for _, begin, _ in parts], device=DEVICE),
            query_start=integers(torch.tensor([0, *lengths]).cumsum(0).tolist()),
            max_query_len=max(lengths),
            scale=HEAD_DIM**-0.5,
            context_lens=integers([end for _, _, end in parts]),
            boundaries=boundaries,
        )


def exactly(name: str) -> dict[str, float]:
    """Tolerances that ask for the same bits, but of PyTorch: its vector and scalar functions differ in the
    last one, and which of them an element gets depends on where it lies. That comes to 5e-7 in one of
    hundreds.
    """
    return dict.fromkeys(("rtol", "atol"), 1e-5 if name in ("reference", "torch") else 0.0)


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("name", implementations())
def test_cut_at_the_grid_changes_no_bit(name: str, seed: int) -> None:
    prompts = Prompts((200,), seed)
    with use(gated_delta_prefill=name):
        whole, state = prompts.run([(0, 0, 200)]), prompts.states[0].clone()
        parts = [prompts.run([(0, begin, end)]) for begin, end in ((0, 64), (64, 192), (192, 200))]
    torch.testing.assert_close(torch.cat(parts), whole, **exactly(name))
    torch.testing.assert_close(prompts.states[0], state, **exactly(name))


@pytest.mark.parametrize("name", implementations())
def test_grid_is_of_positions(name: str, seed: int) -> None:
    prompts = Prompts((150,), seed)
    with use(gated_delta_prefill=name):
        prompts.run([(0, 0, 30)])
        begun = prompts.states[0].clone()
        whole, state = prompts.run([(0, 30, 150)]), prompts.states[0].clone()
        prompts.states[0] = begun
        parts = [prompts.run([(0, begin, end)]) for begin, end in ((30, 64), (64, 150))]
    torch.testing.assert_close(torch.cat(parts), whole, **exactly(name))
    torch.testing.assert_close(prompts.states[0], state, **exactly(name))


@pytest.mark.parametrize("name", implementations())
def test_cut_elsewhere_changes_little(name: str, seed: int) -> None:
    prompts = Prompts((200,), seed)
    tolerance = 2e-2 if DEVICE.type == "cuda" else 2e-5
    with use(gated_delta_prefill=name):
        whole, state = prompts.run([(0, 0, 200)]), prompts.states[0].clone()
        parts = [prompts.run([(0, begin, end)]) for begin, end in ((0, 1), (1, 70), (70, 200))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(prompts.states[0], state, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", implementations())
def test_row_depends_on_no_other(name: str, seed: int) -> None:
    prompts = Prompts((70, 129, 3), seed)
    for tensor in prompts.tensors.values():
        tensor[:70] = torch.nan
    with use(gated_delta_prefill=name):
        alone, state = prompts.run([(1, 0, 129)]), prompts.states[1].clone()
        beside = prompts.run([(0, 0, 70), (1, 0, 129), (2, 0, 3)])
    torch.testing.assert_close(beside[70:199], alone, **exactly(name))
    torch.testing.assert_close(prompts.states[1], state, **exactly(name))


@pytest.mark.parametrize("name", implementations())
def test_kept_state_is_that_of_a_shorter_prompt(name: str, seed: int) -> None:
    prompts = Prompts((150,), seed)
    with use(gated_delta_prefill=name):
        prompts.run([(0, 0, 150)], Boundaries(integers([0, 1]), integers([128]), integers([1])))
        prompts.run([(0, 0, 128)])
    torch.testing.assert_close(prompts.states[0], prompts.states[1], **exactly(name))


def named(op: str) -> list[str]:
    """Implementations of an op that run here on these cases."""
    signature = Signature(
        DEVICE,
        DTYPE,
        {"head_dim": HEAD_DIM, "channelwise": False, "width": 4 if op == "causal_conv1d" else 0},
    )
    machine = platform.describe(DEVICE)
    found = registry.implementations(op)
    return [one.name for one in found if one.fits(signature) and one.platform.runs_on(machine)]


@pytest.fixture(scope="module")
def distant() -> Tensor:
    """Memory for blocks 2^30 elements apart, of which little is ever touched."""
    return torch.empty((2 << 30) + (1 << 20), dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op in ("gated_delta_prefill", "gated_delta_decode") for name in named(op)],
)
def test_states_may_lie_far_apart(op: str, name: str, distant: Tensor, seed: int) -> None:
    prompts = Prompts((70 if op == "gated_delta_prefill" else 1,), seed)
    size = prompts.states.shape[1:]
    state = torch.randn(size, generator=Generator().manual_seed(seed)).bfloat16().to(DEVICE)
    near = torch.zeros((3, *size), dtype=torch.bfloat16, device=DEVICE)
    far = distant.as_strided((3, *size), (1 << 30, *near.stride()[1:]))
    found = []
    for states in (near, far):
        states[2] = state
        given = {**prompts.tensors, **prompts.gates, **one_row(2, 0), "states": states, "scale": 0.1}
        given = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in given.items()}
        with use(**{op: name}):
            if op == "gated_delta_prefill":
                starts = integers([0, 70])
                out = gated_delta_prefill(**given, query_start=starts, max_query_len=70)
            else:
                out = gated_delta_decode(**given)
        found.append((out, states[0].clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", named("causal_conv1d"))
def test_convolution_states_may_lie_far_apart(name: str, distant: Tensor, seed: int) -> None:
    generator = Generator().manual_seed(seed)
    x, weight, state = (
        torch.randn(size, generator=generator).bfloat16().to(DEVICE) for size in ((5, 16), (16, 4), (16, 3))
    )
    near = torch.zeros((3, 16, 3), dtype=torch.bfloat16, device=DEVICE)
    far = distant.as_strided((3, 16, 3), (1 << 30, 3, 1))
    found = []
    for states in (near, far):
        states[2] = state
        places = {key: value.to(DEVICE) for key, value in one_row(2, 0).items()}
        with use(causal_conv1d=name):
            out = causal_conv1d(x, weight, states, **places, query_start=integers([0, 5]), max_query_len=5)
        found.append((out, states[0].clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
