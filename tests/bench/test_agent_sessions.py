"""Which sessions are held: recorded in both formats, synthetic, to scale; what a cache could have of them."""

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickturn.bench.agent import content, traces
from quickturn.bench.agent.ceiling import PrefixTree
from quickturn.bench.agent.load import Load
from quickturn.bench.agent.sessions import Piece, Session, Turn, prepared, repeated, salted, scaled
from quickturn.bench.agent.synthetic import Shape, sessions
from quickturn.bench.agent.talk import Answer, ChatTalk, TokenTalk
from quickturn.bench.agent.traces import Recorded


@pytest.fixture
def seed() -> int:
    chosen = secrets.randbits(32)
    print(f"seed {chosen}")
    return chosen


def request(prompt: int, answer: int, ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"type": "n", "in": prompt, "out": answer, "hash_ids": ids, "think_time": 0.0, **fields}


def trace(requests: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "trace_0001", "block_size": 64, "requests": requests}


def test_a_recorded_session_grows_as_it_did(tmp_path: Path) -> None:
    requests = [
        request(200, 50, [1, 2, 3]),
        # Goes on behind the answer; 60 tokens are new.
        request(310, 40, [1, 2, 3, 4], think_time=7.5),
        # The answer was rewritten: there is no room for it.
        request(330, 30, [1, 2, 3, 4, 5], think_time=None),
        {"type": "subagent", "requests": [request(100, 9, [1])]},
        # A compaction: the first two blocks stay.
        request(190, 20, [1, 2, 9], type="s"),
        request(90, 5, [7]),
    ]
    path = tmp_path / "trace_0001.json"
    path.write_text(json.dumps(trace(requests)))
    (session,) = traces.read(tmp_path)
    assert session.name == "trace_0001"
    found = [(turn.parent, turn.keep, turn.prompt, turn.answer, turn.think) for turn in session.turns]
    assert found == [
        (-1, 0, 200, 50, 0.0),
        (0, 250, 310, 40, 7.5),
        (1, 310, 330, 30, 0.0),
        (2, 64, 100, 9, 0.0),
        (2, 128, 190, 20, 0.0),
        (-1, 0, 90, 5, 0.0),
    ]
    assert traces.read(path) == [session]
    recorded = list(traces.flatten(requests))
    assert traces.ceiling(recorded) == 3 * 64 + 4 * 64 + 64 + 2 * 64


