"""Ports for servers of tests."""

import socket


def free_port() -> int:
    """A port whose next one is free, too."""
    while True:
        with socket.create_server(("", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                with socket.create_server(("", port + 1)):
                    return port
            except OSError:
                continue
