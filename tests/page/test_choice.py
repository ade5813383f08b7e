"""How much the engine speculates, and why, beside the conversation."""

from __future__ import annotations

from playwright.sync_api import Browser, expect
from tests.page.conftest import KEY
from tests.page.opened import QUESTIONS, Opened
from tests.page.test_looks import expect_readable
from tests.server.running import RunningServer


def test_the_page_shows_what_is_chosen_and_why(opened: Opened, server: RunningServer) -> None:
    page = opened.page
    opened.ask(QUESTIONS[0], temperature=0, max_tokens=200)
    opened.wait_answered()
    if page.locator("#choice").get_attribute("open") is None:
        page.click("#choice summary")
    told = server.http().get("/speculation").json()
    expect(page.locator("#choice-expected")).to_have_text(f"{told['choice']['rate']:.1f}")
    expect(page.locator("#choice-plain")).to_have_text(f"{told['choice']['plain_rate']:.1f}")
    expect(page.locator("#choice-requests")).to_have_text(str(told["choice"]["drafting_requests"]))
    for source, line in zip(told["sources"].values(), page.locator("#choice-sources li").all(), strict=True):
        accepted = f"{int(100 * source['accepted'] / source['verified'] + 0.5)} %" if source["verified"] else "–"
        expect(line.locator("span").last).to_have_text(accepted)
    points = page.locator("#choice-costs .point.target")
    assert points.count() == len([rows for rows, _seconds in told["costs"]["target"] if rows <= 128]) > 1
    expect_readable(page)


def test_a_server_that_drafts_nothing_has_no_choice_to_show(browser: Browser, guarded: RunningServer) -> None:
    with Opened(browser, guarded.url) as opened:
        opened.page.fill("#key", KEY)
        opened.page.press("#key", "Enter")
        opened.wait_connected()
        expect(opened.page.locator("#choice")).to_be_hidden()
