"""A grammar of calls takes what the family's models write, lets nothing else begin a call, and what it lets
through the parser reads as a valid call.
"""

# ruff: noqa: RUF001  (the vertical lines of DeepSeek's tokens are full-width)

import json
import random
from typing import Any

import pytest
from markup import PING, SHELL, WRITERS, Call, data, markup, read, tokenizer, write

from quickturn.engine.constraints import ConstrainedRow
from quickturn.engine.grammar import grammar_of
from quickturn.sampling_params import Constraint
from quickturn.text.answer_format import AnswerMarkup
from quickturn.text.structured.constraint import constraint_of, helpful_constraint
from quickturn.text.structured.formats import json_schema
from quickturn.text.structured.schema import BadSchema
from quickturn.text.structured.tool_grammar import NoGrammar
from quickturn.text.tools import Tool, call_is_valid

xgrammar = pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

END = 256
STRICT = Tool("shell", {**SHELL.parameters, "additionalProperties": False}, strict=True)
TOOLS = (STRICT, Tool("ping", PING.parameters, strict=True))
CASES = [
    (case, with_tokens)
    for case in (*WRITERS, "gpt_oss")
    for with_tokens in (True, False)
    if (case, with_tokens) not in (("mistral", False), ("mistral list", True), ("gpt_oss", False))
]
IN_TEXT = [case for case in CASES if case[0] not in ("llama3_json", "pythonic", "gpt_oss")]


def chosen(case: str, with_tokens: bool) -> AnswerMarkup:
    return markup(WRITERS[case][0] if case in WRITERS else case, with_tokens)


def row(constraint: Constraint | None, with_tokens: bool) -> ConstrainedRow:
    assert constraint is not None
    backend = tokenizer(with_tokens)
    size = backend.backend.get_vocab_size()
    special = backend.vocabulary.special_ids
    vocabulary = [b"\xff" * (i in special) + backend.vocabulary.token_bytes(i) for i in range(size)]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return ConstrainedRow(constraint, compiler.compile_grammar(grammar_of(constraint.source)))


def takes(constraint: Constraint | None, tokens: list[int], with_tokens: bool) -> bool:
    state = row(constraint, with_tokens)
    return all(state.accept(token) for token in [*tokens, END])


TWO = [Call("shell", {"command": "mkdir -p a/{b1,b2", "timeout": 5}), Call("ping", {})]


@pytest.mark.parametrize(("case", "with_tokens"), CASES)
def test_forced_calls(case: str, with_tokens: bool) -> None:
    calls = TWO if case != "gpt_oss" else TWO[:1]
    chosen_markup = chosen(case, with_tokens)
    forced = constraint_of(chosen_markup, tools=TOOLS, must_call=True)
    for reasoning in ("", "hm {"):
        tokens = write(case, (reasoning, "", calls), with_tokens)
        if case == "gpt_oss":
            tokens = tokens[:-1]
        assert takes(forced, tokens, with_tokens)
    assert not takes(forced, data("No."), with_tokens)
    unknown = write(case, ("", "", [Call("rm", {"command": "x"})]), with_tokens)
    assert not takes(forced, unknown, with_tokens)
    only = constraint_of(chosen_markup, tools=TOOLS[1:], must_call=True, single_call=True)
    ping = write(case, ("", "", TWO[1:]), with_tokens)
    assert takes(only, ping[:-1] if case == "gpt_oss" else ping, with_tokens)
    assert not takes(only, write(case, ("", "", TWO[:1]), with_tokens), with_tokens)


@pytest.mark.parametrize(("case", "with_tokens"), IN_TEXT)
def test_strict_calls_in_free_text(case: str, with_tokens: bool) -> None:
    constraint = constraint_of(chosen(case, with_tokens), tools=TOOLS)
    for text in ("", "I <b>look</b> {first}."):
        for calls in ([], TWO):
            tokens = write(case, ("hm", text, calls), with_tokens)
            assert takes(constraint, tokens, with_tokens)
    bad = write(case, ("", "", [Call("shell", {"command": "ls", "sudo": True})]), with_tokens)
    assert not takes(constraint, bad, with_tokens)


