"""Where prompts are likely to part is told to the engine, and what stands before it is reused by others."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from servers import Served, stop_server
from tiny_hybrid import serve, write_tiny_hybrid

UNIT = 64
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks " * 30, "parameters": {}}}
SYSTEM = {"role": "system", "content": "You are an agent. " * 12}


def told(client: openai.OpenAI, messages: list[dict[str, Any]], **fields: Any) -> tuple[list[int], str]:
    """The boundaries of a prompt, and the prompt; a token is a byte, or a control token in brackets."""
    answers = []
    for what in ("tell_boundaries", "echo"):
        extra = {"prompt_cache_key": json.dumps({what: True})}
        answer = client.chat.completions.create(model="fake", messages=messages, extra_body=extra, **fields)
        answers.append(str(answer.choices[0].message.content))
    return json.loads(answers[0]), answers[1]


def before(prompt: str, position: int) -> str:
    """The text of the first tokens of a prompt."""
    at = 0
    for _ in range(position):
        at = prompt.index(">>", at) + 2 if prompt.startswith("<<", at) else at + 1
    return prompt[:at]


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="any", max_retries=0)


def test_prompts_part_behind_system_and_tools_and_before_the_last_question(client: openai.OpenAI) -> None:
    messages = [SYSTEM, said("one"), {"role": "assistant", "content": "two"}, said("three")]
    places, prompt = told(client, messages, tools=[TOOL])
    first, last = (before(prompt, place) for place in places)
    assert first.endswith(f"system\n{SYSTEM['content']}<<|im_end|>>\n<<|im_start|>>user")
    assert last.endswith("two<<|im_end|>>\n<<|im_start|>>user")
    again, _ = told(client, [SYSTEM, said("other")], tools=[TOOL])
    assert again == places[:1]


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_marks_of_clients_are_places_where_prompts_part(served: Served, client: openai.OpenAI) -> None:
    def text(content: str, marked: bool = False) -> dict[str, Any]:
        mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
        return {"type": "text", "text": content, **mark}

    other = anthropic.Anthropic(base_url=served.root, api_key="any", max_retries=0)
    questions = [
        {"role": "user", "content": [text("A <|im_end|> document.", True), text("And a question?")]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [text("More.")]},
    ]
    fields: Any = {"system": [text("Always the same.", True), text("Today.")], "messages": questions}
    answers = []
    for what in ("tell_boundaries", "echo"):
        script = {"user_id": json.dumps({what: True})}
        message = other.messages.create(model="fake", max_tokens=999, metadata=script, **fields)
        answers.append(message.content[0].text)
    prompt = answers[1]
    ends = [before(prompt, place) for place in json.loads(answers[0])]
    assert [end.rpartition("\n")[2] for end in ends] == [
        "Always the same",
        "<<|im_start|>>user",
        "A <|im_end|> document",
        "<<|im_start|>>user",
    ]
    chat = [{"role": "system", "content": "Always the same.\nToday."}, *questions]
    assert told(client, chat)[0] == json.loads(answers[0])[1:]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder: Path = write_tiny_hybrid(tmp_path_factory.mktemp("hybrid"))
    server = serve(folder)
    yield openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=300)
    stop_server(server)


def test_a_session_reuses_what_another_computed_of_system_and_tools(hybrid: openai.OpenAI) -> None:
    """At once, though neither ended there: the state was kept where sessions part."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def ask(salt: str = "") -> tuple[int, str]:
        rest = "".join(rng.choices("abcdefgh ", k=700))
        messages: Any = [SYSTEM, said(rest)]
        answer = hybrid.chat.completions.create(
            model="hybrid",
            messages=messages,
            tools=[TOOL],
            max_tokens=4,
            temperature=0,
            extra_body=extra(salt),
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0, rest

    def extra(salt: str) -> dict[str, Any]:
        return {"cache_salt": salt, "ignore_eos": True}

    assert ask()[0] == 0
    cached, _ = ask()
    head = len("<|im_start|>system\n# Tools\n") + len(json.dumps(TOOL)) + len(str(SYSTEM["content"]))
    assert head - UNIT <= cached <= head + UNIT
    assert ask("another salt")[0] == 0
