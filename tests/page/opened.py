"""The playground in a browser: what tests do with it, and what it complained about."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from playwright.sync_api import Browser, Error, Page, expect
from tests.server.running import RunningServer

WAIT_MS = 60_000
"""For whatever is waited for, answers included: several times what the slowest takes on a busy machine."""
expect.set_options(timeout=WAIT_MS)

QUESTIONS = ("Give me five tips for a first visit to a large museum.", "Write a short poem about snow.")
NO_END = "Write a very long story about a lighthouse keeper and her two brothers."
ORIGINS = ("accepted", "corrected", "bonus", "plain")

still_open: list[Opened] = []


class Opened:
    """The page, and whatever it complained about or asked others for."""

    def __init__(self, browser: Browser, url: str, *, width: int = 1360, height: int = 960, **options: Any) -> None:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(WAIT_MS)
        self.url = url
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self._last_look = ""
        self.page = context.new_page()
        self._listen(self.page)

    def _listen(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("request", lambda asked: None if asked.url.startswith(self.url) else self.elsewhere.append(asked.url))
        # Nothing it can print may open one.
        page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(self.url)

    def _note(self, kind: str, text: str) -> None:
        # Answers with an error status are reported by the browser itself; the page shows those in words.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.complaints.append(text)

    def __enter__(self) -> Opened:
        still_open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None:
            # The report is written later.
            self._last_look = self.described()
        self.page.context.close()
        if kind is None:
            if self in still_open:
                still_open.remove(self)
            assert self.complaints == []
            assert self.elsewhere == []

    def described(self) -> str:
        if self._last_look:
            return self._last_look
        try:
            shown = self.page.locator("#server-text, #problem, #live-state, .summary").all_inner_texts()
            picture = Path(tempfile.gettempdir()) / "outrider-page-failed.png"
            self.page.screenshot(path=picture, timeout=5_000)
        except Error as error:
            return f"cannot be looked at: {error}"
        return f"shows {[text for text in shown if text]}, complains {self.complaints}; picture: {picture}"

    def other_tab(self) -> Page:
        page = self.page.context.new_page()
        self._listen(page)
        return page

    def wait_connected(self) -> None:
        expect(self.page.locator("#server-text")).to_have_text("connected")

    def ask(self, text: str, **settings: object) -> None:
        for name, value in settings.items():
            self.page.fill(f"#{name.replace('_', '-')}", str(value))
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def wait_answered(self) -> None:
        expect(self.page.locator("#send")).to_be_enabled()

    def wait_written(self, tokens: int, *, answer: int = 0) -> None:
        expect(self.page.locator(".assistant").nth(answer).locator(".token").nth(tokens - 1)).to_be_attached()

    def colours(self, answer: int = 0) -> dict[str, int]:
        """Tokens of an answer by the colour that they are really painted in."""
        found: dict[str, int] = (
            self.page.locator(".assistant")
            .nth(answer)
            .evaluate(
                """(element, names) => {
                    const colour = (token) => getComputedStyle(token).backgroundColor;
                    const sample = (name) => document.querySelector(`.legend .${name}`);
                    const legend = new Map(names.map((name) => [colour(sample(name)), name]));
                    const counts = Object.fromEntries(names.map((name) => [name, 0]));
                    for (const token of element.querySelectorAll(".text .token"))
                        counts[legend.get(colour(token))] += 1;
                    return counts;
                }""",
                ORIGINS,
            )
        )
        return found


def metric(server: RunningServer, name: str) -> float:
    lines = server.http().get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"outrider:{name}{{"))