@pytest.mark.parametrize("case", [case for case, with_tokens in CASES if with_tokens])
def test_whatever_is_drawn_is_a_valid_call(case: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Without objects: in a format of tags, one whose strings hold a closing tag can't be told from its end.
    flat = {key: value for key, value in SHELL.parameters["properties"].items() if key != "env"}
    tools = (Tool("shell", {**STRICT.parameters, "properties": flat}, strict=True), TOOLS[1])
    constraint = constraint_of(chosen(case, True), tools=tools, must_call=True, single_call=True)
    for _ in range(6):
        tokens = _draw(case, row(constraint, True), rng)
        said, _ = read(case, [[token] for token in tokens], tools=tools)
        assert said.finish == "tool_calls", tokenizer().decode(tokens, skip_special=False)
        ((name, arguments),) = said.calls
        assert call_is_valid(tools, name, json.loads(arguments)), (name, arguments)


def _draw(case: str, state: ConstrainedRow, rng: random.Random) -> list[int]:
    """A walk over allowed tokens that prefers printable ones, and closes what it can after a while."""
    size = tokenizer().backend.get_vocab_size()
    mask = xgrammar.allocate_token_bitmask(1, size)
    tokens: list[int] = []
    closers = {END, *b"\"]}<>/0')"}
    while True:
        mask.fill_(-1)
        state.fill(mask, 0)
        bits = mask[0].tolist()
        allowed = [
            t for t in range(size) if bits[t // 32] >> (t % 32) & 1 and (t >= 256 or 32 <= t < 127 or t == 10)
        ]
        allowed = [t for t in allowed if t not in state._constraint.think_open] or allowed
        assert allowed, f"a dead end behind {tokenizer().decode(tokens, skip_special=False)!r}"
        ways_out = [t for t in allowed if t in closers or t > 256]
        eager = rng.random() < (0.2 if len(tokens) < 60 else 0.9)
        begun = [t for t in (_next_of_tag(case, tokens[-16:]),) if t in allowed]
        token = rng.choice((begun or ways_out or allowed) if eager else allowed)
        assert state.accept(token)
        if token == END:
            return tokens
        tokens.append(token)
        assert len(tokens) < 20_000


def _next_of_tag(case: str, tail: list[int]) -> int:
    """The token that goes on with a closing tag that `tail` has begun; 0 for none."""
    dsml = tokenizer().encode("</｜DSML｜parameter>", add_special=False)
    plain = [list(tag.encode()) for tag in ("</parameter>", "</arg_value>", "</think>")]
    for ids in [dsml] if case == "deepseek_v32" else plain:
        for length in range(len(ids) - 1, 0, -1):
            if tail[-length:] == ids[:length]:
                return ids[length]
    return 0


def test_output_formats_and_calls_side_by_side() -> None:
    output = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    constraint = constraint_of(chosen("hermes", True), tools=(PING,), output=output)
    for tokens in (data('{"a": 1}'), write("hermes", ("hm", "", TWO[1:]))):
        assert takes(constraint, tokens, True)
    assert not takes(constraint, data("a"), True)
    final = tokenizer().encode("<|channel|>final<|message|>", add_special=False)
    harmony = constraint_of(chosen("gpt_oss", True), output=output)
    assert takes(harmony, [*write("gpt_oss", ("hm", "", [])), *_next(), *final, *data('{"a": 1}')], True)
    assert not takes(harmony, [*final, *data("a")], True)


def _next() -> list[int]:
    return tokenizer().encode("<|start|>assistant", add_special=False)


WELL_FORMED = ["hermes", "deepseek_v3", "deepseek_v31", "kimi_k2", "mistral"]


@pytest.mark.parametrize("case", WELL_FORMED)
def test_calls_of_any_tool_are_whole_objects(case: str) -> None:
    constraint = helpful_constraint(chosen(case, True), thinking=False)
    other = [Call("mcp.files/read-2", {"a": [{"}": "{"}]})]
    for text, calls in (("Free <b> {text}.", []), ("Hm.", TWO), ("", other)):
        assert takes(constraint, write(case, ("why", text, calls)), True)
    broken = write(case, ("", "", [Call("shell", {"command": "x"})]))
    quote = next(at for at in range(len(broken) - 1, 0, -1) if broken[at] == ord('"'))
    assert not takes(constraint, [*broken[:quote], *broken[quote + 1 :]], True)


def test_nothing_is_constrained_that_need_not_be() -> None:
    assert constraint_of(chosen("hermes", True)) is None
    for case in ("qwen3_coder", "llama3_json", "pythonic", "minimax_m2", "gpt_oss"):
        assert constraint_of(chosen(case, True), tools=(SHELL, PING)) is None
        assert helpful_constraint(chosen(case, True), thinking=False) is None
    assert helpful_constraint(chosen("hermes", False), thinking=False) is None


@pytest.mark.parametrize("case", ["pythonic", "llama3_json"])
def test_strict_tools_need_calls_that_begin_with_something(case: str) -> None:
    with pytest.raises(NoGrammar, match="tool_choice 'required'"):
        constraint_of(chosen(case, True), tools=TOOLS)


def test_a_strict_tool_with_a_schema_that_can_not_be_followed() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"not": {}}}}
    with pytest.raises(BadSchema, match="'not'"):
        constraint_of(chosen("hermes", True), tools=(Tool("t", schema, strict=True),))
    relaxed = constraint_of(chosen("hermes", True), tools=(Tool("t", schema),), must_call=True)
    assert takes(relaxed, write("hermes", ("", "", [Call("t", {"a": [1]})])), True)


