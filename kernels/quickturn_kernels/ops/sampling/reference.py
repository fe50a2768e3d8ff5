"""Sampling in plain PyTorch, by a full sort."""

import torch
from torch import Tensor

from quickturn_kernels.ops.sampling import GREEDY_BELOW, IN_PROMPT, Sampled, SamplingTensors
from quickturn_kernels.ops.sampling.noise import gumbel
from quickturn_kernels.registry import Priority, register


@register("sample", name="reference", priority=Priority.REFERENCE)
def sample(logits: Tensor, params: SamplingTensors, num_logprobs: int | None) -> Sampled:
    """See `quickturn_kernels.sample`."""
    adjusted = adjust(logits, params)
    best, greedy = adjusted.max(dim=-1)
    tokens = greedy
    if not params.all_greedy:
        scores = noisy(adjusted, params)
        if not params.no_filters:
            scores = scores.masked_fill(~kept(adjusted, best, params), float("-inf"))
        tokens = torch.where(params.temperature < GREEDY_BELOW, greedy, scores.argmax(-1))
    usable = torch.isfinite(best) & torch.isfinite(logits.amax(dim=-1))
    tokens = torch.where(usable, tokens, -1)
    return with_logprobs(logits, tokens, num_logprobs)


def adjust(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Penalties, bias and bitmask: a new float32 [R, V]."""
    result = logits.float().clone()
    if params.counts is not None:
        assert params.presence is not None
        assert params.frequency is not None
        assert params.repetition is not None
        counts = params.counts if params.count_rows is None else params.counts[params.count_rows]
        repetition = params.repetition[:, None]
        penalised = torch.where(result > 0, result / repetition, result * repetition)
        result = torch.where(counts != 0, penalised, result)
        generated = counts & (IN_PROMPT - 1)
        result -= params.frequency[:, None] * generated + params.presence[:, None] * (generated > 0)
    if params.bias_ids is not None:
        assert params.bias_values is not None
        used = params.bias_ids >= 0
        result.scatter_add_(1, params.bias_ids.where(used, 0).long(), params.bias_values.where(used, 0.0))
    if params.bitmask is not None:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = ((params.bitmask[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
        result = result.masked_fill(allowed == 0, float("-inf"))
    return result


def with_logprobs(logits: Tensor, tokens: Tensor, num_logprobs: int | None) -> Sampled:
    """Add the log-probabilities that were asked for. logits: [R, V] raw; tokens: [R] int64."""
    if num_logprobs is None:
        return Sampled(tokens)
    raw = logits.float()
    normaliser = raw.logsumexp(-1, keepdim=True)
    chosen = (raw.gather(1, tokens.clamp(min=0)[:, None]) - normaliser)[:, 0]
    if num_logprobs == 0:
        return Sampled(tokens, chosen)
    top = raw.topk(num_logprobs, dim=-1)
    return Sampled(tokens, chosen, top.indices, top.values - normaliser)


def noisy(adjusted: Tensor, params: SamplingTensors) -> Tensor:
    """logits / temperature + noise: [R, V] float32, whose largest element is a draw from the softmax."""
    temperature = params.temperature.clamp(min=GREEDY_BELOW)[:, None]
    return adjusted / temperature + gumbel(params.seeds, params.positions, adjusted.shape[1])


def kept(adjusted: Tensor, best: Tensor, params: SamplingTensors) -> Tensor:
    """What the filters leave: bool [R, V]; best: [R] largest logits."""
    temperature = params.temperature.clamp(min=GREEDY_BELOW)[:, None]
    weights = ((adjusted - best[:, None]) / temperature).double().exp()
    return weights >= floors(weights, params)


def floors(weights: Tensor, params: SamplingTensors) -> Tensor:
    """The least weight that top-k, then top-p, then min-p keep: [R, 1]. weights: [R, V] float64, the largest
    of a row is 1.
    """
    vocabulary = weights.shape[1]
    ordered = weights.sort(dim=-1, descending=True).values
    k = torch.where(params.top_k > 0, params.top_k, vocabulary).clamp(max=vocabulary).long()[:, None]
    least = ordered.gather(1, k - 1)
    ordered = ordered.where(ordered >= least, 0.0)
    cumulative = ordered.cumsum(-1)
    wanted = params.top_p.double()[:, None] * cumulative[:, -1:]
    reached = (cumulative < wanted).sum(-1, keepdim=True).clamp(max=vocabulary - 1)
    nucleus = torch.where(params.top_p[:, None] < 1.0, ordered.gather(1, reached), 0.0)
    return torch.maximum(torch.maximum(least, nucleus), params.min_p.double()[:, None])
