"""Ports for servers of tests."""

import random
import socket


def free_port() -> int:
    """A port whose next one is free, too. Neither is among those that the system hands out by itself, so
    that no connection takes one before the server has it.
    """
    for port in random.sample(range(20_000, 32_000, 2), 1000):
        try:
            with socket.create_server(("", port)), socket.create_server(("", port + 1)):
                return port
        except OSError:
            continue
    raise AssertionError("no port is free")
