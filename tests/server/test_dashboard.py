"""The page at `/` in a real browser."""

import json
import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, Route, expect, sync_playwright
from servers import PATIENCE_S, Served, http

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: Debian's package `chromium`")

expect.set_options(timeout=PATIENCE_S * 1000)

MARKUP = "<img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser_page() -> Iterator[Callable[[], Page]]:
    """Makes pages that fail the test when their script does."""
    failures: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def make() -> Page:
            page = browser.new_page()
            page.on("pageerror", lambda error: failures.append(str(error)))
            return page

        yield make
        browser.close()
    assert not failures


def test_the_live_view_shows_the_server_and_its_requests(
    served: Served, browser_page: Callable[[], Page]
) -> None:
    page = browser_page()
    page.goto(served.root)
    expect(page.locator("#condition")).to_have_text("serving")
    expect(page.locator("#model")).not_to_be_empty()
    page.get_by_role("button", name="Chat").click()
    page.locator("#input").fill("hello")
    page.locator("#send").click()
    expect(page.locator(".message.model .text")).to_have_text("Grüße, 世界 🙂!")
    expect(page.locator(".usage")).to_contain_text("tokens in")
    page.get_by_role("button", name="Live").click()
    row = page.locator("#requests tbody tr").first
    expect(row).to_contain_text("stop")
    expect(page.locator("#figures")).to_contain_text("added_total")


def test_reasoning_calls_and_their_results_are_shown_and_sent_back(
    served: Served, browser_page: Callable[[], Page]
) -> None:
    page = browser_page()
    asked: list[dict[str, object]] = []
    begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    answers = [
        [
            {"reasoning_content": "I need "},
            {"reasoning_content": "the weather."},
            {"tool_calls": [begun]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
        ],
        [{"content": MARKUP}, {"content": " rain"}],
    ]

    def answer(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or ""))
        chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in answers[len(asked) - 1]]
        body = (
            ": keep-alive\n\n"
            + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
            + "data: [DONE]\n\n"
        )
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    page.goto(served.root + "/#chat")
    page.locator("#tools").fill('[{"type": "function", "function": {"name": "weather"}}]')
    page.locator("#input").fill("Will it rain in Oslo?")
    page.locator("#send").click()
    expect(page.locator(".reasoning pre")).to_have_text("I need the weather.")
    expect(page.locator(".call pre")).to_have_text('{"city": "Oslo"}')
    page.locator("#input").fill("rain, 4 degrees")
    page.locator("#send").click()
    expect(page.locator(".message.model .text").last).to_have_text(MARKUP + " rain")
    expect(page).to_have_title("Quickturn")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert asked[0]["tools"] == [{"type": "function", "function": {"name": "weather"}}]
    assert asked[1]["messages"] == [
        {"role": "user", "content": "Will it rain in Oslo?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I need the weather.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain, 4 degrees"},
    ]


def test_a_server_with_keys_shows_its_state_to_those_who_have_one(
    own_server: Callable[..., Served], browser_page: Callable[[], Page]
) -> None:
    server = own_server(api_keys=["secret"])
    page = browser_page()
    page.goto(server.root)
    expect(page.locator("#condition")).to_have_text("the server asks for an API key")
    page.locator("#key").fill("secret")
    expect(page.locator("#condition")).to_have_text("serving")


def test_errors_of_the_server_are_shown(served: Served, browser_page: Callable[[], Page]) -> None:
    page = browser_page()
    page.goto(served.root + "/#chat")
    page.locator("#tools").fill("[")
    page.locator("#input").fill("hello")
    page.locator("#send").click()
    expect(page.locator(".message.error")).to_contain_text("not JSON")
    page.locator("#tools").fill("")
    page.locator("#max-tokens").fill("-1")
    page.locator("#input").fill("hello")
    page.locator("#send").click()
    expect(page.locator(".message.error").last).to_contain_text("max_completion_tokens")


@pytest.mark.parametrize("name", ["..%2Fpages.py", "%2e%2e", "nothing.js", "__init__.py"])
def test_only_the_pages_own_files_are_served(served: Served, name: str) -> None:
    assert http.get(f"{served.root}/dashboard/{name}").status_code == 404