def test_what_a_ceiling_of_ids_counts(seed: int) -> None:
    """Against the longest run shared with any earlier request, tried one by one."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(40):
        ids = tuple(int(id) for id in rng.integers(0, 2, rng.integers(0, 9)))
        requests.append(Recorded(64 * len(ids) + int(rng.integers(1, 64)), 1, ids))
    expected = 0
    for index, one in enumerate(requests):
        runs = [0]
        for other in requests[:index]:
            run = 0
            while run < min(len(one.ids), len(other.ids)) and one.ids[run] == other.ids[run]:
                run += 1
            runs.append(run)
        expected += min(64 * max(runs), one.prompt - 1)
    assert traces.ceiling(requests) == expected


def test_mooncake_lines_become_sessions(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 900, "output_length": 20, "hash_ids": [0, 5]},
        {"timestamp": 4000, "input_length": 1700, "output_length": 40, "hash_ids": [0, 1, 3, 4]},
        {"timestamp": 9000, "input_length": 1200, "output_length": 10, "hash_ids": [0, 1, 8]},
        {"timestamp": 9500, "input_length": 2100, "output_length": 15, "hash_ids": [0, 1, 3, 9, 10]},
        # Goes on from the first request, whose session has gone another way since.
        {"timestamp": 9900, "input_length": 1800, "output_length": 25, "hash_ids": [0, 1, 2, 6]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, third, fourth = traces.read(path)
    assert [(turn.parent, turn.keep, turn.prompt, turn.answer, turn.think) for turn in first.turns] == [
        (-1, 0, 1100, 30, 0.0),
        (0, 1130, 1700, 40, 4.0),
        (1, 1740, 2100, 15, 5.5),
    ]
    assert [len(one.turns) for one in (second, third, fourth)] == [1, 1, 1]
    # Equal ids are equal text in all sessions, to the token where they part.
    texts = [content.ids(one.turns[0].new, 10, 1000) for one in (first, second, third)]
    assert [len(text) for text in texts] == [1100, 900, 1200]
    assert common(texts[0], texts[1]) in range(512, 530)
    assert common(texts[0], texts[2]) in range(1024, 1040)


def common(one: Any, other: Any) -> int:
    length = min(len(one), len(other))
    same = np.asarray(one[:length]) == np.asarray(other[:length])
    return length if same.all() else int(same.argmin())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.json", '{"requests": [{"type": "n"}]}'),
        ("a.json", "[]"),
        ("a.jsonl", '{"timestamp": 1}\n'),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        traces.read(tmp_path / name)
    with pytest.raises(ValueError, match="trace_"):
        traces.read(tmp_path)


def test_the_shape_that_evalscope_has() -> None:
    made = sessions(Shape(), 20)
    for one in made:
        assert 10 <= len(one.turns) <= 15
        assert [turn.prompt for turn in one.turns] == [
            50_000 + index * (800 + 500) for index in range(len(one.turns))
        ]
        assert {turn.answer for turn in one.turns} == {500}
    assert len({len(one.turns) for one in made}) > 1
    # Prompt by prompt: another user shares the head that all share, and nothing else.
    first, second = (content.ids(one.turns[0].new, 10, 1 << 20) for one in sessions(Shape(shared=640), 2))
    assert common(first, second) in range(640, 650)


@pytest.mark.parametrize("wrong", [{"first": 0}, {"turns": (3, 2)}, {"shared": 50_000}, {"answer": 0}])
def test_shapes_that_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"shape|shared"):
        Shape(**wrong)


def test_a_scaled_session_keeps_what_it_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        one, other = (random_session(rng, name) for name in "ab")
        factor, answers = rng.uniform(0.02, 1.5, 2)
        small = scaled(one, factor, answers)
        for turn, before in zip(small.turns, one.turns, strict=True):
            assert turn.prompt >= 1
            assert turn.answer == max(1, round(before.answer * answers))
            if turn.parent < 0:
                assert turn.prompt == max(1, round(before.prompt * factor))
                continue
            parent, old = small.turns[turn.parent], one.turns[turn.parent]
            if before.keep == old.prompt + old.answer:
                assert turn.keep == parent.prompt + parent.answer
            else:
                assert turn.keep <= parent.prompt
        # Two that share their first blocks share them at any scale.
        heads = [content.ids(scaled(it, factor, 1.0).turns[0].new, 0, 1 << 30) for it in (one, other)]
        assert common(*heads) >= min(round(6 * 64 * factor), *map(len, heads))


def random_session(rng: np.random.Generator, name: str) -> Session:
    """Six blocks that all share, some of its own, and turns that go on, rewrite or compact."""
    pieces = [Piece(f"x/{id}", 64) for id in range(6)]
    pieces += [Piece(f"{name}/{id}", 64) for id in range(int(rng.integers(1, 9)))]
    turns = [Turn(-1, 0, tuple(pieces), int(rng.integers(1, 90)))]
    for index in range(1, int(rng.integers(2, 7))):
        parent = int(rng.integers(0, index))
        old = turns[parent]
        keep = [old.prompt + old.answer, old.prompt, int(rng.integers(1, old.prompt))][int(rng.integers(3))]
        turns.append(
            Turn(
                parent,
                keep,
                (Piece(f"{name}/t{index}", int(rng.integers(1, 200))),),
                int(rng.integers(1, 90)),
            )
        )
    return Session(name, tuple(turns))


def test_sessions_are_cut_to_turns_and_context() -> None:
    (one,) = sessions(Shape(first=100, grow=10, turns=(5, 5), answer=10), 1)
    assert len(prepared([one], turns=3)[0].turns) == 3
    assert [turn.prompt for turn in prepared([one], context=140)[0].turns] == [100, 120]
    with pytest.raises(ValueError, match="scale it down"):
        prepared([one], context=109)
    with pytest.raises(ValueError, match="above 0"):
        prepared([one], scale=0.0)


def test_more_sessions_than_were_recorded_are_users_of_their_own() -> None:
    made = repeated(sessions(Shape(first=100, turns=(1, 1), shared=50), 2), 5)
    texts = [content.ids(one.turns[0].new, 0, 1 << 30) for one in made]
    assert len({one.name for one in made}) == 5
    assert common(texts[0], texts[1]) == 50
    assert common(texts[0], texts[2]) == 0


def test_runs_of_another_seed_share_nothing() -> None:
    shape = Shape(first=300, turns=(2, 3), shared=100)
    one, other, again = (Load(2, seed, shape=shape).make() for seed in (1, 2, 1))
    assert one == again
    assert [len(session.turns) for session in one] == [len(session.turns) for session in other]
    assert common(*(content.ids(it[0].turns[0].new, 0, 1 << 30) for it in (one, other))) == 0
    with pytest.raises(ValueError, match="at least 1 session"):
        Load(0, 1).make()


def test_words_are_as_many_as_tokens_and_ids_stay_in_range() -> None:
    pieces = [Piece("a", 3), Piece("b", 4), Piece("c", 5)]
    assert len(content.words(pieces, 1.0).split()) == 12
    assert len(content.words(pieces, 1.5).split()) == 8
    assert content.words(pieces[:2], 1.0) == " ".join(content.words(pieces, 1.0).split()[:7])
    found = content.ids([Piece("a", 5000)], 7, 9)
    assert (found.min(), found.max(), found.dtype) == (7, 8, np.int32)


def test_the_tree_finds_the_longest_beginning(seed: int) -> None:
    """Against comparing with every sequence; two letters, so that much is shared, of about a chunk."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        tree, added = PrefixTree(), [b""]
        base = bytes(rng.integers(0, 2, 700, dtype=np.uint8))
        for _ in range(25):
            cut = int(rng.integers(0, 700))
            one = base[:cut] + bytes(rng.integers(0, 2, rng.integers(0, 300), dtype=np.uint8))
            expected = max(common(list(one), list(other)) for other in added)
            assert tree.longest(one) == expected
            tree.add(one)
            added.append(one)
            assert tree.longest(one) == len(one)


