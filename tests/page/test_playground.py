"""The playground in a real browser, against a real server with the default model and DFlash."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.server.running import RunningServer, wait_until

from outrider.models.resolve import DEFAULT_MODEL

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
KEY = "key-of-a-person"
DFLASH = '{"method": "dflash"}'
QUESTIONS = ("Give me five tips for a first visit to a large museum.", "Write a short poem about snow.")
NO_END = "Write a very long story about a lighthouse keeper and her two brothers."
ANSWER_LIMIT_MS = 180_000
expect.set_options(timeout=ANSWER_LIMIT_MS)


def start(*options: str) -> RunningServer:
    return RunningServer(
        DEFAULT_MODEL, "--speculative-config", DFLASH, "--kv-cache-memory-bytes", "256M", *options
    ).wait()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    server = start("--sanitizer", "raise")
    try:
        yield server
        assert "Traceback" not in server.log, server.log
    finally:
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["OUTRIDER_TEST_BROWSER"],
            # A sandbox cannot be made by root, nor in most containers.
            args=["--no-sandbox", "--disable-dev-shm-usage"],
        )
        yield browser
        browser.close()


class Opened:
    """The page, and whatever it complained about or asked others for."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        context = browser.new_context(viewport={"width": 1360, "height": 960}, **options)
        context.set_default_timeout(ANSWER_LIMIT_MS)
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda said: self._note(said.type, said.text))
        self.page.on("request", lambda asked: None if asked.url.startswith(url) else self.elsewhere.append(asked.url))
        self.page.goto(url)

    def _note(self, kind: str, text: str) -> None:
        # Answers with an error status are reported by the browser itself; the page shows those in words.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.complaints.append(text)

    def ask(self, text: str, **settings: object) -> None:
        for name, value in settings.items():
            self.page.fill(f"#{name.replace('_', '-')}", str(value))
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def wait_answered(self) -> None:
        expect(self.page.locator("#send")).to_be_enabled(timeout=ANSWER_LIMIT_MS)

    def close(self) -> None:
        self.page.context.close()
        assert self.complaints == []
        assert self.elsewhere == []


@pytest.fixture
def opened(browser: Browser, server: RunningServer) -> Iterator[Opened]:
    opened = Opened(browser, server.url)
    expect(opened.page.locator("#server-text")).to_have_text("connected")
    yield opened
    opened.close()


def colours(page: Page, answer: int) -> dict[str, int]:
    """Tokens of an answer by the colour that they are really painted in."""
    return (
        page.locator(".assistant")
        .nth(answer)
        .evaluate(
            """(element) => {
            const legend = {};
            for (const name of ["accepted", "corrected", "bonus", "plain"])
                legend[getComputedStyle(document.querySelector(`.legend .${name}`)).backgroundColor] = name;
            const counts = { accepted: 0, corrected: 0, bonus: 0, plain: 0 };
            for (const token of element.querySelectorAll(".text .token"))
                counts[legend[getComputedStyle(token).backgroundColor]] += 1;
            return counts;
        }"""
        )
    )


def test_a_chat_streams_in_the_colours_that_the_server_counts(opened: Opened) -> None:
    page = opened.page
    exact = 0
    for number, question in enumerate(QUESTIONS):
        opened.ask(question, temperature=0, max_tokens=120)
        tokens = page.locator(".assistant").nth(number).locator(".token")
        expect(tokens.nth(3)).to_be_attached()
        # It is shown while it is written.
        assert page.locator("#stop").is_enabled()
        opened.wait_answered()
        counts = colours(page, number)
        told = json.loads(page.locator(".assistant").nth(number).get_attribute("data-metrics") or "")
        speculation = told["speculative_decoding"]
        assert speculation["drafts"] > 5
        assert counts["accepted"] > 5
        ends = counts["corrected"] + counts["bonus"]
        if ends == speculation["drafts"]:
            exact += 1
            assert counts["accepted"] == speculation["accepted_tokens"]
        else:
            # The end of the text lies within the last draft: what is behind it was verified, but is not shown.
            assert ends == speculation["drafts"] - 1
            hidden = speculation["accepted_tokens"] - counts["accepted"]
            assert 0 <= hidden <= len(speculation["accepted_per_position"])
        summary = page.locator(".assistant").nth(number).locator(".summary").inner_text()
        assert f"{sum(counts.values())} tokens" in summary
        assert f"{speculation['acceptance_length']:.2f} acceptance length" in summary
        assert re.search(r"[\d.]+ tokens/s", summary)
        assert re.search(r"\d (ms|s) to the first token", summary)
        assert f"{speculation['acceptance_length']:.2f}" == page.locator("#live-acceptance").inner_text()
    assert exact > 0


