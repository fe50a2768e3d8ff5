"""Several ranks on one GPU, for `test_gpu_ranks.py`; a process of its own, which may be killed.

python ranks_of_one_gpu.py CHECKPOINT OPTIONS PROMPTS RESULT    (JSON; the result is a file)
"""

import json
import os
import signal
import sys
from pathlib import Path

from driving import Driver

from quickturn.config import EngineConfig
from quickturn.engine.crew import RankLost
from quickturn.engine.llm import open_core

TOKENS = 24


def main() -> None:
    checkpoint, given, prompts, result = sys.argv[1:]
    options = json.loads(given)
    kill = options.pop("kill", False)
    core = open_core(EngineConfig(checkpoint, device="cuda", **options))
    driver = Driver(core)  # type: ignore[arg-type]
    ids = [driver.add(prompt, max_tokens=TOKENS) for prompt in json.loads(prompts)]
    error = ""
    try:
        for _ in range(5 if kill else 0):
            driver.step()
        if kill:
            os.kill(core._crew.members[0].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        driver.drain()
    except RankLost as lost:
        error = str(lost)
    said = {
        "tokens": [driver.answers[id].tokens for id in ids],
        "facts": dict(core.ready().facts),
        "stats": {} if error else core.stats().values,
        "error": error,
    }
    core.close()
    Path(result).write_text(json.dumps(said))
    # A kernel that gave up has cost the process its CUDA context, and what would be freed with it.
    os._exit(0)


if __name__ == "__main__":
    main()
