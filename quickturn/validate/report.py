"""What a validation found, and what it was bound to."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FORMAT = 1

Status = Literal["passed", "failed", "absent"]
"""`absent`: there was nothing to check, or no way to check it here; `detail` says why."""

Section = Literal["numerics", "repeats", "paths", "parity", "features", "performance"]


@dataclass(frozen=True)
class Finding:
    """One check. `figures` are numbers that two runs can be compared by, with their unit in the name."""

    section: Section
    name: str
    status: Status
    detail: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything that a run found.

    settings: what was asked for, enough to run it again. environment: code, machine and versions. paths:
    calls by "op=implementation", and steps by "step=kind", of the runs that the checks made.
    """

    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    findings: Sequence[Finding]
    paths: Mapping[str, int]
    format: int = FORMAT

    @property
    def failed(self) -> list[Finding]:
        """The checks that failed."""
        return [finding for finding in self.findings if finding.status == "failed"]

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return asdict(self)


def from_json(data: Mapping[str, Any]) -> Report:
    """The report that `to_json` made. Raises ValueError if it is none, or of another format."""
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"the report has format {data['format']}, this version reads {FORMAT}")
        findings = [Finding(**finding) for finding in data["findings"]]
        return Report(data["settings"], data["environment"], findings, data["paths"], data["format"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a validation report: {error!r}") from error