ODD = {
    "type": "object",
    "properties": {
        "word": {"enum": ["it's", 'say "u"', "a\\b"]},
        "either": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "integer"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "deep": {"type": "object", "properties": {"none": {"type": "null"}}, "required": ["none"]},
        "yes": {"type": "boolean"},
        "free": {},
        "short": {"type": "string", "minLength": 1, "maxLength": 4},
        "x-y.z": {"type": "number", "minimum": 0, "maximum": 9},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize("case", ["pythonic", "deepseek_v32"])
@pytest.mark.parametrize("required", [[], ["deep", "word"], list(ODD["properties"])])
def test_arguments_of_every_type_come_back_as_the_schema_wants_them(case: str, required: list[str]) -> None:
    """Strings with quotes, values that are a string or not, words of JSON within lists, no required ones."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    tool = Tool("odd", {**ODD, "required": required}, strict=True)
    constraint = constraint_of(chosen(case, True), tools=(tool,), must_call=True, single_call=True)
    seen: set[str] = set()
    for _ in range(8):
        tokens = _draw(case, row(constraint, True), rng)
        said, _ = read(case, [[token] for token in tokens], tools=(tool,))
        written = tokenizer().decode(tokens, skip_special=False)
        assert said.finish == "tool_calls", written
        ((name, arguments),) = said.calls
        assert name == "odd"
        value = json.loads(arguments)
        jsonschema.Draft202012Validator(tool.parameters).validate(value)
        seen |= set(value)
    assert seen >= set(required)


@pytest.mark.parametrize("case", ["pythonic", "deepseek_v32", "glm45"])
def test_names_and_schemas_that_the_markup_can_not_say(case: str) -> None:
    name = {"type": "object", "properties": {"a=<b>": {"type": "integer"}}, "required": ["a=<b>"]}
    choice = {"type": "object", "anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    for schema, keyword in ((name, "properties"), (choice, "anyOf")):
        with pytest.raises(BadSchema) as caught:
            constraint_of(chosen(case, True), tools=(Tool("t", schema, strict=True),), must_call=True)
        assert caught.value.keyword == keyword
        assert constraint_of(chosen(case, True), tools=(Tool("t", schema),), must_call=True) is not None
