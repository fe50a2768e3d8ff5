"""Answer events as the output items of a response and the stream events that build them."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quickturn.server.openai_objects import new_id
from quickturn.text.answer_reader import AnswerEvent, Finished
from quickturn.text.parsing.events import (
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

Event = dict[str, Any]
_TEXT, _REASONING = "response.output_text", "response.reasoning_text"


class Output:
    """The output items so far, the last of them perhaps still open."""

    def __init__(self) -> None:
        self.items: list[Event] = []
        self._open = ""

    def add(self, event: AnswerEvent, logprobs: Sequence[Event] = ()) -> Iterator[Event]:
        """The stream events of `event`, without their sequence numbers; `logprobs` belong to its text."""
        if isinstance(event, ReasoningDelta):
            if self._open != "reasoning":
                yield from self._close()
                part = {"type": "reasoning_text", "text": ""}
                yield from self._begin(
                    {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}, part
                )
            yield from self._text(_REASONING, event.text, {})
        elif isinstance(event, TextDelta):
            if self._open != "message":
                yield from self._close()
                item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
                yield from self._begin(
                    item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                )
            self.items[-1]["content"][0]["logprobs"] += logprobs
            yield from self._text(_TEXT, event.text, {"logprobs": list(logprobs)})
        elif isinstance(event, ToolCallStart):
            yield from self._close()
            call = {"call_id": event.id, "name": event.name, "arguments": ""}
            yield from self._begin({"id": new_id("fc"), "type": "function_call", **call}, None)
        elif isinstance(event, ToolArgumentsDelta):
            self.items[-1]["arguments"] += event.text
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": event.text}
        elif isinstance(event, ToolCallEnd):
            yield from self._close("completed" if _is_json(self.items[-1]["arguments"]) else "incomplete")
        elif isinstance(event, Finished):
            yield from self._close("incomplete" if event.reason == "length" else "completed")

    def _begin(self, item: Event, part: Event | None) -> Iterator[Event]:
        self.items.append({**item, "status": "in_progress"})
        self._open = item["type"]
        yield {
            "type": "response.output_item.added",
            "output_index": self._index(),
            "item": _copy(self.items[-1]),
        }
        if part is not None:
            self.items[-1]["content"].append(part)
            yield {"type": "response.content_part.added", **self._place(0), "part": _copy(part)}

    def _text(self, kind: str, text: str, more: Event) -> Iterator[Event]:
        self.items[-1]["content"][0]["text"] += text
        yield {"type": f"{kind}.delta", **self._place(0), "delta": text, **more}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if not self._open:
            return
        item = self.items[-1]
        item["status"] = status
        if self._open == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **self._place(), **done}
        else:
            part = item["content"][0]
            kind = _TEXT if self._open == "message" else _REASONING
            more = {"logprobs": part["logprobs"]} if self._open == "message" else {}
            yield {"type": f"{kind}.done", **self._place(0), "text": part["text"], **more}
            yield {"type": "response.content_part.done", **self._place(0), "part": _copy(part)}
        self._open = ""
        yield {"type": "response.output_item.done", "output_index": self._index(), "item": _copy(item)}

    def _index(self) -> int:
        return len(self.items) - 1

    def _place(self, part: int | None = None) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": self._index()}
        return place if part is None else {**place, "content_index": part}


def _is_json(text: str) -> bool:
    """Whether arguments are whole: only an answer that was cut within them leaves them broken."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _copy(value: Event) -> Event:
    """A snapshot: what was yielded may not change any more."""
    return {key: [dict(part) for part in each] if key == "content" else each for key, each in value.items()}