def test_the_text_is_what_the_server_answers_without_a_page(opened: Opened, server: RunningServer) -> None:
    opened.ask(QUESTIONS[1], temperature=0, max_tokens=40, system="You are terse.")
    opened.wait_answered()
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": QUESTIONS[1]}]
    whole = server.openai().chat.completions.create(
        model=DEFAULT_MODEL,
        messages=messages,
        temperature=0,
        max_tokens=40,  # type: ignore[arg-type]
    )
    assert opened.page.locator(".assistant .text").text_content() == whole.choices[0].message.content


def painted(page: Page) -> str:
    return str(page.locator("#arenas canvas").first.evaluate("(canvas) => canvas.toDataURL()"))


def count(page: Page, state: str) -> int:
    text = page.locator("#kv-legend li", has_text=state).locator(".count").inner_text()
    return int(text.replace(",", ""))


def test_the_map_shows_pages_being_taken_and_cached_and_found_again(opened: Opened) -> None:
    page = opened.page
    expect(page.locator("#arenas canvas").first).to_have_attribute("data-runs", re.compile("^1k"))
    before, cached = painted(page), count(page, "cached")
    requests = page.locator("#hits li").count()
    opened.ask("Explain in detail how a canal lock works, and why it needs no pumps.", temperature=0, max_tokens=400)
    page.wait_for_function("() => /[hx]/.test(document.querySelector('#arenas canvas').dataset.runs)")
    assert painted(page) != before
    # A hit is told while its request is still being written.
    expect(page.locator("#hits li")).to_have_count(requests + 1)
    assert page.locator("#stop").is_enabled()
    opened.wait_answered()
    page.wait_for_function("() => !/[hsx]/.test(document.querySelector('#arenas canvas').dataset.runs)")
    assert count(page, "cached") > cached
    assert count(page, "held") == 0
    opened.ask("And how many boats fit in?", max_tokens=8)
    opened.wait_answered()
    expect(page.locator("#hits li")).to_have_count(requests + 2)
    found = re.match(r"(\d+) of (\d+) tokens", page.locator("#hits li").first.locator("span").first.inner_text())
    assert found is not None
    assert int(found[1]) > 32


def test_a_map_of_very_many_pages_keeps_its_size_and_shows_the_busiest(opened: Opened) -> None:
    shown = opened.page.evaluate(
        """async () => {
            const { PageMap, spelt } = await import("/page/page_map.js");
            const names = { k: "sink", f: "free", c: "cached", h: "held" };
            const canvas = document.getElementById("arenas").appendChild(document.createElement("canvas"));
            canvas.style.display = "block";
            canvas.style.width = "360px";
            const map = new PageMap(canvas, names);
            const looks = [];
            for (const runs of ["1k199999f", "1k99999f1h99999f", "1k99998f1c1h99999f"]) {
                map.show(spelt(runs));
                looks.push({ height: canvas.clientHeight, picture: canvas.toDataURL(), states: map.cells.join("") });
            }
            map.close();
            canvas.remove();
            return { looks, perCell: map.perCell };
        }"""
    )
    empty, one_held, cached_beside = shown["looks"]
    assert shown["perCell"] > 10
    assert 50 < empty["height"] <= 100
    assert {look["height"] for look in shown["looks"]} == {empty["height"]}
    assert one_held["states"].count("h") == 1
    assert one_held["picture"] != empty["picture"]
    assert cached_beside["states"] == one_held["states"]


