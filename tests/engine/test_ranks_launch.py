"""How ranks find each other, who is blamed when they fail, which of them gets a request; without models."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from free_port import free_port
from typer.testing import CliRunner

from quickturn.cli.main import build
from quickturn.config import EngineConfig
from quickturn.engine.crew import WAITING, Crew, Member, RankLost, blame, tell
from quickturn.engine.device import pick_device
from quickturn.engine.join import Outside, gather, join, outside
from quickturn.engine.link import Link, LinkClosed
from quickturn.engine.lockstep import Alive, Failed
from quickturn.engine.messages import AddRequest
from quickturn.engine.routing import Router
from quickturn.sampling_params import SamplingParams

SECONDS = 30.0


def links() -> tuple[Link, Link]:
    one, other = socket.socketpair()
    return Link(one), Link(other)


def test_links_carry_messages_of_any_size_and_tell_their_end() -> None:
    one, other = links()
    sent = [b"", b"x", os.urandom(1 << 16), os.urandom(3 << 20), b"last"]
    thread = threading.Thread(target=lambda: [one.send(message) for message in sent] and one.close())
    thread.start()
    assert [other.recv() for _ in sent] == sent
    thread.join(SECONDS)
    other.wait_for_end()
    with pytest.raises(LinkClosed):
        other.recv()
    with pytest.raises(LinkClosed):
        other.send(b"y" * (1 << 20))


class Followers:
    """Ranks that are links alone, or processes that do nothing."""

    def __init__(self) -> None:
        self.theirs: list[Link] = []
        self.members: list[Member] = []

    def add(self, process: "subprocess.Popen[bytes] | None" = None) -> Link:
        status, its_status = links()
        steps, its_steps = links()
        self.members.append(Member(len(self.members) + 1, "somewhere", status, steps, process))
        self.theirs += [its_status, its_steps]
        return its_status


@pytest.fixture
def followers() -> Iterator[Followers]:
    made = Followers()
    yield made
    for link in made.theirs:
        link.close()


def lost(crew: Crew) -> str:
    """What it says when the main thread takes part in a step."""
    assert crew._failed.wait(SECONDS), "nobody noticed"
    with pytest.raises(RankLost) as caught:
        crew.check()
    crew.report()
    crew.close()
    return str(caught.value)


def test_the_rank_where_it_began_is_blamed(followers: Followers) -> None:
    """Rank 1 says first that it was cut off; rank 2 is the one that was killed."""
    first = followers.add()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as process:
        second = followers.add(process)
        crew = Crew(followers.members, SECONDS)
        process.kill()
        tell(first, Failed("[gloo] Connection closed by peer", follows=True))
        first.close()
        second.close()
        assert lost(crew).startswith("rank 2 (somewhere) ended unexpectedly (killed by SIGKILL")


def test_a_ranks_own_words_go_before_what_followed() -> None:
    members = [Member(rank, "somewhere", *links()) for rank in range(1, 4)]
    members[0].failed = Failed("Connection closed", follows=True)
    members[2].failed = Failed("no room for the weights")
    assert blame(members) == "rank 3 (somewhere) failed: no room for the weights"
    members[2].failed = None
    assert blame(members) == "rank 1 (somewhere) failed: Connection closed"
    members[0].failed = None
    members[1].gone = True
    assert blame(members).startswith("the connection to rank 2 (somewhere) broke")


def test_a_rank_that_hangs_is_found_and_one_that_waits_is_not(followers: Followers) -> None:
    waits, hangs = followers.add(), followers.add()
    crew = Crew(followers.members, 2.0)
    crew.alive(WAITING)
    tell(waits, Alive(WAITING))
    tell(hangs, Alive("loading tiny"))
    assert "rank 2 (somewhere) hangs: it has not got on with 'loading tiny' for 2 s" in lost(crew)


def test_errors_of_links_become_those_of_ranks(followers: Followers) -> None:
    status = followers.add()
    crew = Crew(followers.members, SECONDS)
    tell(status, Failed("it broke"))
    status.close()
    with pytest.raises(RankLost, match="rank 1"), crew.together("a step"):
        raise LinkClosed("the other process is gone")
    crew.close()
    sound = Crew([], SECONDS)
    with pytest.raises(KeyError, match="own"), sound.together("a step"):
        raise KeyError("own")
    sound.close()


def test_a_main_thread_that_waits_for_ever_is_spoken_for(followers: Followers) -> None:
    status = followers.add()
    said: list[str] = []
    told = threading.Event()
    crew = Crew(followers.members, SECONDS)
    crew.on_stuck = lambda why: (said.append(why), told.set())[0]
    tell(status, Failed("it broke"))
    assert told.wait(SECONDS)
    assert said == ["rank 1 (somewhere) failed: it broke"]
    crew.close()


def environment(rank: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": port}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}


def place_of(config: EngineConfig, rank: int, port: int) -> Outside:
    place = outside(config, environment(rank, port))
    assert place is not None
    return place


def test_ranks_of_a_launcher_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig("x", tp=3, rank_timeout=SECONDS)
    port = free_port()
    for name, value in environment(0, port).items():
        monkeypatch.setenv(name, value)
    found: dict[int, tuple[Link, Link]] = {}

    def come(rank: int) -> None:
        found[rank] = join(config, place_of(config, rank, port))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 1)]
    for thread in threads:
        thread.start()
    crew = gather(config, "WARNING")
    for thread in threads:
        thread.join(SECONDS)
    for member in crew.members:
        member.steps.send(str(member.rank).encode())
        assert found[member.rank][1].recv() == str(member.rank).encode()
    found[2][0].close()
    assert "the connection to rank 2" in lost(crew)


def test_ranks_with_other_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig("x", tp=3, rank_timeout=SECONDS)
    port = free_port()
    for name, value in environment(0, port).items():
        monkeypatch.setenv(name, value)
    refused: list[Exception] = []

    def come() -> None:
        other = EngineConfig("x", tp=3, rank_timeout=SECONDS, block_tokens=32)
        try:
            join(other, place_of(config, 1, port))
        except ValueError as error:
            refused.append(error)

    thread = threading.Thread(target=come)
    thread.start()
    with pytest.raises(ValueError, match=r"rank 1 on .* other options"):
        gather(config, "WARNING")
    thread.join(SECONDS)
    assert "refuses rank 1" in str(refused[0])


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig("x", tp=3, rank_timeout=0.3)
    port = free_port()
    for name, value in environment(0, port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TimeoutError, match="ranks 1, 2 did not come"):
        gather(config, "WARNING")
    with pytest.raises(TimeoutError, match="the first rank was not found at"):
        join(config, place_of(config, 1, port))


@pytest.mark.parametrize(
    ("options", "missing", "message"),
    [({"tp": 2}, (), "3 processes were started"), ({"tp": 3}, ("MASTER_ADDR",), "not MASTER_ADDR")],
)
def test_a_launch_that_can_not_work_says_why(
    options: dict[str, int], missing: tuple[str, ...], message: str
) -> None:
    given = {name: value for name, value in environment(1, 1).items() if name not in missing}
    with pytest.raises(ValueError, match=message):
        outside(EngineConfig("x", **options), given)  # type: ignore[arg-type]
    assert outside(EngineConfig("x", tp=3), {}) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "2", "--ep", "3"], "--ep 3 doesn't divide"),
        (["--tp", "3", "--dense-tp", "2"], "--dense-tp 2"),
        (["--cp", "3"], "3 ranks (cp) can't share out blocks of 64 tokens"),
        (["--cp", "4", "--block-tokens", "2"], "4 ranks (cp) can't share out blocks of 2 tokens"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused_before_anything_is_loaded(
    options: list[str], message: str, tmp_path: Path
) -> None:
    command = ["serve", str(tmp_path / "nothing"), *options]
    result = CliRunner().invoke(build("serve"), command, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in result.output


def request(id: int, tokens: int, session: str = "") -> AddRequest:
    return AddRequest(id, bytes(4 * tokens), SamplingParams(max_tokens=100), 0.0, session=session)


def blocks(conversation: int, count: int) -> list[tuple[int, int]]:
    return [(conversation, index) for index in range(count)]


def test_requests_go_where_their_cache_is_until_that_group_is_much_busier() -> None:
    router = Router(2, 10)
    assert router.choose(request(1, 1000), blocks(1, 100)) == 0
    assert router.choose(request(2, 1000), blocks(2, 100)) == 1
    router.over(1)
    router.over(2)
    assert router.choose(request(3, 1050), blocks(1, 105)) == 0
    # Behind 150 tokens of work, of which 50 are a prompt's, 1000 known ones still win.
    assert router.choose(request(4, 1050), blocks(1, 105)) == 0
    assert router.choose(request(5, 1060), blocks(2, 106)) == 1
    assert router.choose(request(6, 2000), blocks(3, 200)) == 1
    # Behind 2260 they don't.
    assert router.choose(request(7, 200), blocks(2, 20)) == 0
    assert [router.of_request(id) for id in (3, 4, 5, 6, 7)] == [0, 0, 1, 1, 0]


def test_sessions_decide_ties_and_holds_follow_them() -> None:
    router = Router(3, 10)
    assert router.choose(request(1, 5), []) == 0
    assert router.choose(request(2, 5, "s"), []) == 1
    for id in (1, 2):
        router.over(id)
    assert router.of_session("s") == 1
    assert router.choose(request(3, 5, "s"), []) == 1
    router.over(3)
    assert router.choose(request(4, 5), []) == 0
    assert router.of_session("t") is None
    assert router.of_request(3) is None
    router.over(99)


def test_old_blocks_are_forgotten_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quickturn.engine.routing._BLOCKS", 10)
    router = Router(1, 10)
    router.choose(request(1, 80), blocks(1, 8))
    router.choose(request(2, 50), blocks(2, 5))
    group = router._groups[0]
    assert group.known(blocks(2, 5)) == 5
    assert group.known(blocks(1, 8)) == 5


class Cards:
    """A machine with so many GPUs."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_each_rank_has_a_gpu_or_shares_one_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    Cards(2, monkeypatch)
    assert [pick_device("auto", rank, 2).index for rank in range(2)] == [0, 1]
    assert [pick_device("cuda", rank, 4, 2).index for rank in range(4)] == [0, 0, 1, 1]
    assert [pick_device("cuda:1", rank, 3, 4).index for rank in range(3)] == [1, 1, 1]
    assert pick_device("cuda:1").index == 1
    assert pick_device("cpu", 3, 4).type == "cpu"


@pytest.mark.parametrize(
    ("cards", "given", "message"),
    [
        (1, ("cuda", 0, 2), "2 ranks of this machine need 2 GPUs, but PyTorch sees 1"),
        (2, ("auto", 1, 5, 2), "5 ranks of this machine need 3 GPUs, but PyTorch sees 2"),
        (2, ("cuda:0", 0, 2), "need 2 GPUs, but 'cuda:0' is one"),
        (2, ("cuda:2",), "device 'cuda:2' needs 3 GPUs, but PyTorch sees 2"),
        (0, ("cuda",), "sees no GPU"),
    ],
)
def test_too_few_gpus_are_an_error(
    cards: int, given: tuple[Any, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cards(cards, monkeypatch)
    with pytest.raises(ValueError, match=message):
        pick_device(*given)
