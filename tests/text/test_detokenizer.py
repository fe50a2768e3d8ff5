"""The law: however tokens are cut into pushes, the joined text is that of all at once, and stop strings never
show.
"""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quickturn.files.resolve import embedded_model
from quickturn.sampling_params import SamplingParams
from quickturn.text.detokenizer import Detokenizer, NewText
from quickturn.text.stop import StopStrings
from quickturn.text.tokenizer import Tokenizer, load_tokenizer

TOKENIZER: Tokenizer = load_tokenizer(str(embedded_model()))


def _is_text(index: int) -> bool:
    return "\ufffd" not in TOKENIZER.vocabulary.token_text(index)


BROKEN = [index for index in range(49152) if not _is_text(index)]
"""Tokens that hold a part of a character only."""

IDS = st.lists(st.one_of(st.integers(0, 49151), st.sampled_from(BROKEN)), max_size=40)
TEXTS = st.text(st.sampled_from("abcD <é你🙂\n\u0301"), max_size=40)


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    return sorted(draw(st.lists(st.integers(0, length), max_size=8)))


def pieces(sequence: Sequence[int] | str, at: list[int]) -> list[Sequence[int] | str]:
    edges = [0, *at, len(sequence)]
    return [sequence[start:end] for start, end in pairwise(edges)]


def run(tokens: list[int], at: list[int], sampling: SamplingParams, finish: str = "length") -> list[NewText]:
    """Push tokens in pieces until the answer ends."""
    detokenizer = Detokenizer(TOKENIZER, sampling)
    parts = pieces(tokens, at)
    deltas = []
    for index, part in enumerate(parts):
        deltas.append(detokenizer.push(list(part), finish if index == len(parts) - 1 else ""))  # type: ignore[arg-type]
        if deltas[-1].finish:
            break
    return deltas


@given(st.data(), IDS)
def test_any_ids_in_any_pieces_decode_as_all_at_once(data: st.DataObject, ids: list[int]) -> None:
    deltas = run(ids, data.draw(cuts(len(ids))), SamplingParams())
    expected = TOKENIZER.backend.decode(ids, skip_special_tokens=True)
    assert "".join(delta.text for delta in deltas) == expected == TOKENIZER.decode(ids)


@given(st.data(), TEXTS)
def test_whole_text_streams_without_replacement_characters(data: st.DataObject, text: str) -> None:
    ids = TOKENIZER.encode(text)
    deltas = run(ids, data.draw(cuts(len(ids))), SamplingParams())
    assert "".join(delta.text for delta in deltas) == text
    assert all("\ufffd" not in delta.text for delta in deltas)


def oracle(text: str, stops: Sequence[str], include: bool) -> tuple[str, bool]:
    """The stop string that ends first; of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return (text[:end] if include else text[: end - max(map(len, found))]), True
    return text, False


@given(
    st.data(),
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=500)
def test_stop_strings_over_any_cut(data: st.DataObject, text: str, stops: list[str], include: bool) -> None:
    expected, stopped = oracle(text, stops, include)
    filtered = StopStrings(stops, include)
    shown = ""
    for part in pieces(text, data.draw(cuts(len(text)))):
        shown += filtered.push(str(part))
        assert expected.startswith(shown)
    assert (filtered.found is not None) == stopped
    assert shown + filtered.flush() == expected


@given(st.data(), TEXTS, st.lists(st.text("abcD é你", min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=300)
def test_stop_strings_over_tokens(data: st.DataObject, text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    sampling = SamplingParams(stop=tuple(stops))
    deltas = run(ids, data.draw(cuts(len(ids))), sampling)
    expected, stopped = oracle(text, stops, include=False)
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].finish == ("stop" if stopped else "length")
    one_by_one = run(ids, list(range(1, len(ids))), sampling)
    assert sum(delta.tokens for delta in deltas) == sum(delta.tokens for delta in one_by_one)


def test_held_text_is_not_longer_than_needed() -> None:
    stops = StopStrings(["GHI"])
    assert [stops.push(part) for part in ("DEF", "G", "HJ", "GH")] == ["DEF", "", "GHJ", ""]
    assert stops.flush() == "GH"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_shows_only_if_asked_for(include: bool) -> None:
    ids = TOKENIZER.encode("one two")
    sampling = SamplingParams(stop_token_ids=(ids[-1],), include_stop_str=include)
    text = "".join(delta.text for delta in run(ids, [1], sampling, finish="stop"))
    assert text == ("one two" if include else "one")


def test_the_engine_is_told_only_of_what_it_does_not_know() -> None:
    ids = TOKENIZER.encode("a stop here")
    sampling = SamplingParams(stop=("stop",))
    running = Detokenizer(TOKENIZER, sampling).push(ids)
    assert (running.text, running.finish, running.stopped_here) == ("a ", "stop", True)
    ended = Detokenizer(TOKENIZER, sampling).push(ids, "length")
    assert (ended.text, ended.finish, ended.stopped_here) == ("a ", "stop", False)


def test_special_tokens_show_only_if_asked_for() -> None:
    ids = TOKENIZER.encode("a<|im_end|>")
    assert Detokenizer(TOKENIZER, SamplingParams()).push(ids, "stop").text == "a"
    shown = Detokenizer(TOKENIZER, SamplingParams(), skip_special=False).push(ids, "length")
    assert shown.text == "a<|im_end|>"


def test_ids_beyond_the_vocabulary_are_nothing() -> None:
    assert TOKENIZER.decode([10**6]) == ""
