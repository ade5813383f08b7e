"""The acceptance benchmark asks what the file says, counts what the engine counts, and does not depend on crowding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli import chat_model
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model

from outrider.api.llm import LLM
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, ModelError
from outrider.sampling import SamplingParams
from outrider.tools.bench.acceptance import (
    AcceptanceConfig,
    Chat,
    Tally,
    measure,
    prepare,
    read_chats,
    run_chats,
    spread,
)

LINES = (
    {"category": "maths", "turns": ["1 + 1?", "And twice that?"], "source": "ignored"},
    {"category": "maths", "turns": ["What is seven times eight, and why?"]},
    {"prompt": "No category here."},
    {"category": "prose", "prompt": "Tell me, tell me, tell me, tell me"},
    {"category": "prose", "turns": ["One.", "Two.", "Three."]},
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
# The sanitizer has tests of its own.
ROOMY = {"max_num_batched_tokens": 256, "sanitizer": "off"}
SAMPLED = replace(GREEDY, temperature=0.9, seed=5)


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def chats(tmp_path: Path) -> list[Chat]:
    return read_chats(write(tmp_path / "chats.jsonl", *LINES))


def drafting_engine(**settings: Any) -> Engine:
    """A draft model that is right some of the time, and has KV of its own to lose."""
    target = chat_model()
    drafter = tiny_draft_model(target, first_layers(target, 1))
    return tiny_engine(target, drafter=drafter, method="draft_model", **(ROOMY | settings))


# ---- the file -------------------------------------------------------------------------------------------


def test_lines_are_chats_with_or_without_a_category(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", LINES[0], "", LINES[2], "  ", {"category": "all", "prompt": "x"})
    first, second, third = read_chats(path)
    assert third.category is None
    assert (first.turns, first.category, first.number) == (("1 + 1?", "And twice that?"), "maths", 1)
    assert (second.turns, second.category, second.number) == (("No category here.",), None, 3)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ("{}", 'neither "turns" nor "prompt"'),
        ('{"turns": ["a"], "prompt": "a"}', "keep one"),
        ('{"turns": []}', '"turns" must hold text'),
        ('{"turns": "a"}', '"turns" must hold text'),
        ('{"turns": ["a", " "]}', '"turns" must hold text'),
        ('{"prompt": 3}', '"prompt" must hold text'),
        ('{"prompt": "a", "category": 3}', '"category" must be a name'),
        ("[" * 100_000, "is not valid JSON"),
        ('{"prompt": ' + "9" * 5000 + "}", "is not valid JSON"),
        ('{"prompt": "a", "category": "\\ud800"}', "half a character"),
    ],
    ids=lambda text: text[:24],
)
def test_a_broken_line_is_refused_by_number_and_reason(line: str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", LINES[0], line, LINES[1])
    with pytest.raises(ConfigError) as refusal:
        read_chats(path)
    assert f"{path}, line 2" in str(refusal.value)
    assert reason in str(refusal.value)


def test_files_that_hold_nothing_to_ask_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_chats(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="has no prompts"):
        read_chats(write(tmp_path / "empty.jsonl", ""))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_chats(binary)


def test_a_limit_takes_chats_from_all_over_a_category() -> None:
    def chat(number: int, category: str | None) -> Chat:
        return Chat(turns=("?",), category=category, number=number, source="")

    many = [chat(number, ("a", "b", None)[number % 3]) for number in range(30)]
    chosen = spread(many, 2)
    assert [each.number for each in chosen] == [0, 1, 2, 15, 16, 17]
    assert spread(many, None) == many
    assert spread(many, 100) == many


# ---- running --------------------------------------------------------------------------------------------


def test_a_later_turn_follows_the_model_s_own_answer() -> None:
    chat = Chat(turns=("One.", "Two."), category=None, number=1, source="")
    (tally,) = run_chats(drafting_engine(), [chat], GREEDY, at_once=1)
    llm = LLM.over(tiny_engine(chat_model()))
    messages = [{"role": "user", "content": "One."}]
    (first,) = llm.chat(messages, GREEDY)
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "Two."}]
    (second,) = llm.chat(messages, GREEDY)
    assert tally.answers == [first.outputs[0].token_ids, second.outputs[0].token_ids]
    assert (tally.prompts, tally.turns, tally.tokens) == (1, 2, 16)


def test_figures_are_those_of_the_engine(chats: list[Chat]) -> None:
    engine = drafting_engine()
    tallies = run_chats(engine, chats, GREEDY, at_once=4)
    assert sum(tally.speculation.drafts for tally in tallies) == engine.speculation.drafts
    assert sum(tally.speculation.accepted_tokens for tally in tallies) == engine.speculation.accepted_tokens > 0
    for tally in tallies:
        figures = tally.as_json(engine.k)
        # A prompt's last step samples one token without drafts; every other step adds what it accepted, and one.
        assert tally.tokens == tally.steps + figures["accepted_tokens"]
        assert figures["mean_acceptance_length"] == 1 + figures["accepted_tokens"] / figures["drafts"]
        assert sum(figures["accepted_share"]) == pytest.approx(figures["mean_acceptance_length"] - 1)
        assert len(figures["accepted_share"]) == engine.k


def outcome(tallies: list[Tally]) -> list[Any]:
    return [(tally.answers, tally.speculation, tally.steps, tally.turns) for tally in tallies]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "crowding",
    [
        {"at_once": 5},
        {"at_once": 32, "max_num_batched_tokens": 40},
        # Pages for two or three chats.
        {"at_once": 5, "kv_cache_memory_bytes": 100_000, "max_model_len": 128},
    ],
    ids=["roomy", "few rows", "few pages"],
)
def test_figures_do_not_depend_on_who_runs_beside(
    crowding: dict[str, int], params: SamplingParams, chats: list[Chat]
) -> None:
    alone = run_chats(drafting_engine(), chats, params, at_once=1)
    at_once, settings = crowding["at_once"], {name: crowding[name] for name in crowding if name != "at_once"}
    engine = drafting_engine(**settings)
    assert outcome(run_chats(engine, chats, params, at_once=at_once)) == outcome(alone)


def test_chats_run_side_by_side(chats: list[Chat], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing above says anything about crowding."""

    def most_at_once(at_once: int, **settings: Any) -> int:
        engine, most = drafting_engine(**settings), 0
        step = engine.step

        def counting() -> Any:
            nonlocal most
            most = max(most, len(engine._live.requests))
            return step()

        monkeypatch.setattr(engine, "step", counting)
        run_chats(engine, chats, GREEDY, at_once=at_once)
        return most

    assert most_at_once(5) == 5
    assert most_at_once(2) == 2
    assert 1 < most_at_once(32, max_num_batched_tokens=40) < 5
    assert 1 < most_at_once(5, kv_cache_memory_bytes=100_000, max_model_len=128) < 5


