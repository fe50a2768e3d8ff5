"""Long texts are read beside the event loop, so that no stream waits for another request's prompt.

The tokenizer releases the interpreter's lock while it works; templates and JSON don't, but give it up when
others ask for it.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from quickturn.server.streaming import unless_gone

OFF_LOOP_BYTES = 16 << 10
"""Bodies beyond this are read in a thread."""

_MOST_THREADS = 4
_SWITCH_S = 0.0005

Result = TypeVar("Result")


class TextThreads(ThreadPoolExecutor):
    """The threads of one server. Making them sets what the whole process goes by."""

    def __init__(self) -> None:
        """A thread that wants the interpreter's lock asks for it after half a millisecond, not five: the loop
        may have to ask each of these threads. The tokenizer leaves half the cores to the engine and the loop.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        super().__init__(max(2, min(cores, _MOST_THREADS)), thread_name_prefix="text")
        sys.setswitchinterval(_SWITCH_S)
        os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, cores // 2)))


async def beside(size: int, work: Callable[[], Result], threads: TextThreads) -> Result:
    """What `work` makes of a body of `size` bytes, in one of `threads` if that may take long."""
    if size <= OFF_LOOP_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(threads, work)


async def prepare(request: Request, work: Callable[[], Result]) -> Result:
    """What `work` makes of the request's text, in a thread if that may take long. Raises ClientGone."""
    size = int(request.headers.get("content-length", OFF_LOOP_BYTES + 1))
    if size <= OFF_LOOP_BYTES:
        return work()
    return await unless_gone(request, beside(size, work, request.app.state.server.text_threads))
