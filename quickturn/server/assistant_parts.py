"""Past answers that clients send back in parts (thinking, text, calls), as the messages that chat templates
read.
"""

from collections.abc import Iterator
from typing import Any


class AssistantParts:
    """Joins parts to messages of thinking, then text, then calls; what comes in another order begins a new
    message, so that nothing is merged across a border that the model saw.
    """

    def __init__(self) -> None:
        self._done: list[dict[str, Any]] = []
        self._message: dict[str, Any] = _empty()
        self._filled = False

    def thinking(self, text: str) -> None:
        """What the model thought."""
        if self._message["content"] or "tool_calls" in self._message:
            self._next()
        before = self._message.get("reasoning_content")
        self._message["reasoning_content"] = text if before is None else f"{before}\n{text}"
        self._filled = True

    def text(self, text: str) -> None:
        """What it said."""
        if "tool_calls" in self._message:
            self._next()
        before = self._message["content"]
        self._message["content"] = f"{before}\n{text}" if before else text
        self._filled = True

    def call(self, id: str, name: str, arguments: Any) -> None:
        """What it called; `arguments` are an object or JSON text."""
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._message.setdefault("tool_calls", []).append(call)
        self._filled = True

    def take(self) -> Iterator[dict[str, Any]]:
        """The messages so far, if any part came; begins anew."""
        done = [*self._done, self._message] if self._filled else self._done
        self._done, self._message, self._filled = [], _empty(), False
        return iter(done)

    def _next(self) -> None:
        self._done.append(self._message)
        self._message = _empty()


def _empty() -> dict[str, Any]:
    return {"role": "assistant", "content": ""}
