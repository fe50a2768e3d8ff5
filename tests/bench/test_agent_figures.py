"""What the benchmark reports is what a scripted server did, on a clock that the test holds."""

import json
from typing import Any

import pytest
from bench_world import (
    DONE,
    Script,
    ScriptedServer,
    event,
    floor_of,
    plain,
    run,
    session,
    text_event,
    usage_event,
)

from quickturn.bench.agent.ceiling import PrefixTree
from quickturn.bench.agent.figures import figures, over_time
from quickturn.bench.agent.records import Record
from quickturn.bench.agent.run import Pace, Run, hold
from quickturn.bench.agent.sessions import Session
from quickturn.bench.agent.stream import StreamFault, StreamReader
from quickturn.bench.agent.talk import ChatTalk
from quickturn.bench.agent.wire import ConnectionFault


def held(server: ScriptedServer, sessions: list[Session], pace: Pace, **options: Any) -> Run:
    seen = PrefixTree()
    talks = [ChatTalk(one, seen, 1.0) for one in sessions]
    return run(hold(floor_of(server, pace, **options), sessions, talks))


def test_known_gaps_and_counts() -> None:
    """Two users, two turns each: first token after 0.5 s and 0.25 s, then 8 tokens a second; 4 s between."""

    def answer(body: dict[str, Any], number: int) -> Script:
        later = len(body["messages"]) > 1
        return plain(0.25 if later else 0.5, 0.125, 5, 115 if later else 100, 96 if later else 0)

    server = ScriptedServer(answer)
    done = held(server, [session("a", 2), session("b", 2)], Pace(2, think_scale=1.0))
    found = figures(done, gpus=2, promise=10.0)
    assert found["requests"] == 4
    assert found["seconds"] == 0.5 + 0.5 + 4.0 + 0.25 + 0.5
    assert found["user_tokens_per_second"] == dict.fromkeys(
        ("median", "p10", "p90", "p99", "least", "most"), 8.0
    )
    assert found["gap_ms"]["median"] == found["gap_ms"]["p99"] == 125.0
    assert found["first_token_ms"]["first_turn"]["median"] == 500.0
    assert found["first_token_ms"]["later_turns"]["most"] == 250.0
    ceilings = [record.ceiling for record in done.records if record.turn == 1]
    # All of the first turn and its answer; what two first turns share is the role's name, less than 2 tokens.
    assert ceilings == [105, 105]
    ceiling = found["tokens"].pop("ceiling")
    assert 210 <= ceiling < 212
    assert found["tokens"] == {"prompt": 430, "cached": 192, "answer": 20}
    assert found["cache"]["cached_over_ceiling"] == round(192 / ceiling, 4)
    assert found["cache"]["hit_rate"] == round(192 / 430, 4)
    assert found["per_gpu"] == {
        "answer": round(20 / 5.75 / 2, 2),
        "new_prompt": round(238 / 5.75 / 2, 2),
        "cached_prompt": round(192 / 5.75 / 2, 2),
    }
    assert found["promise"] == {"tokens_per_second": 10.0, "kept": 0.0}
    assert (found["tokens_per_arrival"], found["exact_counts"], found["errors"]) == (1.0, True, {})
    slices = over_time(done, buckets=23)
    assert slices["bucket"] == 0.25
    assert slices["answer_tokens_per_second"][2:5] == [16.0, 16.0, 8.0]
    assert [value for value in slices["gap_ms_p50"] if value is not None] == [125.0] * 5


def test_percentiles_and_rates_of_uneven_gaps() -> None:
    """Gaps of 0.1 to 1.0 s in one answer of eleven tokens."""
    record = Record("a", 0, 0.0, 11, done=6.0, prompt=10, cached=0, answer=11)
    record.arrivals = [0.5]
    for tenth in range(1, 11):
        record.arrivals.append(record.arrivals[-1] + tenth / 10)
    record.counts = [1] * 11
    found = figures(Run([record], 6.0, 6.0), 1)
    assert found["gap_ms"]["median"] == pytest.approx(550.0)
    assert found["gap_ms"]["p90"] == pytest.approx(910.0)
    assert found["gap_ms"]["p99"] == pytest.approx(991.0)
    assert found["user_tokens_per_second"]["median"] == pytest.approx(10 / 5.5, abs=0.01)


