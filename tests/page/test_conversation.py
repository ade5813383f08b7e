"""A conversation in a real browser, against a real server with the default model and DFlash."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect
from tests.page.opened import NO_END, ORIGINS, QUESTIONS, Opened, metric
from tests.server.running import RunningServer, wait_until

from outrider.models.resolve import DEFAULT_MODEL


def test_a_chat_streams_in_the_colours_that_the_server_counts(opened: Opened) -> None:
    page = opened.page
    exact = 0
    for number, question in enumerate(QUESTIONS):
        opened.ask(question, temperature=0, max_tokens=120)
        # It is shown while it is written, which takes little more than a tenth of a second.
        page.wait_for_function(
            """(number) => {
                const answer = document.querySelectorAll(".assistant")[number];
                return answer?.querySelectorAll(".token").length >= 4 && !document.querySelector("#stop").disabled;
            }""",
            arg=number,
        )
        opened.wait_answered()
        counts = opened.colours(number)
        assert {name: int(page.locator(f"#count-{name}").inner_text()) for name in ORIGINS} == counts
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


def test_without_speculation_every_token_is_plain(opened: Opened, server: RunningServer) -> None:
    drafts = metric(server, "spec_decode_num_drafts_total")
    opened.page.uncheck("#speculate")
    opened.ask("Name three rivers.", temperature=0, max_tokens=12)
    opened.wait_answered()
    counts = opened.colours()
    assert counts == {"accepted": 0, "corrected": 0, "bonus": 0, "plain": counts["plain"]}
    assert counts["plain"] > 3
    assert opened.page.locator("#live-acceptance").inner_text() == "–"
    assert metric(server, "spec_decode_num_drafts_total") == drafts


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
    expect(opened.page.locator(".assistant .summary")).to_contain_text("ended by max tokens")


def test_a_long_answer_is_several_blocks_and_still_the_same_text(opened: Opened) -> None:
    """In one block, each new token would cost the browser more than the one before it."""
    shown = opened.page.evaluate(
        r"""async () => {
            const { Answer } = await import("/page/answer.js");
            const log = document.getElementById("log");
            const kinds = ["\n\n", "word ", "word.\n", "a\nb", "word ", ".\n\n", "word "];
            const told = kinds.flatMap((text) => Array(40).fill(text));
            const element = log.appendChild(document.createElement("article"));
            element.className = "message assistant";
            const answer = new Answer(element);
            told.forEach((text, place) => {
                const tokens = [{ text, id: 1, origin: "plain" }];
                answer.take({ choices: [{ delta: { content: text }, token_origins: tokens }] });
                if (place % 7 === 0) answer.paint();
            });
            answer.end();
            const height = answer.body.clientHeight;
            getSelection().selectAllChildren(answer.body);
            const copied = getSelection().toString();
            const blocks = answer.body.children.length;
            const one = answer.body.cloneNode(false);
            const whole = (one.textContent = told.join(""));
            element.replaceChildren(one);
            return { blocks, text: answer.body.textContent, copied, whole, height, heightOfOne: one.clientHeight };
        }"""
    )
    assert shown["blocks"] > 2
    assert shown["text"] == shown["whole"]
    assert shown["copied"].strip() == shown["whole"].strip()
    assert abs(shown["height"] - shown["heightOfOne"]) <= 1


@pytest.mark.parametrize("how", ["button", "escape", "reset"])
def test_stopping_ends_the_request_in_the_engine(opened: Opened, server: RunningServer, how: str) -> None:
    page = opened.page
    opened.ask(NO_END, temperature=0, max_tokens=4000)
    opened.wait_written(6)
    wait_until(lambda: metric(server, "num_requests_running") == 1)
    if how == "escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop" if how == "button" else "#reset")
    expect(page.locator("#send")).to_be_enabled()
    wait_until(lambda: metric(server, "num_requests_running") == 0)
    if how == "reset":
        expect(page.locator(".message")).to_have_count(0)
        expect(page.locator("#welcome")).to_be_visible()
    else:
        expect(page.locator(".assistant .summary")).to_contain_text("stopped")
    # What was stopped does not stand in the way of the next.
    opened.ask("Name a river.", max_tokens=5)
    opened.wait_answered()
    expect(page.locator("#problem")).to_be_hidden()


def test_it_can_be_used_with_the_keyboard_alone(opened: Opened) -> None:
    page = opened.page
    expect(page.locator("#prompt")).to_be_focused()
    page.fill("#max-tokens", "60")
    page.locator("#prompt").focus()
    page.keyboard.type("Name a river")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and a lake.")
    page.keyboard.press("Tab")
    expect(page.locator("#send")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.locator(".user .text").text_content() == "Name a river\nand a lake."
    opened.wait_answered()
    # The button that was switched off had the focus.
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("Another one.")
    page.keyboard.press("Enter")
    # Whoever types elsewhere meanwhile is left in peace.
    page.locator("#system").focus()
    opened.wait_answered()
    expect(page.locator("#system")).to_be_focused()


def test_two_tabs_talk_at_the_same_time_and_see_the_same_cache(opened: Opened) -> None:
    first, second = opened.page, opened.other_tab()
    expect(second.locator("#server-text")).to_have_text("connected")
    for page in (first, second):
        page.fill("#max-tokens", "80")
        page.fill("#prompt", NO_END)
        page.press("#prompt", "Enter")
    for page in (first, second):
        expect(page.locator(".assistant .token").nth(5)).to_be_attached()
        assert page.locator("#stop").is_enabled()
    for page in (first, second):
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("#problem")).to_be_hidden()
        assert page.locator(".message").count() == 2
    numbers = [page.locator("#hits li").count() for page in (first, second)]
    assert numbers[0] == numbers[1] >= 2


def test_a_setting_that_is_wrong_is_said_before_anything_is_sent(opened: Opened) -> None:
    opened.ask("x", temperature=-1)
    expect(opened.page.locator("#problem")).to_contain_text("Temperature")
    expect(opened.page.locator("#temperature")).to_be_focused()


def test_a_context_that_is_too_long_is_said_and_the_question_is_still_there(opened: Opened) -> None:
    problem = opened.page.locator("#problem")
    opened.ask("x", temperature=0, max_tokens=100_000)
    expect(problem).to_contain_text("The server refused (400): this model's context holds")
    expect(opened.page.locator("#prompt")).to_have_value("x")
    opened.ask("x", max_tokens=2)
    opened.wait_answered()
    expect(problem).to_be_hidden()
    long = "word " * 9000
    opened.ask(long)
    expect(problem).to_contain_text("Or begin a new chat.")
    expect(opened.page.locator("#prompt")).to_have_value(long.strip())
    assert opened.page.locator(".message").count() == 2