def test_the_ceiling_of_token_prompts_is_exact(seed: int) -> None:
    """Random sessions, interleaved, with and without the answers' ids: brute force over all that was sent."""
    rng = np.random.default_rng(seed)
    for own in (True, False):
        seen, sent = PrefixTree(), []
        held = [random_session(rng, name) for name in "abc"]
        talks = [TokenTalk(one, seen, 0, 50) for one in held]
        for index in range(max(len(one.turns) for one in held)):
            for one, talk in zip(held, talks, strict=True):
                if index >= len(one.turns):
                    continue
                prompt = talk.prompt(index)
                assert len(prompt) == one.turns[index].prompt
                assert talk.body(index) == {"prompt": prompt.tolist()}
                expected = max((common(prompt, other) for other in sent), default=0)
                known = talk.sending(index)
                assert talk.ceiling(index, known, len(prompt)) == min(expected, len(prompt) - 1)
                sent.append(prompt)
                answer = rng.integers(0, 50, one.turns[index].answer)
                ids = tuple(answer.tolist()) if own else ()
                talk.answered(index, len(prompt), Answer(ids=ids, tokens=len(answer)))
                if own:
                    sent.append(np.concatenate((prompt, answer)))


def test_the_ceiling_of_a_chat_is_in_the_servers_tokens() -> None:
    """A server whose template adds 7 tokens, and a token a word: what was sent before is known exactly."""
    turns = (
        Turn(-1, 0, (Piece("a", 100),), 4),
        Turn(0, 104, (Piece("b", 10),), 4),
        # Compaction: half of the first message is kept, and something new follows it.
        Turn(1, 50, (Piece("c", 30),), 4),
    )
    talk = ChatTalk(Session("a", turns), PrefixTree(), 1.0)
    assert talk.ceiling(0, talk.sending(0), 107) == 0
    talk.answered(0, 107, Answer("one two three four", tokens=4))
    assert talk.ceiling(1, talk.sending(1), 128) == 111
    talk.answered(1, 128, Answer("five six seven eight", tokens=4))
    known = talk.sending(2)
    (message,) = talk.body(2)["messages"]
    words = message["content"].split()
    assert words[:50] == talk.body(0)["messages"][0]["content"].split()[:50]
    assert len(words) == 80
    assert talk.ceiling(2, known, 87) in range(48, 58)


def test_an_answer_with_reasoning_counts_to_the_prompts_end() -> None:
    turns = (Turn(-1, 0, (Piece("a", 100),), 4), Turn(0, 104, (Piece("b", 10),), 4))
    talk = ChatTalk(Session("a", turns), PrefixTree(), 1.0)
    talk.sending(0)
    talk.answered(0, 107, Answer("so it is", reasoning="hm", tokens=9))
    assert talk.body(1)["messages"][1] == {
        "role": "assistant",
        "content": "so it is",
        "reasoning_content": "hm",
    }
    assert talk.ceiling(1, talk.sending(1), 128) == 107


def test_salts_change_every_text() -> None:
    (one,) = sessions(Shape(first=50, turns=(2, 2)), 1)
    other = salted(one, "x")
    for turn, its in zip(one.turns, other.turns, strict=True):
        assert turn.prompt == its.prompt
        assert common(content.ids(turn.new, 0, 1 << 30), content.ids(its.new, 0, 1 << 30)) == 0
