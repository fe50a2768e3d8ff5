"""From chat messages to the prompt's token ids."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from quickturn.text.answer_format import AnswerMarkup
from quickturn.text.chat_template import ChatTemplate, TemplateFailed
from quickturn.text.conversation import Message, in_user_turns, merged_with_neighbours, normalise_messages
from quickturn.text.encoder import DATA_END, DATA_START, Encoded, Part
from quickturn.text.splice import AnswerStore, spliced
from quickturn.text.tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[Message],
    extra: Mapping[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    written: "WrittenAnswers | None" = None,
    scope: str = "",
    partings: bool = False,
) -> Encoded:
    """The prompt that asks for the next answer. Control tokens inside messages and tools are encoded as plain
    text; answers that `written` knows in `scope` are as the model wrote them.

    `extra` are further variables for the template. `partings`: the prompt's `places` are where others are
    likely to part from it: behind tools and system prompt, before the last question, and at parts of messages
    that bear a `cache_control`. Raises BadMessage or TemplateFailed.
    """
    normal = normalise_messages(messages, template.source)
    definitions = None if tools is None else tokenizer.mark_data(list(tools))

    def render(messages: list[Message]) -> str:
        return template.render(messages, definitions, extra=extra)

    marked = [tokenizer.mark_data(message) for message in normal]
    text = _in_place(render, marked)
    parts: Sequence[Part] = [text] if written is None else written.put_back(text, normal, scope)
    ends: set[int] = set()
    if partings:
        places = [*_usual_partings(normal), *_marked_partings(messages)]
        ends = {_end_of(place, render, normal, marked, text) for place in places}
    return tokenizer.encoder.encode(parts, scope, sorted(end for end in ends if 0 < end < len(text)))


Place = tuple[int, int]
"""A message, and how many characters of its content stand before the place (-1: it is before the message)."""

_MOST_MARKS = 8
_OTHERS = "\ufdd2"
"""What another prompt says where it parts from this one: a noncharacter."""


def _usual_partings(messages: Sequence[Message]) -> list[Place]:
    """Other sessions have the same tools and system prompt; the session itself is asked something else."""
    start = next((at for at, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=start)
    return [(at, -1) for at in sorted({start, last}) if at < len(messages)]


def _marked_partings(messages: Sequence[Message]) -> list[Place]:
    """Behind the last parts of content that the client marks as worth caching."""
    places = []
    for index, message in enumerate(messages):
        parts = message.get("content")
        length = -1
        for part in parts if isinstance(parts, list) else ():
            length += 1 + len(part["text"] if isinstance(part, dict) else part)
            if isinstance(part, dict) and part.get("cache_control") is not None:
                places.append((index, length))
    return places[-_MOST_MARKS:]


def _end_of(
    place: Place,
    render: Callable[[list[Message]], str],
    messages: Sequence[Message],
    marked: Sequence[Message],
    text: str,
) -> int:
    """How much of `text` a prompt has in common with it that says something else from `place` on."""
    index, chars = place
    other = [{"role": "user", "content": _OTHERS}]
    if chars >= 0:
        # Another prompt may say more in the same message.
        content = marked[index]["content"]
        if chars < len(messages[index]["content"]):
            content = _first(content, chars)
        other = other[messages[index]["role"] == "user" :]
        other.insert(0, {**marked[index], "content": content + _OTHERS})
    try:
        return _shared(text, _in_place(render, [*marked[:index], *other]))
    except TemplateFailed:
        return 0


def _first(marked: str, count: int) -> str:
    """The first `count` characters of a text that has marks of data in it."""
    at = 0
    for char in marked:
        if count == 0:
            break
        at += 1
        count -= char not in (DATA_START, DATA_END)
    return marked[:at]


def _shared(one: str, other: str) -> int:
    """The length of the common beginning."""
    at, stride = 0, 4096
    while stride:
        while one[at : at + stride] == other[at : at + stride] and at < min(len(one), len(other)):
            at += stride
        stride //= 8
    return min(at, len(one), len(other))


def _in_place(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """The conversation's text, every system message where it stands.

    Templates differ in what they do with one behind the first place: some refuse it, some move it to the top,
    which changes the beginning of every later prompt. It is said by the user then, where it stands.
    """
    late = [index for index, message in enumerate(messages) if index and message["role"] in _SYSTEM]
    try:
        text = render(messages)
    except TemplateFailed:
        if not late:
            raise
    else:
        if not late or _in_order(text, messages, late):
            return text
    try:
        return render(in_user_turns(messages, late))
    except TemplateFailed:
        return render(merged_with_neighbours(messages, late))


_SYSTEM = ("system", "developer")


def _in_order(text: str, messages: Sequence[Message], late: Sequence[int]) -> bool:
    """Whether the messages at `late` come behind what stands before them."""
    at = 0
    for index, message in enumerate(messages):
        content = message["content"].strip()[:200]
        found = text.find(content, at)
        if found >= 0:
            at = found + len(content)
        elif index in late:
            return False
    return True


class WrittenAnswers:
    """Answers of one model, and how to put them back into conversations as the model wrote them."""

    def __init__(
        self, template: ChatTemplate, markup: AnswerMarkup, store: AnswerStore | None = None
    ) -> None:
        """`store` may be given for a bound of its own."""
        self.store = store or AnswerStore()
        self._template = template
        self._markup = markup

    def put_back(self, text: str, messages: Sequence[Message], scope: str) -> list[Part]:
        """A rendered conversation in parts, known answers as tokens."""
        runs = _runs_of_answers(messages)
        answers = [self.store.find(scope, run) for run in runs]
        if not any(answers) or not self._header:
            return [text]
        before, *regions = text.split(self._header)
        if len(regions) - sum(map(len, runs)) not in (0, 1):
            # The template joins answers, or writes them another way: which is which can't be told.
            return [text]
        parts: list[Part] = [before]
        for run, answer in zip(runs, answers, strict=True):
            own, regions = regions[: len(run)], regions[len(run) :]
            found = None if answer is None else spliced(own, answer, self._markup)
            parts += [self._header, *(found or [self._header.join(own)])]
        return _joined(parts + [part for region in regions for part in (self._header, region)])

    @cached_property
    def _header(self) -> str:
        """What the template writes in front of an answer: what it adds when an answer is asked for."""
        probe: list[Message] = [{"role": "user", "content": "x"}]
        try:
            without = self._template.render(probe, add_generation_prompt=False)
            asked = self._template.render(probe)
        except TemplateFailed:
            return ""
        header = asked.removeprefix(without) if asked.startswith(without) else ""
        reasoning = self._markup.format.reasoning
        return header if reasoning is None else header.split(reasoning.open)[0]


def _runs_of_answers(messages: Sequence[Message]) -> list[list[Message]]:
    """Assistant messages, those with nothing between them together."""
    runs: list[list[Message]] = []
    before = ""
    for message in messages:
        if message["role"] == "assistant":
            if before != "assistant":
                runs.append([])
            runs[-1].append(message)
        before = message["role"]
    return runs


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring texts as one, so that they are encoded as they would be by themselves."""
    result: list[Part] = []
    for part in parts:
        if isinstance(part, str) and result and isinstance(result[-1], str):
            result[-1] += part
        else:
            result.append(part)
    return result
