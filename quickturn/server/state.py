"""What every endpoint of one server shares."""

import asyncio
import time
from dataclasses import dataclass, field

from quickturn.engine.client import EngineClient
from quickturn.server.errors import ApiError, unavailable
from quickturn.server.metrics import Metrics
from quickturn.server.off_loop import TextThreads
from quickturn.server.pace import Pace
from quickturn.server.responses_store import ResponseStore
from quickturn.server.waiting_room import WaitingRoom
from quickturn.text.answer_format import AnswerMarkup
from quickturn.text.chat_template import ChatTemplate
from quickturn.text.rendering import WrittenAnswers
from quickturn.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Limits:
    """Bounds of what one server accepts: bytes of a body and seconds for it to come, messages (or items) of a
    conversation, and seconds between signs of life and without any from the engine.
    """

    body: int = 64 << 20
    body_seconds: float = 60.0
    messages: int = 20_000
    keepalive: float = 5.0
    stuck_after: float = 120.0


@dataclass
class ServerState:
    """The engine, the model's text side, and the server's own condition. `names`: the served name first, then
    aliases."""

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    markup: AnswerMarkup
    names: tuple[str, ...]
    api_keys: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    responses: ResponseStore = field(default_factory=ResponseStore)
    room: WaitingRoom = field(default_factory=WaitingRoom)
    draining: bool = False
    written: WrittenAnswers | None = None
    """Answers as the model wrote them, for the turns that come back with them."""
    grammars: dict[str, None] = field(default_factory=dict)
    """Sources of grammars that the engine has compiled lately, oldest first."""
    grammars_tried: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Sources of grammars that nobody asked for, and who waits for the engine to compile them."""
    text_threads: TextThreads = field(default_factory=TextThreads)
    active: int = 0
    """HTTP requests to `/v1` that have not been answered to the end."""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Watch how fast answers come."""
        self.pace = Pace(self.metrics.answers)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        if self.engine.ready is None:
            raise unavailable("the engine is not ready yet")
        return self.engine.ready.max_context

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer: token ids are below it."""
        return self.engine.ready.vocab_size if self.engine.ready is not None else 0

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises a 404 for a model that isn't served."""
        if asked is None or asked in self.names:
            return asked or self.names[0]
        raise ApiError(
            404,
            f"the model {asked!r} is not served here; use {self.names[0]!r}",
            param="model",
            code="model_not_found",
        )

    def trouble(self) -> str | None:
        """Why this server can't take requests now; None when it can."""
        if self.engine.failure is not None:
            return self.engine.failure
        if self.engine.ready is None:
            return "the engine is starting"
        if self.engine.silent_for > self.limits.stuck_after:
            return f"the engine has not answered for {self.engine.silent_for:.0f} s"
        return "the server is shutting down" if self.draining else None
