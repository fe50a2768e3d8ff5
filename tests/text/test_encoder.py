"""What is encoded in runs, and what is remembered of it, has the ids that the whole text has."""

import random
from array import array
from pathlib import Path

import pytest
from texts import random_text
from tokenizers import Tokenizer as Backend
from tokenizers_of_kinds import CONTROL, CORPUS, KINDS, tokenizer_of

from quickturn.text import runs
from quickturn.text.encoder import DATA_END, DATA_START, Encoder, KnownRuns, Part, Tokens
from quickturn.text.runs import Cutter
from quickturn.text.tokenizer import Tokenizer

EVERY = ["smollm", *KINDS]
_SHREDS = (
    "\n",
    " ",
    "\n\n",
    "  ",
    "'",
    "s",
    "The",
    "x;\nabc",
    ")\nre",
    "/\nA",
    "    ",
    "9\nfox",
    "é",
    " dog",
)


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(params=EVERY)
def backend(request: pytest.FixtureRequest, smollm: Tokenizer) -> Backend:
    return smollm.backend if request.param == "smollm" else tokenizer_of(request.param)


@pytest.fixture(autouse=True)
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second line break is a place to cut at."""
    monkeypatch.setattr(runs, "LONG", 12)


def whole(backend: Backend, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


def encoder_of(backend: Backend, known: KnownRuns | None = None) -> Encoder:
    return Encoder(backend, Tokenizer(backend, {}, ()).control_pattern, known)


def text_of(rng: random.Random, backend: Backend) -> str:
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    parts = []
    for _ in range(rng.randrange(12)):
        pick = rng.randrange(5)
        if pick == 0:
            parts.append(rng.choice(added))
        elif pick == 1:
            parts.append(rng.choice(CORPUS)[rng.randrange(30) :])
        elif pick == 2:
            parts.append(random_text(rng, 8))
        else:
            parts.append(rng.choice(_SHREDS))
    return "".join(parts).replace(DATA_START, "").replace(DATA_END, "")


def test_runs_are_the_whole(backend: Backend, rng: random.Random) -> None:
    encoder = encoder_of(backend)
    for _ in range(250):
        text = text_of(rng, backend)
        pieces = list(Cutter(backend).runs(text))
        assert "".join(run.text for run in pieces) == text
        assert encoder.encode([text]).ids.tolist() == whole(backend, text), f"{text!r} in {pieces}"


def by_segments(backend: Backend, parts: list[Part], control: tuple[str, ...]) -> list[int]:
    """Marked control tokens as text, everything else as usual, nothing remembered: each segment by itself,
    those that follow others as they are behind a line break.
    """
    plain = Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    ids: list[int] = []
    seen = False

    def segment(text: str, own: Backend) -> None:
        nonlocal seen
        if not text:
            return
        behind, line = whole(own, "\n" + text), whole(own, "\n")
        if seen and behind[: len(line)] == line:
            ids.extend(behind[len(line) :])
        else:
            ids.extend(whole(own, text))
        seen = True

    for part in parts:
        if isinstance(part, Tokens):
            ids.extend(part.ids)
            seen = True
            continue
        rest = part
        while rest:
            at = rest.find(DATA_START)
            if at < 0:
                segment(rest, backend)
                break
            segment(rest[:at], backend)
            inner, _, rest = rest[at + 1 :].partition(DATA_END)
            assert inner in control
            segment(inner, plain)
    return ids


def test_a_growing_conversation_is_encoded_as_if_it_were_new(backend: Backend, rng: random.Random) -> None:
    """With quoted control tokens, answers that are tokens already, and changes of what was said before."""
    encoder = encoder_of(backend)
    for _ in range(6):
        parts: list[Part] = []
        for _ in range(8):
            change = rng.randrange(6)
            if change == 0 and parts:
                parts[rng.randrange(len(parts))] = text_of(rng, backend)
            elif change == 1:
                ids = array("i", rng.choices(range(5, 200), k=rng.randrange(1, 9)))
                parts.append(Tokens(ids, rng.randrange(30)))
            elif change == 2:
                quoted = f"{DATA_START}{rng.choice(CONTROL[:2])}{DATA_END}"
                parts.append(text_of(rng, backend) + quoted + text_of(rng, backend))
            else:
                parts.append(f"<|im_start|>user\n{text_of(rng, backend)}<|im_end|>\n")
            expected = by_segments(backend, parts, CONTROL)
            assert encoder.encode(parts).ids.tolist() == expected, f"{parts!r}"
            assert encoder_of(backend, KnownRuns(0)).encode(parts).ids.tolist() == expected


class Counting(Encoder):
    """Counts the characters that really go to the tokenizer."""

    encoded = 0

    def _encode(self, texts: list[str], kind: int) -> list["array[int]"]:
        self.encoded += sum(map(len, texts))
        return super()._encode(texts, kind)


def test_only_the_tail_of_a_growing_conversation_is_encoded(smollm: Tokenizer) -> None:
    encoder = Counting(smollm.backend, smollm.control_pattern)
    text = ""
    for turn in range(20):
        text += f"<|im_start|>user\nturn {turn}, " + "a line of it;\nand " * 40 + "<|im_end|>\n"
        encoder.encoded = 0
        encoder.encode([text])
        assert encoder.encoded < 1200
        encoder.encode([text])
        assert encoder.encoded < 1200
    assert len(text) > 14_000
    encoder.encoded = 0
    encoder.encode([text], scope="somebody else")
    assert encoder.encoded > 400


def test_what_is_remembered_is_bounded_and_the_latest(smollm: Tokenizer) -> None:
    known = KnownRuns(20_000)
    encoder = Counting(smollm.backend, smollm.control_pattern, known)
    for number in range(200):
        encoder.encode([f"<|im_start|>number {number}"])
    assert known._size <= 20_000
    assert known._size == sum(200 + 4 * len(ids) for ids in known._ids.values()) + sum(
        key[2].__sizeof__() for key in known._ids
    )
    encoder.encoded = 0
    encoder.encode(["<|im_start|>number 199"])
    assert encoder.encoded == 0
    encoder.encode(["<|im_start|>number 0"])
    assert encoder.encoded == len("<|im_start|>number 0")


def test_places_are_where_the_tokens_before_them_end(backend: Backend, rng: random.Random) -> None:
    """The tokens before a place are the same whatever comes behind it, or the place is earlier."""
    encoder = encoder_of(backend)
    for _ in range(60):
        head, tail = text_of(rng, backend), text_of(rng, backend)
        text = f"{head}<|im_start|>{tail}"
        ids = encoder.encode([text], places=[len(head)])
        assert ids.places == (len(whole(backend, head)) if head else 0,) or "<word>" in text
        some = rng.randrange(len(text) + 1)
        (position,) = encoder.encode([text], places=[some]).places
        assert ids.ids[:position].tolist() == whole(backend, text)[:position]
        assert position <= len(whole(backend, text[:some]))


def test_places_behind_answers_that_are_tokens(smollm: Tokenizer) -> None:
    answer = Tokens(array("i", [7, 8, 9]), 5)
    parts: list[Part] = ["<|im_start|>a", answer, "<|im_end|>b<|im_start|>c"]
    before = len(smollm.encode("<|im_start|>a", add_special=False))
    encoded = smollm.encoder.encode(parts, places=[13, 14, 18, 29, 42])
    assert encoded.places == (before, before, before + 3, before + 5, len(encoded.ids))


def test_long_lines_are_cut_where_it_is_known_to_be_safe(tmp_path: Path) -> None:
    kinds = {kind for kind in KINDS if Cutter(tokenizer_of(kind))._at_lines}
    assert kinds == {"gpt-2", "digits", "llama-3", "qwen-2", "qwen-3.5", "tekken", "gpt-4o"}
    assert [run.text for run in Cutter(tokenizer_of("gpt-2")).runs("0123456789012\n\n9;\nabc")] == [
        "0123456789012\n\n9;\n",
        "abc",
    ]
