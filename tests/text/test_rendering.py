"""Conversations as token ids: every message in its place, and answers as the model wrote them."""

import random

import pytest

from quickturn.text.answer_format import markup_of
from quickturn.text.chat_template import ChatTemplate, TemplateFailed
from quickturn.text.rendering import WrittenAnswers, render_chat
from quickturn.text.splice import AnswerStore, Written, written
from quickturn.text.tokenizer import Tokenizer

PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
HOISTS = (
    "{% for m in messages if m.role == 'system' %}[system:{{ m.content }}]{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
DROPS = (
    "{% for m in messages if m.role != 'system' or loop.first %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
ALTERNATES = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
MESSAGES = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "system", "content": "three"},
    {"role": "user", "content": "four"},
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, "[user:one][assistant:two][system:three][user:four]"),
        (STRICT, "[user:one][assistant:two][user:three][user:four]"),
        (HOISTS, "[user:one][assistant:two][user:three][user:four]"),
        (DROPS, "[user:one][assistant:two][user:three][user:four]"),
        (ALTERNATES, "[user:one][assistant:two][user:three\n\nfour]"),
    ],
)
def test_a_late_system_message_is_said_in_its_place(smollm: Tokenizer, source: str, expected: str) -> None:
    ids = render_chat(smollm, ChatTemplate(source, {}), MESSAGES).ids
    assert smollm.decode(ids, skip_special=False) == expected


def test_late_system_messages_behind_the_last_user(smollm: Tokenizer) -> None:
    messages = [MESSAGES[0], {"role": "system", "content": "x"}, {"role": "developer", "content": "y"}]
    ids = render_chat(smollm, ChatTemplate(ALTERNATES, {}), messages).ids
    assert smollm.decode(ids) == "[user:one\n\nx\n\ny]"


def test_a_first_system_message_is_never_touched(smollm: Tokenizer) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(TemplateFailed, match="no system"):
        render_chat(smollm, ChatTemplate(refuses, {}), [{"role": "system", "content": "x"}])


def test_any_tokens_come_back_as_they_were(smollm: Tokenizer) -> None:
    """Also those that no tokenizer would make of their text, and half characters."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    assert smollm.chat_template is not None
    template, markup = ChatTemplate(smollm.chat_template, smollm.special), markup_of(smollm)
    answers = WrittenAnswers(template, markup)
    messages = [{"role": "user", "content": "Hello <|im_start|>assistant\n"}]
    prompt = render_chat(smollm, template, messages, written=answers).ids.tolist()
    for turn in range(30):
        special = smollm.vocabulary.special_ids
        tokens = [
            token for token in rng.choices(range(49152), k=rng.randrange(1, 20)) if token not in special
        ]
        content = smollm.decode(tokens)
        answer = written(smollm, markup, tokens, False, content.strip(), [])
        assert answer is not None
        answers.store.keep("", [], answer)
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": f"{turn} <|im_end|>"},
        ]
        following = render_chat(smollm, template, messages, written=answers).ids.tolist()
        kept = len(prompt) + len(tokens)
        if content.strip():
            assert following[:kept] == [*prompt, *tokens]
        prompt = following


def test_the_store_is_bounded(smollm: Tokenizer) -> None:
    store = AnswerStore(limit=2000)
    for number in range(100):
        answer = written(smollm, markup_of(smollm), [number] * 10, False, f"text {number}", [])
        assert answer is not None
        store.keep("", [], answer)
    kept = [number for number in range(100) if store.find("", [{"content": f"text {number}"}])]
    assert kept
    assert kept == list(range(100 - len(kept), 100))
    assert sum(found.size for found in _answers(store)) <= 2000


def _answers(store: AnswerStore) -> list[Written]:
    return list(store._answers.values())


TOOLED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("source", [None, TOOLED, PLAIN, ALTERNATES])
def test_what_stands_before_a_parting_is_the_same_in_the_other_prompt(
    smollm: Tokenizer, source: str | None
) -> None:
    """Two conversations over one system prompt and the same tools, then two that part at a later question."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    template = ChatTemplate(source or smollm.chat_template or "", smollm.special)

    def text() -> str:
        return "".join(
            rng.choices(["look ", "<|im_end|>", "\n", "é", "12", "You are. "], k=rng.randrange(20))
        )

    for _ in range(40):
        tools = [{"name": text()}]
        head = [{"role": "system", "content": text()}, {"role": "user", "content": text()}]
        common = [*head, {"role": "assistant", "content": text()}]
        pairs = [
            [[head[0], {"role": "user", "content": f"{word} {text()}"}] for word in ("A", "B")],
            [[*common, {"role": "user", "content": f"{word} {text()}"}] for word in ("A", "B")],
        ]
        for one, other in pairs:
            first, second = (
                render_chat(smollm, template, messages, tools=tools, partings=True)
                for messages in (one, other)
            )
            assert first.places == second.places
            for place in first.places:
                assert first.ids[:place] == second.ids[:place]
            shared = next(at for at in range(len(first.ids)) if first.ids[at] != second.ids[at])
            assert shared - 8 <= (first.places or (0,))[-1] <= shared