def test_what_a_chat_draws_does_not_depend_on_which_others_are_asked(chats: list[Chat]) -> None:
    everything = run_chats(drafting_engine(), chats, SAMPLED, at_once=4)
    (last,) = run_chats(drafting_engine(), chats[-1:], SAMPLED, at_once=4)
    assert last.answers == everything[-1].answers
    # Turns have draws of their own: with one seed for all, equal questions would get equal answers.
    twice = [replace(chats[2], number=number) for number in (1, 2)]
    first, second = run_chats(drafting_engine(), twice, SAMPLED, at_once=1)
    assert first.answers != second.answers


def test_a_turn_that_does_not_fit_ends_its_chat_and_is_counted(chats: list[Chat]) -> None:
    engine = drafting_engine(max_model_len=56)
    reported: list[int] = []
    tallies = run_chats(engine, chats, GREEDY, at_once=2, on_turns=reported.append)
    assert [tally.too_long for tally in tallies] == [1, 1, 0, 1, 1]
    assert [tally.turns for tally in tallies] == [1, 0, 1, 0, 1]
    assert sum(reported) == sum(len(chat.turns) for chat in chats)


def test_an_interrupted_run_leaves_the_engine_idle(chats: list[Chat]) -> None:
    engine = drafting_engine()

    def interrupt(_turns: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_chats(engine, chats, GREEDY, at_once=4, on_turns=interrupt)
    assert not engine.has_work


def test_a_model_without_a_chat_template_is_refused(chats: list[Chat]) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        run_chats(tiny_engine(tiny_model(), speculate=True), chats, GREEDY, at_once=1)


# ---- the report -----------------------------------------------------------------------------------------

CONFIG = AcceptanceConfig(
    engine=EngineConfig(
        backend="reference",
        max_model_len=256,
        kv_cache_memory_bytes=1 << 23,
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=3),
    ),
    max_tokens=10,
    batch=3,
)


def test_the_report_has_every_category_and_everything(chats: list[Chat]) -> None:
    reported: list[tuple[str, int]] = []
    report = measure(
        CONFIG, prepare(CONFIG, model=chat_model()), chats, lambda name, turns: reported.append((name, turns))
    )
    json.dumps(report)
    assert (report["model"], report["drafter"], report["config"]["k"]) == ("tiny-0", "ngram", 3)
    for name in ("greedy", "sampled"):
        everything, categories = report[name]["all"], report[name]["categories"]
        assert set(categories) == {"maths", "prose", "without category"}
        assert [categories[each]["prompts"] for each in ("maths", "prose")] == [2, 2]
        assert [categories[each]["turns"] for each in ("maths", "prose")] == [3, 4]
        assert (everything["prompts"], everything["turns"], everything["tokens"]) == (5, 8, 80)
        assert sum(turns for which, turns in reported if which == name) == 8
        assert everything["steps"] == sum(each["steps"] for each in categories.values())
    greedy_only = replace(CONFIG, temperature=None)
    report = measure(greedy_only, prepare(greedy_only, model=chat_model()), chats[:1])
    assert (report["sampled"], report["greedy"]["all"]["turns"]) == (None, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"batch": 0}, "batch"),
        ({"temperature": 0.0}, "--no-sampled"),
        ({"engine": EngineConfig()}, "--method"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(CONFIG, **changes)
