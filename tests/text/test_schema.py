"""A schema is followed to the letter, or refused by the name of its keyword."""

import json
import random
from typing import Any

import pytest
from schemas import FIXED, REFUSED, drawn_schemas

from quickturn.engine.grammar import grammar_of
from quickturn.text.structured.schema import BadSchema, checked_schema

xgrammar = pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

EOS = 256
CLOSERS = b'"]}'


@pytest.fixture(scope="module")
def compiler() -> Any:
    """Over a vocabulary of bytes."""
    vocabulary = [bytes([byte]) for byte in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compiled(compiler: Any, schema: Any) -> Any:
    format = {"type": "json_schema", "json_schema": checked_schema(schema), "max_whitespace_cnt": 2}
    return compiler.compile_grammar(grammar_of(json.dumps({"type": "structural_tag", "format": format})))


def draw(grammar: Any, rng: random.Random, patience: int) -> bytes:
    """A walk over allowed bytes; after `patience` of them it looks for the way out."""
    matcher, text = xgrammar.GrammarMatcher(grammar), bytearray()
    mask = xgrammar.allocate_token_bitmask(1, 257)
    while True:
        matcher.fill_next_token_bitmask(mask)
        bits = mask[0].tolist()
        allowed = [token for token in range(257) if bits[token // 32] >> (token % 32) & 1]
        assert allowed, f"a dead end behind {bytes(text)!r}"
        ways_out = [token for token in allowed if token == EOS or token in CLOSERS]
        eager = rng.random() < (0.8 if len(text) > patience else 0.3)
        token = rng.choice(ways_out if ways_out and eager else allowed)
        assert matcher.accept_token(token)
        if token == EOS:
            return bytes(text)
        text.append(token)
        assert len(text) < 5000, f"no end: {bytes(text[:300])!r}"


def test_whatever_a_grammar_allows_is_valid_under_the_schema_that_was_sent(compiler: Any) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for schema in drawn_schemas(seed, len(FIXED) + 80):
        grammar = compiled(compiler, schema)
        for _ in range(4):
            text = draw(grammar, rng, rng.randrange(60))
            try:
                value = json.loads(text)
                jsonschema.Draft202012Validator(_modern(schema)).validate(value)
            except ValueError as error:
                raise AssertionError(f"{text!r} of {schema}: {error}") from error


@pytest.mark.parametrize(("schema", "keyword"), REFUSED)
def test_what_can_not_be_followed_is_refused_by_name(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(BadSchema) as caught:
        checked_schema(schema)
    assert caught.value.keyword == keyword
    assert repr(keyword) in str(caught.value)


def test_depth_and_size_are_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    wide = {"anyOf": [{"type": "integer"}] * 30_000}
    for schema in (deep, wide):
        with pytest.raises(BadSchema, match="too deep or too large"):
            checked_schema(schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, '{"a":1,"b":[]}', '{"a":1}'),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b":1}', "{}"),
        ({"minLength": 3}, '"abc"', '"ab"'),
        ({"type": "string", "enum": ["a", 1]}, '"a"', "1"),
        ({"type": "string", "format": "no-such"}, '"x"', "1"),
    ],
)  # fmt: skip
def test_rewritten_schemas(compiler: Any, schema: dict[str, Any], good: str, bad: str) -> None:
    grammar = compiled(compiler, schema)
    assert xgrammar.GrammarMatcher(grammar).accept_string(good)
    matcher = xgrammar.GrammarMatcher(grammar)
    assert not (matcher.accept_string(bad) and matcher.accept_token(EOS))


def test_numbers_without_bounds_have_an_end(compiler: Any) -> None:
    """As many digits as 64 bits need; a schema's own bounds and patterns may ask for more."""

    def accepts(schema: dict[str, Any], text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled(compiler, schema))
        return bool(matcher.accept_string(text) and matcher.accept_token(EOS))

    for good in ("0", "-9223372036854775808", "18446744073"):
        assert accepts({"type": "integer"}, good)
        assert accepts({"type": "number"}, good + ".25e-10")
        assert accepts({"type": "object"}, f'{{"a": [{good}]}}')
    for kind, bad in (
        ("integer", "1" * 30),
        ("number", "1" * 30),
        ("number", f"0.{'3' * 30}"),
        ("number", "1e12345"),
    ):
        assert not accepts({"type": kind}, bad)
    assert accepts({"type": "string", "pattern": "^[0-9]+$"}, f'"{"1" * 30}"')


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """The 2020-12 form of the one older schema among the fixed ones."""
    if isinstance(schema.get("items"), list):
        return {"type": "array", "prefixItems": schema["items"], "items": False}
    return schema


_ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 1.5, 10**30, "", "string", [], {}, [None], [[]], [{}], ["a"], [1]),
    *({"a": None}, {"a": []}, {"a": {"type": [[]]}}, {"type": {}}, {"$ref": "#"}, {"$ref": "#/properties"}),
    *({"required": [[]]}, {"items": 5}, {"enum": [[], {}]}, {"properties": [["a", 1]]}, ["string", "null"]),
    *(
        [{"required": [{}]}, {"required": 5}],
        [{"minimum": "a"}, {"minimum": 3}],
        [{"enum": 5}, {"enum": [1]}],
    ),
    *([{"properties": 5}, {"properties": {"a": {}}}], [{"type": [[]]}, {"type": ["null"]}], [True, {}]),
)
_WORDS = (
    *(
        "type",
        "enum",
        "const",
        "format",
        "minLength",
        "pattern",
        "minimum",
        "multipleOf",
        "items",
        "minItems",
    ),
    *("prefixItems", "properties", "required", "additionalProperties", "patternProperties", "maxProperties"),
    *("allOf", "anyOf", "oneOf", "$ref", "$defs"),
)


@pytest.mark.parametrize("word", _WORDS)
def test_a_keyword_of_a_wrong_kind_is_refused_by_its_name(word: str) -> None:
    for value in _ODD:
        for other, beside in [("type", "object"), *((name, odd) for name in _WORDS for odd in _ODD)]:
            schema = {other: beside, word: value}
            try:
                json.dumps(checked_schema(schema))
            except BadSchema:
                pass
            except Exception as error:
                raise AssertionError(f"{schema} is answered with {error!r}") from error


def test_the_place_of_a_flaw_is_told() -> None:
    with pytest.raises(BadSchema, match=r"'type' at /items must be a name or names"):
        checked_schema({"items": {"type": []}})
    with pytest.raises(BadSchema, match=r"'required' at /properties/a must be a list of names"):
        checked_schema({"properties": {"a": {"type": "object", "required": [{}]}}})
    with pytest.raises(BadSchema, match=r"'minimum' at #/properties must be a number"):
        checked_schema({"properties": {"minimum": {}}, "allOf": [{"$ref": "#/properties"}]})


def test_a_part_that_says_nothing_changes_nothing() -> None:
    assert checked_schema({"allOf": [True, {"type": "string"}, {}]}) == {"type": "string"}
    with pytest.raises(BadSchema, match="'allOf'"):
        checked_schema({"allOf": [False]})
