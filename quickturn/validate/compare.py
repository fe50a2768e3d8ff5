"""Two validations side by side: what one found and the other didn't, and figures that moved."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from quickturn.validate.report import Finding, Report

Kind = Literal["worse", "better", "moved", "only one", "bound"]

FASTER_IS_MORE = ("tokens_per_second", "roof_share")


@dataclass(frozen=True)
class Difference:
    """One line of a comparison. `bound`: code, machine or settings differ."""

    kind: Kind
    what: str
    before: str
    after: str


def compare(before: Report, after: Report, tolerance: float) -> Iterator[Difference]:
    """What differs; of speeds, what moved by more than the share `tolerance`."""
    yield from _bound(before, after)
    old = {(one.section, one.name): one for one in before.findings}
    new = {(one.section, one.name): one for one in after.findings}
    for key in dict.fromkeys((*old, *new)):
        name = f"{key[0]}: {key[1]}"
        if key not in old or key not in new:
            there = (_word(old.get(key)), _word(new.get(key)))
            # A check that failed on the one side, where the other has none of that name, isn't forgotten.
            kind: Kind = "worse" if "failed" in there[1] else "only one"
            yield Difference(kind, name, *there)
        elif old[key].status != new[key].status:
            yield Difference(_turn(old[key], new[key]), name, _word(old[key]), _word(new[key]))
        else:
            yield from _figures(name, old[key], new[key], tolerance)


def _turn(before: Finding, after: Finding) -> Kind:
    if after.status == "failed":
        return "worse"
    return "better" if before.status == "failed" and after.status == "passed" else "moved"


def _bound(before: Report, after: Report) -> Iterator[Difference]:
    pairs: tuple[tuple[str, Mapping[str, object], Mapping[str, object]], ...] = (
        ("settings", before.settings, after.settings),
        ("code", before.environment["code"], after.environment["code"]),
        ("versions", before.environment["versions"], after.environment["versions"]),
        ("device", before.environment["device"], after.environment["device"]),
    )
    for what, old, new in pairs:
        for key in dict.fromkeys((*old, *new)):
            if old.get(key) != new.get(key):
                yield Difference("bound", f"{what}: {key}", str(old.get(key)), str(new.get(key)))


def _figures(name: str, before: Finding, after: Finding, tolerance: float) -> Iterator[Difference]:
    if before.section != "performance":
        return
    for figure in before.figures.keys() & after.figures.keys():
        if not (figure in FASTER_IS_MORE or figure.endswith("median_ms")):
            continue
        old, new = before.figures[figure], after.figures[figure]
        change = new / old - 1 if old else 0.0
        if abs(change) > tolerance:
            better = (change > 0) == (figure in FASTER_IS_MORE)
            kind: Kind = "better" if better else "worse"
            yield Difference(kind, f"{name}: {figure}", f"{old:.4g}", f"{new:.4g} ({change:+.1%})")


def _word(finding: Finding | None) -> str:
    if finding is None:
        return "not there"
    return f"{finding.status} {finding.detail}".strip()[:160]