def test_the_part_with_all_users_is_counted_apart() -> None:
    """One user's session is half as long: the other goes on alone, and that time isn't full."""
    server = ScriptedServer(lambda body, number: plain(0.5, 0.25, 3, 100))
    done = held(server, [session("a", 1), session("b", 3)], Pace(2))
    found = figures(done, gpus=1)
    assert (found["seconds"], found["full"]["seconds"]) == (3.0, 1.0)
    assert found["full"]["per_gpu"]["answer"] == 6.0
    assert found["per_gpu"]["answer"] == 4.0


def test_connecting_is_not_part_of_the_first_token() -> None:
    server = ScriptedServer(lambda body, number: plain(0.5, 0.25, 3, 100), connects=2.0)
    found = figures(held(server, [session("a", 2)], Pace(1)), gpus=1)
    assert (
        found["first_token_ms"]["first_turn"]["most"] == found["first_token_ms"]["later_turns"]["most"] == 500
    )
    assert found["seconds"] == 6.0


def test_never_more_users_than_asked_for() -> None:
    server = ScriptedServer(lambda body, number: plain(0.5, 0.25, 3, 100))
    held(server, [session(str(number), 2) for number in range(7)], Pace(3))
    assert (server.most, len(server.bodies)) == (3, 14)


def test_the_next_turn_carries_the_answer_and_asks_for_exact_lengths() -> None:
    server = ScriptedServer(lambda body, number: plain(0.5, 0.25, 5, 100, word=f"said{number} "))
    held(server, [session("a", 3)], Pace(1), temperature=0.5)
    first, second, third = (body["messages"] for body in server.bodies)
    said = {"role": "assistant", "content": "said0 " * 5}
    assert [message["role"] for message in third] == ["user", "assistant", "user", "assistant", "user"]
    assert second[:2] == [first[0], said]
    assert third[:3] == second
    assert len(first[0]["content"].split()) == 100
    assert len(second[2]["content"].split()) == 10
    body = server.bodies[0]
    assert body["path"] == "/chat/completions"
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (5, 5, True)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert (body["temperature"], body["prompt_cache_key"]) == (0.5, "a")


def read(*reads: tuple[float, bytes]) -> Record:
    reader, record = StreamReader(), Record("a", 0, 0.0, 9)
    for at, data in reads:
        reader.feed(at, data)
    reader.settle(record)
    return record


def test_tokens_of_a_chunk_are_counted_where_the_server_says() -> None:
    """Speculation: 1, 3 and 4 tokens at a time, by the usage that comes with each event."""

    def told(text: str, count: int) -> bytes:
        return text_event(text, usage={"prompt_tokens": 7, "completion_tokens": count})

    record = read(
        (1.0, told("a", 1)), (2.0, told("bcd", 4)), (3.0, told("efgh", 8)), (3.0, usage_event(7, 8, 2) + DONE)
    )
    assert (record.arrivals, record.counts, record.exact_counts) == ([1.0, 2.0, 3.0], [1, 3, 4], True)
    assert (record.rate, record.gaps()) == (3.5, [1.0, 1.0])
    assert (record.prompt, record.cached, record.answer) == (7, 2, 8)


def test_tokens_of_a_chunk_are_shared_out_by_length_where_it_does_not() -> None:
    reads = [(float(at), text_event(text)) for at, text in ((1, "abcd"), (2, "ab"), (3, "abcdef"))]
    record = read(*reads, (3.0, usage_event(7, 12, None) + DONE))
    assert (record.counts, record.exact_counts, record.cached) == ([4, 2, 6], False, None)
    assert record.rate == 4.0


def test_events_of_one_read_arrive_together_however_they_are_cut() -> None:
    whole = text_event("a") + text_event("b") + text_event("c")
    for cut in range(len(whole)):
        record = read((1.0, whole[:cut]), (1.0, whole[cut:]), (2.0, text_event("d") + DONE))
        assert (record.arrivals, record.counts) == ([1.0, 2.0], [3, 1])


def test_an_event_arrives_with_its_last_byte() -> None:
    data = text_event("a")
    record = read((1.0, data[:-1]), (2.0, data[-1:]), (2.5, DONE))
    assert record.arrivals == [1.0]
    record = read((1.0, data[:-2]), (2.0, data[-2:]), (2.5, DONE))
    assert record.arrivals == [2.0]


