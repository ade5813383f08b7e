"""Nothing moves, nothing is cut off, everything can be read; in both colour schemes, on a desk and on a telephone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.page.opened import QUESTIONS, Opened
from tests.server.running import RunningServer

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURE_BYTES_MAX = 300 << 10
FIXED = ("#composer", ".legend", "#arenas", "#kv-legend", "#settings", ".figures:not(.rates)", ".rates")
CONTRAST_LEAST = 4.5
"""WCAG's AA for text of ordinary size."""

POOR_CONTRAST = """(least) => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const linear = (part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const light = (colour) => {
        const [red, green, blue] = colour.slice(0, 3).map((part) => linear(part / 255));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const behind = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const colour = numbers(getComputedStyle(each).backgroundColor);
            if (colour.length === 3 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
    };
    const poor = [];
    let seen = 0;
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement;
        const text = texts.currentNode.textContent.trim();
        if (!text || !element.checkVisibility() || element.closest(":disabled")) continue;
        const both = [light(numbers(getComputedStyle(element).color)), light(behind(element))];
        seen += 1;
        if ((Math.max(...both) + 0.05) / (Math.min(...both) + 0.05) < least) poor.push(text);
    }
    return { seen, poor };
}"""
CUT_OFF = """() => {
    const wide = (element) => element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1;
    const labels = "button, label:not(.hidden), h1, h2, h3, dt, dd, li, input, .server, .arena p";
    return [...document.querySelectorAll(labels)]
        .filter((element) => element.checkVisibility() && wide(element))
        .map((element) => element.id || element.textContent);
}"""


def expect_readable(page: Page) -> None:
    found = page.evaluate(POOR_CONTRAST, CONTRAST_LEAST)
    assert found["seen"] > 30
    assert found["poor"] == []
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_moves_while_an_answer_is_written(browser: Browser, server: RunningServer, scheme: str) -> None:
    """The pictures in the documentation are taken here."""
    with Opened(browser, server.url, color_scheme=scheme) as opened:
        page = opened.page
        opened.wait_connected()
        expect_readable(page)
        opened.ask(QUESTIONS[0], temperature=0, max_tokens=160)
        opened.wait_answered()
        before = [page.locator(name).bounding_box() for name in FIXED]
        opened.ask("Which of them matters most with children?", max_tokens=150)
        # Half-way, so that pages are held and hits are fresh.
        opened.wait_written(20, answer=1)
        page.wait_for_function("() => /[hx]/.test(document.querySelector('#arenas canvas').dataset.runs)")
        if os.environ.get("OUTRIDER_TEST_PICTURES"):
            IMAGES.mkdir(exist_ok=True)
            page.screenshot(path=IMAGES / ("playground.png" if scheme == "light" else "playground-dark.png"))
        assert [page.locator(name).bounding_box() for name in FIXED] == before
        opened.wait_answered()
        assert [page.locator(name).bounding_box() for name in FIXED] == before
        expect_readable(page)


def test_everything_fits_on_a_small_screen(browser: Browser, server: RunningServer) -> None:
    with Opened(browser, server.url, width=1280, height=800) as opened:
        opened.wait_connected()
        assert opened.page.evaluate("document.documentElement.scrollHeight - innerHeight") == 0
        aside = opened.page.locator("aside").evaluate("(aside) => aside.scrollHeight - aside.clientHeight")
        assert aside == 0


def test_everything_fits_on_a_telephone(browser: Browser, server: RunningServer) -> None:
    with Opened(browser, server.url, width=390, height=844, is_mobile=True, has_touch=True) as opened:
        page = opened.page
        opened.wait_connected()
        expect_readable(page)
        page.fill("#max-tokens", "30")
        page.locator(".examples button").first.tap()
        opened.wait_answered()
        expect(page.locator(".user .text")).to_have_text(QUESTIONS[0])
        assert opened.colours()["accepted"] > 3
        expect_readable(page)
        # An answer that ends does not bring up the keyboard.
        expect(page.locator("#prompt")).not_to_be_focused()


def test_pictures_in_the_documentation_are_small() -> None:
    pictures = list(IMAGES.glob("playground*.png"))
    assert len(pictures) == 2
    assert all(picture.stat().st_size < PICTURE_BYTES_MAX for picture in pictures)
