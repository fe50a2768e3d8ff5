"""What machine this is. Imports nothing heavy: clients of servers ask, too."""

import platform
import subprocess
from pathlib import Path


def processor() -> str:
    """The name of this machine's processor."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit(digits: int = 40) -> str:
    """The commit of this code in so many digits, with a + where it was changed since; '' outside a
    repository.
    """
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        changed = "+" if git("status", "--porcelain", "-uno") else ""
        return git("rev-parse", f"--short={digits}", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return ""
