"""Keys, a full queue, a server without a drafter, and one that is gone. The last test ends the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect
from tests.page.conftest import KEY, NAME_WITH_MARKUP
from tests.page.opened import NO_END, Opened
from tests.server.running import RunningServer, wait_until


@pytest.fixture
def entered(browser: Browser, guarded: RunningServer) -> Iterator[Opened]:
    with Opened(browser, guarded.url) as opened:
        opened.page.fill("#key", KEY)
        opened.page.press("#key", "Enter")
        opened.wait_connected()
        yield opened


def test_the_page_asks_for_the_key_and_shows_nothing_without(browser: Browser, guarded: RunningServer) -> None:
    with Opened(browser, guarded.url) as opened:
        page, problem = opened.page, opened.page.locator("#problem")
        expect(problem).to_contain_text("needs an API key")
        expect(page.locator("#server-text")).to_have_text("API key needed")
        expect(page.locator("#key")).to_be_focused()
        expect(page.locator("#key-state")).to_have_text("is needed")
        assert page.locator("#arenas canvas").count() == 0
        assert page.locator("#model").inner_text().strip() == ""
        opened.ask("Are you there?")
        expect(problem).to_contain_text("needs an API key")
        expect(page.locator("#prompt")).to_have_value("Are you there?")
        for wrong in ("wrong", "nötig"):
            page.fill("#key", wrong)
            page.press("#key", "Tab")
            expect(page.locator("#server-text")).to_have_text("API key wrong")
            expect(problem).to_contain_text("key")
            expect(page.locator("#key-state")).to_have_text("is wrong")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        opened.wait_connected()
        expect(problem).to_be_hidden()
        expect(page.locator("#key-state")).to_be_empty()


def test_a_key_outlives_the_page_but_not_the_tab(entered: Opened) -> None:
    page = entered.page
    page.reload()
    entered.wait_connected()
    assert page.evaluate("[localStorage.length, document.cookie, location.href]") == [0, "", entered.url + "/"]
    expect(entered.other_tab().locator("#server-text")).to_have_text("API key needed")
    page.fill("#key", "")
    page.press("#key", "Tab")
    expect(page.locator("#server-text")).to_have_text("API key needed")
    assert page.evaluate("sessionStorage.length") == 0


def test_a_server_without_a_drafter_writes_plain_tokens_and_says_so(entered: Opened) -> None:
    page = entered.page
    expect(page.locator("#model")).to_contain_text("no speculation")
    expect(page.locator("#speculate")).to_be_disabled()
    entered.ask("Name a river.", max_tokens=6, temperature=0)
    entered.wait_answered()
    assert entered.colours() == {"accepted": 0, "corrected": 0, "bonus": 0, "plain": 6}


def test_a_full_queue_is_said_in_words(entered: Opened, guarded: RunningServer) -> None:
    page, problem = entered.page, entered.page.locator("#problem")
    with guarded.openai(KEY).chat.completions.create(
        model=NAME_WITH_MARKUP,
        messages=[{"role": "user", "content": NO_END}],
        stream=True,
        max_tokens=4000,
        temperature=0,
    ) as stream:
        next(iter(stream))
        entered.ask("Are you there?", max_tokens=4)
        expect(problem).to_contain_text("overloaded")
        expect(problem).to_contain_text("Try again in a second.")
        expect(page.locator("#prompt")).to_have_value("Are you there?")
    wait_until(lambda: guarded.http(KEY).get("/kv").json()["groups"][0]["held"] == 0)
    entered.ask("Are you there?", max_tokens=4)
    entered.wait_answered()
    expect(problem).to_be_hidden()


def test_a_server_that_is_gone_is_said_in_words(entered: Opened, guarded: RunningServer) -> None:
    page, problem = entered.page, entered.page.locator("#problem")
    entered.ask(NO_END, temperature=0, max_tokens=4000)
    entered.wait_written(6)
    guarded.process.kill()
    expect(problem).to_contain_text("Is “outrider serve” still running?")
    expect(page.locator("#server-text")).to_have_text("server unreachable")
    expect(page.locator("#kv-state")).to_have_text("not live")
    expect(page.locator(".assistant .summary")).to_contain_text("broken off")
    entered.ask("Hello?")
    expect(problem).to_contain_text("cannot be reached")
    expect(page.locator("#prompt")).to_have_value("Hello?")
