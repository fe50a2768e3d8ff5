"""What machine this is. Imports nothing heavy: clients of servers ask, too."""

import platform


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
