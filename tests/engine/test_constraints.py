"""Answers that follow a grammar: with the small real model, and each row's state by itself."""

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from quickturn.engine.constraints import ConstrainedRow, bitmask_words
from quickturn.engine.grammar import GrammarLimits, GrammarPool, tokenizer_info
from quickturn.engine.llm import LLM
from quickturn.engine.messages import AddRequest
from quickturn.sampling_params import Constraint, SamplingParams
from quickturn.text.tokenizer import load_tokenizer, pack_tokens

xgrammar = pytest.importorskip("xgrammar")

VOCAB, EOS = 49152, 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def tag(format: dict[str, Any], **options: Any) -> Constraint:
    return Constraint(json.dumps({"type": "structural_tag", "format": format}), **options)


def schema(value: dict[str, Any], **options: Any) -> Constraint:
    return tag({"type": "json_schema", "json_schema": value, "max_whitespace_cnt": 2}, **options)


def regex(pattern: str, **options: Any) -> Constraint:
    return tag({"type": "regex", "pattern": pattern}, **options)


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("embedded", dtype="float32", memory=256 << 20, max_requests=16, overlap=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def pool() -> GrammarPool:
    return GrammarPool(lambda: tokenizer_info("embedded", VOCAB, (EOS,)))


def compiled(pool: GrammarPool, constraint: Constraint) -> Any:
    while (outcome := pool.outcome(constraint)) is None:
        pass
    return outcome


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    text: str = ""


def generate_each(llm: LLM, wanted: list[tuple[str, SamplingParams]]) -> list[Answer]:
    """All at once, each with sampling of its own."""
    answers = [Answer() for _ in wanted]
    for id, (prompt, sampling) in enumerate(wanted):
        llm._core.add(AddRequest(id, pack_tokens(llm.tokenizer.encode(prompt)), sampling, time.monotonic()))
    while not all(answer.finish_reason for answer in answers):
        for output in llm._core.step().outputs:
            answers[output.id].tokens += output.tokens
            answers[output.id].finish_reason = output.finish
            answers[output.id].text = output.error
    for answer in answers:
        answer.text = answer.text or llm.tokenizer.decode(answer.tokens)
    return answers


def test_answers_follow_their_grammars_and_others_are_as_ever(llm: LLM) -> None:
    prompt = "Once upon a time"
    free = SamplingParams(max_tokens=12, temperature=0.0)
    alone = llm.generate(prompt, free)[0].text
    wanted = [
        (prompt, free),
        (prompt, SamplingParams(max_tokens=80, temperature=1.0, seed=1, constraint=schema(PERSON))),
        (prompt, SamplingParams(max_tokens=80, temperature=0.0, constraint=regex("(yes|no), [a-c]{3}"))),
        (prompt, SamplingParams(max_tokens=80, temperature=2.0, seed=2, constraint=schema(PERSON))),
        (prompt, free),
    ]
    answers = generate_each(llm, wanted)
    assert answers[0].text == answers[4].text == alone
    for answer in (answers[1], answers[3]):
        assert set(json.loads(answer.text)) == {"name", "age"}
    assert re.fullmatch("(yes|no), [a-c]{3}", answers[2].text)
    assert {answer.finish_reason for answer in answers[1:4]} == {"stop"}


def test_a_bad_grammar_is_an_error_that_says_why(llm: LLM) -> None:
    answer = generate_each(llm, [("x", SamplingParams(constraint=regex("(a")))])[0]
    assert answer.finish_reason == "error"
    assert "parenthesis" in answer.text
    with pytest.raises(ValueError, match="ignore_eos can't be combined"):
        SamplingParams(ignore_eos=True, constraint=regex("a"))


@pytest.mark.parametrize("most", [30, 200])
def test_json_that_runs_out_of_tokens_is_closed(pool: GrammarPool, most: int) -> None:
    """A string that goes on for ever, in an object that must have more; without the wish it goes on."""
    strings = {
        "type": "object",
        "properties": {key: {"type": "string"} for key in "ab"},
        "required": ["a", "b"],
    }
    constraint = schema(strings)
    begin, more = pool_tokens('{"a": "'), pool_tokens(" word")[0]
    for ways in (pool.ways, None):
        row = ConstrainedRow(constraint, compiled(pool, constraint), ways, most)
        written: list[int] = []
        mask = torch.empty((1, bitmask_words(VOCAB)), dtype=torch.int32)
        while len(written) < most and not row.finished:
            mask.fill_(-1)
            row.fill(mask, 0)
            token = begin[len(written)] if len(written) < len(begin) else more
            if not allowed(mask, token):
                (token,) = (each for each in range(VOCAB) if allowed(mask, each))
            assert row.accept(token)
            written.append(token)
        text = load_tokenizer("embedded").decode(written)
        assert row.cut == row.finished == (ways is not None)
        if row.cut:
            assert json.loads(text)["b"] == ""
            assert len(written) > most // 2


def test_thinking_is_free_and_the_grammar_follows(pool: GrammarPool) -> None:
    """One accepted batch may span the end of thinking and the first tokens of the object."""
    open_id, close_id = 17, 18
    options = {"think_open": (open_id,), "think_close": (close_id,)}
    text = pool_tokens('{"name": "Bo", "age": 7}')
    for thinking in (True, False):
        constraint = schema(PERSON, thinking=thinking, **options)
        row = ConstrainedRow(constraint, compiled(pool, constraint))
        mask = torch.full((1, bitmask_words(VOCAB)), -1, dtype=torch.int32)
        if not thinking:
            assert row.fill(mask, 0)
            assert allowed(mask, open_id)
            assert allowed(mask, text[0])
            assert not allowed(mask, close_id)
            row.accept(open_id)
        assert not row.fill(mask, 0)
        batch = [*pool_tokens("Let me } think {"), close_id, *text, EOS]
        assert all(row.accept(token) for token in batch)
        assert row.finished


def test_without_thinking_the_grammar_holds_at_once(pool: GrammarPool) -> None:
    constraint = schema(PERSON, think_open=(17,), think_close=(18,))
    row = ConstrainedRow(constraint, compiled(pool, constraint))
    assert row.accept(pool_tokens("{")[0])
    mask = torch.full((1, bitmask_words(VOCAB)), -1, dtype=torch.int32)
    assert row.fill(mask, 0)
    assert not allowed(mask, 17)
    assert not row.accept(pool_tokens("x")[0])


def test_rollback_is_as_if_it_had_never_been(pool: GrammarPool) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    constraint = schema(PERSON, think_close=(18,), thinking=True)
    grammar = compiled(pool, constraint)
    tokens = [*pool_tokens("hm { hm"), 18, *pool_tokens('{"name": "A}{", "age": 12}'), EOS]
    for _ in range(200):
        row, done = ConstrainedRow(constraint, grammar), 0
        for _ in range(rng.randrange(6)):
            ahead = rng.randrange(len(tokens) - done + 1)
            assert all(row.accept(token) for token in tokens[done : done + ahead])
            done += ahead
            back = rng.randrange(done + 1)
            row.rollback(back)
            done -= back
        fresh = ConstrainedRow(constraint, grammar)
        for token in tokens[:done]:
            fresh.accept(token)
        ours, theirs = (torch.full((1, bitmask_words(VOCAB)), -1, dtype=torch.int32) for _ in range(2))
        assert row.fill(ours, 0) == fresh.fill(theirs, 0)
        assert torch.equal(ours, theirs)


def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = GrammarPool(lambda: tokenizer_info("embedded", VOCAB, (EOS,)), GrammarLimits(seconds=0.02))
    compile, endless, release = pool._compile, regex("a*"), threading.Event()

    def slow(source: str) -> Any:
        if source == endless.source:
            release.wait()
        return compile(source)

    monkeypatch.setattr(pool, "_compile", slow)
    assert "took longer than 0.02 s" in compiled(pool, endless)
    assert "took longer" in compiled(pool, endless)
    object.__setattr__(pool._limits, "seconds", 60.0)
    assert not isinstance(compiled(pool, regex("a+")), str)
    release.set()


def test_when_every_thread_is_kept_new_grammars_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    pool = GrammarPool(lambda: tokenizer_info("embedded", VOCAB, (EOS,)), GrammarLimits(seconds=0.02))
    compile = pool._compile

    def slow(source: str) -> Any:
        release.wait(60)
        return compile(source)

    monkeypatch.setattr(pool, "_compile", slow)
    for letter in "abcd":
        assert "took longer" in compiled(pool, regex(letter))
    assert "busy" in compiled(pool, regex("e"))
    release.set()
    object.__setattr__(pool._limits, "seconds", 60.0)
    while "busy" in str(outcome := compiled(pool, regex("e"))):
        pass
    assert not isinstance(outcome, str)


def test_a_huge_grammar_is_refused(pool: GrammarPool) -> None:
    assert "more than 1048576" in compiled(pool, regex("a" * (1 << 20)))


def test_the_cache_is_bounded() -> None:
    pool = GrammarPool(
        lambda: tokenizer_info("embedded", VOCAB, (EOS,)), GrammarLimits(seconds=60.0, cache_bytes=1)
    )
    for pattern in ("a", "b", "c"):
        compiled(pool, regex(pattern))
    assert list(pool._compiled) == [regex("c").source]


def pool_tokens(text: str) -> list[int]:
    return load_tokenizer("embedded").encode(text)


def allowed(mask: torch.Tensor, token: int) -> bool:
    return bool((int(mask[0, token // 32]) >> (token % 32)) & 1)
