"""A server under several loads: what is sent, what is counted, and what of it is said when the server errs."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli import Done, run_main
from tests.tools.bench.fake_openai import DONE, FakeServer, answer, event, fake_server

from outrider.errors import ConfigError, RequestError
from outrider.tools.bench import http_client, serve_rates
from outrider.tools.bench.arrivals import Load, burst_loads, closed_loads, poisson_loads, send_all
from outrider.tools.bench.openai_server import CHAT_ROUTE, ServerFacts, base_url, look_at
from outrider.tools.bench.serve_rates import (
    AS_IT_IS,
    OFF,
    ON,
    RatesConfig,
    Turn,
    distribution,
    measure,
    measurements,
    raise_if_nothing_worked,
)
from outrider.tools.bench.streamed_answer import Answer, Recorded, error_message, read, record

OURS = {"data": [{"id": "ours", "owned_by": "outrider", "drafter": "dflash"}]}


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


def facts(fake: FakeServer, **options: Any) -> ServerFacts:
    return look_at(fake.url, **({"model": None, "key": None, "route": CHAT_ROUTE} | options))


def config(**changes: Any) -> RatesConfig:
    return RatesConfig(**({"loads": (Load(clients=2),), "tokens": 6, "requests": 4, "rounds": 2} | changes))


# ---- what is sent ----------------------------------------------------------------------------------


def test_every_load_gets_as_many_requests_as_the_report_says(fake: FakeServer) -> None:
    loads = (Load(clients=1), Load(clients=3), Load(rate_per_s=500.0), Load(clients=2, every_s=0.01))
    told: list[str] = []
    given = config(loads=loads, texts=("chat", "ordinary"))
    report = measure(given, facts(fake), progress=told.append)
    json.dumps(report)
    assert len(told) == measurements(given)
    assert [case["load"] for case in report["cases"][::2]] == [
        "1 client",
        "3 clients",
        "500 a second",
        "2 every 0.01 s",
    ]
    for case in report["cases"]:
        figures = case["variants"][AS_IT_IS]
        assert (figures["requests"], figures["failures"]) == (8, {})
        assert figures["output_tokens"] == 8 * 6
        assert figures["tokens_per_s"] > 0
        for name in ("ttft_ms", "tpot_ms"):
            assert 0 < figures[name]["p50"] <= figures[name]["p99"]
        assert case["comparison"] is None
    measured = [body for body in fake.bodies if body["max_tokens"] == 6]
    assert {"messages" in body for body in measured} == {True, False}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in measured)


def test_no_prompt_is_found_in_the_prefix_cache(fake: FakeServer) -> None:
    measure(config(), facts(fake))
    salts = Counter(body["cache_salt"] for body in fake.bodies if body["max_tokens"] == 6)
    assert set(salts.values()) == {1}


def test_as_many_requests_are_under_way_as_there_are_clients(fake: FakeServer) -> None:
    known, meeting = facts(fake), threading.Barrier(3, timeout=60)

    def meet() -> None:
        # An answer comes only when three requests are there.
        meeting.wait()

    fake.before = meet
    measure(config(loads=(Load(clients=3),), requests=6), known)
    assert fake.most_at_once == 3


def test_bursts_do_not_wait_for_answers() -> None:
    """Eight requests are under way although the first four are not answered before all are there."""
    meeting = threading.Barrier(8, timeout=60)
    done: list[int] = []

    def send(number: int) -> None:
        meeting.wait()
        done.append(number)

    send_all(Load(clients=4, every_s=0.01), 8, send)
    assert sorted(done) == list(range(8))


def test_arrivals_are_those_of_the_seed() -> None:
    load = Load(rate_per_s=4.0)
    times = load.arrival_times_s(2_000, seed=1)
    assert times == load.arrival_times_s(2_000, seed=1) != load.arrival_times_s(2_000, seed=2)
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.1)
    assert Load(clients=2, every_s=3.0).arrival_times_s(5, seed=0) == [0, 0, 3, 3, 6]


def answered(sent_s: float, first_s: float, ended_s: float, tokens: int) -> Answer:
    return Answer(sent_s=sent_s, ended_s=ended_s, ttft_s=first_s - sent_s, tokens=tokens)


def test_tokens_per_second_of_clients_are_counted_as_long_as_all_of_them_have_requests() -> None:
    """Two clients with two requests each; from 20 s on, only one of them has any."""
    answers = [answered(*times) for times in ((0, 1, 8, 8), (0, 1, 10, 10), (8, 9, 20, 12), (10, 11, 31, 21))]
    until_20_s = 8 + 10 + 12 + (1 + 20 * 9 / 20)
    assert Turn(answers, is_closed=True).tokens_per_s == pytest.approx(until_20_s / 20)
    assert Turn(answers).tokens_per_s == pytest.approx(51 / 31)
    failed = Answer(sent_s=10.0, ended_s=10.5, failure="no answer")
    assert Turn([*answers[:3], failed], is_closed=True).tokens_per_s == pytest.approx(30 / 20)
    assert Turn([failed], is_closed=True).tokens_per_s is None


def test_what_was_complete_counts_if_the_last_request_fails() -> None:
    answers = [answered(*times) for times in ((0, 1, 8, 8), (0, 1, 10, 10))]
    failed = Answer(sent_s=10.0, ended_s=30.0, failure="no answer")
    assert Turn([*answers, failed], is_closed=True).tokens_per_s == pytest.approx(18 / 10)


def test_only_clients_that_wait_are_measured_as_such(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def turn(answers: list[Answer], *, is_closed: bool) -> Turn:
        closed.append(is_closed)
        return Turn(answers, is_closed=is_closed)

    monkeypatch.setattr(serve_rates, "Turn", turn)
    loads = (Load(clients=2), Load(rate_per_s=500.0), Load(clients=2, every_s=0.01))
    measure(config(loads=loads, rounds=1), facts(fake))
    assert closed == 2 * [True, False, False]


def test_an_answer_has_no_tokens_before_its_first_text() -> None:
    some = answered(2, 4, 12, 9)
    assert [some.tokens_until(at_s) for at_s in (1, 3.9, 4, 8, 12, 50)] == [0, 0, 1, 5, 9, 9]
    assert Answer(sent_s=0, ended_s=5, tokens=3).tokens_until(4) == 0


# ---- speculation on and off ------------------------------------------------------------------------


def test_speculation_is_switched_in_turns_and_compared_in_pairs(fake: FakeServer) -> None:
    fake.models = OURS
    report = measure(config(compare_speculation=True, rounds=3, loads=(Load(clients=1),)), facts(fake))
    measured = [body["speculate"] for body in fake.bodies if body["max_tokens"] == 6 and "speculate" in body]
    on, off = [True] * 4, [False] * 4
    # The warm-up sends one request with each.
    assert measured == [False, True, *on, *off, *off, *on, *on, *off]
    (case,) = report["cases"]
    assert set(case["variants"]) == {ON, OFF}
    comparison = case["comparison"]
    assert (comparison["texts"], comparison["texts_that_differ"]) == (12, 0)
    assert len(comparison["tokens_per_s"]["pairs"]) == len(comparison["tpot_ms"]["pairs"]) == 3
    for base, head in comparison["tokens_per_s"]["pairs"]:
        assert base in case["variants"][OFF]["tokens_per_s_by_round"]
        assert head in case["variants"][ON]["tokens_per_s_by_round"]


def test_texts_that_differ_are_counted(fake: FakeServer) -> None:
    fake.models = OURS
    known = facts(fake)
    fake.events = lambda body: answer({**body, "max_tokens": body["max_tokens"] - body["speculate"]})
    report = measure(config(compare_speculation=True), known)
    assert report["cases"][0]["comparison"]["texts_that_differ"] == 8
    assert any("fewer tokens than 6" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("entry", "words"), [({"id": "x"}, "does not say that it is one of Outrider"), (None, "has no drafter")]
)
def test_other_servers_cannot_be_compared(fake: FakeServer, entry: dict[str, Any] | None, words: str) -> None:
    fake.models = {"data": [entry or {"id": "x", "owned_by": "outrider", "drafter": None}]}
    with pytest.raises(ConfigError, match=words):
        measure(config(compare_speculation=True), facts(fake))


# ---- servers that know less ------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [("ignore_eos",), ("cache_salt",), ("ignore_eos", "cache_salt", "stream_options")])
def test_fields_that_a_server_refuses_are_left_out_and_noted(fake: FakeServer, refused: tuple[str, ...]) -> None:
    fake.refused_fields = refused
    known = facts(fake)
    assert set(known.fields) == {"ignore_eos", "cache_salt", "stream_options"} - set(refused)
    report = measure(config(), known)
    assert report["cases"][0]["variants"][AS_IT_IS]["failures"] == {}
    assert report["cases"][0]["variants"][AS_IT_IS]["output_tokens"] == 48
    notes = " ".join(report["notes"])
    assert [word in notes for word in ("ignore_eos", "cache_salt", "events with text are counted")] == [
        name in refused for name in ("ignore_eos", "cache_salt", "stream_options")
    ]


def test_a_server_without_a_list_of_models_is_measured_if_the_model_is_named(fake: FakeServer) -> None:
    fake.models_status = 404
    assert facts(fake, model="m").model == "m"
    with pytest.raises(ConfigError, match="name one with --model"):
        facts(fake)


# ---- errors that say what to do --------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:9 .*outrider serve"):
        look_at("127.0.0.1:9/v1", model=None, key=None, route=CHAT_ROUTE)


def test_a_model_that_is_not_there_is_named_beside_those_that_are(fake: FakeServer) -> None:
    fake.models = {"data": [{"id": "a"}, {"id": "b"}]}
    with pytest.raises(ConfigError, match="no model 'c'; it has: a, b"):
        facts(fake, model="c")
    assert facts(fake, model="b").model == "b"
    assert facts(fake).model == "a"


def test_a_key_is_asked_for_and_sent(fake: FakeServer) -> None:
    fake.key = "secret"
    with pytest.raises(ConfigError, match="--api-key"):
        facts(fake)
    assert facts(fake, key="secret").model == "fake"


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [5]}, [], "x"])
def test_a_list_of_models_that_is_none_is_an_error(fake: FakeServer, models: Any) -> None:
    fake.models = models
    with pytest.raises(ConfigError, match="does not say which models"):
        facts(fake)


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_a_server_that_refuses_everything_is_an_error(fake: FakeServer, status: int) -> None:
    fake.status = status
    with pytest.raises(RequestError, match=f"status {status}: not today"):
        facts(fake)


@pytest.mark.parametrize(
    "url", ["", "https://x", "ftp://x", "http://", "http://x:99999", "http://x/some/path", "http://[::1"]
)
def test_addresses_that_cannot_be_measured_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        base_url(url)


def test_addresses_are_taken_as_users_copy_them() -> None:
    for given in ("http://127.0.0.1:80/v1", "127.0.0.1:80", "http://127.0.0.1:80/", "http://127.0.0.1:80/v1/"):
        assert base_url(given) == "http://127.0.0.1:80"


# ---- answers that are wrong ------------------------------------------------------------------------

WORD = event({"choices": [{"delta": {"content": "word"}}]})
USAGE_OF_NONE = event({"choices": [], "usage": {"completion_tokens": 0}})


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([WORD, b"data: {not json\n\n", DONE], "malformed event"),
        ([WORD, b"data: 5\n\n", DONE], "malformed event"),
        ([WORD, event({"error": {"message": "the engine died"}}), DONE], "error in the stream"),
        ([WORD, WORD], "stream cut off"),
        ([], "stream cut off"),
        ([DONE], "no tokens"),
        ([USAGE_OF_NONE, DONE], "no tokens"),
        ([event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), DONE], "no tokens"),
    ],
)
def test_a_wrong_answer_is_a_failure_with_its_kind(fake: FakeServer, events: list[bytes], kind: str) -> None:
    known = facts(fake)
    fake.events = lambda body: events
    report = measure(config(rounds=1), known)
    figures = report["cases"][0]["variants"][AS_IT_IS]
    assert figures["failures"] == {kind: 4}
    assert figures["first_failure"].startswith(f"{kind}: ")
    assert (figures["tokens_per_s"], figures["ttft_ms"], figures["output_tokens"]) == (None, None, 0)
    with pytest.raises(RequestError, match=kind):
        raise_if_nothing_worked(report)


def test_some_failures_leave_the_figures_of_the_others(fake: FakeServer) -> None:
    known, numbers = facts(fake), iter(range(1_000))
    fake.events = lambda body: [WORD] if next(numbers) % 2 else answer(body)
    report = measure(config(loads=(Load(clients=1),)), known)
    figures = report["cases"][0]["variants"][AS_IT_IS]
    assert figures["failures"] == {"stream cut off": 4}
    assert figures["output_tokens"] == 24
    raise_if_nothing_worked(report)


def test_a_request_that_is_not_answered_in_time_is_not_sent_again(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def stall() -> None:
        over.wait(60)

    fake.before = stall
    monkeypatch.setattr(http_client, "TIMEOUT_S", 0.2)
    answer_of = record(http_client.Client(fake.url), CHAT_ROUTE, {"max_tokens": 1})
    over.set()
    assert read(answer_of).failure == "no answer"
    assert len(fake.bodies) == 1


def recorded(*lines: tuple[float, bytes]) -> Recorded:
    return Recorded(1.0, status=200, lines=[(at_s, line.rstrip()) for at_s, line in lines], ended_s=9.0)


def test_times_are_those_of_events_with_text() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    usage = event({"choices": [], "usage": {"completion_tokens": 5}})
    found = read(recorded((1.1, role), (1.5, WORD), (2.0, WORD), (2.5, WORD), (2.6, usage), (2.7, DONE)))
    assert (found.tokens, found.counted_by_server, found.text) == (5, True, "wordwordword")
    assert found.ttft_s == pytest.approx(0.5)
    assert found.tpot_s == pytest.approx(1.0 / 4)
    assert found.ended_s == 2.5


def test_without_usage_events_with_text_are_counted() -> None:
    found = read(recorded((1.5, WORD), (2.0, WORD), (2.7, DONE)))
    assert (found.tokens, found.counted_by_server) == (2, False)
    assert found.tpot_s == pytest.approx(0.5)


def test_one_token_has_no_time_per_token() -> None:
    found = read(recorded((1.5, event({"choices": [{"text": "word"}]})), (2.7, DONE)))
    assert (found.tokens, found.tpot_s) == (1, None)


def test_percentiles() -> None:
    assert distribution([]) is None
    assert distribution([3.0]) == {"mean": 3.0, "p50": 3.0, "p99": 3.0}
    assert distribution([float(value) for value in range(101)]) == {"mean": 50.0, "p50": 50.0, "p99": 99.0}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "a"}}', "a"),
        ('{"error": "b"}', "b"),
        ('{"message": "c"}', "c"),
        ('{"detail": "d"}', "d"),
        ("<h1>\n  e</h1>", "<h1> e</h1>"),
        ("", "the answer has no text"),
    ],
)
def test_messages_are_found_in_errors_of_all_kinds(body: str, message: str) -> None:
    assert error_message(body) == message


# ---- settings and the command ----------------------------------------------------------------------


def test_loads_are_read_from_lists() -> None:
    assert closed_loads("1, 8,8") == [Load(clients=1), Load(clients=8)]
    assert poisson_loads("0.5,2") == [Load(rate_per_s=0.5), Load(rate_per_s=2.0)]
    assert burst_loads("8/2.0") == [Load(clients=8, every_s=2.0)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--concurrency", "0"),
        ("--concurrency", "many"),
        ("--concurrency", "5000"),
        ("--rate", "-1"),
        ("--rate", "inf"),
        ("--burst", "8"),
        ("--burst", "8,4/2"),
        ("--burst", "8/0"),
        ("--text", "poems"),
        ("--load", "--quick"),
        ("--max-num-seqs", "4"),
        ("--dtype", "float32"),
        ("--concurrency", ","),
        ("--prompts", "nowhere.jsonl"),
    ],
)
def test_mistakes_are_status_2(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ("--url", "http://127.0.0.1:9")
    done = run_main(monkeypatch, capsys, ("bench", "serve", *url, *arguments), "")
    assert done.status == 2
    assert done.err.startswith("error: ")
    assert "no server answers" not in done.err


def bench(fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: object) -> Done:
    arguments = ("bench", "serve", "--url", fake.url, "--concurrency", "2,3", "--quick", "--tokens", 5, *more)
    return run_main(monkeypatch, capsys, arguments, "")


def test_the_command_prints_tables_and_ratios(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.models = OURS
    done = bench(fake, monkeypatch, capsys, "--compare-speculation")
    assert done.status == 0, done.err
    for words in (
        "ours at http",
        "3 clients, on",
        "2 clients, off",
        "speculation relative to none",
        "in 10 of 10 answ",
    ):
        assert words in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_the_command_prints_json_alone(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Why?"}\n{"turns": ["How?", "Really?"]}\n', encoding="utf-8")
    done = bench(fake, monkeypatch, capsys, "--json", "--prompts", tmp_path / "mine.jsonl", "--model", "fake")
    assert done.status == 0, done.err
    assert [case["load"] for case in json.loads(done.out)["cases"]] == ["2 clients", "3 clients"]
    asked = {body["messages"][0]["content"] for body in fake.bodies[1:]}
    assert asked == {"Why?", "How?"}


def test_failures_are_shown_and_are_status_1(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = iter(range(1_000))
    fake.events = lambda body: [WORD] if next(numbers) == 9 else answer(body)
    done = bench(fake, monkeypatch, capsys)
    assert done.status == 1
    assert "1 × stream cut off; the first one: stream cut off: it ended without [DONE]" in done.out
