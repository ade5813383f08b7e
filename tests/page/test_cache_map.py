"""The map of the KV pages, live."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect
from tests.page.opened import Opened


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
    opened.ask("Explain in detail how a canal lock works, and why it needs no pumps.", temperature=0, max_tokens=300)
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
            const names = { k: "null page", f: "free", c: "cached", h: "held" };
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
    assert 50 < empty["height"] <= 74
    assert {look["height"] for look in shown["looks"]} == {empty["height"]}
    assert one_held["states"].count("h") == 1
    assert one_held["picture"] != empty["picture"]
    assert cached_beside["states"] == one_held["states"]
