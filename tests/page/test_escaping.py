"""Whatever a model, a person or a server's name says is text, and the policy would stop what is not."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Browser, Error, expect
from tests.page.conftest import KEY, NAME_WITH_MARKUP
from tests.page.opened import Opened
from tests.server.running import RunningServer

IMAGE = "<img src=x onerror=alert(1)>"
MARKUP = f"{IMAGE}<b>bold</b><script>alert(2)</script>"


def expect_text(opened: Opened, who: str, text: str) -> None:
    assert opened.page.locator(f".{who} .text").text_content() == text
    assert opened.page.locator(f".{who} .text :is(img, b, script)").count() == 0


def test_markup_from_a_person_and_from_a_model_is_text(opened: Opened) -> None:
    request = f"Repeat exactly: {IMAGE}<b>bold</b>"
    opened.ask(request, temperature=0, max_tokens=40)
    opened.wait_answered()
    expect_text(opened, "user", request)
    answer = opened.page.locator(".assistant .text").text_content() or ""
    assert IMAGE in answer, "the model printed no markup: another request is needed"
    expect_text(opened, "assistant", answer)


def test_a_single_token_of_markup_is_text(opened: Opened) -> None:
    """No vocabulary at hand has one; another's might."""
    tokens = [{"id": 7, "text": MARKUP, "origin": "accepted"}]
    chunks = [
        {"choices": [{"delta": {"content": MARKUP}, "token_origins": tokens, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ": a comment\n\ndata: [DONE]\n\n"
    opened.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream)
    )
    opened.ask("x")
    opened.wait_answered()
    expect_text(opened, "assistant", MARKUP)
    assert opened.colours()["accepted"] == 1
    expect(opened.page.locator("#problem")).to_be_hidden()


def test_markup_in_an_error_and_in_the_models_name_is_text(browser: Browser, guarded: RunningServer) -> None:
    with Opened(browser, guarded.url) as opened:
        page = opened.page
        page.fill("#key", KEY)
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_contain_text(NAME_WITH_MARKUP)
        error = json.dumps({"error": {"message": MARKUP}})
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=400, content_type="application/json", body=error),
        )
        opened.ask("x")
        expect(page.locator("#problem")).to_contain_text(MARKUP)
        assert page.locator(":is(#problem, #model) :is(img, b, i, script)").count() == 0


def test_the_policy_stops_markup_and_scripts_that_get_in_all_the_same(opened: Opened) -> None:
    page = opened.page
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("(markup) => { document.body.innerHTML = markup; }", MARKUP)
    with pytest.raises(Error, match="TrustedScript"):
        page.evaluate("() => document.createElement('img').setAttribute('onerror', 'alert(1)')")
    page.evaluate(
        """() => {
            window.blocked = [];
            document.addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
            const style = document.createElement("style");
            style.textContent = "body { display: none }";
            const image = document.createElement("img");
            image.src = "https://example.invalid/image.png";
            document.body.append(style, image);
            return fetch("https://example.invalid/").catch(() => {});
        }"""
    )
    page.wait_for_function("() => window.blocked.length >= 3")
    assert sorted(page.evaluate("window.blocked")) == ["connect-src", "img-src", "style-src-elem"]
    assert page.locator("body").is_visible()
    # The browser complained about each.
    opened.complaints.clear()
    opened.elsewhere.clear()
