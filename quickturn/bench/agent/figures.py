"""From records to figures. Everything is computed here, in one place, for servers and for the engine alone.

- A user's tokens a second is that of one answer behind its first arrival.
- A gap is the time between two arrivals, as a reader waits for it, however many tokens the second one brings.
- Rates per GPU count the whole run, and again the part of it in which all users were at work ("full").
- Requests that failed count in `errors` and nowhere else.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from quickturn.bench.agent.records import Record
from quickturn.bench.agent.run import Run

Figures = dict[str, Any]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float] | None:
    """Median, 10th, 90th and 99th percentile (linear between neighbours), least and most; None of none."""
    if not values:
        return None
    array = np.array(values, dtype=np.float64)
    p10, median, p90, p99 = np.percentile(array, (10, 50, 90, 99))
    named = {"median": median, "p10": p10, "p90": p90, "p99": p99, "least": array.min(), "most": array.max()}
    return {name: round(float(value), digits) for name, value in named.items()}


def figures(run: Run, gpus: int, promise: float = 0.0) -> Figures:
    """All figures of a run on `gpus` GPUs; `promise` are the tokens a second that each user was promised."""
    good = [record for record in run.records if not record.error]
    rates = [record.rate for record in good if record.rate is not None]
    gaps = [gap * 1e3 for record in good for gap in record.gaps()]
    firsts = [[], []]  # type: list[list[float]]
    for record in good:
        if record.first_token is not None:
            firsts[record.turn > 0].append(record.first_token * 1e3)
    arrivals = sum(len(record.arrivals) for record in good)
    tokens = sum(record.answer for record in good)
    return {
        "requests": len(good),
        "seconds": round(run.seconds, 3),
        "user_tokens_per_second": spread(rates, 2),
        "gap_ms": spread(gaps),
        "first_token_ms": {"first_turn": spread(firsts[0], 1), "later_turns": spread(firsts[1], 1)},
        "promise": _promise(rates, promise),
        "tokens": _tokens(good),
        "cache": _cache(good),
        "per_gpu": _rates(good, run.seconds, gpus),
        "full": {
            "seconds": round(run.full_until, 3),
            "per_gpu": _rates(good, run.full_until, gpus, until=run.full_until),
        },
        "tokens_per_arrival": round(tokens / arrivals, 3) if arrivals else None,
        "exact_counts": all(record.exact_counts for record in good),
        "short_answers": sum(record.answer < record.asked for record in good),
        "errors": dict(Counter(record.error for record in run.records if record.error)),
        "error_examples": _examples(run.records),
        "sessions_given_up": run.given_up,
        "turns_left_out": run.left_out,
    }


def _tokens(good: Sequence[Record]) -> Figures:
    return {
        "prompt": None if _unknown(good, "prompt") else sum(record.prompt or 0 for record in good),
        "cached": None if _unknown(good, "cached") else sum(record.cached or 0 for record in good),
        "answer": sum(record.answer for record in good),
        "ceiling": sum(record.ceiling for record in good),
    }


def _cache(good: Sequence[Record]) -> Figures:
    """Cached over ceiling, in all and for the worst session; None where the server doesn't say."""
    tokens = _tokens(good)
    if tokens["cached"] is None or tokens["prompt"] is None:
        return {"known": False, "cached_over_ceiling": None, "least_session": None, "hit_rate": None}
    sessions: dict[str, list[Record]] = {}
    for record in good:
        sessions.setdefault(record.session, []).append(record)
    ratios = [_ratio(records) for records in sessions.values()]
    known = [ratio for ratio in ratios if ratio is not None]
    return {
        "known": True,
        "cached_over_ceiling": _ratio(good),
        "least_session": min(known, default=None),
        "hit_rate": round(tokens["cached"] / tokens["prompt"], 4) if tokens["prompt"] else None,
    }


def _ratio(records: Sequence[Record]) -> float | None:
    most = sum(record.ceiling for record in records)
    return round(sum(record.cached or 0 for record in records) / most, 4) if most else None


def _rates(good: Sequence[Record], seconds: float, gpus: int, until: float = float("inf")) -> Figures:
    """Tokens a second for each GPU. Prompts count when their first token comes."""
    if seconds <= 0:
        return {"answer": 0.0, "new_prompt": None, "cached_prompt": None}
    prompts = [record for record in good if record.arrivals and record.arrivals[0] <= until]
    answered = 0
    for record in good:
        answered += sum(
            count for at, count in zip(record.arrivals, record.counts, strict=True) if at <= until
        )
    share = seconds * gpus
    rates: Figures = {"answer": round(answered / share, 2), "new_prompt": None, "cached_prompt": None}
    if not _unknown(good, "prompt") and not _unknown(good, "cached"):
        cached = sum(record.cached or 0 for record in prompts)
        total = sum(record.prompt or 0 for record in prompts)
        rates |= {"new_prompt": round((total - cached) / share, 2), "cached_prompt": round(cached / share, 2)}
    return rates


def _unknown(good: Sequence[Record], field: str) -> bool:
    return any(getattr(record, field) is None for record in good)


def _promise(rates: Sequence[float], promise: float) -> Figures | None:
    if not promise or not rates:
        return None
    return {
        "tokens_per_second": promise,
        "kept": round(sum(rate >= promise for rate in rates) / len(rates), 4),
    }


def _examples(records: Sequence[Record]) -> dict[str, str]:
    """One message for each kind of error."""
    return {record.error: record.detail for record in records if record.error}


def over_time(run: Run, buckets: int = 100) -> Figures:
    """Gaps and rates by time, for plots: `bucket` seconds each, gaps as p50 and p99 of those that ended in it
    (None of none), answer tokens a second of all users.
    """
    width = max(run.seconds / buckets, 1e-3)
    gaps: list[list[float]] = [[] for _ in range(buckets)]
    tokens = [0] * buckets
    for record in run.records:
        if record.error:
            continue
        for at, count in zip(record.arrivals, record.counts, strict=True):
            tokens[min(buckets - 1, max(0, int(at / width)))] += count
        for at, gap in zip(record.arrivals[1:], record.gaps(), strict=True):
            gaps[min(buckets - 1, max(0, int(at / width)))].append(gap * 1e3)
    return {
        "bucket": round(width, 4),
        "gap_ms_p50": [_percentile(some, 50) for some in gaps],
        "gap_ms_p99": [_percentile(some, 99) for some in gaps],
        "answer_tokens_per_second": [round(count / width, 1) for count in tokens],
    }


def _percentile(values: list[float], share: float) -> float | None:
    return round(float(np.percentile(values, share)), 2) if values else None
