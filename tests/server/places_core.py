"""An engine core with as many places as `max_requests`: whoever comes later waits until one is free. An
answer has `max_tokens` tokens, one a step, and a request of `priority` 9 never ends by itself.
"""

from collections import deque
from collections.abc import Callable

from fake_core import FakeCore

from quickturn.config import EngineConfig
from quickturn.engine.messages import (
    AddRequest,
    Admitted,
    CancelRequest,
    EngineStats,
    LoadProgress,
    StepOutput,
    TokenOutput,
)

ENDLESS = 9


class PlacesCore(FakeCore):
    def __init__(self, config: EngineConfig, progress: Callable[[LoadProgress], None]) -> None:
        super().__init__(config, progress)
        self._places = config.max_requests
        self._queue: deque[AddRequest] = deque()
        self._places_of: dict[int, tuple[AddRequest, int]] = {}
        self._dropped = 0

    def add(self, request: AddRequest) -> None:
        self._queue.append(request)

    def cancel(self, request: CancelRequest) -> None:
        waited = [queued for queued in self._queue if queued.id == request.id]
        self._dropped += len(waited)
        for queued in waited:
            self._queue.remove(queued)
        self._places_of.pop(request.id, None)

    def has_work(self) -> bool:
        return bool(self._places_of) or bool(self._queue and len(self._places_of) < self._places)

    def step(self) -> StepOutput:
        super().step()
        outputs = []
        for id, (request, sent) in list(self._places_of.items()):
            last = sent + 1 == request.sampling.max_tokens and request.priority != ENDLESS
            outputs.append(TokenOutput(id, [ord("a")], "length" if last else "", 0 if sent == 0 else -1))
            if last:
                del self._places_of[id]
            else:
                self._places_of[id] = request, sent + 1
        while self._queue and len(self._places_of) < self._places:
            request = self._queue.popleft()
            self._places_of[request.id] = request, 0
            self.tell(Admitted([request.id]))
        return StepOutput(outputs)

    def stats(self) -> EngineStats:
        figures = {
            "running": len(self._places_of),
            "queued": len(self._queue),
            "dropped": self._dropped,
            "requests_held_by_promise": len(self._queue),
            "step_us_predicted": 1500,
            "step_us_measured": 2500,
        }
        return EngineStats({name: float(value) for name, value in figures.items()})
