"""How processes end, in words for the user."""

import signal


def how_it_ended(status: int | None) -> str:
    """What `Popen.returncode` means."""
    if status == -signal.SIGKILL:
        return "killed by SIGKILL, as the system does when memory runs out: try a smaller --memory or model"
    if status is not None and status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