def running(server: RunningServer) -> float:
    text = server.http().get("/metrics").text
    return float(re.search(r"^outrider:num_requests_running\S* (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]


@pytest.mark.parametrize("how", ["button", "escape", "reset"])
def test_stopping_ends_the_request_in_the_engine(opened: Opened, server: RunningServer, how: str) -> None:
    page = opened.page
    opened.ask(NO_END, temperature=0, max_tokens=4000)
    expect(page.locator(".assistant .token").nth(5)).to_be_attached()
    wait_until(lambda: running(server) == 1)
    if how == "escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop" if how == "button" else "#reset")
    expect(page.locator("#send")).to_be_enabled()
    wait_until(lambda: running(server) == 0)
    if how == "reset":
        expect(page.locator(".message")).to_have_count(0)
    else:
        expect(page.locator(".assistant .summary")).to_contain_text("stopped")
    # What was stopped does not stand in the way of the next.
    opened.ask("Name a river.", max_tokens=5)
    opened.wait_answered()
    expect(page.locator("#problem")).to_be_hidden()


def test_text_is_never_taken_for_markup(opened: Opened) -> None:
    opened.ask("<img src=x onerror=alert(1)><b>bold</b>", max_tokens=4)
    opened.wait_answered()
    assert opened.page.locator(".user .text").text_content() == "<img src=x onerror=alert(1)><b>bold</b>"
    assert opened.page.locator(".user img, .user b").count() == 0


def test_a_setting_that_is_wrong_is_said_before_anything_is_sent(opened: Opened) -> None:
    opened.ask("x", temperature=-1)
    expect(opened.page.locator("#problem")).to_contain_text("Temperature")
    opened.ask("x", temperature=0, max_tokens=100_000)
    expect(opened.page.locator("#problem")).to_contain_text("The server refused (400)")
    # The question is still there to be sent again.
    expect(opened.page.locator("#prompt")).to_have_value("x")


def test_a_full_queue_a_wrong_key_and_a_server_that_is_gone_are_said_in_words(browser: Browser) -> None:
    server = start("--api-key", KEY, "--max-num-seqs", "1", "--max-queue", "0")
    opened = Opened(browser, server.url)
    page, problem = opened.page, opened.page.locator("#problem")
    try:
        expect(problem).to_contain_text("wants an API key")
        expect(page.locator("#server-text")).to_have_text("API key needed")
        page.fill("#key", "wrong")
        page.press("#key", "Tab")
        expect(problem).to_contain_text("key is wrong")
        page.fill("#key", KEY)
        page.press("#key", "Tab")
        expect(page.locator("#server-text")).to_have_text("connected")
        expect(problem).to_be_hidden()
        # It outlives the page, but not the tab.
        page.reload()
        expect(page.locator("#server-text")).to_have_text("connected")
        assert page.evaluate("localStorage.length") == 0

        with server.openai(KEY).chat.completions.create(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": NO_END}],
            stream=True,
            max_tokens=4000,
            temperature=0,
        ) as stream:
            next(iter(stream))
            opened.ask("Are you there?", max_tokens=4)
            expect(problem).to_contain_text("too much to do")
            expect(problem).to_contain_text("Try again in a second.")
            expect(page.locator("#prompt")).to_have_value("Are you there?")
        wait_until(lambda: server.http(KEY).get("/kv").json()["groups"][0]["held"] == 0)
        opened.ask("Are you there?", max_tokens=4)
        opened.wait_answered()
        expect(problem).to_be_hidden()

        opened.ask(NO_END, temperature=0, max_tokens=4000)
        expect(page.locator(".assistant").nth(1).locator(".token").nth(5)).to_be_attached()
        server.process.kill()
        expect(problem).to_contain_text("Is “outrider serve” still running?")
        expect(page.locator("#server-text")).to_have_text("server gone")
        expect(page.locator(".assistant").nth(1).locator(".summary")).to_contain_text("broken off")
        opened.ask("Hello?")
        expect(problem).to_contain_text("cannot be reached")
    finally:
        server.stop()
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_moves_while_an_answer_is_written(browser: Browser, server: RunningServer, scheme: str) -> None:
    """In both colour schemes; the pictures in the documentation are taken here."""
    opened = Opened(browser, server.url, color_scheme=scheme)
    page = opened.page
    expect(page.locator("#server-text")).to_have_text("connected")
    fixed = ["#composer", ".legend", "#arenas", "#kv-legend", "#settings", ".figures"]
    opened.ask(QUESTIONS[0], temperature=0, max_tokens=160)
    opened.wait_answered()
    before = [page.locator(name).bounding_box() for name in fixed]
    opened.ask("Which of them matters most with children?", max_tokens=200)
    # Half-way, so that pages are held and hits are fresh.
    expect(page.locator(".assistant").nth(1).locator(".token").nth(20)).to_be_attached()
    page.wait_for_function("() => /[hx]/.test(document.querySelector('#arenas canvas').dataset.runs)")
    if os.environ.get("OUTRIDER_TEST_PICTURES"):
        IMAGES.mkdir(exist_ok=True)
        page.screenshot(path=IMAGES / ("playground.png" if scheme == "light" else "playground-dark.png"))
    assert [page.locator(name).bounding_box() for name in fixed] == before
    opened.wait_answered()
    assert [page.locator(name).bounding_box() for name in fixed] == before
    opened.close()
