"""Which sessions a run holds: recorded or synthetic ones, to scale, each run with a text of its own."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quickturn.bench.agent import synthetic, traces
from quickturn.bench.agent.run import Pace
from quickturn.bench.agent.sessions import Session, prepared, repeated, salted
from quickturn.bench.agent.synthetic import Shape


@dataclass(frozen=True)
class Load:
    """`trace`: recorded sessions; '' for synthetic ones of `shape`. `sessions`: how many in all; 0 for those
    of the trace. `scale` multiplies prompts, `answer_scale` answers; `max_turns` of a session, and `context`
    tokens of prompt and answer, cut it. Runs of one `seed` say the same; runs of different ones share nothing
    that a server could still have in its cache.
    """

    sessions: int
    seed: int
    trace: str = ""
    shape: Shape = field(default_factory=Shape)
    scale: float = 1.0
    answer_scale: float = 1.0
    max_turns: int | None = None
    context: int | None = None

    def make(self) -> list[Session]:
        """The sessions. Raises ValueError, saying what to change."""
        if self.sessions < 0 or (not self.sessions and not self.trace):
            raise ValueError(f"there must be at least 1 session, got {self.sessions}")
        recorded = traces.read(Path(self.trace)) if self.trace else None
        found = synthetic.sessions(self.shape, self.sessions) if recorded is None else recorded
        made = prepared(
            found,
            scale=self.scale,
            answer_scale=self.answer_scale,
            turns=self.max_turns,
            context=self.context,
        )
        return [salted(session, str(self.seed)) for session in repeated(made, self.sessions or len(made))]

    def facts(self) -> dict[str, Any]:
        """For the result file."""
        facts = asdict(self)
        if self.trace:
            del facts["shape"]
            facts["trace"] = Path(self.trace).name
        return {"source": "trace" if self.trace else "synthetic", **facts}


def describe(pace: Pace, sessions: Sequence[Session], source: dict[str, Any]) -> dict[str, Any]:
    """The load, for the result file: `source` says where the sessions are from."""
    turns = [turn for session in sessions for turn in session.turns]
    limits = asdict(pace) | {"limit": None if pace.limit == float("inf") else pace.limit}
    return {
        **source,
        **limits,
        "sessions": len(sessions),
        "turns": len(turns),
        "asked_prompt_tokens": sum(turn.prompt for turn in turns),
        "asked_answer_tokens": sum(turn.answer for turn in turns),
        "longest_prompt": max(turn.prompt for turn in turns),
    }
