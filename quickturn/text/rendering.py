"""From chat messages to the prompt's token ids."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from quickturn.text.answer_format import AnswerMarkup
from quickturn.text.chat_template import ChatTemplate, TemplateFailed
from quickturn.text.conversation import Message, in_user_turns, merged_with_neighbours, normalise_messages
from quickturn.text.splice import AnswerStore, Part, spliced
from quickturn.text.tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: list[Message],
    extra: Mapping[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    written: "WrittenAnswers | None" = None,
    scope: str = "",
) -> list[int]:
    """Ids of the prompt that asks for the next answer. Control tokens inside messages and tools are encoded
    as plain text; answers that `written` knows in `scope` are as the model wrote them.

    `extra` are further variables for the template. Raises BadMessage or TemplateFailed.
    """
    normal = normalise_messages(messages, template.source)
    definitions = None if tools is None else tokenizer.mark_data(list(tools))

    def render(messages: list[Message]) -> str:
        return template.render(tokenizer.mark_data(messages), definitions, extra=extra)

    text = _in_place(render, normal)
    if written is None:
        return tokenizer.encode_marked(text)
    return tokenizer.encode_parts(written.put_back(text, normal, scope))


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
