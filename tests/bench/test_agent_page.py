"""The page holds its data, opens in a real browser without an error, and asks nobody for anything."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from bench_world import ScriptedServer, floor_of, plain, run, session

from quickturn.bench.agent import report
from quickturn.bench.agent.ceiling import PrefixTree
from quickturn.bench.agent.load import describe
from quickturn.bench.agent.page import render, write_page
from quickturn.bench.agent.run import Pace, hold
from quickturn.bench.agent.talk import ChatTalk

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def result(label: str, users: int, cached: int | None = 90) -> dict[str, Any]:
    server = ScriptedServer(
        lambda body, number: plain(0.5, 0.125 * users, 5, 100, cached if number >= users else 0)
    )
    sessions = [session(str(number), 2) for number in range(users)]
    seen, pace = PrefixTree(), Pace(users)
    done = run(hold(floor_of(server, pace), sessions, [ChatTalk(one, seen, 1.0) for one in sessions]))
    return report.result(
        done,
        label=label,
        gpus=1,
        promise=0.0,
        load=describe(pace, sessions, {"source": "synthetic"}),
        server={"url": "http://x", "model": "m", "api": "chat", "models": None},
        client={"cpu_share": 0.1, "loop_lag_ms_p99": 1.0, "warning": "the client was slow"},
        words=["quickturn", "bench", "agent"],
        warm_up={},
    )


def data_of(page: str) -> dict[str, Any]:
    start = page.index('type="application/json">') + len('type="application/json">')
    found: dict[str, Any] = json.loads(page[start : page.index("</script>", start)])
    return found


def test_the_data_is_in_the_page() -> None:
    runs = [result("ours", 2), result("ours", 1), result("</script><b>x", 1, cached=None)]
    page = render(runs, "A <title>")
    found = data_of(page)
    assert found["title"] == "A <title>"
    assert [(one["label"], one["load"]["concurrency"]) for one in found["runs"]] == [
        ("</script><b>x", 1),
        ("ours", 1),
        ("ours", 2),
    ]
    assert found["runs"][2]["figures"] == runs[0]["figures"]
    assert "requests" not in found["runs"][0]
    assert page.count("</script>") == 2
    for word in ("http://", "https://", "@import", "url("):
        assert word not in page.replace("http://www.w3.org", "").replace('"http://x"', "")


def test_a_page_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        write_page(tmp_path / "page.html", [])


def test_the_table_says_what_is_unknown() -> None:
    known = dict(report.lines(result("ours", 2)))
    silent = dict(report.lines(result("ours", 2, cached=None)))
    assert known["answer tokens/s per GPU (all users at work)"].startswith("6.67")
    assert silent["cached prompt tokens/s per GPU"] == "unknown: the server doesn't say"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: Debian's package `chromium`")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    broken = copy.deepcopy(result("theirs", 4))
    broken["figures"] |= {"errors": {"http 429": 3}, "error_examples": {"http 429": "too <many>"}}
    # Nothing was answered: every figure is missing.
    empty = copy.deepcopy(result("nothing", 1))
    empty["figures"] |= {"user_tokens_per_second": None, "gap_ms": None, "requests": 0}
    empty["figures"]["first_token_ms"] = {"first_turn": None, "later_turns": None}
    empty["figures"]["tokens"] = {"prompt": 0, "cached": 0, "answer": 0, "ceiling": 0}
    path = tmp_path / "page.html"
    write_page(path, [result("ours", 1), result("ours", 4), result("theirs", 1, cached=None), broken, empty])
    faults: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="dark")
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        assert page.title() == "Agent sessions"
        assert page.locator("#table tbody tr").count() == 5
        assert page.locator("#pareto circle").count() == 4
        assert page.locator("#gaps path.trace").count() == 5
        assert "don't say what was cached" in page.locator("#cache").inner_text()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.get_by_role("button", name="ours").click()
        assert page.locator("#table tbody tr").count() == 3
        page.locator("#pick").select_option(index=2)
        page.locator("#pareto circle").first.hover()
        assert "tokens/s a user" in page.locator("#tip").inner_text()
        browser.close()
    assert faults == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
