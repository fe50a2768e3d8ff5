"""Rank processes for tests: started once, then asked to run one function after the other."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from quickturn.parallel.communicator import ProcessGroups

SECONDS = 120
GROUPS = ProcessGroups()
"""Of this process: made once for all cases."""


class Crew:
    """`size` processes with gloo between them."""

    def __init__(self, size: int, directory: Path) -> None:
        # A server that has imported torch once and forks: four imports cost four times five seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "quickturn.loading.load"])
        self.size = size
        self.broken = False
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, size, str(directory / "store"), there), daemon=True
            )
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(rank, *arguments)` on every rank; their results. The first failure is raised here."""
        assert not self.broken, "an earlier test left its ranks waiting for each other"
        self.broken = True
        for end in self._ends:
            end.send((function, arguments))
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = [end for rank, end in enumerate(self._ends) if rank not in results]
            ready = wait(waiting, SECONDS)
            assert ready, f"ranks {sorted(set(range(self.size)) - set(results))} don't answer"
            for end in ready:
                rank = self._ends.index(end)
                failed, results[rank] = end.recv()
                assert not failed, f"rank {rank}: {results[rank]}"
        self.broken = False
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _work(rank: int, size: int, store: str, end: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    # Every group that a mesh of up to four ranks has: later nobody waits for ranks that have no part.
    for members in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]):
        GROUPS.of(members, rank)
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            return
        try:
            end.send((False, function(rank, *arguments)))
        except BaseException:
            end.send((True, traceback.format_exc()))


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