def test_an_answer_of_tokens_without_text_is_one() -> None:
    """Nothing but control tokens: nobody saw anything arrive, and still it was answered."""
    record = read((1.0, usage_event(7, 3, 2)), (2.0, DONE))
    assert (record.answer, record.arrivals, record.first_token, record.rate) == (3, [], None, None)
    assert figures(Run([record], 2.0, 2.0), 1)["requests"] == 1


def test_reasoning_and_calls_are_text_that_arrives() -> None:
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])
    call = event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}])
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    record = read((1.0, role), (2.0, thought), (3.0, call), (4.0, DONE))
    assert (record.arrivals, record.answer) == ([2.0, 3.0], 2)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"data: {nonsense\n\n", "malformed"),
        (b"data: [1]\n\n", "malformed"),
        (b'data: {"choices": [7]}\n\n', "malformed"),
        (b'data: {"choices": [{"delta": {"content": 3}}]}\n\n', "malformed"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "error event"),
        (text_event("a"), "cut"),
        (DONE, "empty"),
    ],
)
def test_streams_that_fail(data: bytes, kind: str) -> None:
    with pytest.raises(StreamFault) as caught:
        read((1.0, data))
    assert caught.value.kind == kind


def test_refusals_and_broken_streams_are_counted_and_the_run_ends() -> None:
    """a: refused twice, then answered. b: refused for good. c: breaks in its second turn. d: is fine."""
    busy = json.dumps({"error": {"message": "come back later"}}).encode()
    tries = {"a": 0}

    def answer(body: dict[str, Any], number: int) -> Script:
        name = body["prompt_cache_key"]
        if name == "a":
            tries["a"] += 1
            if tries["a"] <= 2:
                return Script([(0.25, busy)], 429, {"retry-after": "2"})
        if name == "b":
            return Script([(0.25, b"no")], 500)
        if name == "c" and len(body["messages"]) > 1:
            return Script([(0.5, text_event("half"))], fault=ConnectionFault("cut", "gone"))
        return plain(0.5, 0.25, 3, 100)

    done = held(ScriptedServer(answer), [session(name, 2) for name in "abcd"], Pace(4))
    found = figures(done, gpus=1)
    assert found["errors"] == {"http 429": 2, "http 500": 1, "cut": 1}
    assert found["error_examples"]["http 429"] == "come back later"
    assert (found["sessions_given_up"], found["turns_left_out"], found["requests"]) == (2, 1, 5)
    refused = [record for record in done.records if record.error == "http 429"]
    assert [record.sent for record in refused] == [0.0, 2.25]
    # What came before it broke is kept with the record, and in no figure.
    broken = next(record for record in done.records if record.error == "cut")
    assert len(broken.arrivals) == 1
    assert found["tokens"]["answer"] == 15


def test_a_server_that_says_429_for_ever_does_not_hold_the_run_up() -> None:
    server = ScriptedServer(lambda body, number: Script([(0.25, b"{}")], 429, {"retry-after": "9999"}))
    done = held(server, [session("a", 2)], Pace(1, retries=2))
    assert figures(done, 1)["errors"] == {"http 429": 3}
    assert done.seconds == pytest.approx(2 * 30 + 3 * 0.25)
    assert figures(done, 1)["user_tokens_per_second"] is None


def test_an_answer_that_never_ends_times_out() -> None:
    reads = [(1.0, text_event("a"))] * 1000
    done = held(ScriptedServer(lambda body, number: Script(reads)), [session("a", 2)], Pace(1), timeout=10.5)
    assert figures(done, 1)["errors"] == {"timeout": 1}
    assert done.seconds == 10.5


def test_no_turn_begins_after_the_limit() -> None:
    server = ScriptedServer(lambda body, number: plain(0.5, 0.25, 3, 100))
    done = held(server, [session(str(number), 4) for number in range(3)], Pace(1, limit=2.5))
    assert (len(done.records), done.left_out, done.seconds) == (3, 9, 3.0)


def test_what_the_server_does_not_say_is_unknown() -> None:
    server = ScriptedServer(lambda body, number: plain(0.5, 0.25, 3, 100, cached=None))
    found = figures(held(server, [session("a", 2)], Pace(1)), gpus=1)
    assert found["cache"] == {
        "known": False,
        "cached_over_ceiling": None,
        "least_session": None,
        "hit_rate": None,
    }
    assert found["per_gpu"]["new_prompt"] is None
    assert found["tokens"]["cached"] is None


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"think_scale": -1.0}, {"retries": -1}])
def test_paces_that_cannot_be_kept(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        Pace(**({"concurrency": 1} | wrong))
