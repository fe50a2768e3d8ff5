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
    """`size` processes with gloo between them. A failure ends them; the next call has new ones."""

    def __init__(self, size: int, directory: Path) -> None:
        self.size = size
        self._directory = directory
        self._starts = 0
        self._ends: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(rank, *arguments)` on every rank; their results. The first failure is raised here."""
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send((function, arguments))
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = [end for rank, end in enumerate(self._ends) if rank not in results]
            ready = wait(waiting, SECONDS)
            if not ready:
                self.close()
                raise AssertionError(f"of {self.size} ranks only {sorted(results)} have answered")
            for end in ready:
                rank = self._ends.index(end)
                failed, results[rank] = end.recv()
                if failed:
                    self.close()
                    raise AssertionError(f"rank {rank}: {results[rank]}")
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Ends the processes, whatever they wait for."""
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.kill()
            process.join()
        self._ends, self._processes = [], []

    def _start(self) -> None:
        # A server that has imported torch once and forks: four imports cost four times five seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "quickturn.loading.load"])
        self._starts += 1
        store = str(self._directory / f"store{self._starts}")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.size, store, there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)


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
