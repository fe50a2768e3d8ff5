"""Replay recorded agent sessions through the whole engine: a tiny hybrid model with random weights.

    python benchmarks/engine_replay.py TRACES --json benchmarks/results/engine_replay.json

All sessions start at once; each request is sent when the one before it was answered (think times are left
out). What is printed is cached / ceiling: prompt tokens that were not computed again over those that an
infinite cache would have had. What decides that is how large a state is beside a token of keys and values:
as much as 3,150 tokens here, as in a large hybrid.

The working set is, summed over the sessions, room for the largest context and five states (see
`control_replay.py`).
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from control_replay import UNIT, Session, load

from quickturn.cache.layout import CacheDtypes, plan_arena
from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore
from quickturn.engine.messages import AddRequest, HoldSession
from quickturn.models.registry import architecture_of
from quickturn.sampling_params import SamplingParams

STATES_A_SESSION = 5
HOLD_S = 300.0
VOCAB = 4096
"""Traces are replayed as ids below this: 64 of them tell any two blocks apart."""

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1 << 17,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}


class Replay:
    """All sessions on one engine."""

    def __init__(self, sessions: list[Session], share: float, device: str, most_answer: int) -> None:
        """The cache holds `share` of the working set; answers are cut to `most_answer` tokens."""
        self.sessions = sessions
        self.most_answer = most_answer
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            config = EngineConfig(
                folder,
                dtype="float32",
                device=device,
                load_format="dummy",
                memory=max(1 << 20, int(share * working_set(sessions))),
                max_requests=64,
                max_step_tokens=4096,
            )
            self.core = EngineCore(config)
        self.ids = itertools.count(1)
        self.owner: dict[int, Session] = {}

    def run(self) -> None:
        """To the end of all sessions."""
        for session in self.sessions:
            self.send(session)
        while self.core.has_work():
            for output in self.core.step().outputs:
                session = self.owner[output.id]
                if output.cached_tokens >= 0:
                    session.cached += output.cached_tokens
                if output.finish:
                    if output.finish != "length":
                        raise RuntimeError(f"{session.name}: {output}")
                    if session.turns[session.at].stop == "tool_use":
                        self.core.hold(HoldSession(session.name, HOLD_S))
                    session.at += 1
                    if session.at < len(session.turns):
                        self.send(session)

    def send(self, session: Session) -> None:
        """The session's next request."""
        turn = session.turns[session.at]
        number = next(self.ids)
        self.owner[number] = session
        self.core.add(
            AddRequest(
                number,
                (session.next_prompt() % VOCAB).tobytes(),
                SamplingParams(
                    temperature=0.0, max_tokens=min(turn.answer, self.most_answer), ignore_eos=True
                ),
                arrival=time.monotonic(),
                session=session.name,
                boundaries=(session.tools_end,),
            )
        )


def working_set(sessions: Sequence[Session]) -> int:
    """Bytes of the slabs for the largest contexts and for some states of all sessions; a state fills one."""
    dtypes = CacheDtypes(torch.float32, torch.float32, torch.float32)
    layout = plan_arena(
        architecture_of(MODEL).cache_groups(), block_tokens=UNIT, dtypes=dtypes, memory=1 << 30
    )
    tokens = UNIT * layout.groups[0].blocks_per_slab
    contexts = (max(turn.tokens + turn.answer for turn in session.turns) for session in sessions)
    return sum(-(-context // tokens) + STATES_A_SESSION for context in contexts) * layout.slab_bytes


def measure(
    folder: Path, share: float, names: Sequence[str] = (), device: str = "cpu", most_answer: int = 1 << 30
) -> dict[str, Any]:
    """One replay of the traces of `folder` (those of `names`, or all)."""
    sessions = load(folder, names)
    started = time.perf_counter()
    replay = Replay(sessions, share, device, most_answer)
    replay.run()
    stats = replay.core.stats().values
    ratios = {session.name: round(session.cached / max(1, session.ceiling), 4) for session in sessions}
    return {
        "pool_share": share,
        "cached_over_ceiling": ratios,
        "least": min(ratios.values()),
        "all": round(sum(s.cached for s in sessions) / sum(s.ceiling for s in sessions), 4),
        "prompt_tokens": sum(s.prompt for s in sessions),
        "state": replay.core.ready().facts["state"],
        **{key: int(stats[key]) for key in ("steps", "evictions", "retractions", "generated_tokens")},
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Print the ratios; write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, help="folder with trace_*.json")
    parser.add_argument("--names", nargs="*", default=(), help="only these traces, such as trace_0538")
    parser.add_argument("--share", type=float, nargs="*", default=(1.0, 0.6), help="of the working set")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most-answer", type=int, default=1 << 30, help="cut answers to so many tokens")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small are no faster on more
    runs = [
        measure(options.traces, share, options.names, options.device, options.most_answer)
        for share in options.share
    ]
    for run in runs:
        print(json.dumps(run))
    if options.json:
        result = {"command": "python " + " ".join(sys.argv), "torch": torch.__version__, "runs": runs}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
