"""Runs a coding agent against a local server whose model is a script, in a folder of its own.

    python tests/agents/run_agent.py --calls '[["Bash", {"command": "echo hi > made.txt"}]]' -- AGENT...

In the agent's arguments and in the values of `--env NAME=VALUE`, {url} is the server's address (without /v1)
and {mark} what the task must contain. Prints what the agent said, and what is in its folder at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "server")]

from servers import start_server, stop_server  # noqa: E402
from tiny_text import write_tiny_text  # noqa: E402

MARK = "quickturn-task"


def main() -> int:
    """Returns the agent's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", required=True, help="JSON list of [tool, arguments]")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the agent")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("agent", nargs="+")
    options = parser.parse_args()
    os.environ.update(AGENT_CALLS=options.calls, AGENT_MARK=MARK)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as temporary:
        model, work = write_tiny_text(Path(temporary) / "model"), Path(temporary) / "work"
        work.mkdir()
        server = start_server(
            model, core="scripted_core:ScriptedCore", max_context=1 << 20, tool_parser="hermes"
        )
        try:
            names = {"url": server.root, "mark": MARK}
            agent = [word.replace("{url}", names["url"]).replace("{mark}", MARK) for word in options.agent]
            own = dict(pair.split("=", 1) for pair in options.env)
            environment = {**os.environ, "HOME": temporary, "QUICKTURN_KEY": "any"}
            environment |= {name: value.replace("{url}", names["url"]) for name, value in own.items()}
            done = subprocess.run(
                agent, cwd=work, env=environment, timeout=options.seconds, stdin=subprocess.DEVNULL
            )
            print(json.dumps({path.name: path.read_text() for path in work.iterdir() if path.is_file()}))
            figures = {name: value for name, value in server.stats().items() if "http_requests_total" in name}
            print(json.dumps(figures))
            return done.returncode
        finally:
            stop_server(server)


if __name__ == "__main__":
    sys.exit(main())
